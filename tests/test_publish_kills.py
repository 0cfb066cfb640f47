"""A publish that is killed at any moment leaves every file old or new, and the next one finishes the work."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from helpers import image_bytes, read_tree, write_tree

from wangen.generator import lock
from wangen.generator.cli import main
from wangen.generator.publish import manifest
from wangen.generator.publish import plan as publishing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="trials are forked")]

NUM_TRIALS = 200
CALLS = {
    os: ("replace", "link", "unlink", "mkdir", "rmdir", "fsync", "chmod", "open", "write", "rename"),
    io: ("open",),
}
TOML = (
    'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux", "windows"]\n[dataset.cats]\nresolutions = ["64"]\n'
)
KILLED = 77


def first(place: Path) -> None:
    """A published dataset in which the user changed a script, a TOML file, a caption and a knob."""
    tree: dict[str, bytes | str] = {"wangen.toml": TOML, "profiles/windows.toml": 'shells = ["bat"]\n'}
    for number in range(5):
        tree[f"datasets/cats/{number}.png"] = image_bytes((96, 80), format="PNG", seed=number)
        tree[f"datasets/cats/{number}.txt"] = f"cat number {number}"
    write_tree(place, tree)
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    linux, windows = (place / "published" / name for name in ("linux", "windows"))
    edit(linux / "cache_cats.sh", "cd ", "cd  ", count=1)
    edit(linux / "files/tomls/cats_linux.toml", "num_repeats = 1", "num_repeats = 7")
    edit(windows / "train_cats.bat", "SEED=42", "SEED=7")
    edit(windows / "files/datasets/cats/64/3.txt", "cat", "my cat")


def edit(path: Path, old: str, new: str, count: int = -1) -> None:
    data = path.read_bytes()
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode(), count))


def second(place: Path) -> None:
    """What the user changes before publishing again: everything that a publish can meet."""
    cats = place / "datasets" / "cats"
    (cats / "0.png").unlink()
    (cats / "0.txt").unlink()
    replaced = cats / "replaced"
    replaced.write_bytes(image_bytes((120, 80), format="PNG", seed=50))
    replaced.replace(cats / "1.png")
    for number in (2, 3):
        (cats / f"{number}.txt").write_text(f"a tabby, number {number}")
    (cats / "4.png").rename(cats / "four.png")
    (cats / "4.txt").rename(cats / "four.txt")
    write_tree(cats, {"new.png": image_bytes((144, 96), format="PNG", seed=9), "new.txt": "a new cat"})
    edit(place / "wangen.toml", '"64"', '"64", "96"')
    edit(place / "wangen.toml", "[dataset", "[steps.train]\nnetwork_dim = 8\n[dataset")


def third(place: Path) -> None:
    """What the user changes after the interruption: the unfinished publish's files are not wanted as they were."""
    cats = place / "datasets" / "cats"
    (cats / "2.txt").write_text("a third text")
    (cats / "four.png").write_bytes(image_bytes((90, 150), format="PNG", seed=77))
    os.utime(cats / "four.png", ns=(10**18, 10**18))  # the same in every trial, for the manifest holds it
    for name in ("new.png", "new.txt"):
        (cats / name).unlink()


def publish(place: Path) -> int:
    return main(["publish", "cats", "--workspace", str(place), "--resize", "--trigger", "ohwx"])


def bundles(place: Path) -> dict[str, bytes]:
    """Everything that was published; manifests name the place they were published from, and its files by their numbers
    and times, which differ here."""
    found = {name: data for name, data in read_tree(place / "published").items() if ".whl" not in name}
    for name in (name for name in found if name.endswith(manifest.NAME)):
        content = json.loads(found[name])
        for records in (content[part] for part in ("files", "before") if part in content):
            records |= {name: record[:-1] for name, record in records.items()}
        found[name] = json.dumps(content).encode()
    return {name: data.replace(str(place).encode(), b"PLACE") for name, data in found.items()}


class Killer:
    """Ends the process at the k-th call of the file system; a write that it meets is cut in half."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.count = 0

    def install(self) -> None:
        for module, names in CALLS.items():
            for name in names:
                setattr(module, name, self._wrapped(getattr(module, name)))

    def _wrapped(self, real):
        def call(*words, **named):
            self.count += 1
            self.left -= 1
            if self.left == 0:
                os._exit(KILLED)
            made = real(*words, **named)
            return _Halved(made, self) if isinstance(made, io.BufferedWriter) else made

        return call


class _Halved:
    """A file whose `write` counts as a call too."""

    def __init__(self, file: io.BufferedWriter, killer: Killer) -> None:
        self._file, self._killer = file, killer

    def write(self, data) -> int:
        self._killer.left -= 1
        self._killer.count += 1
        if self._killer.left == 0:
            self._file.write(bytes(data)[: len(data) // 2])
            self._file.flush()
            os._exit(KILLED)
        return self._file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *_exception) -> None:
        self._file.close()

    def __getattr__(self, name: str):
        return getattr(self._file, name)


def forked(place: Path, at: int) -> tuple[int, int]:
    """Publish in a forked process that is killed at call `at`; returns its exit code and how many calls it made."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads: none is in use
        child = os.fork()
    if child == 0:
        code = 99
        try:
            with Path(os.devnull).open("w") as silence:
                sys.stdout = sys.stderr = silence
                killer = Killer(at)
                report = os.write
                killer.install()
                code = publish(place)
                report(writer, str(killer.count).encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        count = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(count or 0)


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def states(room, module_patch):
    """The changed workspace; what is published before, after an unbroken publish, and after one of the third state;
    and how many calls the unbroken one made."""
    folder = room
    module_patch.setattr(publishing, "wheel_bytes", lambda: b"a small one")
    before = folder / "before"
    first(before)
    second(before)
    old = bundles(before)
    after = copy(before, folder / "after")
    code, num_calls = forked(after, 0)
    assert code == 0
    last = copy(before, folder / "last")
    third(last)
    assert publish(last) == 0
    return before, old, bundles(after), bundles(last), num_calls


def copy(place: Path, to: Path) -> Path:
    """A copy of a workspace in which links stay links, as they are on the user's disk."""
    subprocess.run(["cp", "-a", str(place), str(to)], check=True)
    return to


def assert_whole(found: dict[str, bytes], old: dict[str, bytes], new: dict[str, bytes], where: str) -> None:
    """Every file is the old one or the new one; what was not there before and after is a temporary file of ours."""
    for name, data in found.items():
        base = Path(name).name
        if base.startswith((".wangen-publish-", ".publish.lock-")) or base in (
            ".wangen-published.json",
            "publish.lock",
        ):
            continue
        assert data in (old.get(name), new.get(name)), f"{where}: {name} is neither old nor new"
    for name in old.keys() & new.keys():
        assert name in found, f"{where}: {name} is missing"


def test_two_hundred_interruptions(states, room, monkeypatch):
    monkeypatch.setattr(lock, "START_S", 0.0)  # a lock that was being made counts as held for so long
    before, old, new, last, num_calls = states
    assert num_calls > 150
    assert old.keys() - new.keys()
    changed = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    assert {Path(name).suffix for name in changed} >= {".sh", ".bat", ".toml", ".txt", ".png"}
    draw = random.Random(20)
    points = sorted(draw.sample(range(1, num_calls + 1), min(NUM_TRIALS, num_calls)))
    points += draw.choices(range(1, num_calls + 1), k=NUM_TRIALS - len(points))
    unfinished = 0
    for number, at in enumerate(points):
        place = copy(before, room / f"trial{number}")
        code, _ = forked(place, at)
        assert code in (KILLED, 0)  # threads make the number of calls vary a little
        found = bundles(place)
        assert_whole(found, old, new, f"call {at}")
        unfinished += found != new
        if number % 4 == 0:  # killed once more on the way
            forked(place, draw.randint(1, num_calls))
            assert_whole(bundles(place), old, new, f"call {at}, second kill")
        if number % 2 == 0:
            third(place)
        assert publish(place) == 0
        found, wanted = bundles(place), new if number % 2 else last
        assert found.keys() == wanted.keys(), f"call {at}"
        for name in found:
            assert found[name] == wanted[name], f"call {at}: {name}"
        shutil.rmtree(place)
    assert unfinished > NUM_TRIALS // 2


def test_processes_that_are_killed_from_outside(states, tmp_path):
    before, old, new, _, _ = states
    words = [sys.executable, "-m", "wangen.runtime", "publish", "cats", "--resize", "--trigger", "ohwx", "--workspace"]
    started = time.monotonic()
    subprocess.run([*words, str(copy(before, tmp_path / "timed"))], check=True, stdout=subprocess.DEVNULL)
    whole_s = time.monotonic() - started
    for number, share in enumerate((0.5, 0.7, 0.85, 0.95)):
        place = copy(before, tmp_path / f"killed{number}")
        with subprocess.Popen([*words, str(place)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(whole_s * share)
            process.send_signal(signal.SIGKILL)
        assert_whole(bundles(place), old, new, f"killed after {share}")
        assert publish(place) == 0
        assert bundles(place) == new
