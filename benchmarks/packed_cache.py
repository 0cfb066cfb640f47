"""A cache of very many entries, in files and in packs: opening it, reading it at random, and the memory that takes.

python benchmarks/packed_cache.py [NUM_ENTRIES] [FOLDER]

The entries are latents of 1 KiB with the names and headers that the caching step gives them, and digests that fit. They
are written as files, measured, packed by `wangen cache pack`, measured again, verified. Each measurement is a process
of its own; memory is what its own pages take (of mapped indexes the system may drop any page at any time). Reading is
10,000 entries in random order, `cold` after their data has been dropped from the page cache (names and inodes are not).
"""

import hashlib
import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from wangen.runtime.cache import FORMAT, RECIPE_VERSIONS, Encoder, Recipe
from wangen.runtime.cache.index import INDEX

ENCODER = Encoder("ab" * 32, "bfloat16")
NUM_READ = 10_000
MEASURE = """
import os, random, sys, time
from pathlib import Path
from packed_cache import ENCODER, recipe
place, num_entries, num_read = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
import torch
from wangen.runtime.cache import Folder, load

def memory_mb():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) / 1e3, int(fields["RssFile"].split()[0]) / 1e3

before = memory_mb()
started = time.perf_counter()
folder = Folder(place)
assert folder.judge(recipe(0), ENCODER).state == "valid"
open_s = time.perf_counter() - started
numbers = random.Random(1).sample(range(num_entries), num_read)
started = time.perf_counter()
entries = [folder.judge(recipe(number), ENCODER).entry for number in numbers]
judge_s = time.perf_counter() - started

def read():
    started = time.perf_counter()
    for entry in entries:
        load(entry)
    return num_read / (time.perf_counter() - started)

for path in {entry.held_by for entry in entries}:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
cold = read()
warm = max(read() for _ in range(3))
after = memory_mb()
print(f"open {open_s:7.2f} s, judge {1e6 * judge_s / num_read:5.0f} us, read {cold:6.0f}/s cold {warm:6.0f}/s warm, "
      f"memory +{after[0] - before[0]:.0f} MB of its own, +{after[1] - before[1]:.0f} MB mapped")
"""


def recipe(number: int) -> Recipe:
    """What entry `number` is made of."""
    source = hashlib.sha256(b"%d" % number).hexdigest()
    content = {"source": source, "width": 64, "height": 64, "frames": 17, "first_frame": number, "frame_step": 2,
               "resize": "lanczos, cover, centre", "stride_px": 16, "stride_frames": 4}  # fmt: skip
    return Recipe("latent", content, f"video_{number // 10_000}.mp4:{number}+17")


def main() -> None:
    """Write, measure, pack, measure, verify."""
    num_entries = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as text:
        cache = Path(text)
        started = time.perf_counter()
        for number in range(num_entries):
            made = recipe(number)
            (cache / made.file_name(ENCODER)).write_bytes(_entry(made))
        _say(f"{num_entries} files", started)
        _measure("files, first look (headers)", cache, num_entries)
        time.sleep(3)  # a young file is not trusted
        _measure("files, the index is written", cache, num_entries)
        _measure("files", cache, num_entries)
        _wangen("pack", cache)
        (cache / INDEX).unlink(missing_ok=True)
        for _ in range(2):
            _measure("packs", cache, num_entries)
        for index in (cache / "packs").glob("*.index.safetensors"):
            index.unlink()
        _measure("packs without their indexes", cache, num_entries)
        _wangen("verify", cache)
        packs = list((cache / "packs").iterdir())
        num_bytes = sum(path.stat().st_size for path in packs)
        of_indexes = sum(path.stat().st_size for path in packs if path.suffix != ".tar")
        print(f"{len(packs)} files, {num_bytes / 1e9:.2f} GB, of which indexes {of_indexes / 1e6:.0f} MB")


def _entry(made: Recipe) -> bytes:
    payload = hashlib.sha256(made.source.encode()).digest() * 32
    metadata = {
        "format": FORMAT, "recipe_version": str(RECIPE_VERSIONS[made.kind]), "name": made.name,
        "source": made.source, "content": json.dumps(made.content, sort_keys=True), "encoder": ENCODER.identity,
        "encoder_dtype": ENCODER.dtype, "payload": hashlib.sha256(payload).hexdigest(),
    }  # fmt: skip
    header = {"latent": {"dtype": "BF16", "shape": [512], "data_offsets": [0, 1024]}, "__metadata__": metadata}
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + payload


def _measure(what: str, cache: Path, num_entries: int) -> None:
    command = [sys.executable, "-c", MEASURE, str(cache), str(num_entries), str(min(NUM_READ, num_entries))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    print(f"{what:30} {done.stdout.strip() or done.stderr[-2000:]}", flush=True)


def _wangen(command: str, cache: Path) -> None:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", "import sys; from wangen.generator.cli import main; "
                           "sys.exit(main(sys.argv[1:]))", "cache", command, str(cache)],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    _say(f"wangen cache {command}", started)


def _say(what: str, started: float) -> None:
    print(f"{what:30} {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
