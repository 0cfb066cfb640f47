"""The folders in which the commands of the documentation are run.

Every place is HOME and the folder to begin in. Weights are the tiny ones under the names that the pages use.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from documented import ROOT
from footage import waves, write_video
from helpers import make_clip, make_image, read_tree
from world_model_shards import write_split

TINY = ROOT / "examples" / "tiny-wan"
VECTORS = ROOT / "tests" / "vectors"
FILES = {
    "vae": "Wan2.1_VAE.pth",
    "t5": "models_t5_umt5-xxl-enc-bf16.pth",
    "dit": "wan2.1_t2v_1.3B_bf16.safetensors",
}
PHOTOS = ("cat", "coffee", "astronaut", "gravel")
CATS = """\
[general]
resolution = [64, 64]
[[datasets]]
image_directory = "datasets/cats"
cache_directory = "datasets/cats_cache"
"""


def put_photos(folder: Path, names: Sequence[str] = PHOTOS) -> Path:
    """Photos of the example with their captions."""
    folder.mkdir(parents=True)
    for name in names:
        for ending in ("jpg", "txt"):
            shutil.copy(ROOT / "examples" / "dataset" / f"{name}.{ending}", folder)
    return folder


def put_weights(folder: Path) -> None:
    """The tiny Wan, as people lay out a models folder."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("README.md", "SHA256SUMS"))


def home(folder: Path) -> None:
    """A newcomer's: pictures of a cat, a clip of it, long enough for 81 frames, and an environment to activate."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    (folder / "drive").mkdir()  # C: as WSL sees it
    photos = put_photos(folder / "Pictures" / "cats", PHOTOS[:2])
    make_clip(photos / "walk.mp4", num_frames=90, fps=16, size=(128, 96))
    (photos / "walk.txt").write_text("a cat walks", encoding="utf-8")


def clone(folder: Path) -> None:
    """A checkout, by links."""
    for path in ROOT.iterdir():
        if path.name[0] != ".":
            (folder / path.name).symlink_to(path)


def tree(folder: Path) -> None:
    """A copy of the repository that may be changed; `wangen` is the one in it."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "vectors", "*.egg-info")
    copy = folder / "wangen"
    for name in ("docs", "examples", "generator", "profiles", "runtime", "templates", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "tests/vectors"):
        (copy / name).symlink_to(ROOT / name)


def cats(folder: Path) -> None:
    """A dataset with its TOML, and the weights in the folder and in `models/`."""
    put_photos(folder / "datasets" / "cats")
    put_weights(folder)
    put_weights(folder / "models")
    (folder / "cats.toml").write_text(CATS, encoding="utf-8")


def clips(folder: Path) -> None:
    """Clips of 81 frames with the manifests of `wangen preprocess`, and the weights."""
    put_weights(folder)
    for name in ("train", "val"):
        make_clip(folder / "clips" / "clips" / f"{name}.mp4", num_frames=81, fps=16, size=(64, 64))
        line = f'{{"file": "clips/{name}.mp4", "prompt": "a woman walks", "source": "{name}.mov", "frames": 81}}\n'
        (folder / "clips" / f"{name}.jsonl").write_text(line.replace("81}", '81, "width": 64, "height": 64}'))


def footage(folder: Path) -> None:
    """Two videos of some seconds."""
    (folder / "footage").mkdir()
    for seed, name in enumerate(("street", "garden")):
        write_video(folder / "footage" / f"{name}.mp4", waves(60, (128, 96), seed=seed, step=2), rate=10)
        (folder / "footage" / f"{name}.txt").write_text(f"people in a {name}", encoding="utf-8")


def raw(folder: Path) -> None:
    """The raw world model data, both splits, and a tiny TI2V-5B."""
    from parity import DITS, VAE22
    from tiny_family import narrow

    write_split(folder / "raw" / "train_v2.0_raw", [[(0, 40), (1, 58)], [(2, 38)]])
    write_split(folder / "raw" / "val_v2.0_raw", [[(0, 36)]], flat=True)
    put_weights(folder)
    put_weights(folder / "models")
    shutil.copy(VAE22, folder / "models" / "Wan2.2_VAE.pth")
    narrow(DITS["dit_ti2v5b"], folder / "models" / "wan2.2_ti2v_5B_fp16.safetensors")


def edits(folder: Path) -> None:
    """Edits with control images, and a tiny Qwen-Image-Edit in ComfyUI's files."""
    from tiny_qwen import picture, write_tiny_qwen

    tiny = write_tiny_qwen(folder / ".qwen", size=1)  # a prompt's picture is of full size, some 1,400 tokens
    for path in tiny.single.values():
        path.rename(folder / path.name)
    (tiny.folder.parent / "comfyui" / "processor").rename(folder / "processor")
    for name, wide in (("targets", 1), ("controls", 2)):
        (folder / name).mkdir()
        for seed, stem in enumerate(("house", "lake")):
            picture((64 * wide, 64 * wide), seed + 10 * wide).save(folder / name / f"{stem}.png")
            (folder / "targets" / f"{stem}.txt").write_text("make the sky green", encoding="utf-8")
    shutil.copy(folder / "controls" / "house.png", folder / "house.png")
    shutil.copytree(folder / "targets", folder / "Pictures" / "edits")
    shutil.copytree(folder / "controls", folder / "Pictures" / "edits" / "controls")


def vlm(folder: Path) -> None:
    """Pictures without captions, and a tiny vision-language model."""
    from tiny_vlm import write_tiny_vlm

    for path in put_photos(folder / "datasets" / "cats").glob("*.txt"):
        path.unlink()
    write_tiny_vlm(folder / "models" / "llava-1.5-7b-hf")


def trained(folder: Path) -> None:
    """`cats` after a training that kept a checkpoint, with what else the pages name."""
    for name, content in _trained_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@cache
def _trained_files() -> dict[str, bytes]:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "made"
        folder.mkdir()
        _train(folder)
        return read_tree(folder)


def _train(folder: Path) -> None:
    from wangen.generator.cli import main

    cats(folder)
    for name, photos in (("val", "galaxies"), ("others", "retina")):
        (folder / "datasets" / name).mkdir()
        for ending in ("jpg", "txt"):
            shutil.copy(ROOT / "examples" / "dataset" / f"{photos}.{ending}", folder / "datasets" / name)
        (folder / f"{name}.toml").write_text(CATS.replace("cats", name), encoding="utf-8")
    (folder / "prompts.txt").write_text("a cat --w 64 --h 64 --f 5 --s 2\n", encoding="utf-8")
    vae, t5, dit = (str(folder / FILES[role]) for role in ("vae", "t5", "dit"))
    here = Path.cwd()
    os.chdir(folder)
    try:
        for name in ("cats", "val", "others"):
            assert main(["cache_latents", "--dataset_config", f"{name}.toml", "--vae", vae]) == 0
            assert main(["cache_text", "--dataset_config", f"{name}.toml", "--t5", t5]) == 0
        flags = f"--task t2v-1.3B --dit {dit} --dataset_config cats.toml --network_dim 4 --max_train_steps 2"
        flags += " --mixed_precision no --log_with none --save_every_n_steps 1 --output_name cats"
        assert main(["train", *flags.split(), "--output_dir", "outputs/cats", "--device", "cpu"]) == 0
        layout = ["--output_dir", ".", "--lora_layout", "kohya", "--device", "cpu"]
        assert main(["train", *flags.split(), *layout]) == 0
    finally:
        os.chdir(here)
    shutil.copy(folder / "cats.safetensors", folder / "dogs.safetensors")
    for name in ("wan2.1_t2v", "cats_full"):
        shutil.copy(dit, folder / f"{name}.safetensors")


def workspace(folder: Path) -> None:
    """A workspace with the dataset `cats`, not yet published."""
    from wangen.generator import workspace as workspaces

    workspaces.init(folder)
    shutil.rmtree(folder / "datasets" / "cats", ignore_errors=True)
    put_photos(folder / "datasets" / "cats")


def planned(folder: Path) -> None:
    """A workspace whose dataset of five pictures and three clips is published for the 14B."""
    from wangen.generator import workspace as workspaces
    from wangen.generator.cli import main

    workspaces.init(folder, "t2v-14B")
    media = folder / "datasets" / "cats"
    for number in range(5):
        make_image(media / f"cat{number}.jpg", (64, 48), seed=number + 1)
    for number in range(3):
        make_clip(media / f"walk{number}.mp4", num_frames=90, fps=16, size=(208, 120), seed=number)
    for path in list(media.iterdir()):
        path.with_suffix(".txt").write_text("a cat", encoding="utf-8")
    assert main(["publish", "cats", "--workspace", str(folder), "--platform", "linux"]) == 0


def bundle(folder: Path) -> None:
    """The folder of the scripts for Linux, as it is copied to the machine that trains."""
    from wangen.generator.cli import main

    with TemporaryDirectory() as temporary:
        workspace(Path(temporary))
        words = ["publish", "cats", "--workspace", temporary, "--platform", "linux", "--resolution", "64"]
        assert main(words) == 0
        shutil.copytree(Path(temporary) / "published" / "linux", folder, dirs_exist_ok=True)


def zoo(folder: Path) -> None:
    """Weight files that are looked at: one missing, three of true size without content, a LoRA of musubi-tuner."""
    from published import TRANSFORMERS, umt5, vae21, write_sparse

    models = folder / "models"
    write_sparse(models / "vae" / "wan_2.1_vae.safetensors", vae21(), "F32")
    write_sparse(models / "text_encoders" / "umt5-xxl-enc-bf16.safetensors", umt5())
    write_sparse(models / "wan2.1_t2v_14B_fp16.safetensors", TRANSFORMERS["t2v-14B"], "F16")
    shutil.copytree(VECTORS / "t5" / "google", models / "google")
    shutil.copy(VECTORS / "lora_i2v21" / "lora_musubi.safetensors", folder)


def empty(_folder: Path) -> None:
    """Nothing: the page writes its own files."""


PLACES: dict[str, Callable[[Path], None]] = {
    made.__name__: made
    for made in (
        home,
        clone,
        tree,
        cats,
        trained,
        clips,
        footage,
        raw,
        edits,
        vlm,
        workspace,
        planned,
        bundle,
        zoo,
        empty,
    )
}
