"""The loop: what a published script says is what was meant, with hostile names in every place."""

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from helpers import every, image_bytes, write_tree
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from wangen.generator import scripts, workspace
from wangen.generator.bundle import CACHE, bundle_steps, toml_name
from wangen.generator.cli import main
from wangen.generator.commands import parse
from wangen.generator.errors import WangenError
from wangen.generator.publish import plan as publishing
from wangen.generator.publish.source import Source
from wangen.generator.steps import find_step
from wangen.generator.target import Target
from wangen.generator.tasks import supported

SMALL = 'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux", "wsl", "windows"]\n'
SHELLS = {"linux": ["sh"], "wsl": ["sh"], "windows": ["bat", "ps1"]}


def spoken(script: Path) -> list[object]:
    """The steps that a script runs, un-quoted and parsed by the real parser."""
    made = []
    for command, *words in scripts.read_steps(script.read_bytes(), script.suffix[1:]):
        step = find_step(command)
        assert step is not None
        made.append(parse(step, words))
    return made


def publish(made: workspace.Workspace, target: Target) -> publishing.Plan:
    """Publish a dataset of nothing."""
    plan = publishing.make_plan(made, [target], "x", made.profile(), Source(Path("x"), [], {}, {}))
    publishing.carry_out(plan)
    return plan


def assert_scripts_say_what_was_meant(made: workspace.Workspace, target: Target, slug: str) -> None:
    meant = list(bundle_steps(made, target, made.profile(), slug))
    shells = target.platform.shells
    assert shells
    for shell in shells:
        assert spoken(target.folder / f"train_{slug}.{shell}") == meant
        assert spoken(target.folder / f"cache_{slug}.{shell}") == meant[: len(CACHE)]


@pytest.mark.parametrize("platform", SHELLS)
@pytest.mark.parametrize("name", ["Jane's Red House", "nul-free", "x" * 90, "a  b", "-x-", "100% & more!"])
def test_every_line_of_every_script_is_the_step_that_was_meant(tmp_path, platform, name):
    place = write_tree(tmp_path, {"wangen.toml": SMALL, "named/a.jpg": image_bytes(), "named/a.txt": "an ape"})
    source = str(place / "named")
    words = ["publish", "--workspace", str(place), "--source", source, "--platform", platform, "--", name]
    assert main(words) == 0
    made = workspace.read(place)
    (script,) = (place / "published" / platform).glob(f"train_*.{SHELLS[platform][0]}")
    slug = script.stem.removeprefix("train_")
    assert_scripts_say_what_was_meant(made, made.target(platform), slug)


HOSTILE = [
    "two words", "it's", "a&b (x86)", "100% of it %", "!x! ^y", "$HOME `id` $(id)", "semi;colon,=", "é日本 🦊",
    "‘typographic’ “quotes”", "-dash", "[brackets]{braces}~#@", "e\u0301",
]  # fmt: skip


def hostile(tmp_path: Path, platform: str, part: str, rooted: bool) -> tuple[workspace.Workspace, Target]:
    """A workspace whose root, model folder, weights and environment all carry `part` in their names."""
    windows = platform == "windows"
    prefix = "C:\\" if windows else "/"
    text = SMALL + f"[platform.{platform}]\n"
    values = {"models": f"{part} models", "vae": f"{part}.pth", "venv": f"{part} env"}
    if rooted:
        values |= {"root": f"{prefix}{part}", "t5": f"{prefix}t5 {part}.pth"}
    values["host_root"] = str(tmp_path / "seen")
    for key, value in values.items():
        text += f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
    text += f"[steps.train]\ntraining_comment = {json.dumps(part, ensure_ascii=False)}\noptimizer_args = ['a=1']\n"
    made = workspace.read(write_tree(tmp_path, {"wangen.toml": text}))
    return made, made.target(platform)


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("platform", SHELLS)
@pytest.mark.parametrize("part", every(3, HOSTILE, pytest.mark.slow), ids=ascii)
def test_hostile_names_in_roots_and_weights(tmp_path, platform, part, rooted):
    made, target = hostile(tmp_path, platform, part, rooted)
    plan = publish(made, target)
    pure = PureWindowsPath if platform == "windows" else PurePosixPath
    meant = bundle_steps(made, target, made.profile(), "x")
    assert pure(str(meant[0].vae)).name == f"{part}.pth"
    assert meant[-2].training_comment == part
    assert len(plan.texts) == 3 * len(SHELLS[platform]) + 2  # train, cache, setup; the TOML and the wheel
    assert_scripts_say_what_was_meant(made, target, "x")
    assert (target.folder / "files" / "tomls" / toml_name("x", target)).is_file()


NAMES = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters='<>:"/\\|?*'), min_size=1, max_size=30
).filter(lambda text: text.strip(". ") == text and text[0] not in "~$%")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("platform", SHELLS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(part=NAMES, rooted=st.booleans())
def test_drawn_names_in_roots_and_weights(tmp_path_factory, platform, part, rooted):
    folder = tmp_path_factory.mktemp("drawn")
    try:
        made, target = hostile(folder, platform, part, rooted)
    except WangenError:  # a name that Windows reserves
        assume(False)
    publish(made, target)
    assert_scripts_say_what_was_meant(made, target, "x")


def test_what_a_shell_cannot_carry_is_refused_before_anything_is_written(tmp_path):
    made, target = hostile(tmp_path, "windows", "plain", rooted=False)
    steps = {"train": {"training_comment": 'a "quoted" word'}}
    with pytest.raises(WangenError):
        publish(replace(made, steps=steps), target)
    assert not target.folder.exists()


@pytest.mark.slow
def test_every_model_that_is_trained_can_be_published(tmp_path):
    for name in supported():
        made = workspace.read(write_tree(tmp_path / name, {"wangen.toml": f'model = "{name}"\n'}))
        for target in made.targets:
            publish(made, target)
            assert_scripts_say_what_was_meant(made, target, "x")
