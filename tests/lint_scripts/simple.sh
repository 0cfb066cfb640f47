#!/bin/bash
cd "$(dirname "$0")"
source venv/bin/activate
M=/data/models
python src/musubi_tuner/wan_cache_latents.py --dataset_config simple.toml --vae $M/Wan2.1_VAE.pth --sdpa
python src/musubi_tuner/wan_cache_text_encoder_outputs.py --dataset_config simple.toml \
  --t5 $M/models_t5_umt5-xxl-enc-bf16.pth
accelerate launch --mixed_precision bf16 src/musubi_tuner/wan_train_network.py --task t2v-14B \
  --dit $M/wan2.1_t2v_14B_bf16.safetensors --dataset_config simple.toml --sage-attn \
  --mixed_precision bf16 --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing \
  --network_module networks.lora_wan --network_dim 16 --max_train_epochs 16 --save_every_n_epochs 1 \
  --timestep_sampling shift --discrete_flow_shift 5 --blocks_to_swap 20 \
  --output_dir /data/loras --output_name cats
