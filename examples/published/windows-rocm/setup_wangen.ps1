# setup_wangen.ps1: made by wangen 0.1.0 for windows-rocm.
#
#   powershell -NoProfile -ExecutionPolicy Bypass -File setup_wangen.ps1             makes the Python environment that
#                                       the run scripts here use, or renews it: PyTorch for this machine's card, wangen
#                                       and its libraries
#   powershell -NoProfile -ExecutionPolicy Bypass -File setup_wangen.ps1 --dry_run   says what it finds, and only prints
#                                       the commands
#
# It may run again at any time: what is right stays, what is missing or wrong is installed.
# $env:WANGEN_PYTHON names the python.exe (3.11 or newer) that the environment is made with; without it one is searched.
# $env:WANGEN_TORCH_INDEX names another wheel index for PyTorch, or a folder of wheels.
# If you edit this file, publishing again leaves it as it is and writes the new text beside it as setup_wangen.ps1.new.
#
# wangen-digest: 41bf526739670a7304afb7852a360cdd
Set-StrictMode -Version 2.0
$ErrorActionPreference = 'Stop'
$PSNativeCommandUseErrorActionPreference = $false

# Explorer's "Run with PowerShell" closes its window at the end. So another PowerShell runs the script there, and the
# window stays open (never when WANGEN_NO_PAUSE is set).
if (([System.Environment]::CommandLine -match '-Command.+Set-ExecutionPolicy -Scope Process Bypass') -and (-not $env:WANGEN_NO_PAUSE)) {
  $WgShell = (Get-Process -Id $PID).Path
  $global:LASTEXITCODE = 1
  & $WgShell -NoProfile -ExecutionPolicy Bypass -File $PSCommandPath
  $WgCode = $LASTEXITCODE
  Read-Host 'Press Enter to close this window' | Out-Null
  exit $WgCode
}

# The bundle may be moved: its root is the folder that holds this script.
$WgRoot = $PSScriptRoot
if (-not (Test-Path -LiteralPath $WgRoot -PathType Container)) {
  Write-Host "wangen: this folder is not there: $WgRoot"
  Write-Host '  do:    connect or create it, or publish again with the right root'
  exit 1
}
$WgWheel = $WgRoot + '\files\wangen-0.1.0-py3-none-any.whl'
if (-not (Test-Path -LiteralPath $WgWheel -PathType Leaf)) {
  Write-Host "wangen: this file is not there: $WgWheel"
  Write-Host '  do:    copy the whole folder that was published, or publish again'
  exit 1
}
$WgMore = @()
foreach ($WgWord in $args) { $WgMore = $WgMore + @([string]$WgWord) }

$WgVenvs = @(($WgRoot + '\venv'), ($WgRoot + '\.venv'))
$WgFits = 'import sys; sys.exit(sys.version_info < (3, 11))'
$WgFound = $false
$WgPython = ''
$WgSwitches = @()
# A script shares its environment with the window that it runs in: what stood there comes back at the end.
$WgWas = @($env:PYTHONUTF8, $env:PYTHONSAFEPATH, $env:PYTHONHOME)
Push-Location -LiteralPath $WgRoot -ErrorAction Stop
try {
  $env:PYTHONUTF8 = '1'
  $env:PYTHONSAFEPATH = '1'
  $env:PYTHONHOME = $null
  # Windows PowerShell turns a redirected error line into an exception under Stop. What counts are the exit
  # codes, and 1 when a program cannot be started, which leaves the code of the one before.
  $ErrorActionPreference = 'Continue'
  if ($env:WANGEN_PYTHON) {
    $WgPython = $env:WANGEN_PYTHON -replace '"', ''
    if (Test-Path -LiteralPath $WgPython -PathType Leaf) {
      $global:LASTEXITCODE = 1
      & $WgPython -c $WgFits 2>$null | Out-Null
      if ($LASTEXITCODE -eq 0) { $WgFound = $true }
    }
    if (-not $WgFound) {
      Write-Host "wangen: WANGEN_PYTHON names no Python from 3.11 on: $WgPython"
      Write-Host '  do:    unset it, or give the full path of a python.exe'
      exit 1
    }
  }
  foreach ($WgFolder in $WgVenvs) {
    $WgCandidate = $WgFolder + '\Scripts\python.exe'
    if ((-not $WgFound) -and (Test-Path -LiteralPath $WgCandidate -PathType Leaf)) {
      $global:LASTEXITCODE = 1
      & $WgCandidate -c $WgFits 2>$null | Out-Null
      if ($LASTEXITCODE -eq 0) {
        $WgPython = $WgCandidate
        $WgFound = $true
      }
    }
  }
  # The newest ones come last: PyTorch is published for a new Python some months after it.
  $WgLauncher = Get-Command -Name 'py.exe' -CommandType Application -TotalCount 1 -ErrorAction SilentlyContinue
  if ($WgLauncher) {
    foreach ($WgVersion in @('-3.13', '-3.12', '-3.11', '-3')) {
      if (-not $WgFound) {
        $global:LASTEXITCODE = 1
        & $WgLauncher $WgVersion -c $WgFits 2>$null | Out-Null
        if ($LASTEXITCODE -eq 0) {
          $WgPython = $WgLauncher
          $WgSwitches = @($WgVersion)
          $WgFound = $true
        }
      }
    }
  }
  # Where none is installed, python.exe is a link to the Microsoft Store, which fails.
  $WgLauncher = Get-Command -Name 'python.exe' -CommandType Application -TotalCount 1 -ErrorAction SilentlyContinue
  if ((-not $WgFound) -and ($WgLauncher)) {
    $global:LASTEXITCODE = 1
    & $WgLauncher -c $WgFits 2>$null | Out-Null
    if ($LASTEXITCODE -eq 0) {
      $WgPython = $WgLauncher
      $WgFound = $true
    }
  }
  if (-not $WgFound) {
    Write-Host 'wangen: no Python from 3.11 on was found.'
    Write-Host '  do:    install Python 3.13 (64-bit) from python.org, or with: winget install Python.Python.3.13'
    Write-Host '         then run this again; or set WANGEN_PYTHON to the full path of a python.exe'
    exit 1
  }
  $WgArgv = @(
    '--kind', 'windows',
    '--accelerator', 'rocm',
    '--build', 'https://stable.repo.amd.com/rocm/whl-next/',
    '--shell', 'ps1'
  )
  foreach ($WgFolder in $WgVenvs) { $WgArgv = $WgArgv + @('--venv', $WgFolder) }
  $global:LASTEXITCODE = 1
  & $WgPython @WgSwitches -c 'import sys; sys.path.insert(0, sys.argv[1]); from wangen.generator.setup.environment import main; sys.exit(main(sys.argv[1:]))' $WgWheel @WgArgv @WgMore
  $WgCode = $LASTEXITCODE
} finally {
  Pop-Location
  $env:PYTHONUTF8 = $WgWas[0]
  $env:PYTHONSAFEPATH = $WgWas[1]
  $env:PYTHONHOME = $WgWas[2]
}
if ($WgCode -ne 0) { Write-Host "wangen: the environment is not ready (exit code $WgCode)." }
exit $WgCode
