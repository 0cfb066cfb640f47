"""The example's published scripts and TOMLs are what publishing writes now."""

import golden
import pytest

from wangen import profiles


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return golden.make(tmp_path_factory.mktemp("example"))


def test_the_golden_files_are_those_that_publishing_writes(made):
    assert golden.texts(golden.HOME).keys() == made.keys(), "run: python tests/golden.py"


@pytest.mark.parametrize("name", sorted(golden.texts(golden.HOME)))
def test_a_golden_file(made, name):
    assert (golden.HOME / name).read_bytes() == made[name], "run: python tests/golden.py"


def test_every_platform_has_its_scripts(made):
    for platform in map(profiles.platform, profiles.platform_names()):
        for shell in platform.shells:
            for stem in ("train_example", "cache_example", "setup_wangen"):
                assert f"{platform.name}/{stem}.{shell}" in made
        assert f"{platform.name}/files/tomls/example_{platform.suffix}.toml" in made
