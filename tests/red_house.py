"""A workspace with a dataset of two images and a clip, and where publishing puts it: for the tests of `publish`."""

from pathlib import Path

from wangen.generator.cli import main

SMALL = 'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux", "wsl", "windows"]\n'
NAME, SLUG = "Jane's Red House", "janes_red_house"


def dataset(place: Path) -> Path:
    """The folder of the dataset."""
    return place / "datasets" / NAME


def publish(place: Path, *words: str) -> int:
    """Publish the dataset; the exit code."""
    return main(["publish", NAME, "--workspace", str(place), *words])


def media(place: Path, platform: str = "linux") -> Path:
    """Where its images, clips and captions are published."""
    return place / "published" / platform / "files" / "datasets" / SLUG / "64"


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """When each file below a folder was written, and its inode."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file()
    }
