"""The shell that runs the commands of the documentation, as a reader's on a machine without a GPU.

The hub and the package index are servers on this machine, so that downloads and `setup_wangen.sh` run as they are.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import local_hub
from documented import Block, Session, commands
from documented_places import FILES, TINY, VECTORS
from shells.local_index import Server, write_requirements, write_torch

from wangen import profiles

MARK = "\x1eblock "
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?: (?:bytes|[kMG]B)\b)?")


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """A hub with the tiny Wan and package indexes on this machine; the environment that leads to them."""
    model = profiles.model("t2v-1.3B")
    files = {
        f"{weights.downloads[0].repo}/{weights.downloads[0].path}": (TINY / FILES[weights.flag]).read_bytes()
        for weights in model.weights
    }
    for file in model.tokenizer:
        own = TINY / file.path
        files[f"{file.repo}/{file.path}"] = (own if own.is_file() else VECTORS / "t5" / file.path).read_bytes()
    write_requirements(folder / "all")
    write_torch(folder / "cpu", "2.12.0+cpu")
    index = Server(folder)
    try:
        with local_hub.running(files) as hub:
            yield {
                "HF_ENDPOINT": hub.endpoint,
                "NO_PROXY": "*",
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_INDEX_URL": index.url("all"),
                "WANGEN_TORCH_INDEX": index.url("cpu"),
            }
    finally:
        index.close()


def programs(folder: Path) -> Path:
    """`wangen` and `python` as an activated environment has them, of this interpreter."""
    folder.mkdir()
    start = "from wangen.generator.entry import entry; entry()"
    python = f'exec "{sys.executable}"'
    lines = {"wangen": f"{python} -c '{start}'", "python": python, "python3": python}
    for name, line in lines.items():
        (folder / name).write_text(f'#!/bin/sh\n{line} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def environment(place: Path, tools: Path, more: dict[str, str]) -> dict[str, str]:
    """Of a reader's shell on a machine without a GPU; a script takes this interpreter, not the stand-ins of `venv`."""
    dropped = ("WANGEN", "HF_", "HUGGING", "PIP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    kept = {name: value for name, value in kept.items() if "proxy" not in name.lower()}
    return kept | {
        "HOME": str(place),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "WANGEN_PYTHON": sys.executable,
        **more,
    }


def script_of(session: Session, place: Path) -> str:
    """The session as one bash script; the output of each block begins with a mark. `{HOME}` of a swap is the place."""
    parts = ["set -e", "[ ! -d wangen/generator ] || cd wangen"]
    for number, block in enumerate(session.blocks):
        parts.append(f"printf '{MARK}{number}\\n'")
        if "file" in block.says:
            parts.append(f"mkdir -p \"$(dirname '{block.says['file'][0]}')\"")
            parts.append(f"cat >'{block.says['file'][0]}' <<'END OF FILE'\n{_swapped(block)}END OF FILE")
        elif block.is_run:
            parts.append(_typed(block))
    return "\n".join(parts).replace("{HOME}", str(place)) + "\n"


def _typed(block: Block) -> str:
    text = _swapped(block)
    text = "\n".join(commands(text)) if block.language == "console" else text
    if block.language == "diff":
        text = _patch(text)
    return f"python - <<'END OF PYTHON'\n{text}END OF PYTHON" if block.language in ("python", "diff") else text


def _patch(diff: str) -> str:
    """A program that changes one file as a diff without line numbers says; what it takes out must stand there once."""
    lines = diff.splitlines()
    path = lines[1].removeprefix("+++ b/")
    old, new = ("".join(f"{line[1:]}\n" for line in lines[2:] if line[0] != sign) for sign in "+-")
    return (
        f"from pathlib import Path\npath = Path({path!r})\ntext = path.read_text(encoding='utf-8')\n"
        f"assert text.count({old!r}) == 1, 'what is to be changed does not stand in {path} once'\n"
        f"path.write_text(text.replace({old!r}, {new!r}), encoding='utf-8')\n"
    )


def _swapped(block: Block) -> str:
    text = block.text
    for swap in block.says.get("swap", []):
        old, _, rest = swap.partition(" => ")
        new = rest.rpartition(": ")[0].replace("\\n", "\n")
        assert old in text, f"{block}: there is no {old!r} to swap"
        text = text.replace(old, new)
    return text


def run(session: Session, place: Path, env: dict[str, str]) -> list[str]:
    """Run a session in its place; what each block printed.

    Raises:
        AssertionError: a block failed.
    """
    log = place.parent / "output"
    with log.open("wb") as file:
        done = subprocess.run(
            ["bash", "-c", script_of(session, place)],
            cwd=place,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    parts = log.read_text(encoding="utf-8").split(MARK)[1:]
    shown = [part.partition("\n")[2].replace(str(place), "/home/you") for part in parts]
    assert done.returncode == 0, f"{session.blocks[len(parts) - 1]} ended with {done.returncode}:\n{shown[-1]}"
    return shown


def unseen(block: Block, printed: str) -> str:
    """The first line of a block's shown output that was not printed, in order; '' when all were.

    Numbers may be others, blanks may be more or fewer, `…` stands for anything. A block that says `exactly` is all that
    was printed, to the letter.
    """
    shown = [line for line in block.text.splitlines() if line.strip() not in ("", "…") and not line.startswith("$ ")]
    if "exactly" in block.says:
        pairs = zip_longest(shown, filter(str.strip, printed.splitlines()), fillvalue="")
        return next((here or f"nothing, where {there!r} was printed" for here, there in pairs if here != there), "")
    lines = iter([_plain(line) for line in printed.splitlines()])
    for line in shown:
        pattern = re.compile(".*".join(map(re.escape, _plain(line).split("…"))))
        if not any(pattern.fullmatch(found) for found in lines):
            return line
    return ""


def _plain(line: str) -> str:
    return " ".join(_NUMBER.sub("0", line).split())
