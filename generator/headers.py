"""What a weight file is, from its header alone: a VAE, a text encoder, a transformer, a LoRA.

Standard library only, milliseconds per file, nothing executed. The commands that run without a GPU use it to say that
`--vae` was given a transformer; the loaders of `wangen.runtime.weights` use it before they touch torch.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from wangen.generator.companions import strip_prefix
from wangen.generator.errors import WangenError
from wangen.generator.formats import DOWNLOAD_AGAIN, Header, TensorInfo
from wangen.generator.formats.pth import read_pth
from wangen.generator.formats.safetensors import read_safetensors

__all__ = [
    "Header",
    "TensorInfo",
    "describe",
    "expect",
    "identify",
    "identity",
    "kind_of",
    "read_header",
    "shards",
]

MIB = 2**20
NUM_SPREAD_MIB = 64  # how many mebibytes of a safetensors file `identity` reads
SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.safetensors")
INDEX_SUFFIX = ".safetensors.index.json"

# kind -> (plain words, the flag that takes it)
KINDS = {
    "wan-vae-2.1": ("a Wan 2.1 VAE", "--vae"),
    "wan-vae-2.2": ("a Wan 2.2 VAE", "--vae"),
    "wan-vae-diffusers": ("a Wan VAE in the diffusers layout", ""),
    "umt5-encoder": ("a umT5 text encoder", "--t5"),
    "umt5-encoder-hf": ("a umT5 text encoder in the Hugging Face (ComfyUI) layout", ""),
    "wan-transformer-t2v": ("a Wan text-to-video transformer", "--dit"),
    "wan-transformer-i2v": ("a Wan 2.1 image-to-video transformer", "--dit"),
    "wan-transformer-i2v-2.2": ("a Wan 2.2 image-to-video transformer", "--dit"),
    "wan-transformer-ti2v": ("a Wan 2.2 text-and-image-to-video (5B) transformer", "--dit"),
    "wan-transformer-other": ("a Wan transformer with extra inputs (Fun, VACE, control …)", ""),
    "wan-transformer-diffusers": ("a Wan transformer in the diffusers layout", ""),
    "open-clip": ("an open-clip image encoder", "--clip"),
    "lora": ("a LoRA", "--network_weights or --lora_weight"),
    "unknown": ("a weight file of no known kind", ""),
}

# What the other formats that people give look like at their first bytes.
FOREIGN = {
    b"GGUF": ("a GGUF file, which is not read here", "give the .safetensors or .pth weights"),
    b"version https://git-lfs": ("a Git LFS pointer, not the weights", "run `git lfs pull`, or " + DOWNLOAD_AGAIN),
    b"<!DOCTYPE": ("a web page, not weights", DOWNLOAD_AGAIN),
    b"<!doctype": ("a web page, not weights", DOWNLOAD_AGAIN),
    b"<html": ("a web page, not weights", DOWNLOAD_AGAIN),
    **{
        bytes([0x80, protocol]): ("a bare pickle (PyTorch before 1.6), which is not read", "get .safetensors weights")
        for protocol in range(2, 6)
    },
}


def read_header(path: Path) -> Header:
    """The tensors and metadata of a weight file; the shards of a sharded one are merged.

    Args:
        path: a `.safetensors` or `.pth` file (told apart by content), any shard, or an `.index.json`.

    Raises:
        WangenError: missing, unreadable, cut short, malformed, or a pickle that holds more than tensors.
    """
    files = shards(path)
    headers = [_read_one(file) for file in files]
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


def shards(path: Path) -> list[Path]:
    """All files that a weight file consists of, in order; just itself when it is not sharded.

    Args:
        path: a weight file, any of its shards (`…-00001-of-00003.safetensors`), its `.safetensors.index.json`, or
            the name without the numbers (`model.safetensors`) when only shards and an index are there.

    Raises:
        WangenError: a shard or the file itself is missing, a folder was given, the index names a file elsewhere.
    """
    path = Path(path)
    index = path if path.name.endswith(INDEX_SUFFIX) else path.with_name(path.name + ".index.json")
    if path == index or (path.suffix == ".safetensors" and not path.exists() and index.is_file()):
        files = [path.parent / name for name in _index_names(index)]
    elif match := SHARD.fullmatch(path.name):
        count = int(match["count"])
        if not 1 <= int(match["index"]) <= count:
            raise WangenError("the number of this shard is not within its count", where=str(path))
        names = (f"{match['stem']}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
        files = [path.with_name(name) for name in names]
    else:
        if path.is_dir():
            raise WangenError("a folder, where a weight file belongs", where=str(path), cure="name the file inside")
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


def identify(path: Path) -> str:
    """The kind of a weight file: a key of `KINDS`.

    Raises:
        WangenError: as `read_header`.
    """
    return kind_of(read_header(path))


def kind_of(header: Header) -> str:
    """The kind that a header shows, by the names and shapes of its tensors."""
    if any(re.search(r"[._](lora_(A|B|down|up)\b|hada_w[12]_|lokr_w[12])", name) for name in header.tensors):
        return "lora"
    shapes = {strip_prefix(name): info.shape for name, info in header.tensors.items()}
    if "patch_embedding.weight" in shapes and "blocks.0.self_attn.q.weight" in shapes:
        return _transformer_kind(shapes)
    if "condition_embedder.time_proj.weight" in shapes and "blocks.0.attn1.to_q.weight" in shapes:
        return "wan-transformer-diffusers"
    if "encoder.downsamples.0.residual.2.weight" in shapes and "decoder.head.2.weight" in shapes:
        return "wan-vae-2.1"
    if "encoder.downsamples.0.downsamples.0.residual.2.weight" in shapes and "decoder.head.2.weight" in shapes:
        return "wan-vae-2.2"
    if "encoder.mid_block.attentions.0.to_qkv.weight" in shapes and "quant_conv.weight" in shapes:
        return "wan-vae-diffusers"
    if "token_embedding.weight" in shapes and "blocks.0.ffn.gate.0.weight" in shapes:
        return "umt5-encoder"
    if "encoder.block.0.layer.0.SelfAttention.q.weight" in shapes:
        return "umt5-encoder-hf"
    if "visual.patch_embedding.weight" in shapes and "visual.cls_embedding" in shapes:
        return "open-clip"
    return "unknown"


def describe(kind: str) -> str:
    """A kind in plain words.

    >>> describe("wan-transformer-t2v")
    'a Wan text-to-video transformer'
    """
    return KINDS[kind][0]


def expect(path: Path, kind: str, flag: str) -> Header:
    """The header of a file that must be of one kind.

    Args:
        path: the file given to `flag`.
        kind: the kind that `flag` takes.
        flag: the flag as the user writes it (`--vae`).

    Raises:
        WangenError: the file is of another kind; the message says which, and which flag takes it.
    """
    header = read_header(path)
    found = kind_of(header)
    if found == kind:
        return header
    words, belongs = KINDS[found]
    cure = f"give {describe(kind)}"
    if belongs and belongs != flag:
        cure += f"; this file belongs to {belongs}"
    if found == "unknown":
        words += f" (its tensors: {', '.join(sorted(header.tensors)[:3])} …)"
    raise WangenError(f"this is {words}; {flag} takes {describe(kind)}", where=str(path), cure=cure)


def identity(path: Path) -> str:
    """A digest (64 hex digits) that tells one weight file from another without reading all of it.

    Safetensors: header, size and 64 mebibytes spread evenly over each file. `.pth`: names, sizes and checksums from
    the zip directory. The file's name and date play no part.

    Raises:
        WangenError: as `read_header`.
    """
    digest = hashlib.sha256()
    for file in shards(path):
        header = _read_one(file)
        digest.update(f"{header.format} {file.stat().st_size}\n".encode())
        try:
            pieces = _zip_directory(file) if header.format == "pth" else _spread(file)
            for piece in pieces:
                digest.update(piece)
        except OSError as error:
            raise _unreadable(file, error) from error
    return digest.hexdigest()


def _transformer_kind(shapes: Mapping[str, tuple[int, ...]]) -> str:
    channels = shapes["patch_embedding.weight"][1:2]
    has_clip = any(name.startswith("img_emb.") for name in shapes)
    other = any(name.startswith(("vace_", "face_adapter.", "motion_encoder.", "ref_conv.")) for name in shapes)
    if other:
        return "wan-transformer-other"
    kinds: dict[tuple[tuple[int, ...], bool], str] = {
        ((16,), False): "wan-transformer-t2v",
        ((36,), True): "wan-transformer-i2v",
        ((36,), False): "wan-transformer-i2v-2.2",
        ((48,), False): "wan-transformer-ti2v",
    }
    return kinds.get((channels, has_clip), "wan-transformer-other")


def _read_one(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            start = file.read(32)
        if start[8:9] != b"{":  # the first byte of a safetensors header, after eight that may be anything
            for magic, (found, cure) in FOREIGN.items():
                if start.startswith(magic):
                    raise WangenError(f"this is {found}", where=str(path), cure=cure)
        return read_pth(path) if start.startswith(b"PK\x03\x04") else read_safetensors(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> WangenError:
    return WangenError(f"cannot be read: {error.strerror or error}", where=str(path))


def _index_names(index: Path) -> list[str]:
    """The shard names of an index, each a plain name within the index's own folder."""
    try:
        fields = json.loads(index.read_bytes())
        names = sorted(set(fields["weight_map"].values()))
    except OSError as error:
        raise _unreadable(index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WangenError("this is no index of shards (no weight_map)", where=str(index)) from error
    if not names:
        raise WangenError("this index names no shard", where=str(index))
    for name in names:
        if not isinstance(name, str) or not _is_plain(name):
            raise WangenError(f"the index names {name!r}, which is not a file beside it", where=str(index))
    return names


def _is_plain(name: str) -> bool:
    """Whether a name stays in its folder on every system: no separator, drive or dots."""
    same = PurePosixPath(name).name == name == PureWindowsPath(name).name
    return same and name not in ("", ".", "..") and "\0" not in name


def _zip_directory(path: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            yield f"{entry.filename} {entry.file_size} {entry.CRC:08x}\n".encode("utf-8", "surrogatepass")


def _spread(path: Path) -> Iterable[bytes]:
    """The header and 64 mebibytes at even distances; the whole file when it is no longer than that."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = 8 + int.from_bytes(file.read(8), "little")
        payload_bytes = size_bytes - header_bytes
        file.seek(0)
        yield file.read(header_bytes)
        if payload_bytes <= NUM_SPREAD_MIB * MIB:
            while piece := file.read(MIB):
                yield piece
            return
        for number in range(NUM_SPREAD_MIB):
            file.seek(header_bytes + (payload_bytes - MIB) * number // (NUM_SPREAD_MIB - 1))
            yield file.read(MIB)
