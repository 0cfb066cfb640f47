"""A weight file as one header, whatever it consists of: a file, its shards, their index, or a folder.

Standard library only, milliseconds per file, nothing executed. What the file is says `wangen.generator.kinds`.
"""

import hashlib
import json
import re
import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from wangen.generator.companions import CLEAN_CONTROLS, strip_prefix
from wangen.generator.errors import WangenError, unreadable
from wangen.generator.formats import DOWNLOAD_AGAIN, Header, TensorInfo, quoted
from wangen.generator.formats.one_file import fingerprint, read_file
from wangen.generator.formats.strict_json import parse_json
from wangen.generator.header_keys import FORMAT
from wangen.generator.install import install_line

SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.(?P<ending>safetensors|gguf|bin|pth|pt)")
INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(\.(?P<variant>\w+))?\.json")

MAX_INDEX_BYTES = 32 * 2**20
MAX_NAME_BYTES = 255

WEIGHTS_FORMAT = "wangen-weights-1"
"""Of the weights that training writes, in the field `wangen.format`: it counts up when a field of ours or the meaning
of a tensor changes. Files of other programs, and of wangen before 0.1.0, have none."""

PIPELINE = "model_index.json"
"""The file that makes a folder a diffusers pipeline, with one folder for each of its models."""

# flag -> the folders of a pipeline, or of a repository of Wan 2.2, that it takes; the first that is there.
FOLDERS = {
    "--dit": ("transformer_2", "transformer", "low_noise_model"),
    "--dit_high_noise": ("transformer", "high_noise_model"),
    "--vae": ("vae",),
    "--t5": ("text_encoder",),
    "--clip": ("image_encoder",),
}
# flag -> what the files are called in a repository of Wan-AI, where all lie in one folder.
NAMES = {
    "--vae": "Wan2.?_VAE.*",
    "--t5": "models_t5_*",
    "--clip": "models_clip_*",
}
MAIN_NAMES = ("diffusion_pytorch_model", "model", "pytorch_model")
"""What diffusers and transformers call the weights of a model, without ending; a variant stands behind a dot."""


def read_header(path: Path, flag: str = "") -> Header:
    """The tensors and metadata of a weight file; the shards of a sharded one are merged.

    Args:
        path: a `.safetensors`, `.pth` or `.gguf` file (told apart by content), any shard, an `.index.json`, or a
            folder as `shards` takes it.
        flag: the option that the path was given to.

    Raises:
        WangenError: missing, unreadable, cut short, malformed, or a pickle that holds more than tensors.
    """
    files = shards(path, flag)
    headers = [read_file(file) for file in files]
    if len(headers) == 1:
        return headers[0]
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for file, header in zip(files, headers, strict=True):
        if twice := tensors.keys() & header.tensors.keys():
            raise WangenError(f"{min(twice)} stands in two shards", where=str(file), cure=DOWNLOAD_AGAIN)
        tensors |= header.tensors
        metadata |= header.metadata
    return Header(tensors, metadata, headers[0].format)


def num_blocks(header: Header) -> int:
    """How many blocks a transformer's file has, of whatever format; 0 where none is named as one."""
    found = (re.search(r"(?:^|\.|transformer_)blocks\.(\d+)\.", name) for name in header.tensors)
    return len({match[1] for match in found if match})


def require_known_format(header: Header, path: Path) -> None:
    """Refuse weights that a later version of wangen trained.

    Raises:
        WangenError: naming both formats.
    """
    found = header.metadata.get(FORMAT, WEIGHTS_FORMAT)
    if found != WEIGHTS_FORMAT:
        raise WangenError(
            f"these weights are of the format {found[:40]}, this version reads {WEIGHTS_FORMAT}",
            where=str(path),
            cure=f"update the clone of wangen, then {install_line(sys.executable)}",
        )


def shards(path: Path, flag: str = "") -> list[Path]:
    """All files that a weight file consists of, in order; just itself when it is not sharded.

    Args:
        path: a weight file, any of its shards (`…-00001-of-00003.safetensors` or `.gguf`), its
            `.safetensors.index.json`, the name without the numbers (`model.safetensors`) when only shards and an index
            are there, the folder of a model, or that of a pipeline.
        flag: the option that the path was given to (`--vae`); it says which model of a pipeline is meant.

    Raises:
        WangenError: a shard or the file itself is missing, the index names a file elsewhere, a folder holds no
            weights, or several files that could be meant.
    """
    path = _in_folder(Path(path), flag) if Path(path).is_dir() else Path(path)
    index = path if INDEX.fullmatch(path.name) else path.with_name(path.name + ".index.json")
    if path == index or (path.suffix == ".safetensors" and not path.exists() and index.is_file()):
        files = [path.parent / name for name in index_names(index)]
    elif match := SHARD.fullmatch(path.name):
        count = int(match["count"])
        if not 1 <= int(match["index"]) <= count:
            raise WangenError("the number of this shard is not within its count", where=str(path))
        if count > 1 and match["ending"] not in ("safetensors", "gguf"):
            raise WangenError(f"weights in several .{match['ending']} files, which are not read together",
                              where=str(path), cure="get them as .safetensors")  # fmt: skip
        names = (f"{match['stem']}-{number:05d}-of-{count:05d}.{match['ending']}" for number in range(1, count + 1))
        files = [path.with_name(name) for name in names]
    else:
        if not path.is_file():
            raise WangenError("no such weight file", where=str(path), cure="check the path and the file's name")
        return [path]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        names_missing = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        raise WangenError(
            f"{len(missing)} of {len(files)} shards missing: {names_missing}",
            where=str(path.parent),
            cure="download the missing shards into this folder",
        )
    return files


def identity(path: Path, flag: str = "") -> str:
    """A digest (64 hex digits) that tells one weight file from another without reading all of it.

    Safetensors and GGUF: header, size and 64 mebibytes spread evenly over each file. `.pth`: names, sizes and
    checksums from the zip directory. The file's name and date play no part; of the configuration beside a `--dit` it is
    `has_clean_controls` alone, which makes another model of the same weights.

    Raises:
        WangenError: as `read_header`.
    """
    digest = hashlib.sha256()
    for file in shards(path, flag):
        header = read_file(file)
        digest.update(f"{header.format} {file.stat().st_size}\n".encode())
        for piece in fingerprint(file, header):
            digest.update(piece)
    if flag == "--dit" and says_clean_controls(path) and not has_marker(read_header(path, flag)):
        digest.update(CLEAN_CONTROLS.encode())
    return digest.hexdigest()


def has_clean_controls(path: Path, header: Header) -> bool:
    """Whether control images have timestep 0, as in Edit 2511.

    No weight says it, but ComfyUI's marker or the configuration beside the weights do.

    Args:
        path: as it was given to `--dit`.
        header: of that file or folder.
    """
    return has_marker(header) or says_clean_controls(path)


def has_marker(header: Header) -> bool:
    """Whether a file has ComfyUI's marker of Edit 2511."""
    return any(strip_prefix(name) == CLEAN_CONTROLS for name in header.tensors)


def says_clean_controls(path: Path) -> bool:
    """Whether the configuration beside the weights of a `--dit` is that of Edit 2511."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        config = json.loads((shards(path, "--dit")[0].parent / "config.json").read_text(encoding="utf-8"))
        return config.get("zero_cond_t") is True
    return False


def _in_folder(folder: Path, flag: str) -> Path:
    """The weight file, one of the shards or their index that a folder holds for an option."""
    folder = _model_folder(folder, flag)
    named = _weights_in(folder, NAMES[flag]) if flag in NAMES else []
    found = named or _weights_in(folder, "*")
    if not found:
        raise WangenError("a folder without weights", where=str(folder), cure="name a weight file or its folder")
    usual = [path for name in MAIN_NAMES for path in found if _stem(path) == name]
    chosen = usual[:1] or found
    if len(chosen) > 1:
        names = ", ".join(path.name for path in found[:5]) + (" …" if len(found) > 5 else "")
        raise WangenError(f"a folder of {len(found)} weight files: {names}", where=str(folder), cure="name one of them")
    return chosen[0]


def _model_folder(folder: Path, flag: str) -> Path:
    """The folder inside that an option means; the folder itself where it holds one model, or all side by side.

    Raises:
        WangenError: the option names no model of a pipeline, or one whose folder is missing. An expert never stands in
            for the other.
    """
    names = FOLDERS.get(flag, ())
    if not (folder / PIPELINE).is_file():
        return next((folder / name for name in names if (folder / name).is_dir()), folder)
    if not names:
        raise WangenError("a folder of several models", where=str(folder), cure="name the one that is meant, inside")
    entries = _read_json(folder / PIPELINE, "this is no list of a pipeline's models")
    models = {name for name, entry in entries.items() if isinstance(entry, list) and any(entry)}
    meant = next((name for name in names if name in models or (folder / name).is_dir()), names[0])
    if not (folder / meant).is_dir():
        there = ", ".join(sorted(entry.name for entry in folder.glob("*/")))
        raise WangenError(f"this pipeline has no {meant} folder, only {there}", where=str(folder),
                          cure=f"download {meant} into it, too")  # fmt: skip
    return folder / meant


def _weights_in(folder: Path, pattern: str) -> list[Path]:
    """One path for each set of weights in a folder, safetensors before other formats: an index, or else a shard."""
    entries = sorted(path for path in folder.glob(pattern) if path.is_file())
    for suffixes in ((".safetensors", ".json"), (".gguf",), (".pth", ".bin", ".pt")):
        sets: dict[str, Path] = {}
        for path in entries:
            is_index = INDEX.fullmatch(path.name) is not None
            if path.suffix in suffixes and (is_index or path.suffix != ".json"):
                sets[_stem(path)] = path if is_index else sets.get(_stem(path), path)
        if sets:
            return list(sets.values())
    return []


def _stem(path: Path) -> str:
    """The name of a set of weights: without ending, without a shard's number; an index has that of its shards.

    >>> [_stem(Path(name)) for name in ("model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json")]
    ['model.fp16', 'model.fp16']
    """
    if match := INDEX.fullmatch(path.name):
        return ".".join(filter(None, (match["stem"], match["variant"])))
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def index_names(index: Path) -> list[str]:
    """The shard names of an index, each a plain name within the index's own folder."""
    words = "this is no index of shards (no weight_map)"
    try:
        names = sorted(set(_read_json(index, words)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise WangenError(words, where=str(index), cure=DOWNLOAD_AGAIN) from error
    if not names:
        raise WangenError("this index names no shard", where=str(index))
    for name in names:
        if not isinstance(name, str) or not _is_plain(name):
            found = f"the index names {quoted(str(name))}, which is not a file beside it"
            raise WangenError(found, where=str(index), cure=DOWNLOAD_AGAIN)
    return names


def _read_json(path: Path, words: str) -> dict[str, Any]:
    """The object that a small JSON file is; `words` say what is wrong when it is none."""
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise WangenError(f"{words}: it is too long", where=str(path), cure=DOWNLOAD_AGAIN)
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise WangenError(words, where=str(path), cure=DOWNLOAD_AGAIN) from error
    if not isinstance(content, dict):
        raise WangenError(words, where=str(path), cure=DOWNLOAD_AGAIN)
    return content


def _is_plain(name: str) -> bool:
    """Whether a name stays in its folder on every system: no separator, drive or dots; and can be shown and opened."""
    same = PurePosixPath(name).name == name == PureWindowsPath(name).name
    return same and name not in ("", ".", "..") and name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
