"""What is hostile: paths, contents and values; and for every step of the table a line that works but for them."""

import io
import os
import random
import socket
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile import safetensors
from tiny import TinyRun

from wangen.generator.steps import STEPS
from wangen.generator.table import Option, Step, options

Words = dict[str, Any]
USER = "a file of the user's"
"""What is in the files that no line may change."""

# Paths.

DEVICES = {"zeros": 5, "null": 3, "random": 9, "a full disk": 7}
"""The minor numbers of Linux's devices; they are made in the test's own folder."""


def hostile_paths(folder: Path) -> dict[str, str]:
    """Places that nobody expects, made in a folder that must not be there yet: name -> path."""
    folder.mkdir()
    for name in ("folder", "full"):
        (folder / name).mkdir()
    for name in ("file", "full/x.txt", "new\nline", "right\u202eleft", "n" * 255, "-rf", "'; touch pwned; '"):
        (folder / name).write_text(USER)
    for name, target in {"dangling": "nowhere", "loop": "loop2", "loop2": "loop", "linked": "folder"}.items():
        (folder / name).symlink_to(target)
    found = {path.name[:20]: str(path) for path in folder.iterdir()}
    with suppress(OSError):  # a file system that takes UTF-8 alone
        name = os.fsencode(folder) + b"/not \xff UTF-8"
        Path(os.fsdecode(name)).write_text(USER)
        found["not UTF-8"] = os.fsdecode(name)
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server, suppress(OSError):  # a path that is too long for a socket
        server.bind(str(folder / "socket"))
    with suppress(PermissionError):  # only the superuser makes devices
        for name, minor in DEVICES.items():
            os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    places = {path.name: str(path) for path in folder.iterdir() if not path.is_file() and not path.is_dir()}
    named = {"missing": "missing", "below a file": "file/x", "a file as a folder": "file/", "300 letters": "n" * 300}
    inside = {key: f"{folder}/{name}" for key, name in named.items()}
    return found | places | inside | ELSEWHERE


ELSEWHERE = {
    "nothing": "", "here": ".", "above": "..", "an option": "-rf", "a long path": "a/" * 3000, "NUL": "a\0b",
    "somebody's home": "~nobody", "an address": "http://127.0.0.1:1/x", "Windows": "C:\\a\\b",
    "a share": "\\\\a\\b",
}  # fmt: skip


def path_kinds(folder: Path) -> list[str]:
    """The names of all hostile paths of this machine."""
    return sorted(hostile_paths(folder))


# Contents.


def zipped(members: Mapping[str, bytes]) -> bytes:
    """A zip file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(members: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    """A tar file with links."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return buffer.getvalue()


DEEP, DIGITS = 200_000, b"9" * 100_000
CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "one byte": b"\0",
    "a new line": b"\n",
    "a bracket": b"[",
    "a BOM alone": b"\xef\xbb\xbf",
    "UTF-16": "[general]\nresolution = 64\n".encode("utf-16"),
    "latin-1": "caption = 'caf\xe9'\n".encode("latin-1"),
    "deep TOML lists": b"a = " + b"[" * DEEP,
    "deep TOML tables": b"a = " + b"{a=" * DEEP,
    "deep TOML keys": b"a" + b".a" * 5_000 + b" = 1\n",
    "deep JSON lists": b"[" * DEEP,
    "deep JSON objects": b'{"a":' * DEEP + b"\n",
    "whole deep JSON": b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "a TOML number of 100 000 digits": b"a = " + DIGITS,
    "a JSON number of 100 000 digits": b'{"a": ' + DIGITS + b"}",
    "a NUL in a text": b'output_name = "x\\u0000y"\ndataset_config = "a\\u0000b"\n',
    "dates": b"output_name = 1979-05-27\nresolution = 1979-05-27T07:32:00Z\n",
    "keys twice": b"a = 1\na = 2\n",
    "a line of 5 MB": b"a" * 5_000_000,
    "500 000 lines": b"a\n" * 500_000,
    "zeros": bytes(1_000_000),
    "garbage": random.Random(0).randbytes(1_000_000),
    "a JSON text": b'"a"',
    "a JSON null": b"null",
    "a JSON list": b"[1, [2]]",
    "a JSON number": b"7",
    "an empty JSON object": b"{}",
    "JSON that is none": b'{"a": NaN, "b": Infinity, "c": -0.0}',
    "half a safetensors": safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"1234"),
    "an empty safetensors": safetensors({}),
    "a zip that leads out": zipped({"../../a.txt": b"x", "/etc/x": b"y", "archive/data.pkl": b"."}),
    "a zip of much": zipped({"archive/data.pkl": bytes(50_000_000)}),
    "a tar that leads out": tarred({"../a.jsonl": b"{}\n", "/a.jsonl": b"{}\n"}, {"b.jsonl": "/etc/passwd"}),
    "half a picture": b"\x89PNG\r\n\x1a\n" + bytes(30),
}
READS: Mapping[str, tuple[str, ...]] = {
    "dataset_config": (".toml", ".jsonl", ".tar"),
    "manifest": (".jsonl", ".tar"),
    "config_file": (".toml",),
    "validation_config": (".toml",),
    "sample_prompts": (".toml", ".json", ".txt"),
    "prompt_file": (".txt", ".json", ".toml"),
    "labels": (".csv", ".jsonl"),
    "dit": (".safetensors", ".gguf", ".pth", ".safetensors.index.json"),
    "vae": (".pth", ".safetensors"),
    "t5": (".pth", ".gguf"),
    "clip": (".pth",),
    "tokenizer": (".json", ".model"),
    "lora_weight": (".safetensors",),
    "network_weights": (".safetensors",),
    "repeat": (".png", ".mp4"),
    "image_path": (".png", ".mp4"),
    "source": ("/metadata.json",),
}
"""The flags whose files are read, with the endings by which they are told apart."""

# Values.

NUMBERS = (
    "-1", "0", "-0", "1e400", "nan", "inf", "-inf", "9" * 5000, "1e-400", "0x10", "\uff11", "1_000", "", "2147483648",
    "-9223372036854775809", "1e18", "1e308", "5e-324", " 1", "9" * 20, "1.0.0", "True", "1979-05-27",
)  # fmt: skip
TEXTS = (
    "", "\n", "a\nb", "../../x", "/", "..", "-rf", "%s%n", "\u202e", "a" * 5000, "\udcff", "{}", "{0.__class__}",
    "$(touch pwned)", '"', "NUL", "con", "\x1b[31m", "None", "0", "0/0", "-1/2", "5/2", "9" * 5000, "1x", "0x0",
    "99999x99999", "=", "a=b=c", "a=", "[[", "(", "a=__import__('os').abort()", "\u0661",
)  # fmt: skip


def hostile_values(option: Option) -> tuple[str, ...]:
    """What is tried for a flag that is no path; nothing for one that takes no value."""
    if option.kind is Path or option.kind is bool:
        return ()
    if option.choices:
        return ("no such", "", "\n")
    return NUMBERS if option.kind in (int, float) else TEXTS


# Lines.


def place_of(tiny_run: TinyRun) -> Words:
    """Values of flags by name with which the steps work on a tiny dataset; a new step takes those that it has."""
    weights, media = tiny_run.weights, tiny_run.folder / "media"
    return {
        "dataset_config": tiny_run.dataset_config, "dit": weights["dit"], "vae": weights["vae"], "t5": weights["t5"],
        "dataset_dir": media, "videos": media, "source": media, "output": "made", "output_dir": "out",
        "save_path": "saved", "output_name": "lora", "task": "t2v-1.3B", "device": "cpu", "max_train_steps": "1",
        "video_size": ("64", "64"), "video_length": "1", "infer_steps": "1", "prompt": "a red square",
        "log_with": "none", "vae_dtype": "float32", "t5_dtype": "float32", "mixed_precision": "no",
        "network_dim": "2", "num_workers": "1", "report_only": True,
    }  # fmt: skip


_ONLY: Mapping[str, tuple[str, ...]] = {
    "train": ("dataset_config", "dit", "output_dir", "output_name", "task", "device", "max_train_steps", "log_with",
              "mixed_precision", "network_dim"),
    "caption": ("dataset_dir", "report_only"),
}  # fmt: skip
"""Of these steps not all flags that there are values for; of the others all."""
_CHANGED: Mapping[str, Words] = {
    "export": {"save_path": "saved.safetensors", "dit": None},
    "report": {"save_path": "page.html", "output_dir": "run"},
    "watch": {"output_dir": "run", "dataset_config": None},
}


def valid(step: type[Step], known: Words) -> Words:
    """A line of a step as flags with values."""
    wanted = {**known, **_CHANGED.get(step.command, {})}
    words: Words = {}
    for option in options(step):
        only = _ONLY.get(step.command)
        value = wanted.get(option.name) if only is None or option.name in only or option.required else None
        if value is None and option.required:
            value = {Path: "file.txt", str: "x", bool: True}.get(option.kind, "1")
        if value is not None and not (option.name in step.one_of and any(name in words for name in step.one_of)):
            words[option.name] = value
    return words


def line(step: type[Step], words: Words) -> list[str]:
    """The words of a command line."""
    found = [step.command]
    for name, value in words.items():
        if isinstance(value, tuple):
            found += [f"--{name}", *map(str, value)]
        else:
            found.append(f"--{name}" if value is True else f"--{name}={value}")
    return found


@dataclass(frozen=True)
class Case:
    """A flag of a step with something hostile, by its name: a path, a content with an ending, or a value."""

    step: type[Step]
    option: Option
    kind: str
    ending: str = ""


def path_cases(kinds: list[str]) -> Iterator[Case]:
    """Every path of every step that is something else."""
    return (Case(step, option, kind) for step in STEPS for option in options(step) if option.kind is Path
            for kind in kinds)  # fmt: skip


def content_cases() -> Iterator[Case]:
    """Every file that a step reads with every content."""
    return (Case(step, option, kind, ending) for step in STEPS for option in options(step) if option.name in READS
            for ending in READS[option.name] for kind in CONTENTS)  # fmt: skip


def value_cases() -> Iterator[Case]:
    """Every number and text of every step."""
    return (Case(step, option, value) for step in STEPS for option in options(step)
            for value in hostile_values(option))  # fmt: skip


def some(cases: list[Case], part: int) -> list[Case]:
    """Every so-many-th case, so that over the flags of all steps every kind occurs.

    >>> some([1, 2, 3, 4, 5], 2)
    [1, 3, 5]
    """
    return cases[::part]
