"""A tiny TI2V-5B learns a world with a known law: `benchmarks/world_model.py`, and the world itself."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from wangen.generator.excerpts import Excerpt
from wangen.generator.manifests import read_manifest
from wangen.generator.prepare_steps import WorldModel
from wangen.runtime import world_model
from wangen.runtime.media import load_numbered
from wangen.runtime.moving_shapes import look
from wangen.runtime.raw_world_model import read_states

ROOT = Path(__file__).parent.parent
VAE = ROOT / "benchmarks" / "tiny-world" / "Wan2.2_VAE.pth"
NUM_CLIPS, NUM_STEPS = 64, 150
LEAST_FALL = 0.5
"""Of a held-out loss of 2.1; see the test."""


@pytest.fixture(scope="module")
def balls() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import bouncing_balls

        yield bouncing_balls


def test_a_ball_keeps_its_speed_and_turns_round_at_the_walls(balls):
    paths = torch.stack([balls.random_flight(torch.Generator().manual_seed(seed)).path(40) for seed in range(20)])
    low, high = balls.RADIUS_PX, balls.SIDE_PX - balls.RADIUS_PX
    assert paths.min() >= low
    assert paths.max() <= high
    steps = paths.diff(dim=1)
    inside = ((paths[:, 1:-1] - low > 4.1) & (high - paths[:, 1:-1] > 4.1)).all(dim=2)
    torch.testing.assert_close(steps[:, 1:][inside], steps[:, :-1][inside], atol=1e-3, rtol=0)
    speeds = steps.norm(dim=2).max(dim=1).values
    assert speeds.min() > balls.SLOWEST_PX - 0.01
    assert speeds.max() < balls.FASTEST_PX + 0.01
    assert (steps.amin(dim=1) * steps.amax(dim=1) < 0).any(dim=1).sum() > 10, "most meet a wall"


def test_the_shards_of_the_world_show_the_balls_where_their_states_say(balls, tmp_path):
    flights = [balls.random_flight(torch.Generator().manual_seed(seed)) for seed in range(3)]
    balls.write_split(tmp_path / "raw", [flights[:2], flights[2:]], 17)
    report = world_model.run(WorldModel(source=tmp_path / "raw", output=tmp_path, frames=17))
    assert report.counts["clips"] == 3
    items, problems = read_manifest(tmp_path / "train.jsonl")
    assert problems == []
    for item, flight in zip(items, flights, strict=True):
        excerpt: Excerpt = item.excerpt
        frames = load_numbered(item.path, (96, 96), excerpt.numbers())
        seen = look(torch.from_numpy(frames))
        path = flight.path(17)
        assert (96 * seen.path - path).abs().max() < 0.5
        states = item.path.parent.parent / "robot_states" / item.path.name.replace("video", "states")
        found = read_states(states.with_suffix(".bin"), excerpt)
        np.testing.assert_array_equal(found[:, :2], path.numpy())
        np.testing.assert_array_equal(found[:, 2:4], np.broadcast_to(np.float32(flight.velocity), (17, 2)))


@pytest.mark.slow
def test_a_moment_of_the_benchmark_lowers_the_held_out_loss_at_every_timestep(balls, tmp_path):
    """By how many dB more steps beat copying and the untrained model is in benchmarks/RESULTS.md: that takes longer."""
    import world_model as benchmark

    records = benchmark.learn(tmp_path, VAE, NUM_CLIPS, NUM_STEPS, 0)
    lines = (tmp_path / "transformer" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [record["validation"]["rows"] for line in lines if "validation" in (record := json.loads(line))][-1]
    falls = [row["base"] - row["adapter"] for row in rows]
    assert len(falls) == 8
    assert min(falls) > LEAST_FALL, falls
    assert [len(record["clips"]) for record in records] == [benchmark.HELD_OUT] * 2
    found = benchmark.psnr_per_frame(*records)
    assert [len(found[column]) for column in benchmark.COLUMNS] == [12] * 4
    assert fmean(found["vae"]) > 28
    assert found["copy"][0] > 22, "the last given frame is the right one"
    assert found["copy"][-1] < 16, "and the ball goes on"
    model, copy = benchmark.distances(tmp_path / "transformer" / "samples", NUM_STEPS)
    assert model > 0
    assert 10 < copy < 20
    assert "| mean | " in benchmark.table(records)
