"""The wheel of the running wangen that goes into a bundle."""

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from wangen.generator.errors import WangenError
from wangen.generator.setup import wheel
from wangen.generator.setup.wheel import write_wheel

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def shipped() -> set[str]:
    """What setuptools would pack, by `pyproject.toml`."""
    names = set()
    for package in SETUPTOOLS["packages"]:
        folder = ROOT / package.removeprefix("wangen.").replace(".", "/")
        patterns = ["*.py", *SETUPTOOLS["package-data"]["*"], *SETUPTOOLS["package-data"].get(package, [])]
        names |= {path.relative_to(ROOT).as_posix() for pattern in patterns for path in folder.glob(pattern)}
    demo = "examples/tiny-wan/"  # nine megabytes that no bundle needs
    return {f"wangen/{name}" for name in names if (ROOT / name).is_file() and not name.startswith(demo)}


def test_it_holds_what_is_shipped_and_nothing_else(tmp_path):
    path = write_wheel(tmp_path / "files")
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        assert names == shipped() | {"wangen/"}
        assert (
            archive.read("wangen/generator/setup/wheel.py") == (ROOT / "generator" / "setup" / "wheel.py").read_bytes()
        )
        assert f"{path.name.removesuffix('-py3-none-any.whl')}.dist-info" == info
        record = archive.read(f"{info}/RECORD").decode().splitlines()
    assert {line.partition(",")[0] for line in record} == {
        *names - {"wangen/"},
        *(n for n in archive.namelist() if info in n),
    }


def test_it_is_written_only_when_something_changed(tmp_path, monkeypatch):
    path = write_wheel(tmp_path)
    before = path.stat()
    assert write_wheel(tmp_path).stat().st_ino == before.st_ino
    monkeypatch.setattr(wheel, "PACKAGES", ("generator",))
    assert write_wheel(tmp_path).stat().st_ino != before.st_ino
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_without_an_installation_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "distributions", lambda name: [])
    with pytest.raises(WangenError, match="not installed as a package"):
        write_wheel(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_pip_installs_it_and_wangen_runs(tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", write_wheel(tmp_path)]
    subprocess.run(pip, check=True, capture_output=True)
    code = "import wangen.runtime, wangen.generator, wangen.templates, wangen.profiles as p; print(p.__file__)"
    shown = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert shown.startswith(str(tmp_path / "venv"))
    overview = subprocess.run([python.with_name("wangen"), "--help"], check=True, capture_output=True, text=True).stdout
    assert overview == (ROOT / "generator" / "overview.txt").read_text(encoding="utf-8")


def test_a_python_runs_it_uninstalled(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import wangen.generator.setup.environment as e; print(e.__file__)"
    )
    command = [sys.executable, "-I", "-S", "-c", code, write_wheel(tmp_path)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert shown.startswith(str(tmp_path))
