"""How long `wangen publish` takes for 10,000 images, and how much memory: first run, second run, one and three targets.

python benchmarks/publish.py [NUM_IMAGES]
"""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

NUM_IMAGES = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
TOML = 'model = "t2v-1.3B"\nplatforms = [{}]\n'


def make(folder: Path, first: int, last: int) -> None:
    """Real JPEG files of 640x480 pixels with some texture, and captions of a usual length."""
    from PIL import Image

    noise = Image.effect_noise((80, 60), 60)
    for number in range(first, last):
        picture = noise.rotate(number % 360).resize((640, 480)).convert("RGB")
        picture.putpixel((number % 640, number // 640 % 480), (255, 0, 0))
        picture.save(folder / f"photo {number:05}.jpg", quality=80)
        caption = (
            f"photo number {number}: a tabby cat sits on a red sofa beside a window and looks into the camera, " * 2
        )
        (folder / f"photo {number:05}.txt").write_text(caption, encoding="utf-8")


def run(place: Path, *words: str) -> tuple[float, float]:
    """Publish in a process of its own; returns seconds and the peak of its memory in MB."""
    code = "import resource, sys; from wangen.generator.cli import main; code = main(sys.argv[1:]); "
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, "publish", "many", "--workspace", str(place), *words],
                          check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    return time.perf_counter() - started, int(done.stderr.split()[-1]) / 1024


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="wangen-benchmark-") as scratch:
        place = Path(scratch)
        dataset = place / "datasets" / "many"
        dataset.mkdir(parents=True)
        cores = os.cpu_count() or 1
        cuts = [NUM_IMAGES * part // cores for part in range(cores + 1)]
        with ProcessPoolExecutor(cores) as pool:
            list(pool.map(make, [dataset] * cores, cuts[:-1], cuts[1:]))
        num_bytes = sum(path.stat().st_size for path in dataset.iterdir())
        print(f"{NUM_IMAGES} images of 640x480 with captions, {num_bytes / 1e6:.0f} MB, {cores} cores")
        time.sleep(2)  # files that were written just now are not memoised
        for targets in ('"linux"', '"linux", "wsl", "windows"'):
            (place / "wangen.toml").write_text(TOML.format(targets))
            for name, words in (("first", ()), ("second", ()), ("a caption changed", ())):
                if name == "a caption changed":
                    (dataset / "photo 00007.txt").write_text(f"a dog {targets}")
                seconds, memory_mb = run(place, *words)
                print(f"{targets:28} {name:18} {seconds:6.2f} s  {memory_mb:6.0f} MB")
        seconds, memory_mb = run(place, "--platform", "linux", "--resolution", "256", "--resize")
        print(f"{'linux, --resize to 256':28} {'first':18} {seconds:6.2f} s  {memory_mb:6.0f} MB")


if __name__ == "__main__":
    main()
