"""Files that nobody wrote by hand, fed to every parser that reads what others made; guided by coverage (atheris).

python tests/fuzz.py --seconds 12 --seed 1   # each target so long; CI draws the same files each time
python tests/fuzz.py weights --seconds 600   # one of them
python tests/fuzz.py weights FILE            # a file again that was found before

A parser may take a file or refuse it with a `WangenError`; anything else is a fault, and so are five seconds without
an answer. What is found is written to `fuzz-found/TARGET-DIGEST`, and the exit code is 1.
"""

import argparse
import contextlib
import hashlib
import io
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import atheris

ROOT = Path(__file__).parent.parent
SLOW_S = 5.0
FOUND = Path("fuzz-found")
SHELLS = ("sh", "bat", "ps1")
# The byte before a real file by which a target knows its kind.
FIRST = {".jsonl": b"{", ".sh": b"\0", ".bat": b"\1", ".ps1": b"\2"}

with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(["wangen"], enable_loader_override=False):
    from wangen.generator import headers, lint, scripts, workspace
    from wangen.generator.errors import WangenError
    from wangen.generator.manifests import read_manifest
    from wangen.generator.plan.gpus import amd
    from wangen.generator.tomls import read_dataset

Target = Callable[[bytes, Path], object]


def toml(data: bytes, folder: Path) -> None:
    """A dataset's TOML."""
    path = folder / "set.toml"
    path.write_bytes(data)
    read_dataset(path, "all", tell=False)


def settings(data: bytes, folder: Path) -> None:
    """A workspace's settings."""
    (folder / "wangen.toml").write_bytes(data)
    workspace.read(folder)


def manifest(data: bytes, folder: Path) -> None:
    """A manifest: lines of JSON, or a tar of such; the first byte says which."""
    path = folder / ("a.tar" if data[:1] > b"\x7f" else "a.jsonl")
    path.write_bytes(data[1:])
    read_manifest(path, mixed=True, multiple_captions=True)


def weights(data: bytes, folder: Path) -> None:
    """A weight file's header, in each of the formats."""
    for suffix in (".safetensors", ".gguf", ".pth"):
        path = folder / f"a{suffix}"
        path.write_bytes(data)
        with contextlib.suppress(WangenError):
            headers.read_header(path)


def script(data: bytes, folder: Path) -> None:
    """A run script, as the workspace reads its own back and as lint reads anybody's; the first byte says of which."""
    shell, data = SHELLS[data[0] % len(SHELLS) if data else 0], data[1:]
    scripts.untouched(data)
    with contextlib.suppress(WangenError):
        list(scripts.parsed_steps(data, shell))
    lint.lint(lint.parse(folder / f"a.{shell}", shell, data))


def answers(data: bytes, _folder: Path) -> None:
    """What a driver's tool answers."""
    amd(data.decode("utf-8", "replace"))


TARGETS: dict[str, Target] = {one.__name__: one for one in (toml, settings, manifest, weights, script, answers)}


def seeds(name: str, folder: Path) -> None:
    """Real files to begin with: the examples and the tests' vectors, as far as they are small."""
    folder.mkdir(parents=True)
    example = Path(str(files("wangen.examples")))
    patterns = {
        "toml": ["published/**/*.toml"], "settings": ["**/wangen.toml"], "manifest": ["**/*.jsonl"],
        "weights": ["**/*.safetensors", "**/*.pth", "**/*.gguf"], "script": ["published/**/*.sh", "published/**/*.bat",
        "published/**/*.ps1"], "answers": [],
    }  # fmt: skip
    found = [path for pattern in patterns[name] for top in (example, ROOT / "tests") for path in top.glob(pattern)]
    for number, path in enumerate(sorted(found)):
        data = path.read_bytes()
        if len(data) < 200_000:
            (folder / str(number)).write_bytes(FIRST.get(path.suffix, b"") + data)
    own = {
        "settings": b'model = "t2v-1.3B"\nplatforms = ["linux"]\n[steps.train]\nnetwork_dim = 4\n'
        b"[dataset.a]\nfit = {}\n",
        "manifest": b'{{"file": "a.png", "caption": "a", "start_frame": 3, "num_frames": 5}\n',
        "answers": b'{"card0": {"VRAM Total Memory (B)": "25753026560", "Card Series": "x"}}',
    }
    if name in own:
        (folder / "own").write_bytes(own[name])


def run_one(name: str, data: bytes, folder: Path) -> None:
    """Feed a file to a target.

    Raises:
        Exception: a fault.
        TimeoutError: it took too long.
    """
    began = time.monotonic()
    with contextlib.suppress(WangenError):
        TARGETS[name](data, folder)
    if (took := time.monotonic() - began) > SLOW_S:
        raise TimeoutError(f"{took:.1f} s without an answer")


def fuzz(name: str, seconds: int, seed: int) -> None:
    """Draw files for a target; never returns, for atheris ends the process."""
    logging.disable(logging.CRITICAL)
    home = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    corpus, place = home / "corpus", home / "place"
    seeds(name, corpus)
    place.mkdir()

    def once(data: bytes) -> None:
        try:
            run_one(name, data, place)
        except Exception:
            FOUND.mkdir(exist_ok=True)
            (FOUND / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
            raise

    words = [sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=65536", "-timeout=30",
             "-print_final_stats=1",
             f"-artifact_prefix={home}/"]  # fmt: skip
    atheris.Setup(words, once)
    atheris.Fuzz()


def main() -> int:
    """Run every target in a process of its own; 1 when one of them found a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    options = parser.parse_args()
    if options.file:
        run_one(options.target, options.file.read_bytes(), Path(tempfile.mkdtemp()))
        return 0
    if options.target:
        fuzz(options.target, options.seconds, options.seed)
    failed = False
    for name in TARGETS:
        words = ["--seconds", str(options.seconds), "--seed", str(options.seed)]
        done = subprocess.run([sys.executable, __file__, name, *words], capture_output=True, text=True, check=False)
        runs = [line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line]
        word = f"FAULT\n{done.stderr[-4000:]}" if done.returncode else "ok"
        sys.stdout.write(f"{name:10} {runs[0] if runs else '?':>8} files  {word}\n")
        sys.stdout.flush()
        failed |= done.returncode != 0
    for folder in Path("/dev/shm").glob("fuzz-*"):
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
