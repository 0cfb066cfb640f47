@echo off
setlocal
rem Wan 2.2 image-to-video, both experts in one run.
cd /d "%~dp0"
call venv\Scripts\activate.bat
set "MODELS=C:\AI\models"
set "DATASET=C:\AI\sets\cats\dataset.toml"

python src\musubi_tuner\wan_cache_latents.py --dataset_config "%DATASET%" --vae "%MODELS%\Wan2.1_VAE.pth" --i2v
if not "%ERRORLEVEL%"=="0" goto failed
python src\musubi_tuner\wan_cache_text_encoder_outputs.py --dataset_config "%DATASET%" --t5 "%MODELS%\models_t5_umt5-xxl-enc-bf16.pth" --batch_size 16 || goto failed

accelerate launch --num_cpu_threads_per_process 1 --mixed_precision fp16 src\musubi_tuner\wan_train_network.py ^
  --task i2v-A14B ^
  --dit "%MODELS%\wan2.2_i2v_low_noise_14B_fp16.safetensors" ^
  --dit_high_noise "%MODELS%\wan2.2_i2v_high_noise_14B_fp16.safetensors" ^
  --timestep_boundary 900 --timestep_sampling shift --discrete_flow_shift 5.0 ^
  --dataset_config "%DATASET%" --sdpa --mixed_precision fp16 --fp8_base --fp8_scaled ^
  --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing --blocks_to_swap 20 ^
  --network_module networks.lora_wan --network_dim 16 --network_alpha 16 ^
  --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 ^
  --output_dir "C:\AI\out\cats" --output_name "cats 100%% real"
if not "%ERRORLEVEL%"=="0" goto failed
echo finished
goto end
:failed
echo a step failed with the code %ERRORLEVEL%
:end
pause
