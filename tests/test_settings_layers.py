"""Where a setting is said in several places, or in a way that no line can say."""

from pathlib import Path

import pytest
from helpers import write_tree

from wangen.generator import workspace
from wangen.generator.bundle import bundle_steps, told_of_training
from wangen.generator.cli import main
from wangen.generator.commands import parse
from wangen.generator.errors import UsageError
from wangen.generator.steps import Train

LINE = ["--dataset_config", "a.toml", "--output_dir", "o", "--output_name", "n", "--dit", "d"]


@pytest.mark.parametrize("profile", ["max_train_epochs = 3", "validation_config = '/v.toml'"])
def test_what_the_workspace_says_takes_the_place_of_what_a_profile_says_against_it(tmp_path: Path, profile: str):
    own = {"max_train_steps": 4, "validation_items": 2}
    text = "platforms = ['pod']\n[steps.train]\n" + "".join(f"{name} = {value}\n" for name, value in own.items())
    pod = f"based_on = 'linux'\n[overrides.train]\n{profile}\nseed = 7\n"
    place = workspace.read(write_tree(tmp_path, {"wangen.toml": text, "profiles/pod.toml": pod}))
    target, model = place.targets[0], place.profile()
    train = next(step for step in bundle_steps(place, target, model, "x") if isinstance(step, Train))
    told = told_of_training(place, target, model)
    for name, value in {**own, "max_train_epochs": None, "validation_config": None, "seed": 7}.items():
        assert getattr(train, name) == told.get(name) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[steps.train]\nseed = 1\n[steps.wan_train_network]\nseed = 2\n", "seed is said twice of train, as 1 and 2"),
        ("[steps.train]\nlog_with = []\n", "--log_with is empty"),
        ("[dataset.cats]\ntrigger = ' a'\n", "' a' is no trigger word"),
        ("[dataset.cats]\nnum_repeats = 1000000000000\n", "num_repeats must be at most 1000000"),
    ],
)
def test_settings_that_cannot_be_said_are_named_when_they_are_read(tmp_path: Path, capsys, text: str, words: str):
    write_tree(tmp_path, {"wangen.toml": text})
    assert main(["publish", "cats", "--workspace", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "wangen.toml" in said


def test_a_configuration_cannot_name_another(tmp_path: Path):
    write_tree(tmp_path, {"a.toml": "config_file = 'b.toml'\nseed = 3\n", "b.toml": "seed = 4\n"})
    with pytest.raises(UsageError, match="names another one"):
        parse(Train, [*LINE, "--config_file", str(tmp_path / "a.toml")])
    assert parse(Train, [*LINE, "--config_file", str(tmp_path / "b.toml")]).seed == 4
