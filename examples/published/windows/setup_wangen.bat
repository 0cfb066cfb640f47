@echo off
setlocal EnableExtensions DisableDelayedExpansion
rem setup_wangen.bat: made by wangen 0.1.0 for windows.
rem
rem   double click, or setup_wangen.bat   makes the Python environment that the run scripts here use, or renews
rem                                      it: PyTorch for this machine's card, wangen and its libraries
rem   setup_wangen.bat --dry_run          says what it finds, and only prints the commands
rem
rem It may run again at any time: what is right stays, what is missing or wrong is installed. A double-clicked window
rem stays open until a key is pressed (never when WANGEN_NO_PAUSE is set).
rem WANGEN_PYTHON names the python.exe (3.11 or newer) that the environment is made with; without it one is searched.
rem WANGEN_TORCH_INDEX names another wheel index for PyTorch, or a folder of wheels.
rem If you edit this file, publishing again leaves it as it is and writes the new text beside it as setup_wangen.bat.new.
rem
rem wangen-digest: 390d0600f7da1e175ab147dee4e91db3
chcp 65001 >nul 2>&1

rem A variable of this name, which some set by mistake, would hide every exit code.
set "ERRORLEVEL="
set "WG_RC=0"
set "WG_HOLD="
set "WG_INSIDE="
rem The bundle may be moved: its root is the folder that holds this script. This has to be asked before pushd.
set "WG_BASE=%~dp0"
if defined WANGEN_NO_PAUSE goto wg_start
if not defined CMDCMDLINE goto wg_start
set "WG_CCL=%CMDCMDLINE:"=%"
if not "%WG_CCL: /c =%"=="%WG_CCL%" set "WG_HOLD=1"
:wg_start
if not exist "%WG_BASE%" goto wg_noroot
ver >nul
pushd "%WG_BASE%."
if errorlevel 1 goto wg_noroot
set "WG_INSIDE=1"
if not exist "%WG_BASE%files\wangen-0.1.0-py3-none-any.whl" goto wg_nowheel

set "PYTHONUTF8=1"
set "PYTHONSAFEPATH=1"
set "PYTHONHOME="
set "WG_FITS=import sys; sys.exit(sys.version_info < (3, 11))"
set "WG_PY="
set "WG_SWITCH="
if not defined WANGEN_PYTHON goto wg_search
set "WG_PY=%WANGEN_PYTHON:"=%"
"%WG_PY%" -c "%WG_FITS%" >nul 2>&1
if "%ERRORLEVEL%"=="0" goto wg_found
echo wangen: WANGEN_PYTHON names no Python from 3.11 on: "%WG_PY%"
echo   do:    unset it, or give the full path of a python.exe
set "WG_RC=1"
goto wg_end

:wg_search
if not exist "%WG_BASE%venv\Scripts\python.exe" goto wg_venv1
set "WG_PY=%WG_BASE%venv\Scripts\python.exe"
"%WG_PY%" -c "%WG_FITS%" >nul 2>&1
if "%ERRORLEVEL%"=="0" goto wg_found
:wg_venv1
if not exist "%WG_BASE%.venv\Scripts\python.exe" goto wg_venv2
set "WG_PY=%WG_BASE%.venv\Scripts\python.exe"
"%WG_PY%" -c "%WG_FITS%" >nul 2>&1
if "%ERRORLEVEL%"=="0" goto wg_found
:wg_venv2
rem The newest ones come last: PyTorch is published for a new Python some months after it.
set "WG_PY=py.exe"
set "WG_SWITCH=-3.13"
py.exe -3.13 -c "%WG_FITS%" >nul 2>&1
if "%ERRORLEVEL%"=="0" goto wg_found
set "WG_SWITCH=-3.12"
py.exe -3.12 -c "%WG_FITS%" >nul 2>&1
if "%ERRORLEVEL%"=="0" goto wg_found
set "WG_SWITCH=-3.11"
py.exe -3.11 -c "%WG_FITS%" >nul 2>&1
if "%ERRORLEVEL%"=="0" goto wg_found
set "WG_SWITCH=-3"
py.exe -3 -c "%WG_FITS%" >nul 2>&1
if "%ERRORLEVEL%"=="0" goto wg_found
set "WG_PY=python.exe"
set "WG_SWITCH="
rem With the ending, because a python.bat of a version manager would not come back here. Where none is installed,
rem python.exe is a link to the Microsoft Store, which fails.
python.exe -c "%WG_FITS%" >nul 2>&1
if "%ERRORLEVEL%"=="0" goto wg_found
echo wangen: no Python from 3.11 on was found.
echo   do:    install Python 3.13 (64-bit) from python.org, or with: winget install Python.Python.3.13
echo          then run this again; or set WANGEN_PYTHON to the full path of a python.exe
set "WG_RC=1"
goto wg_end

:wg_found
"%WG_PY%" %WG_SWITCH% -c "import sys; sys.path.insert(0, sys.argv[1]); from wangen.generator.setup.environment import main; sys.exit(main(sys.argv[1:]))" ^
  "%WG_BASE%files\wangen-0.1.0-py3-none-any.whl" ^
  "--kind" "windows" ^
  "--accelerator" "cuda" ^
  "--build" "cu130=13.0" ^
  "--build" "cu128=12.8" ^
  "--build" "cu126=12.0" ^
  "--shell" "bat" ^
  "--venv" "%WG_BASE%venv" ^
  "--venv" "%WG_BASE%.venv" %*
set "WG_RC=%ERRORLEVEL%"
goto wg_end

:wg_noroot
echo wangen: this folder is not there: "%WG_BASE%"
echo   do:    connect or create it, or publish again with the right root
set "WG_RC=1"
goto wg_end

:wg_nowheel
echo wangen: this file is not there: "%WG_BASE%files\wangen-0.1.0-py3-none-any.whl"
echo   do:    copy the whole folder that was published, or publish again
set "WG_RC=1"

:wg_end
if defined WG_INSIDE popd
if not "%WG_RC%"=="0" echo wangen: the environment is not ready, exit code %WG_RC%.
if defined WG_HOLD pause
exit /b %WG_RC%
