# train_example.ps1: made by wangen 0.1.0 for example on windows.
#
#   powershell -NoProfile -ExecutionPolicy Bypass -File train_example.ps1              every step in order: check, cache_latents, cache_text, check_cache, train, report
#   powershell -NoProfile -ExecutionPolicy Bypass -File train_example.ps1 smoke        a try: 50 steps on at most 8 items into outputs/example/smoke
#   powershell -NoProfile -ExecutionPolicy Bypass -File train_example.ps1 STEP         one step only
#   powershell -NoProfile -ExecutionPolicy Bypass -File train_example.ps1 STEP WORDS   one step, the words added to its
#                                                command line (a flag given again wins, a list grows)
#
# PowerShell takes a word FLAG=D:\x apart at its colon: write FLAG D:\x, with a blank in place of the =.
#
# A step that failed stops the script with its exit code, and a window that Explorer's "Run with PowerShell" opened
# stays open. Run it again to go on: what is done is kept.
# Python is taken from $env:WANGEN_PYTHON (full path of python.exe), the virtual environment, or $env:VIRTUAL_ENV.
# You may change the values of the knobs below: publishing again keeps them. Any other edit makes publishing
# leave this file as it is and write the new text beside it as train_example.ps1.new.
#
# wangen-digest: 016bc5639dccb5964f184dea577714aa
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
$WgKnobs = @('RESOLUTION', 'NETWORK_DIM', 'NETWORK_ALPHA', 'LEARNING_RATE', 'LR_SCHEDULER', 'OPTIMIZER_TYPE', 'MAX_TRAIN_EPOCHS', 'GRADIENT_ACCUMULATION_STEPS', 'MIXED_PRECISION', 'TIMESTEP_SAMPLING', 'DISCRETE_FLOW_SHIFT', 'SEED', 'BLOCKS_TO_SWAP', 'ATTENTION', 'MAX_DATA_LOADER_N_WORKERS', 'VAE_DTYPE', 'T5_DTYPE', 'VALIDATION_ITEMS', 'NUM_WORKERS')
foreach ($WgKnob in $WgKnobs) { Set-Variable -Name $WgKnob -Value '' }

# >>> knobs: letters, digits and . _ , + - only
# check, cache_latents, cache_text, check_cache, train: which resolutions of the TOML to use: all, or for example 256,832x480 (published: 832x480)
$RESOLUTION = '832x480'
# train: rank of the adapter (published: 16)
$NETWORK_DIM = '16'
# train: alpha; the adapter is scaled by alpha / rank (published: 16.0)
$NETWORK_ALPHA = '16.0'
# train: learning rate (published: 0.0001)
$LEARNING_RATE = '0.0001'
# train: learning-rate schedule; one of constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, cosine_with_min_lr, warmup_stable_decay, rex, adafactor (published: constant)
$LR_SCHEDULER = 'constant'
# train: AdamW, AdamW8bit (bitsandbytes or torchao), Adafactor, another class of torch.optim, or a dotted path (published: AdamW)
$OPTIMIZER_TYPE = 'AdamW'
# train: epochs; wins over --max_train_steps (35 when neither is given) (published: 35)
$MAX_TRAIN_EPOCHS = '35'
# train: batches per optimizer step (published: 1)
$GRADIENT_ACCUMULATION_STEPS = '1'
# train: bf16, or no for float32; one of bf16, no (published: bf16)
$MIXED_PRECISION = 'bf16'
# train: how timesteps are drawn; one of uniform, sigmoid, shift, logit_normal, logsnr, flux_shift, qwen_shift, qinglong_flux, qinglong_qwen, sigma (published: shift)
$TIMESTEP_SAMPLING = 'shift'
# train: shift of timestep_sampling shift (published: 5.0)
$DISCRETE_FLOW_SHIFT = '5.0'
# train: seed of order, noise, timesteps, dropout and initial weights (published: 42)
$SEED = '42'
# train: so many blocks wait in host memory and come when they are needed (default: as --vram says, else 0) (published: 0)
$BLOCKS_TO_SWAP = '0'
# train: attention kernel; auto takes the fastest of flash3, flash, sdpa that runs forward and backward here; sage runs forward only, with the exact gradient of sdpa; one of auto, sdpa, flash, flash3, xformers, sage (published: auto)
$ATTENTION = 'auto'
# train: threads that read cache entries; 0 reads in the training thread (published: 4)
$MAX_DATA_LOADER_N_WORKERS = '4'
# cache_latents, check_cache: precision of the VAE and of the cached latents (default: float16 on CUDA, float32 on CPU and ROCm); one of float32, bfloat16, float16 (published: float16)
$VAE_DTYPE = 'float16'
# cache_text, check_cache: precision of the text encoder and of the cached embeddings (default: bfloat16 on a GPU, float32 on a CPU); one of float32, bfloat16, float16 (published: bfloat16)
$T5_DTYPE = 'bfloat16'
# train: so many items of the dataset are held out for validation (published: 0)
$VALIDATION_ITEMS = '0'
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
$WgSmoke = @()
if (($args.Count -eq 1) -and ($WgOnly -ceq 'smoke')) {
  $WgSmoke = @('--smoke')
  $WgOnly = ''
}
$WgNames = @('check', 'cache_latents', 'cache_text', 'check_cache', 'train', 'report')
if ((($args.Count -gt 1) -or ($WgOnly -ne '')) -and ($WgNames -cnotcontains $WgOnly)) {
  Write-Host 'wangen: this script takes nothing, or smoke, or the name of one step with words for it. Its steps: check, cache_latents, cache_text, check_cache, train, report'
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
    Write-Host 'wangen: step 1 of 6: check'
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
    Write-Host 'wangen: step 2 of 6: cache_latents'
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
    & $WgPython -m wangen.runtime @WgArgv @WgMore @WgSmoke
    $WgCode = $LASTEXITCODE
  }
  if (($WgCode -eq 0) -and (($WgOnly -eq '') -or ($WgOnly -ceq 'cache_text'))) {
    Write-Host 'wangen: step 3 of 6: cache_text'
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
    & $WgPython -m wangen.runtime @WgArgv @WgMore @WgSmoke
    $WgCode = $LASTEXITCODE
  }
  if (($WgCode -eq 0) -and (($WgOnly -eq '') -or ($WgOnly -ceq 'check_cache'))) {
    Write-Host 'wangen: step 4 of 6: check_cache'
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
    & $WgPython -m wangen.runtime @WgArgv @WgMore @WgSmoke
    $WgCode = $LASTEXITCODE
  }
  if (($WgCode -eq 0) -and (($WgOnly -eq '') -or ($WgOnly -ceq 'train'))) {
    Write-Host 'wangen: step 5 of 6: train'
    $WgStep = 'train'
    $WgArgv = @(
      'train',
      '--dataset_config', 'files\tomls\example_win.toml',
      '--resolution', $RESOLUTION,
      '--dit', 'models\wan2.1_t2v_1.3B_bf16.safetensors',
      '--task', 't2v-1.3B',
      '--experts', 'both',
      '--condition_dropout', '0.0',
      '--output_dir', 'outputs\example',
      '--output_name', 'example',
      '--train_mode', 'lora',
      '--network_module', 'lora',
      '--network_dim', $NETWORK_DIM,
      '--network_alpha', $NETWORK_ALPHA,
      '--network_dropout', '0.0',
      '--no_rslora',
      '--no_dora',
      '--lokr_factor=-1',
      '--lora_targets', 'all',
      '--no_dim_from_weights',
      '--learning_rate', $LEARNING_RATE,
      '--lr_scheduler', $LR_SCHEDULER,
      '--lr_warmup_steps', '0',
      '--lr_decay_steps', '0',
      '--lr_scheduler_num_cycles', '1',
      '--lr_scheduler_power', '1.0',
      '--lr_scheduler_min_lr_ratio', '0.0',
      '--optimizer_type', $OPTIMIZER_TYPE,
      '--max_grad_norm', '1.0',
      '--max_train_epochs', $MAX_TRAIN_EPOCHS,
      '--gradient_accumulation_steps', $GRADIENT_ACCUMULATION_STEPS,
      '--mixed_precision', $MIXED_PRECISION,
      '--timestep_sampling', $TIMESTEP_SAMPLING,
      '--discrete_flow_shift', $DISCRETE_FLOW_SHIFT,
      '--sigmoid_scale', '1.0',
      '--logit_mean', '0.0',
      '--logit_std', '1.0',
      '--mode_scale', '1.29',
      '--min_timestep', '0',
      '--max_timestep', '1000',
      '--no_preserve_distribution_shape',
      '--weighting_scheme', 'none',
      '--noise_offset', '0.0',
      '--caption_dropout', '0.0',
      '--prior_loss_weight', '1.0',
      '--seed', $SEED,
      '--quantize', 'none',
      '--blocks_to_swap', $BLOCKS_TO_SWAP,
      '--checkpointing', 'full',
      '--checkpointing_free_blocks', '0',
      '--no_gradient_checkpointing_cpu_offload',
      '--no_split_attn',
      '--attention', $ATTENTION,
      '--no_compile',
      '--no_plain',
      '--no_cuda_allow_tf32',
      '--no_pack',
      '--max_data_loader_n_workers', $MAX_DATA_LOADER_N_WORKERS,
      '--validation_items', $VALIDATION_ITEMS,
      '--save_precision', 'float32',
      '--lora_layout', 'comfyui',
      '--log_file', 'logs\example.log',
      '--report_dir', 'outputs\example',
      '--lock', 'outputs\example\run.lock'
    )
    $global:LASTEXITCODE = 1
    & $WgPython -m wangen.runtime @WgArgv @WgMore @WgSmoke
    $WgCode = $LASTEXITCODE
  }
  if (($WgCode -eq 0) -and (($WgOnly -eq '') -or ($WgOnly -ceq 'report'))) {
    Write-Host 'wangen: step 6 of 6: report'
    $WgStep = 'report'
    $WgArgv = @(
      'report',
      '--output_dir', 'outputs\example',
      '--output_name', 'example',
      '--dataset_config', 'files\tomls\example_win.toml',
      '--log_file', 'logs\example.log',
      '--report_dir', 'outputs\example',
      '--lock', 'outputs\example\run.lock'
    )
    $global:LASTEXITCODE = 1
    & $WgPython -m wangen.runtime @WgArgv @WgMore @WgSmoke
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
if ($WgSmoke.Count -gt 0) { Write-Host 'wangen: train_example (smoke) finished.' }
elseif ($WgOnly -eq '') { Write-Host 'wangen: train_example finished.' }
else { Write-Host "wangen: train_example (step $WgOnly) finished." }
exit 0
