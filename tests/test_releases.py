"""What earlier releases wrote is read by this one: caches, packs, states, LoRAs, scripts, flags."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from releases import HOME, STEPS_IN_ALL, STEPS_KEPT, accepted, losses, train_line, write_toml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wangen.generator import scripts
from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.generator.headers import WEIGHTS_FORMAT
from wangen.generator.steps import find_step
from wangen.runtime.cache import FORMAT as CACHE_FORMAT
from wangen.runtime.cache import Folder
from wangen.runtime.cache.pack_index import FORMAT as PACK_FORMAT
from wangen.runtime.training.checkpoint import FORMAT as STATE_FORMAT

RELEASES = sorted(path.name for path in HOME.iterdir())
SHELLS = {".sh", ".bat", ".ps1"}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a release wrote, with a TOML for it."""
    folder = tmp_path / "release"
    shutil.copytree(HOME / request.param, folder)
    write_toml(folder)
    return folder


def facts(release: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((release / "facts.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_its_cache_is_valid_to_the_last_byte(release, packed, capsys):
    toml = write_toml(release, packed=packed)
    assert main(["check_cache", "--dataset_config", str(toml), "--task", "t2v-1.3B", "--deep"]) == 0
    assert "5 entries valid" in capsys.readouterr().err


def test_its_packs_hold_its_entries(release):
    files, packs = (Folder(release / name, deep=True) for name in ("cache", "packed"))
    assert {(one.kind, one.key) for one in files.all_entries} == {(one.kind, one.key) for one in packs.all_entries}
    assert len(files.all_entries) == 5
    assert main(["cache", "unpack", str(release / "packed")]) == 0
    assert {path.name: path.read_bytes() for path in (release / "packed").glob("*.safetensors")} == {
        path.name: path.read_bytes() for path in (release / "cache").glob("*.safetensors")
    }


def test_its_training_goes_on_where_it_stopped(release, capsys):
    told = {int(step): loss for step, loss in facts(release)["losses"].items()}
    assert main(train_line(release, STEPS_IN_ALL)) == 0
    assert f"resuming at {STEPS_KEPT}" in capsys.readouterr().err
    # Another processor adds in another order.
    assert losses(release) == pytest.approx({step: told[step] for step in (3, 4)}, rel=1e-4)


def test_its_training_without_its_state_gives_the_losses_that_it_gave(release):
    told = {int(step): loss for step, loss in facts(release)["losses"].items()}
    shutil.rmtree(release / "out")
    assert main(train_line(release, STEPS_IN_ALL)) == 0
    assert losses(release) == pytest.approx(told, rel=1e-4)


@pytest.mark.parametrize("layout", ["comfyui", "kohya", "diffusers", "peft"])
def test_its_lora_is_exported(release, tmp_path, layout):
    output = tmp_path / f"exported-{layout}"
    output = output if layout == "peft" else output.with_suffix(".safetensors")
    assert main(["export", "--lora_weight", str(release / "out" / "lora.safetensors"), "--layout", layout,
                 "--output", str(output)]) == 0  # fmt: skip
    file = output if output.is_file() else next(output.glob("*.safetensors"))
    assert len(load_file(file)) >= 2 * 20


def test_its_scripts_are_read(release):
    found = [path for path in sorted((release / "scripts").rglob("*")) if path.suffix in SHELLS]
    named = [path for path in found if not path.name.startswith("setup")]
    assert len(named) >= 8
    for path in named:
        steps = list(scripts.parsed_steps(path.read_bytes(), path.suffix[1:]))
        assert [step for _, step in steps if isinstance(step, WangenError)] == [], path
        assert {command for command, _ in steps} & {"cache_latents", "train"}, path


def test_its_flags_are_taken_or_answered(release):
    """A flag that went is answered with what to do instead; a value that was allowed still is."""
    now = accepted()
    for command, flags in facts(release)["flags"].items():
        step = find_step(command)
        assert step is not None, command
        for name, values in flags.items():
            assert name in now[step.command] or name in step.elsewhere, f"{command} --{name}"
            assert set(values) <= set(now[step.command].get(name, values)), f"{command} --{name}"


def test_every_format_has_a_release_that_wrote_it():
    """Who raises a version adds a folder that holds it, so that all that follow read both."""
    newest = HOME / RELEASES[-1]
    entry, state = next(newest.glob("cache/*.safetensors")), next(newest.glob("out/*/*/state.json"))
    assert metadata(entry)["format"] == CACHE_FORMAT
    assert json.loads(metadata(next(newest.glob("packed/packs/*.safetensors")))["index"])["format"] == PACK_FORMAT
    assert json.loads(state.read_text(encoding="utf-8"))["format"] == STATE_FORMAT
    assert metadata(newest / "out" / "lora.safetensors")["wangen.format"] == WEIGHTS_FORMAT


def test_a_lora_of_a_later_version_is_refused_with_both_formats(release, tmp_path, capsys):
    lora, later = release / "out" / "lora.safetensors", tmp_path / "later.safetensors"
    save_file(load_file(lora), later, metadata(lora) | {"wangen.format": "wangen-weights-9"})
    assert main(["export", "--lora_weight", str(later), "--layout", "peft", "--output", str(tmp_path / "out")]) == 1
    assert f"of the format wangen-weights-9, this version reads {WEIGHTS_FORMAT}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "numpy") as opened:
        return dict(opened.metadata())
