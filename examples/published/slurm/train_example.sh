#!/usr/bin/env bash
# train_example.sh: made by wangen 0.1.0 for example on slurm.
#
#   bash train_example.sh                every step in order: check, cache_latents, cache_text, check_cache, train, report
#   bash train_example.sh smoke          a try: 50 steps on at most 8 items into outputs/example/smoke
#   bash train_example.sh STEP           one step only
#   bash train_example.sh STEP WORDS     one step, the words added to its command line (a flag given again wins, a list grows)
#
# A step that failed stops the script with its exit code. Run it again to go on: what is done is kept.
# Python is taken from $WANGEN_PYTHON (full path of an interpreter), the virtual environment, or $VIRTUAL_ENV.
# You may change the values of the knobs below: publishing again keeps them. Any other edit makes publishing
# leave this file as it is and write the new text beside it as train_example.sh.new.
#
# wangen-digest: 85f35276739f0218c37d3c1d77f2b5ea
# Typographic quotes in a path or prompt are no typing errors.
# shellcheck disable=SC1112
# An editor for Windows may have put a carriage return behind every line: behind the first of these two, and hidden
# by the # behind the second.
wg_end=''
[ -z "$wg_end" ] || { printf '%s\n' "wangen: $0 has the line ends of Windows: publish again, or remove them (sed -i 's/\r//')" >&2; exit 2; } #
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

# Nothing comes from the environment.
unset RESOLUTION NETWORK_DIM NETWORK_ALPHA LEARNING_RATE LR_SCHEDULER OPTIMIZER_TYPE MAX_TRAIN_EPOCHS GRADIENT_ACCUMULATION_STEPS MIXED_PRECISION TIMESTEP_SAMPLING DISCRETE_FLOW_SHIFT SEED BLOCKS_TO_SWAP ATTENTION MAX_DATA_LOADER_N_WORKERS VAE_DTYPE T5_DTYPE VALIDATION_ITEMS NUM_WORKERS

# >>> knobs: letters, digits and . _ , + - only
# check, cache_latents, cache_text, check_cache, train: which resolutions of the TOML to use: all, or for example 256,832x480 (published: 832x480)
RESOLUTION='832x480'
# train: rank of the adapter (published: 16)
NETWORK_DIM='16'
# train: alpha; the adapter is scaled by alpha / rank (published: 16.0)
NETWORK_ALPHA='16.0'
# train: learning rate (published: 0.0001)
LEARNING_RATE='0.0001'
# train: learning-rate schedule; one of constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, cosine_with_min_lr, warmup_stable_decay, rex, adafactor (published: constant)
LR_SCHEDULER='constant'
# train: AdamW, AdamW8bit (bitsandbytes or torchao), Adafactor, another class of torch.optim, or a dotted path (published: AdamW)
OPTIMIZER_TYPE='AdamW'
# train: epochs; wins over --max_train_steps (35 when neither is given) (published: 35)
MAX_TRAIN_EPOCHS='35'
# train: batches per optimizer step (published: 1)
GRADIENT_ACCUMULATION_STEPS='1'
# train: bf16, or no for float32; one of bf16, no (published: bf16)
MIXED_PRECISION='bf16'
# train: how timesteps are drawn; one of uniform, sigmoid, shift, logit_normal, logsnr, flux_shift, qwen_shift, qinglong_flux, qinglong_qwen, sigma (published: shift)
TIMESTEP_SAMPLING='shift'
# train: shift of timestep_sampling shift (published: 5.0)
DISCRETE_FLOW_SHIFT='5.0'
# train: seed of order, noise, timesteps, dropout and initial weights (published: 42)
SEED='42'
# train: so many blocks wait in host memory and come when they are needed (default: as --vram says, else 0) (published: 0)
BLOCKS_TO_SWAP='0'
# train: attention kernel; auto takes the fastest of flash3, flash, sdpa that runs forward and backward here; sage runs forward only, with the exact gradient of sdpa; one of auto, sdpa, flash, flash3, xformers, sage (published: auto)
ATTENTION='auto'
# train: threads that read cache entries; 0 reads in the training thread (published: 4)
MAX_DATA_LOADER_N_WORKERS='4'
# cache_latents, check_cache: precision of the VAE and of the cached latents (default: float16 on CUDA, float32 on CPU and ROCm); one of float32, bfloat16, float16 (published: float16)
VAE_DTYPE='float16'
# cache_text, check_cache: precision of the text encoder and of the cached embeddings (default: bfloat16 on a GPU, float32 on a CPU); one of float32, bfloat16, float16 (published: bfloat16)
T5_DTYPE='bfloat16'
# train: so many items of the dataset are held out for validation (published: 0)
VALIDATION_ITEMS='0'
# cache_latents, cache_text: threads that read and decode media (default: 4, on ROCm 1) (published: 4)
NUM_WORKERS='4'
# <<< knobs

# Nobody may be there to read it any more; the steps are not to stop for that.
trap '' PIPE
wg_say() {
  printf '%s\n' "$@" 2>/dev/null || :
}

wg_stop() {
  local code=$1
  shift
  wg_say "$@" >&2 || :
  exit "$code"
}

# Ctrl-C reaches the step as well, and a kill of this script is handed on to it: it saves, and says so itself unless it
# has just begun. This script says it last, as it does between two steps.
WG_RUNNING='' WG_STOPPED='' WG_STEP=''
wg_ended() {
  WG_RUNNING=''
  [ -z "$WG_STOPPED" ] || wg_stop 130 'wangen: stopped. Nothing saved is lost: run this script again to go on.'
}
trap 'WG_STOPPED=1; [ -n "$WG_RUNNING" ] || wg_ended' INT
wg_told() { # Slurm tells all processes of a job at once
  WG_STOPPED=1
  [ -n "$WG_RUNNING" ] || wg_ended
  [ -z "$WG_STEP" ] || [ -n "${WANGEN_ALL_TOLD:-}" ] || kill -TERM "$WG_STEP" 2>/dev/null || :
}
trap wg_told TERM HUP

wg_step() { # COMMAND…: runs it, in the background as else bash hears of a signal only when it has ended
  local code
  (
    trap - INT
    exec "$@"
  ) <&0 &
  WG_STEP=$!
  [ -z "$WG_STOPPED" ] || kill -TERM "$WG_STEP" 2>/dev/null || :
  while :; do
    code=0
    wait "$WG_STEP" || code=$?
    kill -0 "$WG_STEP" 2>/dev/null || break
  done
  WG_STEP=''
  return "$code"
}

wg_failed() {
  # What wait gives after a signal may be that signal, not how the step ended, which may have been too young for a word.
  [ -z "$WG_STOPPED" ] || wg_ended
  [ "$2" != 137 ] || wg_stop 137 "wangen: step $1 was killed (exit code 137), as Linux does when memory runs out." \
    '  do:    free memory, or change what the step needs, and run this script again: nothing saved is lost'
  case $2 in
    129 | 130 | 143) wg_stop "$2" "wangen: step $1 was stopped (exit code $2). Run this script again to go on: nothing saved is lost." ;;
  esac
  wg_stop "$2" "wangen: step $1 failed (exit code $2); its message stands above. Mend it and run this script again."
}

for wg_knob in RESOLUTION NETWORK_DIM NETWORK_ALPHA LEARNING_RATE LR_SCHEDULER OPTIMIZER_TYPE MAX_TRAIN_EPOCHS GRADIENT_ACCUMULATION_STEPS MIXED_PRECISION TIMESTEP_SAMPLING DISCRETE_FLOW_SHIFT SEED BLOCKS_TO_SWAP ATTENTION MAX_DATA_LOADER_N_WORKERS VAE_DTYPE T5_DTYPE VALIDATION_ITEMS NUM_WORKERS; do
  case ${!wg_knob-} in
    '' | *[!A-Za-z0-9._,+-]*) wg_stop 2 "wangen: the knob $wg_knob may hold letters, digits and . _ , + - only" ;;
  esac
done

wg_only=${1:-}
WG_SMOKE=''
case $wg_only in
  smoke) WG_SMOKE=--smoke wg_only='' ;;
  '' | check | cache_latents | cache_text | check_cache | train | report) ;;
  *) wg_stop 2 "wangen: this script has no step '$wg_only'. Its steps: check, cache_latents, cache_text, check_cache, train, report; or smoke" ;;
esac
[ -n "$wg_only" ] || [ $# -le 1 ] || wg_stop 2 'wangen: further words belong behind the name of a step'
# What is left in "$@" are further words for that one step; without a step's name there are none.
[ $# -eq 0 ] || shift

WG_SELF=${BASH_SOURCE[0]}
[ ! -L "$WG_SELF" ] || WG_SELF=$(readlink -f -- "$WG_SELF")
WG_HERE=$(CDPATH='' cd -- "$(dirname -- "$WG_SELF")" && pwd)
# The bundle may be moved: its root is the folder that holds this script.
WG_ROOT=$WG_HERE
cd -- "$WG_ROOT"

# A Windows environment (Scripts, no bin) cannot run here and is never taken.
WG_PY=${WANGEN_PYTHON:-}
if [ -n "$WG_PY" ]; then
  { [ -f "$WG_PY" ] && [ -x "$WG_PY" ]; } || wg_stop 1 "wangen: WANGEN_PYTHON names no program: $WG_PY" \
    '  do:    unset it, or give the full path of a python'
else
  for wg_venv in "$WG_ROOT"/venv "$WG_ROOT"/'.venv' "${VIRTUAL_ENV:-}"; do
    if [ -n "$wg_venv" ] && [ -x "$wg_venv/bin/python" ]; then
      WG_PY=$wg_venv/bin/python
      break
    fi
  done
fi
if [ -z "$WG_PY" ]; then
  printf 'wangen: no Python was found. Looked for:\n' >&2 || :
  printf '  %s/bin/python\n' "$WG_ROOT"/venv "$WG_ROOT"/'.venv' >&2 || :
  wg_stop 1 '  do:    run setup_wangen.sh beside this script, or set WANGEN_PYTHON to an interpreter'
fi

unset PYTHONHOME
export PYTHONUTF8=1 PYTHONSAFEPATH=1 WANGEN_SCRIPT="$WG_HERE/${WG_SELF##*/}" WANGEN_SCRIPT_VERSION=0.1.0
if ! "$WG_PY" -c 'import wangen.runtime' >/dev/null; then
  wg_stop 1 "wangen: this Python cannot import wangen, as it says above: $WG_PY" \
    '  do:    run setup_wangen.sh beside this script, or type:' \
    "$(printf "  %q -m pip install %q'/files/wangen-0.1.0-py3-none-any.whl[runtime]'" "$WG_PY" "$WG_ROOT")"
fi

if [ -z "$wg_only" ] || [ "$wg_only" = check ]; then
  wg_say 'wangen: step 1 of 6: check'
  WG_RUNNING=check
  wg_step "$WG_PY" -m wangen.runtime \
    check \
    --dataset_config 'files/tomls/example_slurm.toml' \
    --resolution "$RESOLUTION" \
    --task t2v-1.3B \
    --vae 'models/Wan2.1_VAE.pth' \
    --t5 'models/models_t5_umt5-xxl-enc-bf16.pth' \
    --dit 'models/wan2.1_t2v_1.3B_bf16.safetensors' \
    --output_dir 'outputs/example' \
    --log_file 'logs/example.log' \
    --report_dir 'outputs/example' \
    "$@" || wg_failed check $?
  wg_ended
fi

if [ -z "$wg_only" ] || [ "$wg_only" = cache_latents ]; then
  wg_say 'wangen: step 2 of 6: cache_latents'
  WG_RUNNING=cache_latents
  wg_step "$WG_PY" -m wangen.runtime \
    cache_latents \
    --dataset_config 'files/tomls/example_slurm.toml' \
    --resolution "$RESOLUTION" \
    --task t2v-1.3B \
    --num_workers "$NUM_WORKERS" \
    --vae 'models/Wan2.1_VAE.pth' \
    --vae_dtype "$VAE_DTYPE" \
    --vae_tile 0 \
    --log_file 'logs/example.log' \
    --report_dir 'outputs/example' \
    --lock 'outputs/example/run.lock' \
    "$@" ${WG_SMOKE:+"$WG_SMOKE"} || wg_failed cache_latents $?
  wg_ended
fi

if [ -z "$wg_only" ] || [ "$wg_only" = cache_text ]; then
  wg_say 'wangen: step 3 of 6: cache_text'
  WG_RUNNING=cache_text
  wg_step "$WG_PY" -m wangen.runtime \
    cache_text \
    --dataset_config 'files/tomls/example_slurm.toml' \
    --resolution "$RESOLUTION" \
    --task t2v-1.3B \
    --num_workers "$NUM_WORKERS" \
    --t5 'models/models_t5_umt5-xxl-enc-bf16.pth' \
    --t5_dtype "$T5_DTYPE" \
    --no_fp8_t5 \
    --log_file 'logs/example.log' \
    --report_dir 'outputs/example' \
    --lock 'outputs/example/run.lock' \
    "$@" ${WG_SMOKE:+"$WG_SMOKE"} || wg_failed cache_text $?
  wg_ended
fi

if [ -z "$wg_only" ] || [ "$wg_only" = check_cache ]; then
  wg_say 'wangen: step 4 of 6: check_cache'
  WG_RUNNING=check_cache
  wg_step "$WG_PY" -m wangen.runtime \
    check_cache \
    --dataset_config 'files/tomls/example_slurm.toml' \
    --resolution "$RESOLUTION" \
    --task t2v-1.3B \
    --vae 'models/Wan2.1_VAE.pth' \
    --t5 'models/models_t5_umt5-xxl-enc-bf16.pth' \
    --vae_dtype "$VAE_DTYPE" \
    --t5_dtype "$T5_DTYPE" \
    --vae_tile 0 \
    --no_fp8_t5 \
    --log_file 'logs/example.log' \
    --report_dir 'outputs/example' \
    "$@" ${WG_SMOKE:+"$WG_SMOKE"} || wg_failed check_cache $?
  wg_ended
fi

if [ -z "$wg_only" ] || [ "$wg_only" = train ]; then
  wg_say 'wangen: step 5 of 6: train'
  WG_RUNNING=train
  wg_step "$WG_PY" -m wangen.runtime \
    train \
    --dataset_config 'files/tomls/example_slurm.toml' \
    --resolution "$RESOLUTION" \
    --dit 'models/wan2.1_t2v_1.3B_bf16.safetensors' \
    --task t2v-1.3B \
    --experts both \
    --condition_dropout 0.0 \
    --output_dir 'outputs/example' \
    --output_name example \
    --train_mode lora \
    --network_module lora \
    --network_dim "$NETWORK_DIM" \
    --network_alpha "$NETWORK_ALPHA" \
    --network_dropout 0.0 \
    --no_rslora \
    --no_dora \
    '--lokr_factor=-1' \
    --lora_targets all \
    --no_dim_from_weights \
    --learning_rate "$LEARNING_RATE" \
    --lr_scheduler "$LR_SCHEDULER" \
    --lr_warmup_steps 0 \
    --lr_decay_steps 0 \
    --lr_scheduler_num_cycles 1 \
    --lr_scheduler_power 1.0 \
    --lr_scheduler_min_lr_ratio 0.0 \
    --optimizer_type "$OPTIMIZER_TYPE" \
    --max_grad_norm 1.0 \
    --max_train_epochs "$MAX_TRAIN_EPOCHS" \
    --gradient_accumulation_steps "$GRADIENT_ACCUMULATION_STEPS" \
    --mixed_precision "$MIXED_PRECISION" \
    --timestep_sampling "$TIMESTEP_SAMPLING" \
    --discrete_flow_shift "$DISCRETE_FLOW_SHIFT" \
    --sigmoid_scale 1.0 \
    --logit_mean 0.0 \
    --logit_std 1.0 \
    --mode_scale 1.29 \
    --min_timestep 0 \
    --max_timestep 1000 \
    --no_preserve_distribution_shape \
    --weighting_scheme none \
    --noise_offset 0.0 \
    --caption_dropout 0.0 \
    --prior_loss_weight 1.0 \
    --seed "$SEED" \
    --quantize none \
    --blocks_to_swap "$BLOCKS_TO_SWAP" \
    --checkpointing full \
    --checkpointing_free_blocks 0 \
    --no_gradient_checkpointing_cpu_offload \
    --no_split_attn \
    --attention "$ATTENTION" \
    --no_compile \
    --no_plain \
    --no_cuda_allow_tf32 \
    --no_pack \
    --max_data_loader_n_workers "$MAX_DATA_LOADER_N_WORKERS" \
    --validation_items "$VALIDATION_ITEMS" \
    --save_precision float32 \
    --lora_layout comfyui \
    --log_file 'logs/example.log' \
    --report_dir 'outputs/example' \
    --lock 'outputs/example/run.lock' \
    "$@" ${WG_SMOKE:+"$WG_SMOKE"} || wg_failed train $?
  wg_ended
fi

if [ -z "$wg_only" ] || [ "$wg_only" = report ]; then
  wg_say 'wangen: step 6 of 6: report'
  WG_RUNNING=report
  wg_step "$WG_PY" -m wangen.runtime \
    report \
    --output_dir 'outputs/example' \
    --output_name example \
    --dataset_config 'files/tomls/example_slurm.toml' \
    --log_file 'logs/example.log' \
    --report_dir 'outputs/example' \
    --lock 'outputs/example/run.lock' \
    "$@" ${WG_SMOKE:+"$WG_SMOKE"} || wg_failed report $?
  wg_ended
fi

wg_say "wangen: train_example${wg_only:+ (step $wg_only)}${WG_SMOKE:+ (smoke)} finished."
