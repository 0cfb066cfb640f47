#!/usr/bin/env bash
# cache_example.sh: made by wangen 0.1.0 for example on linux.
#
#   bash cache_example.sh                every step in order: check, cache_latents, cache_text, check_cache
#   bash cache_example.sh STEP           one step only
#   bash cache_example.sh STEP WORDS     one step, the words added to its command line (a flag given again wins, a list grows)
#
# A step that failed stops the script with its exit code. Run it again to go on: what is done is kept.
# Python is taken from $WANGEN_PYTHON (full path of an interpreter), the virtual environment, or $VIRTUAL_ENV.
# You may change the values of the knobs below: publishing again keeps them. Any other edit makes publishing
# leave this file as it is and write the new text beside it as cache_example.sh.new.
#
# wangen-digest: 832ae1068fdab5b9c8a42cb387cf0d3d
# Typographic quotes in a path or prompt are no typing errors.
# shellcheck disable=SC1112
# An editor for Windows may have put a carriage return behind every line: behind the first of these two, and hidden
# by the # behind the second.
wg_end=''
[ -z "$wg_end" ] || { printf '%s\n' "wangen: $0 has the line ends of Windows: publish again, or remove them (sed -i 's/\r//')" >&2; exit 2; } #
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail

# Nothing comes from the environment.
unset RESOLUTION VAE_DTYPE T5_DTYPE NUM_WORKERS

# >>> knobs: letters, digits and . _ , + - only
# check, cache_latents, cache_text, check_cache: which resolutions of the TOML to use: all, or for example 256,832x480 (published: 832x480)
RESOLUTION='832x480'
# cache_latents, check_cache: precision of the VAE and of the cached latents (default: float16 on CUDA, float32 on CPU and ROCm); one of float32, bfloat16, float16 (published: float16)
VAE_DTYPE='float16'
# cache_text, check_cache: precision of the text encoder and of the cached embeddings (default: bfloat16 on a GPU, float32 on a CPU); one of float32, bfloat16, float16 (published: bfloat16)
T5_DTYPE='bfloat16'
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

for wg_knob in RESOLUTION VAE_DTYPE T5_DTYPE NUM_WORKERS; do
  case ${!wg_knob-} in
    '' | *[!A-Za-z0-9._,+-]*) wg_stop 2 "wangen: the knob $wg_knob may hold letters, digits and . _ , + - only" ;;
  esac
done

wg_only=${1:-}
case $wg_only in
  '' | check | cache_latents | cache_text | check_cache) ;;
  *) wg_stop 2 "wangen: this script has no step '$wg_only'. Its steps: check, cache_latents, cache_text, check_cache" ;;
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
  wg_say 'wangen: step 1 of 4: check'
  WG_RUNNING=check
  wg_step "$WG_PY" -m wangen.runtime \
    check \
    --dataset_config 'files/tomls/example_linux.toml' \
    --resolution "$RESOLUTION" \
    --task t2v-1.3B \
    --vae 'models/Wan2.1_VAE.pth' \
    --t5 'models/models_t5_umt5-xxl-enc-bf16.pth' \
    --dit 'models/wan2.1_t2v_1.3B_bf16.safetensors' \
    --output_dir 'outputs/example' \
    --log_file 'logs/example.log' \
    --report_dir 'outputs/example' \
    --lock 'outputs/example/run.lock' \
    "$@" || wg_failed check $?
  wg_ended
fi

if [ -z "$wg_only" ] || [ "$wg_only" = cache_latents ]; then
  wg_say 'wangen: step 2 of 4: cache_latents'
  WG_RUNNING=cache_latents
  wg_step "$WG_PY" -m wangen.runtime \
    cache_latents \
    --dataset_config 'files/tomls/example_linux.toml' \
    --resolution "$RESOLUTION" \
    --task t2v-1.3B \
    --num_workers "$NUM_WORKERS" \
    --vae 'models/Wan2.1_VAE.pth' \
    --vae_dtype "$VAE_DTYPE" \
    --vae_tile 0 \
    --log_file 'logs/example.log' \
    --report_dir 'outputs/example' \
    --lock 'outputs/example/run.lock' \
    "$@" || wg_failed cache_latents $?
  wg_ended
fi

if [ -z "$wg_only" ] || [ "$wg_only" = cache_text ]; then
  wg_say 'wangen: step 3 of 4: cache_text'
  WG_RUNNING=cache_text
  wg_step "$WG_PY" -m wangen.runtime \
    cache_text \
    --dataset_config 'files/tomls/example_linux.toml' \
    --resolution "$RESOLUTION" \
    --task t2v-1.3B \
    --num_workers "$NUM_WORKERS" \
    --t5 'models/models_t5_umt5-xxl-enc-bf16.pth' \
    --t5_dtype "$T5_DTYPE" \
    --no_fp8_t5 \
    --log_file 'logs/example.log' \
    --report_dir 'outputs/example' \
    --lock 'outputs/example/run.lock' \
    "$@" || wg_failed cache_text $?
  wg_ended
fi

if [ -z "$wg_only" ] || [ "$wg_only" = check_cache ]; then
  wg_say 'wangen: step 4 of 4: check_cache'
  WG_RUNNING=check_cache
  wg_step "$WG_PY" -m wangen.runtime \
    check_cache \
    --dataset_config 'files/tomls/example_linux.toml' \
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
    --lock 'outputs/example/run.lock' \
    "$@" || wg_failed check_cache $?
  wg_ended
fi

wg_say "wangen: cache_example${wg_only:+ (step $wg_only)} finished."
