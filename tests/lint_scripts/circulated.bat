@echo off
setlocal enabledelayedexpansion
cd D:\musubi-tuner
venv\Scripts\activate.bat
set MODELS=D:\ComfyUI\models
set DATASET = D:\sets\cats\dataset.toml

python src\musubi_tuner\wan_cache_latents.py --dataset_config circulated.toml --vae "%MODELS%\vae\wan_2.1_vae.safetensors" --sdpa
python src\musubi_tuner\wan_cache_text_encoder_outputs.py --dataset_config %DATASET% --t5 %MODELS%\text encoders\umt5_xxl_fp8_e4m3fn_scaled.safetensors
if errorlevel 1 pause

accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src\musubi_tuner\wan_train_network.py ^
  --task i2v-A14B --dit "%MODELS%\diffusion_models\wan2.2_i2v_low_noise_14B_fp16.safetensors" ^
  --dit_high_noise "%MODELS%\diffusion_models\wan2.2_i2v_high_noise_14B_fp16.safetensors" ^
  --timestep_boundary 0.9 --timestep_sampling logsnr --discrete_flow_shift 5 ^ 
  --dataset_config circulated.toml --sage-attn --cache_latents --fp8_scaled ^
  --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing ^
  --network_module networks.lora_wan --network_dim 32 --network_alpha 32 ^
  --max_train_epochs 50 --output_dir "D:\loras\" --output_name <NAME>
pause
