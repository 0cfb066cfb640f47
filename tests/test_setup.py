"""`setup_wangen.sh` runs for real: real environments, real pip, package indexes on this machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shells.local_index import Server, write_requirements, write_torch
from shells.setup_bundles import publish

from wangen.generator import errors
from wangen.profiles import Platform, platform

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="the bash script; tests/test_setup_wine.py has the other"),
]

HOSTILE = "Jane's & 100% é日本 (x) #1;[y]"
OLD = "NVIDIA-SMI 570.86   Driver Version: {0}   CUDA Version: {1}"
NEW = "NVIDIA-SMI 610.43   KMD Version: {0}   CUDA UMD Version: {1}"


class Place:
    """A bundle with its setup script, and the programs on the PATH beside the system's."""

    def __init__(self, folder: Path, indexes: Server, profile: Platform | None = None, **details: object):
        self.root, self.tools, self.indexes = folder / HOSTILE, folder / "tools", indexes
        self.root.mkdir(parents=True)
        self.tools.mkdir(exist_ok=True)
        self.driver(None)
        self.publish(profile or platform("linux"))

    def publish(self, profile: Platform, root: str | None = None) -> None:
        publish(self.root, "sh", platform=profile, root=root)

    def driver(self, version: str | None, cuda: str = "", capability: str = "8.9", table: str = OLD) -> None:
        """An `nvidia-smi` that names a driver, or one that finds none."""
        table = table.format(version, cuda) if version else "NVIDIA-SMI has failed: no driver"
        cards = f"NVIDIA Test Card, {capability}" if version else ""
        text = f"#!/bin/sh\n[ $# -eq 0 ] && echo '{table}' || echo '{cards}'\nexit {0 if version else 9}\n"
        self.tool("nvidia-smi", text)
        self.tool("rocminfo", "#!/bin/sh\nexit 1\n")

    def tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text, encoding="utf-8")
        (self.tools / name).chmod(0o755)

    def run(self, *words: str, torch: str = "cpu", **env: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "WANGEN_", "PYTHON"))}
        set_here = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.indexes.url("all"),
            "PIP_RETRIES": "0",
            "WANGEN_PYTHON": sys.executable,
            "WANGEN_TORCH_INDEX": self.indexes.url(torch) if torch else "",
        }
        script = self.root / "setup_wangen.sh"
        return subprocess.run(["bash", script, *words], env=kept | set_here | env, capture_output=True, text=True)

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    def installed(self, name: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes")
    write_requirements(folder / "all")
    write_torch(folder / "all", "99.0")  # an index for all packages must not win over PyTorch's own
    write_torch(folder / "cpu", "2.12.0+cpu")
    write_torch(folder / "cu128", "2.11.0+cu128", cuda="12.8")
    write_torch(folder / "mixed", "2.11.0", cuda="12.8", build="+cu128")
    server = Server(folder)
    yield server
    server.close()


@pytest.fixture(scope="module")
def fresh(indexes, tmp_path_factory):
    """A bundle whose environment was just made, and what was said; tests work on copies."""
    place = Place(tmp_path_factory.mktemp("fresh"), indexes)
    return place, place.run(PIP_EXTRA_INDEX_URL=indexes.url("all"))


@pytest.fixture
def place(fresh, indexes, tmp_path):
    """A copy of the bundle with its environment, which has PyTorch for the CPU."""
    copy = Place(tmp_path, indexes)
    shutil.copytree(fresh[0].root / "venv", copy.root / "venv", symlinks=True)
    indexes.asked.clear()
    return copy


def test_a_fresh_installation(fresh):
    place, done = fresh
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if line.startswith("wangen: ")]
    assert said[0].startswith("wangen: Python 3.")
    assert "the NVIDIA driver does not answer: NVIDIA-SMI has failed: no driver" in said[1]
    assert "WANGEN_TORCH_INDEX" in said[2]
    assert said[-2].startswith("wangen: ready: PyTorch 2.12.0+cpu on the CPU. Next: ")
    assert "unset it" in said[-1]
    assert place.installed("torch") == "2.12.0+cpu"
    assert {place.installed(name) for name in ("diffusers", "click", "tensorboard")} == {"99.0"}
    code = "import wangen.runtime, wangen.generator, wangen.templates, wangen.examples as e; print(e.__file__)"
    shown = subprocess.run([place.python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith(str(place.root / "venv"))


def test_again_installs_nothing_and_asks_no_index(place):
    done = place.run()
    assert done.returncode == 0, done.stderr
    assert "Successfully installed" not in done.stdout
    assert "PyTorch 2.12.0+cpu" in done.stdout
    assert place.indexes.asked == []


def test_the_run_script_is_named_at_the_end(place):
    (place.root / "train_cats.sh").touch()
    assert "Next: bash train_cats.sh" in place.run(WANGEN_PYTHON="").stdout


def test_another_wangen_of_the_same_version_is_replaced(place):
    wheel = next((place.root / "files").glob("*.whl"))
    module = next((place.root / "venv" / "lib").glob("python*/site-packages/wangen/generator/errors.py"))
    record = next((place.root / "venv" / "lib").glob("python*/site-packages/wangen-*.dist-info/RECORD"))
    module.write_text("broken")
    record.write_text(
        record.read_text().replace("wangen/generator/errors.py,sha256=", "wangen/generator/errors.py,sha256=0")
    )
    done = place.run()
    assert done.returncode == 0, done.stderr
    assert module.read_text() == Path(errors.__file__).read_text()
    assert wheel.is_file()


@pytest.mark.parametrize("index", ["cu128", "mixed"])
def test_a_build_for_the_cpu_is_replaced_where_there_is_a_card(place, index):
    place.driver("570.86", "12.8", table=NEW)
    done = place.run(torch=index, FAKE_CARD="NVIDIA Test Card")
    assert done.returncode == 0, done.stderr
    assert "NVIDIA driver 570.86 for CUDA up to 12.8: NVIDIA Test Card" in done.stdout
    assert "PyTorch 2.12.0+cpu is replaced: it is built for cpu, and cuda is wanted here" in done.stdout
    assert "ready: PyTorch 2.11.0+cu128 on NVIDIA Test Card" in done.stdout
    assert place.installed("torch") == ("2.11.0" if index == "mixed" else "2.11.0+cu128")
    again = place.run(torch=index, FAKE_CARD="NVIDIA Test Card")
    assert (again.returncode, "Successfully installed" in again.stdout) == (0, False)


def test_a_card_that_pytorch_does_not_see_is_a_failure(place):
    place.driver("570.86", "12.8")
    done = place.run(torch="cu128")
    assert done.returncode == 1
    assert "PyTorch 2.11.0+cu128 is installed, and sees no card" in done.stderr


@pytest.mark.parametrize(
    ("cuda", "capability", "index"),
    [
        ("13.3", "12.0", "cu130"),
        ("12.9", "12.0", "cu128"),
        ("12.4", "8.6", "cu126"),
        ("13.0", "6.1", "cu126"),  # CUDA 13 has no code for Pascal
    ],
)
def test_the_build_is_chosen_by_driver_and_card(place, cuda, capability, index):
    place.driver("580.1", cuda, capability)
    done = place.run("--dry_run", torch="")
    assert done.returncode == 0, done.stderr
    assert f"--force-reinstall --index-url https://download.pytorch.org/whl/{index} 'torch>=" in done.stdout
    assert done.stdout.splitlines()[-1] == "wangen: nothing was changed: --dry_run"
    assert place.installed("torch") == "2.12.0+cpu"


@pytest.mark.parametrize(
    ("cuda", "capability", "message"),
    [
        ("11.4", "8.6", "the NVIDIA driver 470.1 offers CUDA 11.4; PyTorch needs 12.0 or newer"),
        ("12.4", "12.0", "no build of PyTorch for this driver has code for the card NVIDIA Test Card"),
    ],
)
def test_a_driver_that_is_too_old(indexes, tmp_path, cuda, capability, message):
    place = Place(tmp_path, indexes)
    place.driver("470.1", cuda, capability)
    done = place.run(torch="")
    assert done.returncode == 1
    assert message in done.stderr
    assert "nvidia.com/drivers" in done.stderr
    assert not (place.root / "venv").exists()


def test_a_cluster_asks_for_a_node_with_cards(indexes, tmp_path):
    done = Place(tmp_path, indexes, platform("slurm")).run(torch="")
    assert (done.returncode, "srun --gpus=1 bash setup_wangen.sh" in done.stderr) == (1, True)


def test_rocm_and_the_address_of_another_index(indexes, tmp_path):
    place = Place(tmp_path, indexes, platform("linux-rocm"))
    place.tool("rocminfo", "#!/bin/sh\necho '  Name:                    gfx1100  '\n")
    done = place.run("--dry_run", torch="")
    assert "AMD card: gfx1100" in done.stdout
    assert "--index-url https://download.pytorch.org/whl/rocm7.2 'torch>=" in done.stdout
    place.publish(platform("windows-rocm"))
    assert "/rocm/whl-next/ 'torch[device-all]>=" in place.run("--dry_run", torch="").stdout


def test_no_python(indexes, tmp_path):
    place = Place(tmp_path, indexes)
    for name in ("bash", "dirname"):
        (place.tools / name).symlink_to(shutil.which(name) or name)
    done = place.run(PATH=str(place.tools), WANGEN_PYTHON="")
    assert (done.returncode, "no Python from 3.11 on was found" in done.stderr) == (1, True)
    done = place.run(WANGEN_PYTHON="/no/python")
    assert (done.returncode, done.stderr) == (
        1,
        "wangen: WANGEN_PYTHON names no Python from 3.11 on: /no/python\n"
        "  do:    unset it, or give the full path of a python\n",
    )


def test_an_environment_whose_python_is_gone_is_made_anew_without_a_network(place, tmp_path):
    for name in ("python", "python3"):
        (place.root / "venv" / "bin" / name).unlink(missing_ok=True)
    left = place.root / "venv" / "left.txt"
    left.touch()
    folder = tmp_path / "wheels & 1"
    folder.mkdir()
    write_requirements(tmp_path / "made")
    write_torch(tmp_path / "made", "2.12.0+cpu")
    for wheel in (tmp_path / "made").glob("*/*.whl"):
        shutil.copy(wheel, folder)
    offline = {"WANGEN_TORCH_INDEX": str(folder), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder.as_uri()}
    done = place.run(**offline)
    assert done.returncode == 0, done.stderr
    assert "does not start: it is made anew" in done.stdout
    assert "ready: PyTorch 2.12.0+cpu" in done.stdout
    assert (place.installed("torch"), left.exists(), place.indexes.asked) == ("2.12.0+cpu", False, [])


def test_a_folder_that_is_no_environment_is_left_alone(indexes, tmp_path):
    place = Place(tmp_path, indexes)
    (place.root / "venv").mkdir()
    (place.root / "venv" / "photo.jpg").write_text("mine")
    done = place.run()
    assert (done.returncode, "this folder is no Python environment" in done.stderr) == (1, True)
    assert [path.name for path in (place.root / "venv").iterdir()] == ["photo.jpg"]


def test_an_environment_of_windows_is_left_alone(indexes, tmp_path):
    place = Place(tmp_path, indexes, platform("wsl"))
    python = place.root / "venv" / "Scripts" / "python.exe"
    python.parent.mkdir(parents=True)
    python.touch()
    (place.root / "venv" / "pyvenv.cfg").touch()
    done = place.run("--dry_run")
    assert done.returncode == 0, done.stderr
    assert f"environment {place.root}/.venv: it is made" in done.stdout
    (place.root / "venv").rename(place.root / ".venv")
    shutil.copytree(place.root / ".venv", place.root / "venv")
    done = place.run()
    assert (done.returncode, "the environment of another system" in done.stderr) == (1, True)
    assert python.exists()


def test_an_environment_without_pip_gets_it(place):
    for folder in (place.root / "venv" / "lib").glob("python*/site-packages/pip*"):
        shutil.rmtree(folder)
    done = place.run()
    assert (done.returncode, "has no pip: it is added" in done.stdout) == (0, True)


def test_an_index_that_does_not_answer(place):
    place.driver("570.86", "12.8")
    done = place.run(WANGEN_TORCH_INDEX="http://127.0.0.1:9/whl", PIP_RETRIES="1")
    assert done.returncode == 1
    assert "the package index cannot be reached" in done.stderr
    assert place.installed("torch") == "2.12.0+cpu"


def test_an_index_without_pytorch_for_this_python(place):
    place.driver("570.86", "12.8")
    done = place.run(torch="empty")
    assert (done.returncode, "there is no PyTorch for this Python and system" in done.stderr) == (1, True)


def test_the_wheel_or_the_root_is_missing(indexes, tmp_path):
    place = Place(tmp_path, indexes)
    next((place.root / "files").glob("*.whl")).unlink()
    done = place.run()
    assert (done.returncode, "this file is not there" in done.stderr) == (1, True)
    place.publish(platform("linux"), root=f"{place.root}/gone")
    done = place.run()
    assert (done.returncode, f"the folder {place.root}/gone is not there" in done.stderr) == (1, True)
