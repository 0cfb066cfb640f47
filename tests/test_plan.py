"""`wangen plan` and `publish --fit`: what they say of a published dataset; what they choose fits and is kept."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import published
import pytest
from cached_bundle import Bundle
from helpers import read_tree, tool

from wangen import profiles
from wangen.generator import workspace
from wangen.generator.cli import main
from wangen.generator.memory import GIB, memory_plan, memory_settings, tokens_of
from wangen.generator.memory_changes import FASTEST
from wangen.generator.plan import planning
from wangen.generator.plan.scripted import read_script
from wangen.generator.plan.shapes import Encoding, survey
from wangen.generator.steps import Train
from wangen.generator.tomls import read_dataset

pytest_plugins = ["bundle_fixtures", "plan_fixtures"]

BIG = profiles.model("t2v-14B")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def script_of(place: Path, platform: str = "linux", shell: str = "sh") -> Train:
    target = workspace.read(place).target(platform)
    step = read_script(target.folder / f"train_cats.{shell}", target).step(Train)
    assert isinstance(step, Train)
    return step


# ---- what it says --------------------------------------------------------------------------------------------------


def test_a_run_that_does_not_fit_gets_the_flags_that_make_it_fit(place: Path, capsys):
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    code, found = planned(capsys, "cats", "--gpu", "rtx 4090")
    assert code == 1
    assert found["fits"] is False
    assert found["memory"]["device"] == sum(found["memory"]["parts"].values()) > found["memory"]["usable"]
    flags = found["changes"]["flags"]
    train = replace(script_of(place), **flags)
    tokens = max(bucket["tokens"] for bucket in found["buckets"])
    assert memory_plan(BIG, memory_settings(train), tokens=tokens).device <= 24 * GIB * 15 / 16
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before, "nothing is changed"
    assert main(["plan", "cats", "--gpu", "rtx 4090"]) == 1
    said = capsys.readouterr().out
    assert f"--quantize {flags['quantize']}" in said
    assert "together" in said
    assert 'wangen publish cats --fit --gpu "RTX 4090 24GB"' in said, "quotes that cmd.exe knows, too"


def test_buckets_steps_and_work_are_those_of_the_dataset(place: Path, capsys):
    code, found = planned(capsys, "cats", "--gpu", "H200")
    assert code == 0
    assert found["fits"] is True
    assert found["changes"] is None
    (size,) = {tuple(bucket["size"]) for bucket in found["buckets"] if bucket["frames"] > 1}
    clip = next(bucket for bucket in found["buckets"] if bucket["frames"] > 1)
    assert clip["tokens"] == tokens_of(BIG, size, clip["frames"])
    assert found["images"] + found["clips"] == sum(bucket["samples"] for bucket in found["buckets"]) == 10
    assert found["steps"] == 35 * found["steps_per_epoch"] == 350
    low, high = found["seconds_per_step"]
    assert 0 < low < high
    done = found["flops_per_step"]["done"]
    assert low >= 1.4 * done / (0.8 * 989e12) * 0.99, "not faster than the card"
    assert found["exact"]
    assert found["measured"] is None


def test_a_card_that_is_not_known_has_memory_and_no_speed(place: Path, capsys):
    code, found = planned(capsys, "cats", "--gpu", "24GB")
    assert code == 1
    assert found["seconds_per_step"] is None
    assert found["memory"]["usable"] == int(24 * GIB * 15 / 16)


def test_a_size_without_its_unit_is_answered_with_it(place: Path, capsys):
    assert main(["plan", "cats", "--gpu", "12"]) == 2
    assert "do:    of memory: --gpu 12GB" in capsys.readouterr().err


def test_that_nothing_is_held_out_is_said_with_what_mends_it(place: Path, capsys):
    words = "the knob VALIDATION_ITEMS, or validation_items = 1 below [steps.train] in wangen.toml"
    assert [words in note for note in planned(capsys, "cats", "--gpu", "H200")[1]["notes"]].count(True) == 1
    set_in_train(place, "validation_items = 1")
    assert not any("nothing is held out" in note for note in planned(capsys, "cats", "--gpu", "H200")[1]["notes"])


@pytest.mark.parametrize("line", ["max_train_epochs = 150", "max_train_steps = 10", 'train_mode = "full"'])
def test_few_steps_of_a_lora_are_said_with_epochs_that_are_more(place: Path, capsys, line: str):
    def few() -> list[str]:
        return [note for note in planned(capsys, "cats", "--gpu", "H200")[1]["notes"] if "steps are few" in note]

    assert few() == ["350 steps are few for a LoRA: MAX_TRAIN_EPOCHS 150 makes 1500"]
    set_in_train(place, line)
    assert few() == []


def test_without_a_card_it_says_what_is_needed_and_does_not_fail(place: Path, capsys):
    code, found = planned(capsys, "cats")
    assert code == 0
    assert found["fits"] is None
    assert found["gpu"] is None
    assert any("--gpu" in note for note in found["notes"])


def test_the_card_of_this_machine_is_found(place: Path, capsys, monkeypatch, tmp_path):
    tool(monkeypatch, tmp_path, "nvidia-smi", "echo 'NVIDIA GeForce RTX 4090, 8.9, 24564, 21554, [N/A], 16, 16'")
    code, found = planned(capsys, "cats")
    assert code == 1
    assert found["gpu"] == {"name": "NVIDIA GeForce RTX 4090", "memory": 24564 << 20, "free": 3010 << 20,
                            "tflops": 165.2}  # fmt: skip
    code, found = planned(capsys, "cats", "--platform", "windows")
    assert found["gpu"] is None, "the scripts of another machine say nothing of this one"
    set_in_train(place, 'gpus = "2"')
    assert "--gpus 2: this machine shows 1 card" in planned(capsys, "cats")[1]["notes"]
    set_in_train(place, 'device = "cpu"')
    code, found = planned(capsys, "cats")
    assert (code, found["gpu"]) == (0, None)
    assert any("on the processor" in note for note in found["notes"])


def set_in_train(place: Path, line: str, code: int = 0) -> None:
    """Put a line into `[steps.train]` of the workspace, and publish, which ends with the exit code."""
    path = place / "wangen.toml"
    path.write_text(path.read_text(encoding="utf-8").replace("[steps.train]\n", f"[steps.train]\n{line}\n"))
    assert main(["publish", "cats"]) == code


def test_a_script_can_be_named_where_there_is_no_workspace(place: Path, capsys, tmp_path, monkeypatch):
    there = shutil.copytree(place / "published" / "linux", tmp_path / "gpu machine")
    monkeypatch.chdir(tmp_path)
    code, found = planned(capsys, str(there / "train_cats.sh"), "--gpu", "H100")
    assert found["steps"] == 350
    assert code == int(not found["fits"])
    assert main(["plan", str(place / "published" / "windows" / "train_cats.bat")]) == 2
    assert "--platform windows" in capsys.readouterr().err
    code, found = planned(capsys, "cats", "--workspace", str(place), "--platform", "windows", "--gpu", "H100")
    assert found["steps"] == 350


@pytest.mark.parametrize(
    ("words", "said"),
    [(["dogs"], "not published"), (["cats", "--gpu", "RTX 4091"], "did you mean RTX 4090"),
     (["cats", "--gpu", "A100 60GB"], "40GB or 80GB"), (["cats", "--gpu", ""], "not known"),
     (["cats", "--gpu", "0GB"], "not known"), (["cats", "--platform", "mac"], "no platform"),
     (["a" * 300], "not published"), (["cats", "--gpu", "9" * 5000 + "GB"], "not known"),
     (["wangen.toml"], "no script"), (["published/linux/cache_cats.sh", "--gpu", "24GB"], "trains nothing")],
)  # fmt: skip
def test_what_cannot_be_planned_is_named(place: Path, capsys, words, said):
    assert main(["plan", *words]) in (1, 2)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [("gradient_accumulation_steps = 0", "must be above 0"), ("network_dim = -5", "must be above 0"),
     ("network_alpha = 1e308", "above 0 and at most 3.4e+38"), ("num_timestep_buckets = 2147483648", "at most 1000000"),
     ("blocks_to_swap = 99", "only the 40 blocks that are recomputed"),
     ("checkpointing_free_blocks = 80", "the model has 40 blocks"),
     ('network_args = ["rank_dropout=0.1"]', "rank_dropout and module_dropout are LoHa's and LoKr's"),
     ('optimizer_args = ["weight_decay"]', "takes key=value"), ('lr_warmup_steps = "soon"', "takes steps, a share"),
     ("lr_scheduler_power = 0", "--lr_scheduler_power must be above 0")],
)  # fmt: skip
def test_numbers_that_training_refuses_are_not_published(place: Path, capsys, line, said):
    before = read_tree(place / "published")
    set_in_train(place, line, 2)
    assert said in capsys.readouterr().err
    assert read_tree(place / "published") == before


@pytest.mark.parametrize(("value", "said"), [(b"0", "--network_dim must be above 0"), (b"", "by \"NETWORK_DIM=''\"")])
def test_a_knob_that_training_or_the_script_refuses_is_refused(place: Path, capsys, value, said):
    script = place / "published" / "linux" / "train_cats.sh"
    script.write_bytes(script.read_bytes().replace(b"NETWORK_DIM='16'", b"NETWORK_DIM='%s'" % value))
    assert main(["plan", "cats", "--gpu", "H100"]) == 2
    assert said in capsys.readouterr().err


def test_weights_that_are_here_are_counted_as_they_are(place: Path, capsys):
    path = place / "published" / "linux" / "models" / "wan2.1_t2v_14B_bf16.safetensors"
    plain = planned(capsys, "cats", "--gpu", "H100")[1]["memory"]["parts"]["weights that stay"]
    shapes = published.transformer(dim=5120, ffn_dim=13824, num_layers=40)
    published.write_sparse(path, shapes)
    assert planned(capsys, "cats", "--gpu", "H100")[1]["memory"]["parts"]["weights that stay"] == plain
    published.write_sparse_mixed(path, published.fp8_scaled(shapes))
    found = planned(capsys, "cats", "--gpu", "H100")[1]
    assert 0.5 < found["memory"]["parts"]["weights that stay"] / plain < 0.56, "half of them, norms stay"
    path.write_bytes(b"no weights")
    notes = planned(capsys, "cats", "--gpu", "H100")[1]["notes"]
    assert any("not understood" in note for note in notes)
    assert not any("\n" in note for note in notes), "a note is one line"


def test_a_broken_file_of_the_dataset_is_named_and_left_out(place: Path, capsys):
    picture = next((place / "published" / "linux" / "files" / "datasets" / "cats").rglob("*.jpg"))
    picture.unlink()
    picture.write_bytes(b"no picture")
    found = planned(capsys, "cats", "--gpu", "H100")[1]
    assert found["images"] + found["clips"] == 9
    assert any(picture.name in note for note in found["notes"])


def test_footage_that_is_not_cut_yet_is_planned_by_its_settings(place: Path, capsys):
    assert main(["publish", "films", "--footage", "films", "--resolution", "832x480"]) == 0
    code, found = planned(capsys, "films", "--gpu", "rtx 4090")
    assert found["exact"] is False
    assert found["steps"] is None
    assert code == 1
    assert max(bucket["tokens"] for bucket in found["buckets"]) == tokens_of(BIG, (832, 480), 45)


@pytest.mark.slow
def test_what_an_earlier_run_measured_counts_while_its_flags_are_the_same(place: Path, capsys):
    folder = place / "published" / "linux" / "outputs" / "cats" / "smoke"
    folder.mkdir(parents=True)
    from wangen.generator.session import plain
    from wangen.generator.table import options

    settings = {option.name: plain(getattr(script_of(place), option.name)) for option in options(Train)}
    report = {"settings": settings, "result": {
        "steps_this_run": 50, "speed": {"s_per_step": 2.5, "tokens_per_s": 1000.0, "peak_memory_bytes": 5 * GIB},
    }}  # fmt: skip
    (folder / "train.report.json").write_text(json.dumps(report), encoding="utf-8")
    assert planned(capsys, "cats")[1]["measured"] == {"seconds_per_step": 2.5, "peak_memory": 5 * GIB, "steps": 50}
    assert planned(capsys, "cats", "--gpu", "H100")[1]["measured"] is None, "another card"
    report["result"]["speed"]["tokens_per_s"] = 10_000.0
    (folder / "train.report.json").write_text(json.dumps(report), encoding="utf-8")
    assert planned(capsys, "cats")[1]["measured"] is None, "longer clips than the dataset has now"
    report["result"]["speed"]["tokens_per_s"] = 1000.0
    report["settings"]["checkpointing"] = "none"
    (folder / "train.report.json").write_text(json.dumps(report), encoding="utf-8")
    assert planned(capsys, "cats")[1]["measured"] is None
    for broken in ("", "[]", "{}", '{"settings": 1, "result": {}}'):
        (folder / "train.report.json").write_text(broken, encoding="utf-8")
        assert planned(capsys, "cats")[1]["measured"] is None


def test_the_cache_is_about_as_large_as_planned(bundle: Bundle):
    bundle.latents()
    bundle.text()
    encoding = Encoding(vae_dtype="float32", t5_dtype="float32", text_width=32)
    found = survey(read_dataset(bundle.toml, "all"), profiles.model("t2v-1.3B"), encoding)
    lying = sum(path.stat().st_size for path in bundle.folder.rglob("*.safetensors") if "_cache" in path.parent.name)
    assert found.cache_bytes == pytest.approx(lying, rel=0.15)
    assert found.num_images == 3
    assert found.num_clips == 1


def test_a_script_is_named_by_its_path_and_a_dataset_by_its_name(place: Path, capsys):
    script = "published/linux/train_cats.sh"
    for words, said in (
        (["published/linux/train_dogs.sh"], "there is no such file"),
        (["train_cats.ps1"], "there is no such file"),
        (["nowhere/cats"], "there is no such file"),
        ([script, "--platform", "linux"], "--platform is for a dataset's name"),
        ([script, "--workspace", "."], "--workspace is for a dataset's name"),
    ):
        assert main(["plan", *words]) == 2
        assert said in capsys.readouterr().err
    assert planned(capsys, script, "--gpu", "H200")[0] == planned(capsys, "datasets/cats", "--gpu", "H200")[0] == 0


# ---- publish --fit -------------------------------------------------------------------------------------------------


def test_fit_writes_the_flags_into_every_script_and_remembers_them(place: Path, capsys):
    plain = (place / "published" / "linux" / "train_cats.sh").read_bytes()
    assert main(["publish", "cats", "--fit", "--gpu", "RTX 4090"]) == 0
    assert planned(capsys, "cats", "--gpu", "RTX 4090")[0] == 0, "it fits now"
    chosen = {name: getattr(script_of(place), name) for name in FASTEST}
    assert chosen["quantize"] == "int8"
    assert chosen == {name: getattr(script_of(place, "windows", "ps1"), name) for name in FASTEST}
    fitted = (place / "published" / "linux" / "train_cats.sh").read_bytes()
    assert main(["publish", "cats"]) == 0
    assert (place / "published" / "linux" / "train_cats.sh").read_bytes() == fitted, "remembered"
    remembered = workspace.read(place).dataset("cats").fit
    assert remembered
    assert remembered.card == "RTX 4090 (24 GiB)"
    assert remembered.flags == chosen
    capsys.readouterr()
    assert main(["publish", "cats", "--fit", "--gpu", "H200"]) == 0
    assert "(train_cats.sh changed, cache_cats.sh, setup_wangen.sh)" in capsys.readouterr().out
    assert (script_of(place).quantize, script_of(place).checkpointing) == ("none", "selective"), "a larger card"
    assert main(["publish", "cats", "--no_fit"]) == 0
    assert (place / "published" / "linux" / "train_cats.sh").read_bytes() == plain
    assert workspace.read(place).dataset("cats").fit is None
    assert "fit = " not in (place / "wangen.toml").read_text(encoding="utf-8")


def test_what_the_workspace_says_of_memory_stays(place: Path):
    path = place / "wangen.toml"
    told = '[steps.train]\nquantize = "fp8"\nvram = "12"\npack = true\ngradient_accumulation_steps = 4\n'
    path.write_text(path.read_text(encoding="utf-8").replace("[steps.train]\n", told), encoding="utf-8")
    assert main(["publish", "cats", "--fit", "--gpu", "H200"]) == 0
    found = script_of(place)
    assert (found.quantize, found.vram, found.pack) == ("fp8", None, True)
    assert not {"quantize", "pack"} & workspace.read(place).dataset("cats").fit.flags.keys()


def test_fit_replaces_a_preset_that_the_card_is_too_small_for(place: Path, capsys):
    path = place / "wangen.toml"
    text = path.read_text(encoding="utf-8").replace("num_frames = 45", "num_frames = 17")
    path.write_text(text.replace("[steps.train]\n", '[steps.train]\nvram = "auto"\n'), encoding="utf-8")
    assert main(["publish", "cats"]) == 0
    assert main(["plan", "cats", "--gpu", "7GB"]) == 1
    assert "wangen publish cats --fit" in capsys.readouterr().out
    assert main(["publish", "cats", "--fit", "--gpu", "7GB"]) == 0
    assert script_of(place).vram is None
    assert planned(capsys, "cats", "--gpu", "7GB")[0] == 0


def test_of_several_cards_the_smallest_decides(place: Path, monkeypatch, tmp_path, capsys):
    line = "echo '{}, 9.0, {}, {}, [N/A], 16, 16'"
    both = [line.format("NVIDIA H200", 143771, 143771), line.format("NVIDIA GeForce RTX 4090", 24564, 24564)]
    tool(monkeypatch, tmp_path, "nvidia-smi", "\n".join(both))
    assert planned(capsys, "cats")[1]["gpu"]["name"] == "NVIDIA GeForce RTX 4090"
    assert main(["publish", "cats", "--fit"]) == 0
    fit = workspace.read(place).dataset("cats").fit
    assert fit
    assert "4090" in fit.card


def test_host_memory_is_that_of_the_flags_that_are_proposed(place: Path, monkeypatch, tmp_path, capsys):
    tool(monkeypatch, tmp_path, "nvidia-smi", "echo 'NVIDIA GeForce RTX 4090, 8.9, 24564, 24564, [N/A], 16, 16'")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=GIB))
    assert main(["plan", "cats"]) == 1
    assert "of host memory are needed, this machine has 1.0" in capsys.readouterr().out
    assert main(["publish", "cats", "--fit"]) == 0
    capsys.readouterr()
    assert main(["plan", "cats"]) == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("memory are needed, this machine has 1.0", "only 0.0 GiB of the card are"))


def test_a_link_to_nothing_in_the_cache_is_no_part_of_it(place: Path, capsys):
    train = script_of(place)
    (entry, *_) = read_dataset(train.dataset, train.resolution, tell=False)
    cache = place / "published" / "linux" / entry.cache_directory
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "gone.safetensors").symlink_to("nowhere")
    assert planned(capsys, "cats")[1]["disk"]["cached"] == 0


def test_a_card_that_nothing_fits_leaves_the_scripts_and_names_smaller_ones(place: Path, capsys):
    plain = (place / "published" / "linux" / "train_cats.sh").read_bytes()
    assert main(["publish", "cats", "--fit", "--gpu", "6GB"]) == 1
    said = capsys.readouterr().err
    assert "does not fit" in said
    assert "num_frames = " in said or "--resolution" in said
    assert "the scripts are published without" in said
    assert (place / "published" / "linux" / "train_cats.sh").read_bytes() == plain
    assert workspace.read(place).dataset("cats").fit is None
    assert main(["publish", "cats", "--fit", "--gpu", "RTX 4090"]) == 0
    fitted = (place / "published" / "linux" / "train_cats.sh").read_bytes()
    assert main(["publish", "cats", "--fit", "--gpu", "5GB"]) == 1
    said = capsys.readouterr().err
    assert "the scripts keep those for RTX 4090" in said
    assert "--resolution" in said
    assert "num_frames = 1 " not in said, "those are pictures"
    assert (place / "published" / "linux" / "train_cats.sh").read_bytes() == fitted


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--gpu", "24GB"], "--gpu 24GB is for --fit"), (["--fit", "--dry_run"], "leave one out"),
     (["--fit", "--gpu", "GTX 9"], "not known"), (["--fit"], "no GPU is seen")],
)  # fmt: skip
def test_what_cannot_be_fitted_is_named(place: Path, capsys, words, said):
    before = read_tree(place)
    assert main(["publish", "cats", "--resolution", "256", *words]) in (1, 2)
    assert said in capsys.readouterr().err
    assert {name: data for name, data in read_tree(place).items() if "state" not in name} == before


@pytest.mark.parametrize("value", ["3", '"RTX 4090"', '{ quantise = "int8" }', '{ quantize = "int9" }', "{ card = 4 }"])
def test_a_fit_that_was_edited_wrongly_is_named(place: Path, capsys, value):
    path = place / "wangen.toml"
    path.write_text(path.read_text(encoding="utf-8") + f"\nfit = {value}\n", encoding="utf-8")
    assert main(["plan", "cats"]) == 2
    assert "fit" in capsys.readouterr().err


def test_one_disk_has_one_number_though_it_fills_meanwhile(tmp_path, monkeypatch):
    numbers = iter((5, 4, 3))
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda _place: SimpleNamespace(free=next(numbers)))
    assert planning._free_of_both(tmp_path / "cache", tmp_path / "output") == (5, 5)
    assert planning._free_of_both(None, tmp_path) == (None, 4)
