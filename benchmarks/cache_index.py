"""How long a large cache takes to be judged, and in how much memory: a dataset of many tiny images, all of it cached.

python benchmarks/cache_index.py [NUM_ITEMS] [FOLDER]

The entries are written directly, with the names and headers that the caching steps would give them. Each measurement
is a process of its own. `first` is without the memo of digests, `headers` with it and without the index.
"""

import json
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from wangen import profiles
from wangen.generator.steps import CheckCache
from wangen.runtime.cache import FORMAT, RECIPE_VERSIONS, TEXT_KINDS, Encoder, Folder, Kind, Recipe
from wangen.runtime.cache.index import INDEX
from wangen.runtime.cache.needed import DatasetNeeds
from wangen.runtime.models import text_encoder_identity, vae_identity
from wangen.runtime.needs import recipes_of
from wangen.runtime.samples import read_samples
from wangen.runtime.sources import MEMO

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_weights import write_tiny_wan

MEASURE = """
import sys, time
from pathlib import Path
toml, vae, t5 = map(Path, sys.argv[1:4])
started = time.perf_counter()
{body}
seconds = time.perf_counter() - started
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(f"{{seconds:7.2f}} s {{peak / 1e3:6.0f}} MB")
"""
CHECK = """
from wangen.generator.cli import main
assert main(["check_cache", "--dataset_config", str(toml)]) == 0
"""
LATENTS = """
from wangen.generator.cli import main
assert main(["cache_latents", "--dataset_config", str(toml), "--vae", str(vae), "--vae_dtype", "float32"]) == 0
assert "torch" not in sys.modules
"""
TEXTS = """
from wangen.generator.cli import main
assert main(["cache_text", "--dataset_config", str(toml), "--t5", str(t5), "--t5_dtype", "float32"]) == 0
assert "torch" not in sys.modules
"""
TRAIN = """
import torch
from wangen import profiles
from wangen.generator.steps import Train
from wangen.runtime.loader import find_entries
from wangen.runtime.samples import read_samples
started = time.perf_counter()
options = Train(dataset_config=toml, dit=toml, output_dir=toml.parent, output_name="x")
model = profiles.model("t2v-14B")
samples = read_samples(options, model)
read_s = time.perf_counter() - started
assert find_entries(options, model, samples)
print(f"(of which samples {read_s:.2f} s)", end=" ")
"""
INDEX_ONLY = """
from wangen.runtime.cache import Folder
assert Folder(toml.parent / "cache").files
"""


def main() -> None:
    """Make the dataset and measure."""
    num_items = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as text:
        folder = Path(text)
        models = write_tiny_wan(folder / "models", ["a picture"])
        toml = _make_dataset(folder, num_items)
        _make_entries(toml, models)
        cache = folder / "cache"
        print(f"{num_items} images, {len(list(cache.glob('*.safetensors')))} entries")
        for what, body, without in (
            ("check_cache, first", CHECK, (MEMO, INDEX)),
            ("check_cache, headers", CHECK, (INDEX,)),
            ("check_cache", CHECK, ()),
            ("the index alone", INDEX_ONLY, ()),
            ("the trainer's entries", TRAIN, ()),
            ("cache_latents, nothing to do", LATENTS, ()),
            ("cache_text, nothing to do", TEXTS, ()),
        ):
            for name in without:
                (cache / name).unlink(missing_ok=True)
            command = [sys.executable, "-c", MEASURE.format(body=body), toml, models["vae"], models["t5"]]
            done = subprocess.run(command, capture_output=True, text=True)
            print(f"{what:30} {done.stdout.strip() or done.stderr[-2000:]}", flush=True)


def _make_dataset(folder: Path, num_items: int) -> Path:
    images, cache = folder / "images", folder / "cache"
    images.mkdir()
    cache.mkdir()
    for number in range(num_items):
        (images / f"{number:06}.png").write_bytes(_png(number))
        (images / f"{number:06}.txt").write_text(f"A photo of thing number {number}, seen from the left, in daylight.")
    toml = folder / "set.toml"
    toml.write_text(f"[general]\nresolution = [64, 64]\n[[datasets]]\nimage_directory = '{images.as_posix()}'\n"
                    f"cache_directory = '{cache.as_posix()}'\n")  # fmt: skip
    return toml


def _png(number: int) -> bytes:
    """One grey pixel, and a text chunk that makes the file unlike any other."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    pixel = zlib.compress(b"\0\x80")
    return b"\x89PNG\r\n\x1a\n" + b"".join([
        chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)), chunk(b"tEXt", b"number\0%d" % number),
        chunk(b"IDAT", pixel), chunk(b"IEND", b""),
    ])  # fmt: skip


def _make_entries(toml: Path, models: dict[str, Path]) -> None:
    """What the two caching steps would leave, with a payload of one small tensor."""
    encoders: dict[Kind, Encoder] = {"latent": Encoder(vae_identity(models["vae"]), "float32")}
    encoders |= dict.fromkeys(TEXT_KINDS, Encoder(text_encoder_identity(models["t5"], None), "float32"))
    folder = Folder(toml.parent / "cache")
    samples = read_samples(CheckCache(dataset_config=toml), profiles.model("t2v-14B"))
    for kind, encoder in encoders.items():
        recipes = {recipe.key(encoder): recipe for sample in samples for recipe in recipes_of(sample, kind)}
        for recipe in recipes.values():
            (folder.path / recipe.file_name(encoder)).write_bytes(_entry(recipe, encoder))
        DatasetNeeds(folder, toml, kind).extend(set(recipes), encoder)


def _entry(recipe: Recipe, encoder: Encoder) -> bytes:
    metadata = {
        "format": FORMAT, "recipe_version": str(RECIPE_VERSIONS[recipe.kind]), "name": recipe.name,
        "source": recipe.source, "content": json.dumps(recipe.content, sort_keys=True), "encoder": encoder.identity,
        "encoder_dtype": encoder.dtype, "payload": "0" * 64,
    }  # fmt: skip
    header = {"latent": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}, "__metadata__": metadata}
    text = json.dumps(header, sort_keys=True).encode()
    return struct.pack("<Q", len(text)) + text + b"\x01" * 64


if __name__ == "__main__":
    main()
