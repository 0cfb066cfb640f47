"""Masks over edits: what counts of an item is the same, whatever lies in its batch or in its step."""

import pytest
import torch
from edit_set import SIZES, EditSet, make_edit_set
from PIL import Image
from tiny_qwen import TinyQwen, picture

from wangen import profiles
from wangen.runtime.epochs import EpochSampler
from wangen.runtime.loader import find_entries, read_batch
from wangen.runtime.models import family
from wangen.runtime.models.compute import Compute
from wangen.runtime.samples import read_samples
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.prepared import prepare
from wangen.runtime.training.refusals import resolved
from wangen.runtime.training.step import item_losses
from wangen.runtime.training.timesteps import Sampler

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHARES = {"house": 0.5, "lake": 0.25, "hill": 1.0}
"""How much of each picture its mask leaves."""


def masked(made: EditSet) -> EditSet:
    """The dataset with a mask of another share for each item, and a control image of another shape for one."""
    (made.folder / "masks").mkdir()
    for stem, share in SHARES.items():
        mask = Image.new("L", SIZES[stem])
        mask.paste(255, (0, 0, int(share * SIZES[stem][0]), SIZES[stem][1]))
        mask.save(made.folder / "masks" / f"{stem}.png")
    picture((60, 100), 5).save(made.folder / "controls" / "hill.png")
    made.toml.write_text(made.toml.read_text() + f"mask_directory = '{(made.folder / 'masks').as_posix()}'\n")
    return made.fill()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("bucketed", [False, True])
def test_the_loss_of_a_masked_edit_is_the_same_alone_and_among_others_of_other_sizes(
    tiny_qwen: TinyQwen, tmp_path, bucketed: bool, plain: bool
):
    made = masked(make_edit_set(tmp_path / "set", tiny_qwen, "qwen-image-edit-plus", batch_size=3,
                                enable_bucket=bucketed, control_resolution=[96, 96]))  # fmt: skip
    model = profiles.model(made.task)
    options = resolved(made.train(tmp_path / "out"), model, None)
    samples, kind = find_entries(options, model, read_samples(made.check, model)), family(model)
    plan = Plan(options, model, [], [], 1, (ExpertPlan("", options.dit, None, 0.0, 1.0, 1.0, 1),), {})
    transformer = kind.load_transformer(options.dit, dtype=torch.float32)
    velocity = kind.velocity_model(transformer, Compute(checkpointing="none", plain=plain), device=CPU,
                                   dtype=torch.float32)  # fmt: skip

    def losses(*batches):
        prepared = [prepare(plan, read_batch(samples, draws), draws, 0, Sampler(options)) for draws in batches]
        with torch.no_grad():
            return item_losses(kind, velocity, prepared, options, CPU)[0]

    batches = EpochSampler(samples, 1).epoch(0)
    assert sorted(map(len, batches)) == ([1, 2] if bucketed else [3])
    shares = [share for draws in batches for share in read_batch(samples, draws).loss_mask.flatten(1).mean(1).tolist()]
    assert sorted(shares) == pytest.approx([0.25, 0.5, 1.0], abs=0.05)
    alone = torch.cat([losses([draw]) for draws in batches for draw in draws])
    shapes = {tuple(one.shape) for draws in batches for row in read_batch(samples, draws).controls for one in row}
    assert len(shapes) > 1
    assert torch.allclose(losses(*batches), alone, rtol=1e-5)


def test_an_item_without_a_mask_counts_whole_beside_masked_ones(tiny_qwen: TinyQwen, tmp_path):
    """Two blocks of one dataset, of which one has masks, share a batch."""
    made = make_edit_set(tmp_path / "set", tiny_qwen, enable_bucket=False, batch_size=6)
    block = made.toml.read_text().split("[[datasets]]")[1]
    masked(made)
    made.toml.write_text(made.toml.read_text() + "[[datasets]]" + block)
    options, model = made.train(tmp_path / "out"), profiles.model(made.task)
    samples = find_entries(options, model, read_samples(made.check, model))
    (draws,) = EpochSampler(samples, 1).epoch(0)
    batch = read_batch(samples, draws)
    shares = batch.loss_mask.flatten(1).mean(1)
    for draw, share in zip(draws, shares.tolist(), strict=True):
        cached = samples[draw.index]
        wanted = SHARES[cached.sample.item.path.stem] if cached.mask else 1.0
        assert share == pytest.approx(wanted, abs=0.05), cached.sample.name
