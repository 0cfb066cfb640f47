"""`wangen lint`: every rule about flags and steps, in every shell, and no false alarm about right scripts."""

import json
from pathlib import Path

import pytest
from lint_samples import A14B, OUT, SHELLS, call, expect, findings, line_of, script
from shells import bundles

from wangen.generator import lint, scripts
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.lint import tools
from wangen.generator.lint.kinds import KINDS
from wangen.profiles.foreign import musubi

SAMPLES = Path(__file__).with_name("lint_scripts")
LATENTS, TEXT, TRAIN = "wan_cache_latents.py", "wan_cache_text_encoder_outputs.py", "wan_train_network.py"

# step, changed flags, kind, the line that holds this, words of the message
FLAGS = [
    ("latents", {"sdpa": None}, "unknown-flag", "--sdpa", ["no flag --sdpa", "wan_train_network.py"]),
    ("latents", {"skip_exsting": None}, "unknown-flag", "--skip_exsting", ["did you mean --skip_existing?"]),
    ("latents", {"skip-existing": None}, "dashes", "--skip-existing", ["write --skip_existing"]),
    ("latents", {"batch_size": "two"}, "value", "--batch_size", ["whole number", "'two'"]),
    ("latents", {"vae": OUT}, "missing-flag", LATENTS, ["needs --vae"]),
    ("latents", {"task": "t2v-14B"}, "unknown-flag", "--task t2v-14B", ["take it off"]),
    ("text", {"vae": "@x.pth"}, "unknown-flag", "x.pth", ["belongs to wan_cache_latents.py"]),
    ("text", {"t5": OUT}, "missing-flag", TEXT, ["needs --t5"]),
    ("train", {"cache_latents": None}, "unknown-flag", "--cache_latents", ["sd-scripts", "wan_cache_latents.py"]),
    ("train", {"sage-attn": None}, "dashes", "--sage-attn", ["underscores"]),
    ("train", {"sage-attn": None, "sdpa": OUT}, "sage", "--sage-attn", ["no backward"]),
    ("train", {"attn_mode": "sdpa"}, "unknown-flag", "--attn_mode", ["wan_generate_video.py"]),
    ("train", {"train_batch_size": "2"}, "unknown-flag", "--train_batch_size", ["dataset TOML"]),
    ("train", {"gradient_checkpoint1ng": None}, "unknown-flag", "checkpoint1ng", ["--gradient_checkpointing"]),
    ("train", {"task": "ti2v-5B"}, "value", "--task", ["no value 'ti2v-5B'"]),
    ("train", {"mixed_precision": "bfloat16"}, "value", "--mixed_precision bfloat16", ["did you mean bf16?"]),
    ("train", {"network_dim": "16.5"}, "value", "--network_dim", ["whole number"]),
    ("train", {"learning_rate": "1e-4x"}, "value", "--learning_rate", ["a number"]),
    ("train", {"sdpa=true": None}, "value", "--sdpa=true", ["takes no value"]),
    ("train", {"seed": None}, "value", "--seed", ["needs a value"]),
    ("train", {"network_module": "networks.lora"}, "value", "networks.lora", ["networks.lora_wan"]),
    ("train", {"output_dir": OUT}, "missing-flag", TRAIN, ["--output_dir", "first save"]),
    ("train", {"output_name": OUT}, "missing-flag", TRAIN, ["--output_name", "whole run"]),
    ("train", {"network_module": OUT}, "missing-flag", TRAIN, ["networks.lora_wan"]),
    ("train", {"optimizer_type": OUT}, "missing-flag", TRAIN, ["adamw8bit"]),
    ("train", {"dit": OUT}, "missing-flag", TRAIN, ["--dit"]),
    ("train", {"network_dim ": "32"}, "twice", "--network_dim  32", ["given twice", "'32' wins"]),
    ("train", {"sdpa": OUT}, "attention", TRAIN, ["no attention", "--sdpa"]),
    ("train", {"flash_attn": None}, "attention", "--flash_attn", ["--sdpa and --flash_attn"]),
    ("train", {"sdpa": OUT, "sage_attn": None}, "sage", "--sage_attn", ["no backward", "--sdpa"]),
    ("train", {"mixed_precision": OUT}, "precision", TRAIN, ["accelerate's is not seen", "bf16"]),
    ("train", {"mixed_precision": "fp16"}, "precision", "--mixed_precision fp16", ["weights in bf16"]),
    ("train", {"mixed_precision": "no"}, "precision", "--mixed_precision no", ["accelerate is told bf16"]),
    ("train", {"fp8_scaled": None}, "memory", "--fp8_scaled", ["add --fp8_base"]),
    ("train", {"blocks_to_swap": "40"}, "memory", "--blocks_to_swap", ["39 at most"]),
    ("train", {"task": "t2v-1.3B", "blocks_to_swap": "30"}, "memory", "--blocks_to_swap", ["29 at most"]),
    ("train", {"block_swap_h2d_only": None, "gradient_checkpointing": OUT}, "memory", "h2d_only", ["add --gradient"]),
    ("train", {"persistent_data_loader_workers": None, "max_data_loader_n_workers": "0"}, "memory",
     "--persistent", ["without workers"]),
    ("train", {"dim_from_weights": None}, "memory", "--dim_from_weights", ["broken"]),
    ("train", {"flash3": None, "sdpa": OUT, "split_attn": None}, "memory", "--split_attn", ["--flash3"]),
    ("train", {"save_every_n_epochs": OUT}, "saving", TRAIN, ["before the end"]),
    ("train", {"resume": "@state"}, "saving", "--resume", ["step 0 again"]),
    ("train", {"max_train_steps": "900"}, "saving", "--max_train_steps", ["wins"]),
    ("train", {"learning_rate": OUT}, "saving", TRAIN, ["2e-6"]),
    ("train", {"sample_prompts": "@p.txt"}, "samples", "--sample_prompts", ["--vae PATH and --t5 PATH"]),
    ("train", {"sample_at_first": None}, "samples", "--sample_at_first", ["--sample_prompts"]),
    ("train", {"guidance_scale": "3"}, "no-effect", "--guidance_scale", ["ignores"]),
    ("train", {"wandb_api_key": "abc"}, "secret", "--wandb_api_key", ["wandb login"]),
    ("train", {"dit": "@wan2.2_t2v_fp8_scaled.safetensors"}, "weights", "--dit", ["never accepted"]),
    ("train", {"dit": "@wan.gguf"}, "weights", "--dit", ["GGUF"]),
    ("train", {"dit": "@wan.pth"}, "weights", "--dit", [".safetensors only"]),
    ("latents", {"vae": "@Wan2.2_VAE.pth"}, "weights", "--vae", ["Wan2.1_VAE.pth"]),
    ("latents", {"vae": "@models_t5_umt5-xxl-enc-bf16.pth"}, "weights", "--vae", ["a umT5 text", "Wan2.1_VAE.pth"]),
    ("text", {"t5": "@clip_vision_h.safetensors"}, "weights", "--t5", ["a CLIP", "give models_t5_umt5-xxl-enc-bf16"]),
    ("train", {"dit": "@WAN2.1_T2V_1.3B_bf16.safetensors"}, "weights", "--dit", ["of t2v-1.3B, and the task is t2v-14B",
                                                                                "give wan2.1_t2v_14B_bf16"]),
    ("train", {"task": "i2v-14B"}, "weights", "--dit", ["of t2v-14B, and the task is i2v-14B", "wan2.1_i2v_480p"]),
    ("text", {"t5": "@umt5_xxl_fp8_e4m3fn_scaled.safetensors"}, "weights", "--t5", ["ComfyUI"]),
    ("train", {"task": "i2v-A14B"}, "i2v", LATENTS, ["add --i2v"]),
    ("train", {"task": "i2v-14B"}, "i2v", LATENTS, ["--clip PATH"]),
    ("latents", {"i2v": None}, "i2v", "--i2v", ["t2v-14B does not use"]),
    ("train", {"task": "flf2v-14B"}, "i2v", "--task", ["cannot be trained"]),
    ("train", {"min_timestep": "900", "max_timestep": "100"}, "timesteps", "--min_timestep", ["exchange"]),
    ("train", {"timestep_sampling": "sigma", "discrete_flow_shift": OUT, "min_timestep": "875"}, "timesteps",
     "--min_timestep", ["inverts", "shift"]),
    ("train", {"timestep_sampling": OUT}, "shift", "--discrete_flow_shift", ["sigma, the default, ignores"]),
    ("train", {"timestep_sampling": "logsnr"}, "shift", "--discrete_flow_shift", ["logsnr ignores"]),
    ("train", {"discrete_flow_shift": OUT}, "shift", "--timestep_sampling", ["a shift of 1"]),
    ("train", {"weighting_scheme": "logit_normal"}, "shift", "--weighting_scheme", ["sigma only"]),
    ("train", A14B | {"timestep_boundary": "0.875"}, "value", "--timestep_boundary", ["write 875"]),
    ("train", A14B | {"timestep_sampling": "logsnr"}, "starved", "--timestep_sampling", ["0.005 %", "untrained"]),
    ("train", A14B | {"timestep_sampling": "sigmoid"}, "starved", "--timestep_sampling", ["2.6 %"]),
    ("train", A14B | {"timestep_sampling": "shift", "discrete_flow_shift": "12", "max_timestep": "875"}, "starved",
     "--timestep_sampling", [" 0 %", "take --max_timestep off"]),
    ("train", A14B | {"timestep_sampling": "uniform", "min_timestep": "100", "max_timestep": "900",
                      "preserve_distribution_shape": ""}, "starved", "--timestep_sampling", ["3.1 %", "shift 12"]),
    ("train", A14B | {"dit": "@high_bf16.safetensors", "dit_high_noise": "@low_bf16.safetensors"}, "experts",
     "--dit_high_noise", ["exchange"]),
    ("train", A14B | {"dit_high_noise": "@t2v_low_bf16.safetensors"}, "experts", "--dit_high_noise", ["both are"]),
    ("train", A14B | {"dit": "@high_noise_model/a.safetensors", "dit_high_noise": "@low_noise_model/a.safetensors"},
     "experts", "--dit_high_noise", ["exchange"]),
    ("train", A14B | {"task": "t2v-14B"}, "experts", "--dit_high_noise", ["A14B"]),
    ("train", A14B | {"num_timestep_buckets": "10"}, "experts", "--num_timestep_buckets", ["not respected"]),
    ("train", A14B | {"blocks_to_swap": "20", "offload_inactive_dit": None}, "memory", "inactive_dit", ["keep one"]),
    ("train", A14B | {"block_swap_h2d_only": None}, "memory", "--block_swap_h2d_only", ["other"]),
    ("train", A14B | {"dit_high_noise": OUT}, "experts", TRAIN, ["both", "--max_timestep 875"]),
    ("train", A14B | {"dit_high_noise": OUT, "dit": "@t2v_high_bf16.safetensors", "max_timestep": "875"}, "experts",
     "--max_timestep", ["high-noise", "--min_timestep 875"]),
    ("train", {"dataset_config": "@dogs.toml"}, "differs", "dogs.toml", ["another TOML", "cats.toml"]),
    ("text", {"dataset_config": "@dogs.toml"}, "differs", "dogs.toml", ["another TOML"]),
    ("train", {"vae": "@other_vae.pth"}, "differs", "other_vae.pth", ["another VAE"]),
    ("train", {"t5": "@other.pth"}, "differs", "other.pth", ["another text encoder"]),
]  # fmt: skip


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("step", "changes", "kind", "at", "words"), FLAGS)
def test_a_wrong_flag_is_named_with_its_line_and_its_cure(shell, step, changes, kind, at, words):
    text = script(shell, **{step: changes})
    expect(shell, text, kind, at, *words)


@pytest.mark.parametrize("shell", SHELLS)
def test_right_scripts_have_no_findings(shell):
    assert findings(shell, script(shell)) == []
    assert findings(shell, script(shell, train=A14B)) == []
    for low, high in (("wan2.2_t2v_low_noise_14B_highquality", "my_wan22_HN_workflow"), ("highland_wan22_ln", "b")):
        named = {"dit": f"@{low}.safetensors", "dit_high_noise": f"@{high}.safetensors"}
        assert findings(shell, script(shell, train=A14B | named)) == []
    assert findings(shell, script(shell, latents={"i2v": None}, train={"task": "i2v-A14B"} | {
        name: A14B[name] for name in ("dit", "dit_high_noise", "discrete_flow_shift")})) == []  # fmt: skip


@pytest.mark.parametrize("shell", SHELLS)
def test_shipped_examples_of_good_scripts_have_no_findings(shell):
    taken = lint.read(SAMPLES / f"clean.{shell}")
    assert lint.lint(taken) == []
    assert [step.name for step in taken.calls] == ["cache_latents", "cache_text", "train"]


@pytest.mark.parametrize("shell", SHELLS)
def test_our_own_scripts_have_no_findings_and_are_read_exactly(shell):
    bundle = bundles.bundle(shell, bundles.steps("m.safetensors") + bundles.prompts("a cat"))
    data = scripts.render(bundle, shell, "train")
    taken = lint.parse(Path(f"/nowhere/train_red_house.{shell}"), shell, data)
    assert lint.lint(taken) == []
    assert [[made.name, *(word.text for word in made.args)] for made in taken.calls] == scripts.read_steps(data, shell)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_flag_of_our_own_steps_is_judged_by_the_table(shell):
    words = "check_cache --dataset_config x.toml"
    expect(shell, f"wangen {words} --sdpa\n", "unknown-flag", 1, "check_cache has no flag --sdpa")
    train = "wangen train --dataset_config x.toml --dit d --output_dir o --output_name n"
    expect(shell, f"{train} --one_frame\n", "unknown-flag", 1, "one-frame")
    expect(shell, f"{train} --sdpa --flash_attn\n", "attention", 1, "contradict")
    expect(shell, f"{train} --timestep-sampling krea2_shift\n", "value", 1, "another model")
    expect(shell, f"python -m wangen.runtime {train[7:]} --network_dim x\n", "value", 1, "whole number")
    expect(shell, "wangen train --dataset_config x.toml --dit d --output_dir o\n", "missing-flag", 1, "--output_name")
    right = {finding.kind for finding in findings(shell, f"{train} --network-dim 8 --sdpa\n")}
    assert right == {"missing-step", "no-venv", "cwd"}


@pytest.mark.parametrize("shell", SHELLS)
def test_missing_and_misplaced_steps(shell):
    expect(shell, script(shell, text=OUT), "missing-step", TRAIN, "text embeddings", TEXT)
    expect(shell, script(shell, latents=OUT), "missing-step", TRAIN, "latents", LATENTS)
    alone = expect(shell, script(shell, latents=OUT, text=OUT), "missing-step", TRAIN, "latents")
    assert alone.severity == "warning"
    text = script(shell, order=("text", "train", "latents"))
    expect(shell, text, "order", LATENTS, "after training", f"line {line_of(text, TRAIN)}")
    hunyuan = script(shell).replace(LATENTS, "cache_latents.py")
    expect(shell, hunyuan, "foreign-step", "cache_latents.py", "HunyuanVideo", LATENTS)


@pytest.mark.parametrize("shell", SHELLS)
def test_two_trainings_into_one_file(shell):
    text = script(shell) + call(shell, "train", {"seed": "7"})
    last = text[: text.rindex("--output_name")].count("\n") + 1
    expect(shell, text, "same-output", last, "overwrites", f"line {line_of(text, TRAIN)}")


@pytest.mark.parametrize("shell", SHELLS)
def test_clip_belongs_to_wan_2_1(shell):
    text = script(shell, latents={"i2v": None, "clip": "@clip.pth"}, train=A14B | {"task": "i2v-A14B"})
    expect(shell, text, "clip", "--clip", "no image encoder", "--i2v")


def test_generate_is_judged_too(tmp_path):
    start = "python wan_generate_video.py --dit d.safetensors --vae v --t5 t --save_path o --prompt x"
    expect("sh", f"{start} --sdpa\n", "unknown-flag", 1, "--attn_mode sdpa")
    expect("sh", f"{start} --video_length 80\n", "value", 1, "write 77")
    expect("sh", f"{start} --video_size 480 830\n", "value", 1, "write 816")
    expect("sh", f"{start} --video_size 480\n", "value", 1, "2 values")


def test_flags_of_a_config_file_count(tmp_path):
    text = script("sh", train={"output_dir": OUT, "output_name": OUT, "config_file": "run.toml"})
    assert findings("sh", text, tmp_path) == []  # it cannot be seen, so nothing is known to be missing
    (tmp_path / "run.toml").write_text('[run]\noutput_dir = "/ai/out"\nnetwork_dimm = 8\n')
    expect("sh", text, "missing-flag", TRAIN, "--output_name", folder=tmp_path)
    expect("sh", text, "unknown-flag", "--config_file", "--network_dim", folder=tmp_path)


def test_words_that_only_the_running_script_knows_are_not_judged():
    text = script("sh").replace("--output_name cats", '"${EXTRA[@]}"')
    text = text.replace("source venv", "EXTRA=(--fp8_base)\nif [ -f a ]; then EXTRA+=(--y); fi\nsource venv")
    assert "missing-flag" not in {finding.kind for finding in findings("sh", text)}


def test_the_command_prints_counts_and_returns_the_code(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(script("sh", latents={"sdpa": None}, train={"save_every_n_epochs": OUT}))
    assert main(["lint", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.endswith("1 error, 1 warning in 3 calls\n")
    assert "run.sh:8: error: unknown-flag" in out
    assert max(map(len, out.split("\n"))) <= 100
    path.write_text(script("sh", train={"save_every_n_epochs": OUT}))
    assert main(["lint", str(path)]) == 0


def test_the_command_prints_json(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(script("sh", latents={"sdpa": None}))
    assert main(["lint", "--json", str(path)]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["kind"] == "unknown-flag"
    assert finding["severity"] == "error"
    assert finding["line"] == 8
    assert finding["file"] == "run.sh"


def test_what_is_no_script_is_refused(tmp_path, capsys):
    assert main(["lint", str(tmp_path / "none.sh")]) == 2
    (tmp_path / "a.txt").write_text("x")
    assert main(["lint", str(tmp_path / "a.txt")]) == 2
    (tmp_path / "a.sh").write_text("echo wan_train_network.py\npython hv_train_network.py\n")
    with pytest.raises(UsageError, match=r"nothing in this script.*HunyuanVideo"):
        lint.lint(lint.read(tmp_path / "a.sh"))
    assert "give a .bat, .ps1 or .sh" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bat", "ps1", "sh"])
def test_scripts_for_qwen_image_are_shown_the_way(tmp_path, capsys, shell):
    script = tmp_path / f"a.{shell}"
    script.write_text("python src/musubi_tuner/qwen_image_train_network.py --dit d --model_version edit-2509\n")
    assert main(["lint", str(script)]) == 2
    said = capsys.readouterr().err
    assert "qwen_image_train_network works for Qwen-Image" in said
    assert 'say model = "qwen-image-edit-plus" (2509, 2511)' in said


CIRCULATED = [
    (3, "cwd"), (4, "call"), (8, "unchecked"), (8, "unknown-flag"), (8, "i2v"), (9, "undefined"), (9, "unquoted"),
    (9, "unchecked"),
    (10, "errorlevel"), (12, "missing-flag"), (12, "precision"), (12, "saving"), (15, "continuation"), (15, "value"),
    (15, "shift"), (15, "starved"), (16, "dashes"), (16, "unknown-flag"), (16, "sage"), (16, "memory"),
    (19, "placeholder"), (19, "quoting"), (6, "toml-caption"), (6, "toml-cache"), (7, "toml-slashes"),
    (8, "toml-value"), (9, "toml-value"),
]  # fmt: skip


def test_a_script_as_people_pass_it_on():
    found = [(finding.line, finding.kind) for finding in lint.lint(lint.read(SAMPLES / "circulated.bat"))]
    assert sorted(found) == sorted(CIRCULATED)


def test_the_docs_show_what_the_command_says(tmp_path, capsys):
    for name in ("simple.sh", "simple.toml"):
        (tmp_path / name).write_bytes((SAMPLES / name).read_bytes())
    page = (Path(__file__).parents[1] / "docs" / "lint.md").read_text(encoding="utf-8")
    assert main(["lint", str(tmp_path / "simple.sh")]) == 1
    found = capsys.readouterr().out
    assert (SAMPLES / "simple.sh").read_text() in page
    assert found in page
    assert main(["lint", "--fix", str(tmp_path / "simple.sh")]) == 0
    assert capsys.readouterr().out.removeprefix(found) in page


def test_the_file_on_musubi_tuner_agrees_with_itself():
    tool = musubi()
    counts = {program: len(tools.musubi_specs(program)) for program in tool["steps"]}
    assert counts == {"wan_cache_latents": 17, "wan_cache_text_encoder_outputs": 8, "wan_train_network": 130,
                      "wan_generate_video": 70}  # fmt: skip
    kinds = {spec.kind for program in counts for spec in tools.musubi_specs(program).values()}
    assert kinds == {"str", "int", "float", "path"}
    for program, specs in ((program, tools.musubi_specs(program)) for program in counts):
        assert set(tool["required"][program]) <= specs.keys()
        assert set(tool["defaults"].get(program, {})) <= specs.keys()
        assert not set(tool["answers"].get(program, {})) & specs.keys()


def test_the_docs_name_every_kind():
    page = (Path(__file__).parents[1] / "docs" / "lint.md").read_text(encoding="utf-8")
    for name, kind in KINDS.items():
        about = kind.about.replace("|", r"\|")  # else a bar ends the cell
        assert f"| `{name}` | {kind.severity} | {about} |" in page
