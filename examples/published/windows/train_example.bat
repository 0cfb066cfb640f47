@echo off
setlocal EnableExtensions DisableDelayedExpansion
rem train_example.bat: made by wangen 0.1.0 for example on windows.
rem
rem   double click, or train_example.bat     every step in order: check, cache_latents, cache_text, check_cache, train, report
rem   train_example.bat smoke                a try: 50 steps on at most 8 items into outputs/example/smoke
rem   train_example.bat STEP                 one step only
rem   train_example.bat STEP WORDS           one step, up to four words added to its command line; a flag given again
rem                                     wins, a list grows. cmd parts words at blanks and , ; = unless they stand in
rem                                     double quotes
rem
rem A step that failed stops the script with its exit code, and a double-clicked window stays open (never when
rem WANGEN_NO_PAUSE is set). Run it again to go on: what is done is kept.
rem Python is taken from WANGEN_PYTHON (full path of python.exe), the virtual environment, or VIRTUAL_ENV.
rem You may change the values of the knobs below: publishing again keeps them. Any other edit makes publishing
rem leave this file as it is and write the new text beside it as train_example.bat.new.
rem
rem wangen-digest: d1032afb28431265e6444b524b28d94d
chcp 65001 >nul 2>&1

rem Nothing comes from the environment.
for %%K in (RESOLUTION NETWORK_DIM NETWORK_ALPHA LEARNING_RATE LR_SCHEDULER OPTIMIZER_TYPE MAX_TRAIN_EPOCHS GRADIENT_ACCUMULATION_STEPS MIXED_PRECISION TIMESTEP_SAMPLING DISCRETE_FLOW_SHIFT SEED BLOCKS_TO_SWAP ATTENTION MAX_DATA_LOADER_N_WORKERS VAE_DTYPE T5_DTYPE VALIDATION_ITEMS NUM_WORKERS) do set "%%K="

rem >>> knobs: letters, digits and . _ , + - only
rem check, cache_latents, cache_text, check_cache, train: which resolutions of the TOML to use: all, or for example 256,832x480 (published: 832x480)
set "RESOLUTION=832x480"
rem train: rank of the adapter (published: 16)
set "NETWORK_DIM=16"
rem train: alpha; the adapter is scaled by alpha / rank (published: 16.0)
set "NETWORK_ALPHA=16.0"
rem train: learning rate (published: 0.0001)
set "LEARNING_RATE=0.0001"
rem train: learning-rate schedule; one of constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, cosine_with_min_lr, warmup_stable_decay, rex, adafactor (published: constant)
set "LR_SCHEDULER=constant"
rem train: AdamW, AdamW8bit (bitsandbytes or torchao), Adafactor, another class of torch.optim, or a dotted path (published: AdamW)
set "OPTIMIZER_TYPE=AdamW"
rem train: epochs; wins over --max_train_steps (35 when neither is given) (published: 35)
set "MAX_TRAIN_EPOCHS=35"
rem train: batches per optimizer step (published: 1)
set "GRADIENT_ACCUMULATION_STEPS=1"
rem train: bf16, or no for float32; one of bf16, no (published: bf16)
set "MIXED_PRECISION=bf16"
rem train: how timesteps are drawn; one of uniform, sigmoid, shift, logit_normal, logsnr, flux_shift, qwen_shift, qinglong_flux, qinglong_qwen, sigma (published: shift)
set "TIMESTEP_SAMPLING=shift"
rem train: shift of timestep_sampling shift (published: 5.0)
set "DISCRETE_FLOW_SHIFT=5.0"
rem train: seed of order, noise, timesteps, dropout and initial weights (published: 42)
set "SEED=42"
rem train: so many blocks wait in host memory and come when they are needed (default: as --vram says, else 0) (published: 0)
set "BLOCKS_TO_SWAP=0"
rem train: attention kernel; auto takes the fastest of flash3, flash, sdpa that runs forward and backward here; sage runs forward only, with the exact gradient of sdpa; one of auto, sdpa, flash, flash3, xformers, sage (published: auto)
set "ATTENTION=auto"
rem train: threads that read cache entries; 0 reads in the training thread (published: 4)
set "MAX_DATA_LOADER_N_WORKERS=4"
rem cache_latents, check_cache: precision of the VAE and of the cached latents (default: float16 on CUDA, float32 on CPU and ROCm); one of float32, bfloat16, float16 (published: float16)
set "VAE_DTYPE=float16"
rem cache_text, check_cache: precision of the text encoder and of the cached embeddings (default: bfloat16 on a GPU, float32 on a CPU); one of float32, bfloat16, float16 (published: bfloat16)
set "T5_DTYPE=bfloat16"
rem train: so many items of the dataset are held out for validation (published: 0)
set "VALIDATION_ITEMS=0"
rem cache_latents, cache_text: threads that read and decode media (default: 4, on ROCm 1) (published: 4)
set "NUM_WORKERS=4"
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
set "WG_SMOKE="
set "WG_ONLY=%~1"
if not "%~6"=="" goto wg_usage
if not defined WG_ONLY if not "%~2"=="" goto wg_usage
if not defined WG_ONLY goto wg_known
if "%WG_ONLY%"=="smoke" if "%~2"=="" goto wg_smoke
if "%WG_ONLY%"=="check" goto wg_known
if "%WG_ONLY%"=="cache_latents" goto wg_known
if "%WG_ONLY%"=="cache_text" goto wg_known
if "%WG_ONLY%"=="check_cache" goto wg_known
if "%WG_ONLY%"=="train" goto wg_known
if "%WG_ONLY%"=="report" goto wg_known
:wg_usage
echo wangen: this script takes nothing, or smoke, or the name of one step and up to four words for it. Its steps: check, cache_latents, cache_text, check_cache, train, report
set "WG_RC=2"
goto wg_end

:wg_smoke
set "WG_SMOKE=--smoke"
set "WG_ONLY="

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
"%WG_PY%" -c "import wangen.runtime, wangen.generator.knob_values as k; k.require('RESOLUTION NETWORK_DIM NETWORK_ALPHA LEARNING_RATE LR_SCHEDULER OPTIMIZER_TYPE MAX_TRAIN_EPOCHS GRADIENT_ACCUMULATION_STEPS MIXED_PRECISION TIMESTEP_SAMPLING DISCRETE_FLOW_SHIFT SEED BLOCKS_TO_SWAP ATTENTION MAX_DATA_LOADER_N_WORKERS VAE_DTYPE T5_DTYPE VALIDATION_ITEMS NUM_WORKERS')" >nul
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
echo wangen: step 1 of 6: check
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
echo wangen: step 2 of 6: cache_latents
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
  "--lock" "outputs\example\run.lock" %2 %3 %4 %5 %WG_SMOKE%
set "WG_RC=%ERRORLEVEL%"
if not "%WG_RC%"=="0" goto wg_failed

:wg_step3
if defined WG_ONLY if not "%WG_ONLY%"=="cache_text" goto wg_step4
set "WG_STEP=cache_text"
echo wangen: step 3 of 6: cache_text
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
  "--lock" "outputs\example\run.lock" %2 %3 %4 %5 %WG_SMOKE%
set "WG_RC=%ERRORLEVEL%"
if not "%WG_RC%"=="0" goto wg_failed

:wg_step4
if defined WG_ONLY if not "%WG_ONLY%"=="check_cache" goto wg_step5
set "WG_STEP=check_cache"
echo wangen: step 4 of 6: check_cache
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
  "--lock" "outputs\example\run.lock" %2 %3 %4 %5 %WG_SMOKE%
set "WG_RC=%ERRORLEVEL%"
if not "%WG_RC%"=="0" goto wg_failed

:wg_step5
if defined WG_ONLY if not "%WG_ONLY%"=="train" goto wg_step6
set "WG_STEP=train"
echo wangen: step 5 of 6: train
"%WG_PY%" -m wangen.runtime ^
  "train" ^
  "--dataset_config" "files\tomls\example_win.toml" ^
  "--resolution" "%RESOLUTION%" ^
  "--dit" "models\wan2.1_t2v_1.3B_bf16.safetensors" ^
  "--task" "t2v-1.3B" ^
  "--experts" "both" ^
  "--condition_dropout" "0.0" ^
  "--output_dir" "outputs\example" ^
  "--output_name" "example" ^
  "--train_mode" "lora" ^
  "--network_module" "lora" ^
  "--network_dim" "%NETWORK_DIM%" ^
  "--network_alpha" "%NETWORK_ALPHA%" ^
  "--network_dropout" "0.0" ^
  "--no_rslora" ^
  "--no_dora" ^
  "--lokr_factor=-1" ^
  "--lora_targets" "all" ^
  "--no_dim_from_weights" ^
  "--learning_rate" "%LEARNING_RATE%" ^
  "--lr_scheduler" "%LR_SCHEDULER%" ^
  "--lr_warmup_steps" "0" ^
  "--lr_decay_steps" "0" ^
  "--lr_scheduler_num_cycles" "1" ^
  "--lr_scheduler_power" "1.0" ^
  "--lr_scheduler_min_lr_ratio" "0.0" ^
  "--optimizer_type" "%OPTIMIZER_TYPE%" ^
  "--max_grad_norm" "1.0" ^
  "--max_train_epochs" "%MAX_TRAIN_EPOCHS%" ^
  "--gradient_accumulation_steps" "%GRADIENT_ACCUMULATION_STEPS%" ^
  "--mixed_precision" "%MIXED_PRECISION%" ^
  "--timestep_sampling" "%TIMESTEP_SAMPLING%" ^
  "--discrete_flow_shift" "%DISCRETE_FLOW_SHIFT%" ^
  "--sigmoid_scale" "1.0" ^
  "--logit_mean" "0.0" ^
  "--logit_std" "1.0" ^
  "--mode_scale" "1.29" ^
  "--min_timestep" "0" ^
  "--max_timestep" "1000" ^
  "--no_preserve_distribution_shape" ^
  "--weighting_scheme" "none" ^
  "--noise_offset" "0.0" ^
  "--caption_dropout" "0.0" ^
  "--prior_loss_weight" "1.0" ^
  "--seed" "%SEED%" ^
  "--quantize" "none" ^
  "--blocks_to_swap" "%BLOCKS_TO_SWAP%" ^
  "--checkpointing" "full" ^
  "--checkpointing_free_blocks" "0" ^
  "--no_gradient_checkpointing_cpu_offload" ^
  "--no_split_attn" ^
  "--attention" "%ATTENTION%" ^
  "--no_compile" ^
  "--no_plain" ^
  "--no_cuda_allow_tf32" ^
  "--no_pack" ^
  "--max_data_loader_n_workers" "%MAX_DATA_LOADER_N_WORKERS%" ^
  "--validation_items" "%VALIDATION_ITEMS%" ^
  "--save_precision" "float32" ^
  "--lora_layout" "comfyui" ^
  "--log_file" "logs\example.log" ^
  "--report_dir" "outputs\example" ^
  "--lock" "outputs\example\run.lock" %2 %3 %4 %5 %WG_SMOKE%
set "WG_RC=%ERRORLEVEL%"
if not "%WG_RC%"=="0" goto wg_failed

:wg_step6
if defined WG_ONLY if not "%WG_ONLY%"=="report" goto wg_step7
set "WG_STEP=report"
echo wangen: step 6 of 6: report
"%WG_PY%" -m wangen.runtime ^
  "report" ^
  "--output_dir" "outputs\example" ^
  "--output_name" "example" ^
  "--dataset_config" "files\tomls\example_win.toml" ^
  "--log_file" "logs\example.log" ^
  "--report_dir" "outputs\example" ^
  "--lock" "outputs\example\run.lock" %2 %3 %4 %5 %WG_SMOKE%
set "WG_RC=%ERRORLEVEL%"
if not "%WG_RC%"=="0" goto wg_failed

:wg_step7
if defined WG_SMOKE echo wangen: train_example smoke finished.
if defined WG_SMOKE goto wg_end
if not defined WG_ONLY echo wangen: train_example finished.
if defined WG_ONLY echo wangen: train_example step %WG_ONLY% finished.
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
