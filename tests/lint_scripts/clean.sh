#!/usr/bin/env bash
# Wan 2.1 14B text-to-video, one machine, one card.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/musubi-tuner"
source venv/bin/activate

MODELS=/data/models/wan
DATASET=/data/sets/cats/dataset.toml

python src/musubi_tuner/wan_cache_latents.py --dataset_config "$DATASET" --vae "$MODELS/Wan2.1_VAE.pth" --skip_existing
python src/musubi_tuner/wan_cache_text_encoder_outputs.py \
  --dataset_config "$DATASET" \
  --t5 "$MODELS/models_t5_umt5-xxl-enc-bf16.pth" --batch_size 16

accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/wan_train_network.py \
  --task t2v-14B \
  --dit "$MODELS/wan2.1_t2v_14B_bf16.safetensors" \
  --dataset_config "$DATASET" --sdpa --mixed_precision bf16 --fp8_base \
  --optimizer_type adamw8bit --learning_rate 2e-4 --gradient_checkpointing \
  --max_data_loader_n_workers 2 --persistent_data_loader_workers \
  --network_module networks.lora_wan --network_dim 32 \
  --timestep_sampling shift --discrete_flow_shift 3.0 \
  --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 \
  --output_dir "/data/out/cats" --output_name cats
