"""The container's recipe and its page: what they name is there, and their scripts do what is said."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from torch.distributed.run import get_args_parser

from wangen import profiles
from wangen.generator.cli import main

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECIPE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PYTHON_OF_DEBIAN = {"bookworm": "3.11", "trixie": "3.13"}


def instructions() -> list[tuple[str, str]]:
    """The recipe's instructions in order, each on one line, without comments."""
    lines = [line for line in RECIPE.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def all_of(name: str) -> list[str]:
    return [words for instruction, words in instructions() if instruction == name]


def blocks() -> list[str]:
    """The page's blocks of bash."""
    return re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


def docker_lines(word: str) -> list[list[str]]:
    """The words of the page's lines that start with `docker` and this word."""
    lines = re.sub(r"\\\n\s*", "", "\n".join(blocks())).replace("…", "").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [found for found in words if found[:2] == ["docker", word]]


def test_its_python_may_run_wangen_and_is_the_one_that_the_versions_were_tested_with():
    (release,) = {found[1] for words in all_of("FROM") if (found := re.match(r"debian:(\w+)-slim", words))}
    python = PYTHON_OF_DEBIAN[release]
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{python}.0")
    assert f"(Python {python}," in CONSTRAINTS.splitlines()[0]


def test_the_builder_gets_what_the_wheel_is_made_of_and_nothing_else():
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert rules[1] == "*"
    given = {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / name).exists() for name in given)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {path.partition("/")[0] for path in settings["package-dir"].values()}
    wanted = {"pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"], *packages}
    assert given == wanted
    assert [words.split()[0] for words in all_of("COPY")] == [".", "constraints.txt", "--from=wheel"]
    assert any(re.search(r"^debian\S+ AS python$", words) for words in all_of("FROM"))
    assert "python AS wheel" in all_of("FROM")


def test_what_it_installs_is_named_as_the_project_names_it():
    (extra,) = {found for words in all_of("RUN") for found in re.findall(r"\$1\[(\w+)\]", words)}
    assert extra in PROJECT["optional-dependencies"]
    (program,) = (shlex.split(words.strip('["]')) for words in all_of("ENTRYPOINT"))
    assert program[0] in PROJECT["scripts"]
    assert len(re.findall("^torch==", CONSTRAINTS, re.MULTILINE)) == 1, "the recipe takes that line"
    (folder,) = re.findall(r"python3 -m venv (\S+)", RECIPE)
    assert f"PATH={folder}/bin:$PATH" in RECIPE
    assert f"WANGEN_PYTHON={folder}/bin/python" in RECIPE
    assert f"{folder}/bin/python" in PAGE


def test_its_indexes_are_pytorchs_own_for_nvidia_cards_or_none():
    builds = {build.tag for build in profiles.platform("linux").torch_builds} | {"cpu"}
    (default,) = all_of("ARG")
    words = [default, *(word for line in docker_lines("build") for word in line if "=" in word)]
    assert len(words) == 3
    for word in words:
        name, _, index = word.partition("=")
        assert name == "TORCH_INDEX"
        assert index.removeprefix(f"{profiles.TORCH_INDEX}/") in builds


def test_it_ends_without_the_rights_of_root():
    (user,) = all_of("USER")
    assert user.split(":")[0].isdigit(), "a number, which Kubernetes can judge"
    assert int(user.split(":")[0]) > 0
    names = [name for name, _ in instructions()]
    assert "RUN" not in names[names.index("USER") :]


def test_the_lines_of_the_page_can_be_typed(capsys):
    runs = [line[line.index("wangen", 2) + 1 :] for line in docker_lines("run")]
    assert len(runs) == 5
    for line in runs[:3]:
        assert main([*line, "--help"]) == 0
    assert "--gpus" in capsys.readouterr().out
    told = get_args_parser().parse_args(runs[4])
    assert (told.nnodes, told.nproc_per_node, told.training_script) == ("2", "4", "wangen.runtime")
    assert get_args_parser().parse_args(["--local-addr", "10.1.0.3", "x"]).local_addr == "10.1.0.3"


def test_the_python_that_starts_apptainer_says_who_is_first(tmp_path: Path):
    """The page's script, with stand-ins for Apptainer and Slurm."""
    (text,) = (block for block in blocks() if block.startswith("#!/bin/bash"))
    programs = {
        "python": text,
        "apptainer": '#!/bin/sh\nprintf "%s\\n" "${WANGEN_MASTER_ADDR:-none}" "$@"\n',
        "scontrol": '#!/bin/sh\n[ "$*" = "show hostnames gpu[03-04]" ] && printf "gpu03\\ngpu04\\n"\n',
    }
    for name, content in programs.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        (tmp_path / name).chmod(0o755)

    def told(**environment: str) -> list[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "WANGEN"))}
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        done = subprocess.run([tmp_path / "python", "-m", "a b"], env=clean | {"PATH": path} | environment, text=True,
                              capture_output=True, check=True)  # fmt: skip
        return done.stdout.splitlines()

    first, *words = told(SLURM_STEP_NODELIST="gpu[03-04]")
    assert (first, words[-2:]) == ("gpu03", ["-m", "a b"])
    assert told(SLURM_STEP_NODELIST="gpu[03-04]", WANGEN_MASTER_ADDR="10.1.0.3")[0] == "10.1.0.3"
    assert told()[0] == "none"


@pytest.mark.slow
def test_hadolint_has_nothing_to_say():
    program = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
