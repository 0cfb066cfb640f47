@echo off
setlocal EnableExtensions DisableDelayedExpansion
rem cache_example.bat: made by wangen 0.1.0 for example on windows-rocm.
rem
rem   double click, or cache_example.bat     every step in order: check, cache_latents, cache_text, check_cache
rem   cache_example.bat STEP                 one step only
rem   cache_example.bat STEP WORDS           one step, up to four words added to its command line; a flag given again
rem                                     wins, a list grows. cmd parts words at blanks and , ; = unless they stand in
rem                                     double quotes
rem
rem A step that failed stops the script with its exit code, and a double-clicked window stays open (never when
rem WANGEN_NO_PAUSE is set). Run it again to go on: what is done is kept.
rem Python is taken from WANGEN_PYTHON (full path of python.exe), the virtual environment, or VIRTUAL_ENV.
rem You may change the values of the knobs below: publishing again keeps them. Any other edit makes publishing
rem leave this file as it is and write the new text beside it as cache_example.bat.new.
rem
rem wangen-digest: e6620ad9aab3b9aa5e18f521dee1fcbd
chcp 65001 >nul 2>&1

rem Nothing comes from the environment.
for %%K in (RESOLUTION VAE_DTYPE T5_DTYPE NUM_WORKERS) do set "%%K="

rem >>> knobs: letters, digits and . _ , + - only
rem check, cache_latents, cache_text, check_cache: which resolutions of the TOML to use: all, or for example 256,832x480 (published: 832x480)
set "RESOLUTION=832x480"
rem cache_latents, check_cache: precision of the VAE and of the cached latents (default: float16 on CUDA, float32 on CPU and ROCm); one of float32, bfloat16, float16. float32 because on ROCm a bfloat16 VAE gives all-zero or non-finite latents on some builds (published: float32)
set "VAE_DTYPE=float32"
rem cache_text, check_cache: precision of the text encoder and of the cached embeddings (default: bfloat16 on a GPU, float32 on a CPU); one of float32, bfloat16, float16 (published: bfloat16)
set "T5_DTYPE=bfloat16"
rem cache_latents, cache_text: threads that read and decode media (default: 4, on ROCm 1) (published: 1)
set "NUM_WORKERS=1"
rem <<< knobs

rem A variable of this name, which some set by mistake, would hide every exit code.
set "ERRORLEVEL="
set "WG_RC=0"
set "WG_HOLD="
set "WG_INSIDE="
rem What %0 means depends on the folder, so that it is asked before pushd.
set "WG_SELF=%~f0"
rem The bundle may be moved: its root is the folder that holds this script.
set "WG_BASE=%~dp0"
if defined WANGEN_NO_PAUSE goto wg_start
if not defined CMDCMDLINE goto wg_start
set "WG_CCL=%CMDCMDLINE:"=%"
if not "%WG_CCL: /c =%"=="%WG_CCL%" set "WG_HOLD=1"
:wg_start
set "WG_ONLY=%~1"
if not "%~6"=="" goto wg_usage
if not defined WG_ONLY if not "%~2"=="" goto wg_usage
if not defined WG_ONLY goto wg_known
if "%WG_ONLY%"=="check" goto wg_known
if "%WG_ONLY%"=="cache_latents" goto wg_known
if "%WG_ONLY%"=="cache_text" goto wg_known
if "%WG_ONLY%"=="check_cache" goto wg_known
:wg_usage
echo wangen: this script takes nothing, or the name of one step and up to four words for it. Its steps: check, cache_latents, cache_text, check_cache
set "WG_RC=2"
goto wg_end

:wg_known
if not exist "%WG_BASE%" goto wg_noroot
ver >nul
pushd "%WG_BASE%."
if errorlevel 1 goto wg_noroot
set "WG_INSIDE=1"

set "WG_PY="
if not defined WANGEN_PYTHON goto wg_search
set "WG_PY=%WANGEN_PYTHON:"=%"
if exist "%WG_PY%" if not exist "%WG_PY%\*" goto wg_found
echo wangen: WANGEN_PYTHON names no program: "%WG_PY%"
echo   do:    unset it, or give the full path of a python.exe
set "WG_RC=1"
goto wg_end
:wg_search
if not defined WG_PY if exist "%WG_BASE%venv\Scripts\python.exe" set "WG_PY=%WG_BASE%venv\Scripts\python.exe"
if not defined WG_PY if exist "%WG_BASE%.venv\Scripts\python.exe" set "WG_PY=%WG_BASE%.venv\Scripts\python.exe"
if not defined WG_PY if defined VIRTUAL_ENV if exist "%VIRTUAL_ENV%\Scripts\python.exe" set "WG_PY=%VIRTUAL_ENV%\Scripts\python.exe"
if defined WG_PY goto wg_found
echo wangen: no Python was found. Looked for:
echo   "%WG_BASE%venv\Scripts\python.exe"
echo   "%WG_BASE%.venv\Scripts\python.exe"
echo   do:    run setup_wangen.bat beside this script, or set WANGEN_PYTHON to a python.exe
set "WG_RC=1"
goto wg_end

:wg_found
set "PYTHONUTF8=1"
set "PYTHONSAFEPATH=1"
set "PYTHONHOME="
set "WANGEN_SCRIPT=%WG_SELF%"
set "WANGEN_SCRIPT_VERSION=0.1.0"
"%WG_PY%" -c "import wangen.runtime, wangen.generator.knob_values as k; k.require('RESOLUTION VAE_DTYPE T5_DTYPE NUM_WORKERS')" >nul
set "WG_RC=%ERRORLEVEL%"
if "%WG_RC%"=="0" goto wg_step1
if "%WG_RC%"=="2" echo   do:    write its line at the top of this script like the others: set "NAME=value"
if "%WG_RC%"=="2" goto wg_end
echo wangen: this Python cannot import wangen, as it says above: "%WG_PY%"
echo   do:    run setup_wangen.bat beside this script, or type:
echo   "%WG_PY%" -m pip install "%WG_BASE%files\wangen-0.1.0-py3-none-any.whl[runtime]"
set "WG_RC=1"
goto wg_end

:wg_step1
if defined WG_ONLY if not "%WG_ONLY%"=="check" goto wg_step2
set "WG_STEP=check"
echo wangen: step 1 of 4: check
"%WG_PY%" -m wangen.runtime ^
  "check" ^
  "--dataset_config" "files\tomls\example_win.toml" ^
  "--resolution" "%RESOLUTION%" ^
  "--task" "t2v-1.3B" ^
  "--vae" "models\Wan2.1_VAE.pth" ^
  "--t5" "models\models_t5_umt5-xxl-enc-bf16.pth" ^
  "--dit" "models\wan2.1_t2v_1.3B_bf16.safetensors" ^
  "--output_dir" "outputs\example" ^
  "--log_file" "logs\example.log" ^
  "--report_dir" "outputs\example" ^
  "--lock" "outputs\example\run.lock" %2 %3 %4 %5
set "WG_RC=%ERRORLEVEL%"
if not "%WG_RC%"=="0" goto wg_failed

:wg_step2
if defined WG_ONLY if not "%WG_ONLY%"=="cache_latents" goto wg_step3
set "WG_STEP=cache_latents"
echo wangen: step 2 of 4: cache_latents
"%WG_PY%" -m wangen.runtime ^
  "cache_latents" ^
  "--dataset_config" "files\tomls\example_win.toml" ^
  "--resolution" "%RESOLUTION%" ^
  "--task" "t2v-1.3B" ^
  "--num_workers" "%NUM_WORKERS%" ^
  "--vae" "models\Wan2.1_VAE.pth" ^
  "--vae_dtype" "%VAE_DTYPE%" ^
  "--vae_tile" "0" ^
  "--log_file" "logs\example.log" ^
  "--report_dir" "outputs\example" ^
  "--lock" "outputs\example\run.lock" %2 %3 %4 %5
set "WG_RC=%ERRORLEVEL%"
if not "%WG_RC%"=="0" goto wg_failed

:wg_step3
if defined WG_ONLY if not "%WG_ONLY%"=="cache_text" goto wg_step4
set "WG_STEP=cache_text"
echo wangen: step 3 of 4: cache_text
"%WG_PY%" -m wangen.runtime ^
  "cache_text" ^
  "--dataset_config" "files\tomls\example_win.toml" ^
  "--resolution" "%RESOLUTION%" ^
  "--task" "t2v-1.3B" ^
  "--num_workers" "%NUM_WORKERS%" ^
  "--t5" "models\models_t5_umt5-xxl-enc-bf16.pth" ^
  "--t5_dtype" "%T5_DTYPE%" ^
  "--no_fp8_t5" ^
  "--log_file" "logs\example.log" ^
  "--report_dir" "outputs\example" ^
  "--lock" "outputs\example\run.lock" %2 %3 %4 %5
set "WG_RC=%ERRORLEVEL%"
if not "%WG_RC%"=="0" goto wg_failed

:wg_step4
if defined WG_ONLY if not "%WG_ONLY%"=="check_cache" goto wg_step5
set "WG_STEP=check_cache"
echo wangen: step 4 of 4: check_cache
"%WG_PY%" -m wangen.runtime ^
  "check_cache" ^
  "--dataset_config" "files\tomls\example_win.toml" ^
  "--resolution" "%RESOLUTION%" ^
  "--task" "t2v-1.3B" ^
  "--vae" "models\Wan2.1_VAE.pth" ^
  "--t5" "models\models_t5_umt5-xxl-enc-bf16.pth" ^
  "--vae_dtype" "%VAE_DTYPE%" ^
  "--t5_dtype" "%T5_DTYPE%" ^
  "--vae_tile" "0" ^
  "--no_fp8_t5" ^
  "--log_file" "logs\example.log" ^
  "--report_dir" "outputs\example" ^
  "--lock" "outputs\example\run.lock" %2 %3 %4 %5
set "WG_RC=%ERRORLEVEL%"
if not "%WG_RC%"=="0" goto wg_failed

:wg_step5
if not defined WG_ONLY echo wangen: cache_example finished.
if defined WG_ONLY echo wangen: cache_example step %WG_ONLY% finished.
goto wg_end

:wg_failed
rem The first is what a stopped step ends with, the second what Windows gives to one that had just begun.
if "%WG_RC%"=="130" goto wg_stopped
if "%WG_RC%"=="-1073741510" goto wg_stopped
echo wangen: step %WG_STEP% failed, exit code %WG_RC%; its message stands above. Mend it and run this script again.
goto wg_end

:wg_stopped
echo wangen: step %WG_STEP% was stopped. Nothing saved is lost: run this script again to go on.
goto wg_end

:wg_noroot
echo wangen: this folder is not there: "%WG_BASE%"
echo   do:    connect or create it, or publish again with the right root
set "WG_RC=1"

:wg_end
if defined WG_INSIDE popd
if defined WG_HOLD if not "%WG_RC%"=="0" pause
exit /b %WG_RC%
