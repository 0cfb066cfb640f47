# cache_example.ps1: made by wangen 0.1.0 for example on windows.
#
#   powershell -NoProfile -ExecutionPolicy Bypass -File cache_example.ps1              every step in order: check, cache_latents, cache_text, check_cache
#   powershell -NoProfile -ExecutionPolicy Bypass -File cache_example.ps1 STEP         one step only
#   powershell -NoProfile -ExecutionPolicy Bypass -File cache_example.ps1 STEP WORDS   one step, the words added to its
#                                                command line (a flag given again wins, a list grows)
#
# PowerShell takes a word FLAG=D:\x apart at its colon: write FLAG D:\x, with a blank in place of the =.
#
# A step that failed stops the script with its exit code, and a window that Explorer's "Run with PowerShell" opened
# stays open. Run it again to go on: what is done is kept.
# Python is taken from $env:WANGEN_PYTHON (full path of python.exe), the virtual environment, or $env:VIRTUAL_ENV.
# You may change the values of the knobs below: publishing again keeps them. Any other edit makes publishing
# leave this file as it is and write the new text beside it as cache_example.ps1.new.
#
# wangen-digest: 53cae0cb1d288e34ab7658dbd300429a
Set-StrictMode -Version 2.0
$ErrorActionPreference = 'Stop'
$PSNativeCommandUseErrorActionPreference = $false

# "Run with PowerShell" closes its window at the end. So another PowerShell runs the script there, and the window stays
# open when that fails (never when WANGEN_NO_PAUSE is set).
if (([System.Environment]::CommandLine -match '-Command.+Set-ExecutionPolicy -Scope Process Bypass') -and (-not $env:WANGEN_NO_PAUSE)) {
  $WgShell = (Get-Process -Id $PID).Path
  $global:LASTEXITCODE = 1
  & $WgShell -NoProfile -ExecutionPolicy Bypass -File $PSCommandPath
  $WgCode = $LASTEXITCODE
  if ($WgCode -ne 0) { Read-Host 'Press Enter to close this window' | Out-Null }
  exit $WgCode
}

# Nothing comes from the window that this script runs in.
$WgKnobs = @('RESOLUTION', 'VAE_DTYPE', 'T5_DTYPE', 'NUM_WORKERS')
foreach ($WgKnob in $WgKnobs) { Set-Variable -Name $WgKnob -Value '' }

# >>> knobs: letters, digits and . _ , + - only
# check, cache_latents, cache_text, check_cache: which resolutions of the TOML to use: all, or for example 256,832x480 (published: 832x480)
$RESOLUTION = '832x480'
# cache_latents, check_cache: precision of the VAE and of the cached latents (default: float16 on CUDA, float32 on CPU and ROCm); one of float32, bfloat16, float16 (published: float16)
$VAE_DTYPE = 'float16'
# cache_text, check_cache: precision of the text encoder and of the cached embeddings (default: bfloat16 on a GPU, float32 on a CPU); one of float32, bfloat16, float16 (published: bfloat16)
$T5_DTYPE = 'bfloat16'
# cache_latents, cache_text: threads that read and decode media (default: 4, on ROCm 1) (published: 4)
$NUM_WORKERS = '4'
# <<< knobs

foreach ($WgKnob in $WgKnobs) {
  if ([string](Get-Variable -Name $WgKnob -ValueOnly) -notmatch '\A[A-Za-z0-9._,+-]+\z') {
    Write-Host "wangen: the knob $WgKnob may hold letters, digits and . _ , + - only"
    exit 2
  }
}

$WgOnly = ''
if ($args.Count -gt 0) { $WgOnly = [string]$args[0] }
$WgNames = @('check', 'cache_latents', 'cache_text', 'check_cache')
if ((($args.Count -gt 1) -or ($WgOnly -ne '')) -and ($WgNames -cnotcontains $WgOnly)) {
  Write-Host 'wangen: this script takes nothing, or the name of one step with words for it. Its steps: check, cache_latents, cache_text, check_cache'
  exit 2
}
$WgMore = @()
if ($args.Count -gt 1) {
  # A cast, because PowerShell remembers of a word with a dash that it was a parameter and would not quote it.
  foreach ($WgWord in $args[1..($args.Count - 1)]) { $WgMore = $WgMore + @([string]$WgWord) }
}
# Before 7.3 PowerShell hands some words on as others, and says nothing.
$WgMajor = $PSVersionTable.PSVersion.Major
$WgOld = ($WgMajor -lt 7) -or (($WgMajor -eq 7) -and ($PSVersionTable.PSVersion.Minor -lt 3))
$WgBefore = ''
foreach ($WgWord in $WgMore) {
  $WgCure = ''
  if ($WgWord -match '"') { $WgCure = 'leave the double quote out, or use a single quote' }
  if (($WgWord -eq '') -or ($WgWord -eq '--%')) { $WgCure = 'leave the option out' }
  if (($WgWord -match '\s') -and ($WgWord -match '\\\z')) { $WgCure = 'leave the last backslash out' }
  if ($WgOld -and ($WgCure -ne '')) {
    Write-Host "wangen: this version of PowerShell would change the word '$WgWord'"
    Write-Host "  do:    $WgCure; or use PowerShell 7.3 or newer (pwsh)"
    exit 2
  }
  if (($WgBefore -match '\A--[a-z0-9_]+=[a-z]\z') -and ($WgWord -match '\A[\\/]')) {
    Write-Host ('wangen: PowerShell took this word apart at its colon: ' + $WgBefore + ':' + $WgWord)
    Write-Host ('  do:    write a blank in place of the =: ' + ($WgBefore -replace '=', ' ') + ':' + $WgWord)
    exit 2
  }
  $WgBefore = $WgWord
}

# The bundle may be moved: its root is the folder that holds this script.
$WgRoot = $PSScriptRoot
if (-not (Test-Path -LiteralPath $WgRoot -PathType Container)) {
  Write-Host "wangen: this folder is not there: $WgRoot"
  Write-Host '  do:    connect or create it, or publish again with the right root'
  exit 1
}

# A script shares its environment with the window that it runs in: what stood there comes back at the end.
$WgWas = @($env:PYTHONUTF8, $env:PYTHONSAFEPATH, $env:PYTHONHOME, $env:WANGEN_SCRIPT, $env:WANGEN_SCRIPT_VERSION)
Push-Location -LiteralPath $WgRoot -ErrorAction Stop
try {
  $WgVenvs = @(($WgRoot + '\venv'), ($WgRoot + '\.venv'))
  $WgPython = ''
  if ($env:WANGEN_PYTHON) {
    $WgPython = $env:WANGEN_PYTHON -replace '"', ''
    if (-not (Test-Path -LiteralPath $WgPython -PathType Leaf)) {
      Write-Host "wangen: WANGEN_PYTHON names no program: $WgPython"
      Write-Host '  do:    unset it, or give the full path of a python.exe'
      exit 1
    }
  } else {
    $WgFolders = $WgVenvs
    if ($env:VIRTUAL_ENV) { $WgFolders = $WgVenvs + @($env:VIRTUAL_ENV) }
    foreach ($WgFolder in $WgFolders) {
      $WgCandidate = $WgFolder + '\Scripts\python.exe'
      if (($WgPython -eq '') -and (Test-Path -LiteralPath $WgCandidate -PathType Leaf)) { $WgPython = $WgCandidate }
    }
  }
  if ($WgPython -eq '') {
    Write-Host 'wangen: no Python was found. Looked in:'
    foreach ($WgFolder in $WgVenvs) { Write-Host "  $WgFolder" }
    Write-Host '  do:    run setup_wangen.ps1 beside this script, or set WANGEN_PYTHON to a python.exe'
    exit 1
  }

  $env:PYTHONUTF8 = '1'
  $env:PYTHONSAFEPATH = '1'
  $env:PYTHONHOME = $null
  $env:WANGEN_SCRIPT = $PSCommandPath
  $env:WANGEN_SCRIPT_VERSION = '0.1.0'
  # Windows PowerShell turns a redirected error line into an exception under Stop: here, and in every step when this
  # script's own output is redirected (2>&1), because steps log to stderr. What counts are their exit codes, and 1 when
  # a program cannot be started, which leaves the code of the one before.
  $ErrorActionPreference = 'Continue'
  $global:LASTEXITCODE = 1
  & $WgPython -c 'import wangen.runtime' | Out-Null
  $WgCode = $LASTEXITCODE
  if ($WgCode -ne 0) {
    Write-Host "wangen: this Python cannot import wangen, as it says above: $WgPython"
    Write-Host '  do:    run setup_wangen.ps1 beside this script, or type:'
    # Within single quotes only a single quote is to be doubled, also a typographic one.
    $WgQuotes = "['\u2018-\u201b]"
    $WgTyped = ($WgPython -replace $WgQuotes, '$0$0') + "' -m pip install '" + ($WgRoot -replace $WgQuotes, '$0$0')
    Write-Host ("  & '" + $WgTyped + "\files\wangen-0.1.0-py3-none-any.whl[runtime]'")
    exit 1
  }
  if (($WgCode -eq 0) -and (($WgOnly -eq '') -or ($WgOnly -ceq 'check'))) {
    Write-Host 'wangen: step 1 of 4: check'
    $WgStep = 'check'
    $WgArgv = @(
      'check',
      '--dataset_config', 'files\tomls\example_win.toml',
      '--resolution', $RESOLUTION,
      '--task', 't2v-1.3B',
      '--vae', 'models\Wan2.1_VAE.pth',
      '--t5', 'models\models_t5_umt5-xxl-enc-bf16.pth',
      '--dit', 'models\wan2.1_t2v_1.3B_bf16.safetensors',
      '--output_dir', 'outputs\example',
      '--log_file', 'logs\example.log',
      '--report_dir', 'outputs\example',
      '--lock', 'outputs\example\run.lock'
    )
    $global:LASTEXITCODE = 1
    & $WgPython -m wangen.runtime @WgArgv @WgMore
    $WgCode = $LASTEXITCODE
  }
  if (($WgCode -eq 0) -and (($WgOnly -eq '') -or ($WgOnly -ceq 'cache_latents'))) {
    Write-Host 'wangen: step 2 of 4: cache_latents'
    $WgStep = 'cache_latents'
    $WgArgv = @(
      'cache_latents',
      '--dataset_config', 'files\tomls\example_win.toml',
      '--resolution', $RESOLUTION,
      '--task', 't2v-1.3B',
      '--num_workers', $NUM_WORKERS,
      '--vae', 'models\Wan2.1_VAE.pth',
      '--vae_dtype', $VAE_DTYPE,
      '--vae_tile', '0',
      '--log_file', 'logs\example.log',
      '--report_dir', 'outputs\example',
      '--lock', 'outputs\example\run.lock'
    )
    $global:LASTEXITCODE = 1
    & $WgPython -m wangen.runtime @WgArgv @WgMore
    $WgCode = $LASTEXITCODE
  }
  if (($WgCode -eq 0) -and (($WgOnly -eq '') -or ($WgOnly -ceq 'cache_text'))) {
    Write-Host 'wangen: step 3 of 4: cache_text'
    $WgStep = 'cache_text'
    $WgArgv = @(
      'cache_text',
      '--dataset_config', 'files\tomls\example_win.toml',
      '--resolution', $RESOLUTION,
      '--task', 't2v-1.3B',
      '--num_workers', $NUM_WORKERS,
      '--t5', 'models\models_t5_umt5-xxl-enc-bf16.pth',
      '--t5_dtype', $T5_DTYPE,
      '--no_fp8_t5',
      '--log_file', 'logs\example.log',
      '--report_dir', 'outputs\example',
      '--lock', 'outputs\example\run.lock'
    )
    $global:LASTEXITCODE = 1
    & $WgPython -m wangen.runtime @WgArgv @WgMore
    $WgCode = $LASTEXITCODE
  }
  if (($WgCode -eq 0) -and (($WgOnly -eq '') -or ($WgOnly -ceq 'check_cache'))) {
    Write-Host 'wangen: step 4 of 4: check_cache'
    $WgStep = 'check_cache'
    $WgArgv = @(
      'check_cache',
      '--dataset_config', 'files\tomls\example_win.toml',
      '--resolution', $RESOLUTION,
      '--task', 't2v-1.3B',
      '--vae', 'models\Wan2.1_VAE.pth',
      '--t5', 'models\models_t5_umt5-xxl-enc-bf16.pth',
      '--vae_dtype', $VAE_DTYPE,
      '--t5_dtype', $T5_DTYPE,
      '--vae_tile', '0',
      '--no_fp8_t5',
      '--log_file', 'logs\example.log',
      '--report_dir', 'outputs\example',
      '--lock', 'outputs\example\run.lock'
    )
    $global:LASTEXITCODE = 1
    & $WgPython -m wangen.runtime @WgArgv @WgMore
    $WgCode = $LASTEXITCODE
  }
} finally {
  Pop-Location
  $env:PYTHONUTF8 = $WgWas[0]
  $env:PYTHONSAFEPATH = $WgWas[1]
  $env:PYTHONHOME = $WgWas[2]
  $env:WANGEN_SCRIPT = $WgWas[3]
  $env:WANGEN_SCRIPT_VERSION = $WgWas[4]
}
# The first is what a stopped step ends with, the second what Windows gives to one that had just begun.
if (($WgCode -ne 0) -and (@('130', '-1073741510') -cnotcontains [string]$WgCode)) {
  Write-Host "wangen: step $WgStep failed (exit code $WgCode); its message stands above. Mend it and run this script again."
  exit $WgCode
}
if ($WgCode -ne 0) {
  Write-Host "wangen: step $WgStep was stopped. Nothing saved is lost: run this script again to go on."
  exit $WgCode
}
if ($WgOnly -eq '') { Write-Host 'wangen: cache_example finished.' }
else { Write-Host "wangen: cache_example (step $WgOnly) finished." }
exit 0
