"""Clip files, and the dataset that reads them for PyTorch."""

import json
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from footage import counter, decoded, numbers, prepare, rows, write_video
from torch.utils.data import DataLoader

from wangen.generator.errors import WangenError
from wangen.generator.npz import read_npz
from wangen.runtime.clips import write_mp4, write_npz
from wangen.runtime.media import ClipDataset, collate_fn


@pytest.mark.parametrize("size", [(64, 48), (336, 192)])
def test_colours_survive_and_the_file_names_its_matrix(tmp_path, size):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 30, 90), (128, 128, 128)]
    frames = [np.broadcast_to(np.array(colour, np.uint8), (size[1], size[0], 3)).copy() for colour in colours]
    write_mp4(tmp_path / "a.mp4", frames, 24, 12)
    for decoder in (decoded(tmp_path / "a.mp4", size), ours(tmp_path / "a.mp4")):
        assert np.abs(decoder.astype(int) - np.stack(frames)).max() <= 4
    with av.open(str(tmp_path / "a.mp4")) as container:
        codec = container.streams.video[0].codec_context
        assert (codec.name, codec.pix_fmt, codec.colorspace, codec.color_range) == ("h264", "yuv420p", 1, 1)


def ours(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_a_clip_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(WangenError, match="cannot be encoded"):
        write_mp4(tmp_path / "a.mp4", [np.zeros((47, 63, 3), np.uint8)] * 3, 16, 12)
    write_npz(tmp_path / "a.npz", [counter(1)], 16)
    with pytest.raises(ValueError, match="same shape"):
        write_npz(tmp_path / "a.npz", [counter(1), counter(2, (32, 32))], 16)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    assert numbers(read_npz(tmp_path / "a.npz")[0]) == [1]


@pytest.mark.parametrize("broken", ["text", "floats", "names", "pickle"])
def test_a_bad_npz_is_refused_by_name(tmp_path, broken):
    path = tmp_path / "a.npz"
    match broken:
        case "text":
            path.write_text("no zip")
        case "floats":
            np.savez(path, frames=np.zeros((2, 4, 4, 3), np.float32))
        case "names":
            np.savez(path, video=np.zeros((2, 4, 4, 3), np.uint8))
        case "pickle":
            np.savez(path, frames=np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(WangenError) as error:
        read_npz(path)
    assert error.value.where == str(path)


@pytest.fixture(scope="module", params=["mp4", "npz"])
def manifest(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    write_video(folder / "v" / "a.mp4", [counter(number) for number in range(60)], 24)
    prepare(folder / "v", folder / "o", frames=9, cut_threshold=100, keep_all=True, format=request.param)
    return folder / "o" / "train.jsonl"


def test_items_and_batches(manifest):
    dataset = ClipDataset(manifest, frames=9, size=(48, 64))
    assert len(dataset) == 4
    item = dataset[1]
    assert (item["frames"].shape, item["frames"].dtype, item["prompt"]) == ((9, 3, 48, 64), torch.float32, "a thing")
    assert item["frames"].min() >= -1
    assert item["frames"].max() <= 1
    batch = collate_fn([dataset[0], item])
    assert (batch["frames"].shape, batch["prompts"]) == ((2, 9, 3, 48, 64), ["a thing"] * 2)
    pixels = ((batch["frames"][1] + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    assert numbers(pixels) == [int(k * 24 / 16) for k in range(9, 18)]


@pytest.mark.parametrize("kind", ["mkv", "varying", "npz"])
def test_frame_k_is_frame_k_of_the_file(tmp_path, kind):
    frames = [counter(number) for number in range(33)]
    match kind:
        case "mkv":
            path = write_video(tmp_path / "a.mkv", frames, 24, format="matroska")
        case "varying":
            path = write_video(tmp_path / "a.mp4", frames, times_ms=[40 * k + 60 * max(0, k - 15) for k in range(33)])
        case "npz":
            path = tmp_path / "a.npz"
            np.savez(path, frames=np.stack(frames), fps=16)
    (tmp_path / "m.jsonl").write_text(json.dumps({"file": path.name, "prompt": "x"}))
    found = ClipDataset(tmp_path / "m.jsonl", frames=32, size=(48, 64))[0]["frames"]
    assert numbers(((found.permute(0, 2, 3, 1) + 1) * 127.5).round().to(torch.uint8).numpy()) == list(range(32))


@pytest.mark.slow
def test_a_data_loader_with_workers_gives_the_same(manifest):
    dataset = ClipDataset(str(manifest), frames=5, size=(32, 32))
    loader = DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=collate_fn, multiprocessing_context="spawn")
    batches = list(loader)
    assert [batch["frames"].shape for batch in batches] == [(2, 5, 3, 32, 32)] * 2
    assert torch.equal(batches[1]["frames"][0], dataset[2]["frames"])


def test_what_a_dataset_cannot_give_is_said(manifest, tmp_path):
    with pytest.raises(WangenError, match="has 9 frames, 81 are asked for"):
        ClipDataset(manifest)[0]
    row = rows(manifest)[0]
    lines = [json.dumps(row | {"file": str(manifest.parent / row["file"])}), json.dumps(row | {"file": "gone.mp4"})]
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    with pytest.raises(WangenError, match=r"line 2.*gone\.mp4"):
        ClipDataset(tmp_path / "m.jsonl", frames=9)
    (tmp_path / "m.jsonl").write_text("{}\n")
    with pytest.raises(WangenError, match="line 1"):
        ClipDataset(tmp_path / "m.jsonl")
    with pytest.raises(WangenError):
        ClipDataset(tmp_path / "none.jsonl")


def test_the_module_loads_without_torch():
    code = "import sys; from wangen.runtime.media import ClipDataset, collate_fn; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
