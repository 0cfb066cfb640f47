"""What the built package holds, and the arrows between its halves."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from wangen.generator.commit import commit_of_clone
from wangen.generator.errors import WangenError

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("examples", "generator", "profiles", "runtime", "templates")


def test_every_package_on_disk_is_listed():
    found = {
        f"wangen.{path.parent.relative_to(ROOT).as_posix().replace('/', '.')}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_what_publishes_clips_comes_without_the_runtime():
    """`pip install .` is all that the pages ask for before `wangen publish` of a folder with clips."""
    names = {Requirement(line).name for line in PROJECT["project"]["dependencies"]}
    assert "av" in names
    assert not names & {"torch", "transformers", "diffusers"}


def test_the_demo_names_what_is_missing_before_it_makes_anything(tmp_path, monkeypatch):
    from wangen.runtime import demo

    monkeypatch.setattr(demo, "wanted_libraries", lambda: [Requirement("pillow"), Requirement("no-such-library>=1")])
    with pytest.raises(WangenError, match="not installed") as caught:
        demo.run(tmp_path / "demo")
    assert caught.value.found == "not installed: no-such-library"
    assert ".[runtime]" in caught.value.cure
    assert not (tmp_path / "demo").exists()


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("folder", ["generator", "profiles", "templates", "examples"])
def test_nothing_outside_the_runtime_imports_torch_or_the_runtime(folder):
    for path in (ROOT / folder).rglob("*.py"):
        names = imports_of(path)
        assert not {name.split(".")[0] for name in names} & {"torch", "diffusers", "transformers", "peft"}, path
        assert not {name for name in names if name.startswith("wangen.runtime")}, path


def test_templates_name_no_flag():
    for path in (ROOT / "templates").glob("*.j2"):
        text = path.read_text(encoding="utf-8")
        for flag in ("--dataset_config", "--vae", "--dit", "--learning_rate", "--output_dir", "--attention"):
            assert flag not in text, (path, flag)


@pytest.mark.slow
def test_the_wheel_installs_into_a_plain_folder_and_runs_without_torch(tmp_path):
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    built = subprocess.run([*wheel, str(ROOT)], capture_output=True, text=True, check=False)
    if "No module named 'setuptools'" in built.stderr or "Cannot import 'setuptools" in built.stderr:
        pytest.skip("setuptools is not installed in this environment")
    assert built.returncode == 0, built.stderr
    (path,) = tmp_path.glob("*.whl")
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(path)], check=True
    )
    names = {file.relative_to(target).as_posix() for file in target.rglob("*") if file.is_file()}
    assert {
        "wangen/templates/run.sh.j2",
        "wangen/profiles/models/t2v-1.3B.toml",
        "wangen/profiles/platforms/linux.toml",
        "wangen/profiles/configs/world-model.toml",
        "wangen/generator/overview.txt",
        "wangen/generator/py.typed",
        "wangen/examples/dataset/cat.jpg",
        "wangen/examples/SOURCES.md",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "wangen/tests"))]
    written = target / "wangen/generator/commit.txt"
    assert (written.read_text(encoding="utf-8").strip() if written.exists() else "") == commit_of_clone(ROOT)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import wangen.profiles as p; "
        "assert p.__file__.startswith(sys.path[0]), p.__file__; print(p.model('t2v-1.3B').fps)"
    )
    shown = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "16\n"
