"""Rules of `wangen lint` about the flags of wangen's own training."""

import pytest
from lint_samples import SHELLS, expect, findings

TRAIN = "wangen train --dataset_config x.toml --output_dir o --output_name n"
ONE = f"{TRAIN} --dit d"
GIVEN = f"{TRAIN} --dit d --task ti2v-5B --sample_continuations 4"
BOTH = f"{TRAIN} --task t2v-A14B --dit low --dit_high_noise high"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("line", "kind", "words"), [
    (f"{ONE} --blocks_to_swap 20 --checkpointing none", "memory", ["needs checkpointing", "full or selective"]),
    (f"{ONE} --blocks_to_swap 20 --no_gradient_checkpointing", "memory", ["needs checkpointing"]),
    (f"{ONE} --gradient_checkpointing_cpu_offload --checkpointing none", "memory", ["parks what checkpointing"]),
    (f"{ONE} --plain --blocks_to_swap 4", "memory", ["knows no block swap"]),
    (f"{ONE} --plain --checkpointing selective", "memory", ["knows no selective"]),
    (f"{ONE} --blocks_to_swap 41", "memory", ["40 at most for t2v-14B"]),
    (f"{ONE} --task t2v-1.3B --blocks_to_swap 31", "memory", ["--blocks_to_swap 30"]),
    (f"{ONE} --task t2v-1.3B --blocks_to_swap 28 --checkpointing_free_blocks 4", "memory", ["--blocks_to_swap 26"]),
    (f"{ONE} --plain --checkpointing_free_blocks 4", "memory", ["computes every block again"]),
    (f"{ONE} --train_mode full --fp8_base", "memory", ["--quantize", "every weight is trained"]),
    (f"{ONE} --train_mode full --blocks_to_swap 2", "memory", ["every weight is trained"]),
    (f"{ONE} --train_mode full --network_weights w", "memory", ["for adapters"]),
    (f"{ONE} --train_mode full --dora", "memory", ["--dora is for adapters"]),
    (f"{ONE} --train_mode full --network_module loha", "memory", ["--network_module is for adapters"]),
    (f"{ONE} --train_mode full --exclude_patterns attn1", "memory", ["--exclude_patterns is for adapters"]),
    (TRAIN, "missing-flag", ["the transformer of t2v-14B", "--dit PATH"]),
    (f"{ONE} --dit_high_noise h", "experts", ["t2v-14B has one transformer"]),
    (f"{TRAIN} --task t2v-A14B --dit low", "missing-flag", ["high-noise expert of t2v-A14B", "--dit_high_noise PATH"]),
    (f"{TRAIN} --task i2v-A14B --dit_high_noise h", "missing-flag", ["low-noise expert of i2v-A14B", "--dit PATH"]),
    (f"{BOTH.replace(' --dit low', '')} --experts both", "missing-flag", ["low-noise expert"]),
    (f"{ONE} --sample_every_n_epochs 1", "samples", ["needs --sample_prompts"]),
    (f"{ONE} --sample_prompts p.txt --vae v", "samples", ["add --t5 PATH"]),
    (f"{ONE} --keep_best", "value", ["--validation_items 8"]),
    (f"{GIVEN} --vae v", "value", ["--sample_continuations needs a validation", "--validation_items 8"]),
    (f"{GIVEN} --validation_items 4", "samples", ["continuations need the VAE", "--vae PATH"]),
])  # fmt: skip
def test_what_training_would_refuse_is_said_before_it_runs(shell, line, kind, words):
    assert expect(shell, f"{line}\n", kind, 1, *words).severity == "error"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("low", "high", "words"), [
    ("a_high_noise.pth", "a_low_noise.pth", ["exchange them"]),
    ("a_low_noise.pth", "b_low_noise.pth", ["both are weights of the low-noise expert"]),
])  # fmt: skip
def test_experts_that_seem_swapped_are_a_warning(shell, low, high, words):
    line = f"{TRAIN} --task t2v-A14B --dit {low} --dit_high_noise {high}"
    assert expect(shell, f"{line}\n", "experts", 1, *words).severity == "warning"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("line", [
    f"{ONE} --sage_attn",
    f"{ONE} --train_mode full --network_module lora --network_dropout 0 --lora_layout comfyui --network_dim 16",
    f"{ONE} --train_mode full --network_module networks.lora_wan --no_dora",
    f"{ONE} --attention sage --vram 12",
    f"{ONE} --vram auto --blocks_to_swap 40 --block_swap_h2d_only --use_pinned_memory_for_block_swap",
    f"{ONE} --fp8_base --fp8_scaled --gradient_checkpointing --gradient_checkpointing_cpu_offload",
    f"{ONE} --no_gradient_checkpointing --no_gradient_checkpointing_cpu_offload",
    f"{ONE} --plain --checkpointing full --blocks_to_swap 0",
    BOTH,
    f"{BOTH} --blocks_to_swap 20 --block_swap_h2d_only --offload_inactive_dit",
    f"{TRAIN} --task t2v-A14B --dit low --experts low",
    f"{TRAIN} --task t2v-A14B --dit_high_noise high --experts high",
    f"{ONE} --sample_prompts p.txt --vae v --t5 t --sample_at_first",
    f"{ONE} --keep_best --validation_items 4",
    f"{GIVEN} --validation_config v.jsonl --vae v --sample_every_n_epochs 2",
])  # fmt: skip
def test_what_training_can_do_is_no_finding(shell, line):
    """Sage has its gradient here, swap goes with two experts and copies one way only."""
    about_places = {"missing-step", "no-venv", "cwd"}
    assert {finding.kind for finding in findings(shell, f"{line}\n")} <= about_places


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("words", ["--cache_mode realtime", "--cache_mode auto", "--cache_latents_to_disk", ""])
def test_training_that_encodes_needs_no_step_that_caches(shell, words):
    kinds = {finding.kind for finding in findings(shell, f"{ONE} --vae v --t5 t {words}\n")}
    assert ("missing-step" in kinds) == (not words)


@pytest.mark.parametrize("shell", SHELLS)
def test_ti2v_5b_has_a_vae_of_its_own(shell):
    line = "wangen check --dataset_config x.toml --task {} --vae {}\n"
    expect(shell, line.format("ti2v-5B", "Wan2.1_VAE.pth"), "weights", 1, "Wan2.2_VAE.pth")
    expect(shell, line.format("t2v-A14B", "wan2.2_vae.safetensors"), "weights", 1, "Wan2.1_VAE.pth")
    for task, vae in (("ti2v-5B", "Wan2.2_VAE.pth"), ("i2v-A14B", "Wan2.1_VAE.pth")):
        assert "weights" not in {finding.kind for finding in findings(shell, line.format(task, vae))}


@pytest.mark.parametrize("shell", SHELLS)
def test_weights_are_those_of_the_task_and_of_the_flag(shell):
    line = "wangen check --dataset_config x.toml --task {} --{} {}\n"
    expect(shell, line.format("i2v-A14B", "dit", "wan2.2_t2v_low_noise_14B_fp16.safetensors"), "weights", 1,
           "give Wan-2.2-I2V-Low-Noise-BF16.safetensors")  # fmt: skip
    expect(shell, line.format("qwen-image", "t5", "models_t5_umt5-xxl-enc-bf16.pth"), "weights", 1, "qwen_2.5_vl_7b")
    expect(shell, line.format("t2v-1.3B", "vae", "clip_vision_h.safetensors"), "weights", 1, "Wan2.1_VAE.pth")
    bare = "wangen cache_text --dataset_config x.toml --t5 {}\n"
    expect(shell, bare.format("wan2.1_t2v_14B_bf16.safetensors"), "weights", 1, "text-to-video transformer")
    for right in (
        line.format("t2v-14B", "dit", "wan2.2_t2v_high_noise_14B_fp16.safetensors"),  # the same sizes
        line.format("t2v-A14B", "dit", "wan2.1_t2v_14B_bf16.safetensors"),
        line.format("qwen-image-edit", "dit", "qwen_image_bf16.safetensors"),
        line.format("qwen-image", "vae", "wan_2.1_vae.safetensors"),
        line.format("i2v-14B", "dit", "diffusion_pytorch_model-00001-of-00006.safetensors"),
        line.format("t2v-1.3B", "dit", "mine.safetensors"),
        bare.format("qwen_2.5_vl_7b.safetensors"),
    ):
        assert "weights" not in {finding.kind for finding in findings(shell, right)}, right
