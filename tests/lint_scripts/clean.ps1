# Wan 2.2 text-to-video, the high-noise expert alone.
Set-Location $PSScriptRoot
& .\venv\Scripts\Activate.ps1
$Models = "C:\AI\models"
$Dataset = Join-Path $PSScriptRoot "dataset.toml"
$Common = @("--dataset_config", $Dataset)

python src/musubi_tuner/wan_cache_latents.py @Common --vae "$Models\Wan2.1_VAE.pth"
if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }
python src/musubi_tuner/wan_cache_text_encoder_outputs.py @Common --t5 "$Models\models_t5_umt5-xxl-enc-bf16.pth"
if ($LASTEXITCODE -ne 0) { throw "text" }

$TrainArgs = @(
  "--task", "t2v-A14B",
  "--dit", "$Models\wan2.2_t2v_high_noise_14B_bf16.safetensors",
  "--min_timestep", 875, "--max_timestep", 1000, "--preserve_distribution_shape"
  "--timestep_sampling=shift"
  "--discrete_flow_shift=12"
  "--sdpa", "--mixed_precision", "bf16", "--gradient_checkpointing",
  "--optimizer_type", "adamw8bit", "--learning_rate", "1e-4",
  "--network_module", "networks.lora_wan", "--network_dim", "16",
  "--max_train_epochs", "30", "--save_every_n_epochs", "5",
  "--output_dir", "C:\AI\out\cats", "--output_name", "cats_high"
)
accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 `
  src/musubi_tuner/wan_train_network.py @Common @TrainArgs
exit $LASTEXITCODE
