"""Pictures with a colour profile: what is trained on is what a browser shows."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms
from test_recipes import samples_of, write_toml

from wangen.generator.dataset import read_facts
from wangen.runtime.media import control_frames, load_image, mask_frames, open_image

SIZE = (96, 64)
SHOWN = [(250, 20, 10), (30, 240, 40), (250, 120, 40)]
"""What the pictures show, in sRGB, from left to right."""
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
P3_PRIMARIES = {
    b"rXYZ": (0.51512, 0.2412, -0.00105), b"gXYZ": (0.29198, 0.69225, 0.04189), b"bXYZ": (0.1571, 0.06657, 0.78407),
}  # fmt: skip


def display_p3() -> bytes:
    """The profile of an iPhone's photos: sRGB's with the primaries of Display P3."""
    profile = bytearray(SRGB)
    for number in range(struct.unpack(">I", profile[128:132])[0]):
        name, place, _ = struct.unpack(">4sII", profile[132 + 12 * number : 144 + 12 * number])
        if name in P3_PRIMARIES:
            numbers = (struct.pack(">i", round(value * 65536)) for value in P3_PRIMARIES[name])
            profile[place + 8 : place + 20] = b"".join(numbers)
    return bytes(profile)


P3 = display_p3()


def made_profile(space: bytes, values: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A small profile of version 2 for colours of a space, of a kind that needs these tags."""
    place, table, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, content in tags.items():
        table += struct.pack(">4sII", name, place + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    kind = b"prtr" if space == b"CMYK" else b"mntr"
    white = struct.pack(">3i", 63190, 65536, 54061)
    head = struct.pack(">I4xI4s4s4s12x4s28x", place + len(body), 0x02400000, kind, space, values, b"acsp") + white
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


WHITE_POINT = b"XYZ \0\0\0\0" + struct.pack(">3i", 63190, 65536, 54061)
LINEAR_GREY = made_profile(b"GRAY", b"XYZ ", {b"wtpt": WHITE_POINT, b"kTRC": b"curv\0\0\0\0" + struct.pack(">I", 0)})
"""Whose numbers are light itself: half is much lighter than sRGB's."""


def print_profile() -> bytes:
    """Of an ink that is Lab (100, 0, 0) on paper, and of middle grey, Lab (54, 0, 0), with whatever ink."""
    straight = bytes(range(256))
    grid = b"".join(bytes((255 if number == 0 else 138, 128, 128)) for number in range(16))
    matrix = struct.pack(">9i", *(65536 * (number % 4 == 0) for number in range(9)))
    table = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + matrix + straight * 4 + grid + straight * 3
    return made_profile(b"CMYK", b"Lab ", {b"wtpt": WHITE_POINT, b"A2B0": table})


def shown() -> Image.Image:
    pixels = np.zeros((64, 96, 3), np.uint8)
    for number, colour in enumerate(SHOWN):
        pixels[:, 32 * number : 32 * number + 32] = colour
    return Image.fromarray(pixels)


def photo(path: Path, profile: bytes | None = P3) -> Path:
    """What `SHOWN` is in the colours of Display P3, with this profile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = ImageCms.ImageCmsProfile(io.BytesIO(P3))
    stored = ImageCms.profileToProfile(shown(), ImageCms.createProfile("sRGB"), opened)
    assert stored is not None
    words = {"quality": 100, "subsampling": 0} if path.suffix == ".jpg" else {}
    words |= {"lossless": True} if path.suffix == ".webp" else {}
    stored.save(path, icc_profile=profile, **words)
    return path


def colours(picture: np.ndarray) -> np.ndarray:
    """(3, H, W) -> the three colours, (3, 3), int."""
    return picture[:, 30, [16, 48, 80]].T.astype(int)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".avif"])
def test_a_photo_in_display_p3_has_the_colours_that_are_shown(tmp_path: Path, suffix: str):
    path = photo(tmp_path / f"a{suffix}")
    assert read_facts(path).profiled
    most = 12 if suffix == ".avif" else 4
    assert np.abs(colours(load_image(path, SIZE)[:, 0]) - SHOWN).max() <= most
    plain = photo(tmp_path / f"plain{suffix}", profile=None)
    assert np.abs(colours(load_image(plain, SIZE)[:, 0]) - SHOWN).max() > 40


def test_a_profile_counts_beside_transparency_and_in_palettes(tmp_path: Path):
    path = photo(tmp_path / "a.png")
    with Image.open(path) as image:
        image.quantize(8).save(tmp_path / "palette.png", icc_profile=P3)
        image.putalpha(Image.fromarray(np.repeat(np.array([[255, 0, 0]], np.uint8), 32, axis=1).repeat(64, axis=0)))
        image.save(tmp_path / "clear.png", icc_profile=P3)
    assert np.abs(colours(load_image(tmp_path / "palette.png", SIZE)[:, 0]) - SHOWN).max() <= 4
    clear = colours(load_image(tmp_path / "clear.png", SIZE, "#0a141e")[:, 0])
    assert np.abs(clear[0] - SHOWN[0]).max() <= 4
    assert clear[1:].tolist() == [[10, 20, 30]] * 2


@pytest.mark.parametrize("profile", [SRGB, b"no profile", P3[:200], None])
def test_profiles_of_srgb_and_broken_ones_change_nothing(tmp_path: Path, profile: bytes | None):
    path, plain = photo(tmp_path / "a.png", profile), photo(tmp_path / "plain.png", None)
    assert not read_facts(path).profiled
    assert (load_image(path, SIZE) == load_image(plain, SIZE)).all()


def test_a_mask_is_no_colour_and_only_recipes_of_profiled_pictures_differ(tmp_path: Path):
    photo(tmp_path / "media/a.png")
    (tmp_path / "media/a.txt").write_text("a photo")
    photo(tmp_path / "lines/a_0.png", SRGB)
    photo(tmp_path / "lines/a_1.png")
    photo(tmp_path / "masks/a.png")
    folders = "image_directory = '@/media'\ncontrol_directory = '@/lines'\nmask_directory = '@/masks'"
    (sample,) = samples_of(write_toml(tmp_path, folders))
    plain = {"width": 64, "height": 64, "resize": "lanczos, cover, centre", "frames": 1}
    assert sample.control_recipe(0) == {"source": sample.controls[0].digest, **plain}
    assert sample.latent_recipe() == {"source": sample.source.digest, **plain, "colours": "to sRGB, by the profile"}
    assert sample.control_recipe(1)["colours"] == sample.latent_recipe()["colours"]
    assert "colours" not in sample.mask_recipe()
    stored = photo(tmp_path / "stored.png", None)
    assert (mask_frames(sample) == load_image(stored, (64, 64), grey=True)).all()
    assert (control_frames(sample, 0) == load_image(stored, (64, 64))).all()


def test_a_profile_of_another_kind_of_colours_says_nothing(tmp_path: Path):
    path = tmp_path / "a.jpg"
    shown().convert("CMYK").save(path, icc_profile=P3)
    assert not read_facts(path).profiled
    with Image.open(path) as image:
        assert (np.asarray(open_image(path)) == np.asarray(image.convert("RGB"))).all()


def test_grey_and_printed_pictures_are_shown_by_their_profiles(tmp_path: Path):
    Image.new("L", SIZE, 128).save(tmp_path / "grey.png", icc_profile=LINEAR_GREY)
    Image.new("CMYK", SIZE, (0, 255, 255, 0)).save(tmp_path / "print.jpg", icc_profile=print_profile(), quality=100)
    for name, level in (("grey.png", 188), ("print.jpg", 129)):
        assert read_facts(tmp_path / name).profiled
        assert np.abs(load_image(tmp_path / name, SIZE).astype(int) - level).max() <= 4, name
