"""The commands of the workspace, of models and of caches with hostile names and files: one message, nothing lost."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from abuse import digests, run
from abuse_cases import CONTENTS, hostile_paths, path_kinds
from helpers import make_image, write_tree

from wangen.generator import cli
from wangen.generator.steps import STEPS

HERE = "@"
"""Where something hostile stands in a line."""
LINES = {
    "": ["@", "@ --help"],
    "init": ["init @"],
    "publish": ["publish @", "publish cats --source @", "publish cats --footage @", "publish cats --workspace @",
                "publish cats --resolution @", "publish cats --model @", "publish cats --platform @",
                "publish cats --trigger @ --dry_run"],
    "clean": ["clean @", "clean cats --workspace @", "clean cats --platform @", "clean cats --resolution @ --caches"],
    "lint": ["lint @", "lint @ --fix", "lint @ --json"],
    "models": ["models @", "models list --task @", "models list --dir @", "models where @", "models where @ --dir @",
               "models identify @", "models identify @ --json", "models download @ --dry_run --dir models",
               "models download vae --task @ --dry_run --dir models"],
    "cache": ["cache @", "cache stats @", "cache clear @", "cache clear @ --yes", "cache clear full --kind @ --yes",
              "cache prune @ --yes", "cache pack @", "cache unpack @", "cache verify @"],
    "completion": ["completion @"],
    "plan": ["plan @", "plan cats --gpu @", "plan cats --platform @", "plan cats --workspace @",
             "publish cats --fit --gpu @"],
    "check": ["check @", "check cats --workspace @", "check cats --platform @"],
}  # fmt: skip
UNTRIED = {"demo": "writes and trains for a minute; its folder is refused as those of init and publish are",
           "doctor": "in its own tests"}  # fmt: skip
FILES = {"wangen.toml": "check cats", "a.toml": "cache prune a.toml --yes", "a.sh": "lint a.sh --fix",
         "a.bat": "lint a.bat", "a.ps1": "lint a.ps1", "a.safetensors": "models identify a.safetensors",
         "a.jsonl": "publish cats --source a.jsonl", "datasets/cats/a.txt": "publish cats",
         "datasets/cats/a.png": "publish cats", "datasets/cats/a.mp4": "publish cats",
         ".wangen/cats.json": "clean cats --bundle"}  # fmt: skip
"""Files that commands read -> a line that reads them."""


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A workspace with a dataset."""
    folder = tmp_path / "work"
    folder.mkdir()
    assert run(["init"], folder).code == 0
    make_image(folder / "datasets" / "cats" / "a.png")
    write_tree(folder, {"datasets/cats/a.txt": "a cat", "full/mine.txt": "mine"})
    yield folder
    shutil.rmtree(folder)


def test_every_command_is_tried():
    """Those of the table in `test_abuse`."""
    commands = {name for name in cli.wangen.commands if name not in {step.command for step in STEPS}}
    assert commands <= {*LINES, *UNTRIED}
    for group in (cli.models, cli.cache):
        assert isinstance(group, click.Group)
        tried = {text.split()[1] for text in LINES[group.name or ""]}
        assert set(group.commands) <= tried


def faults(lines: list[str], work: Path, part: int) -> list[str]:
    found = []
    kinds = [kind for kind in path_kinds(work / "kinds") if kind != "NUL"]
    shutil.rmtree(work / "kinds")
    trials = [(text, kind) for text in lines for kind in kinds]
    mine = ("datasets", "full")
    before = {name: digests(work / name) for name in mine}
    for text, kind in trials[::part]:
        path = hostile_paths(work / "h")[kind]
        stays = digests(work / "h") if "init" not in text else {}
        outcome = run([path if word == HERE else word for word in text.split()], work)
        after = digests(work / "h")
        lost = [name for name, digest in stays.items() if after.get(name) != digest]
        asked = text.startswith("models download") and outcome.fault == "opens a connection"  # it may
        if (outcome.fault and not asked) or lost:
            found.append(f"{text} {kind!r}: {outcome.fault or 'changes'} {[bytes.fromhex(name) for name in lost]}")
        shutil.rmtree(work / "h")
        shutil.rmtree(work / "models", ignore_errors=True)
    assert {name: digests(work / name) for name in mine} == before
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", LINES)
def test_hostile_paths_and_names(command, work):
    assert faults(LINES[command], work, 53) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", LINES)
def test_many_more_hostile_paths_and_names(command, work):
    """One case of five, or another part of them, which `ABUSE_PART` says."""
    assert faults(LINES[command], work, int(os.environ.get("ABUSE_PART", "5"))) == []


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_hostile_contents(file, work):
    place, text = work / file, FILES[file]
    place.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for kind, content in list(CONTENTS.items())[:: 3 if "publish" in text else 1]:
        place.write_bytes(content)
        outcome = run(text.split(), work)
        if outcome.fault or place.read_bytes() != content:
            found.append(f"{kind}: {outcome.fault or 'changes it'}")
    assert found == []
