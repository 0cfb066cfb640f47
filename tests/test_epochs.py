"""The order of an epoch: every use once for any number of processes and threads, and the same when taken up again."""

import shutil
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cached_bundle import make_many
from tiny import TinyRun

from wangen import profiles
from wangen.generator.launch import Launch
from wangen.generator.steps import Train
from wangen.runtime.epochs import EpochSampler
from wangen.runtime.loader import CachedSample
from wangen.runtime.training import prepared as prepare
from wangen.runtime.training.plan import Plan, make_plan
from wangen.runtime.training.prepared import Group, groups
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.samples import read_training_samples

pytest_plugins = ("bundle_fixtures",)
MODEL = profiles.model("t2v-1.3B")
NUM_EPOCHS = 2
Use = tuple[int, str, int]
"""(epoch, content key of the sample, repeat)."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], one_thread: None) -> Plan:
    """Eleven pictures, the last four twice an epoch: eight batches and a short one, three to a step."""
    folder = tmp_path_factory.mktemp("epochs")
    bundle = make_many(folder / "bundle", models, 11)
    (folder / "bundle/twice").mkdir()
    for path in sorted(bundle.photos.iterdir())[-8:]:
        path.rename(folder / "bundle/twice" / path.name)
    text = bundle.toml.read_text().replace("[general]\n", "[general]\nbatch_size = 2\n")
    more = text[text.index("[[datasets]]") :].replace("/photos'", "/twice'") + "num_repeats = 2\n"
    bundle.toml.write_text(text + more)
    bundle.latents()
    bundle.text()
    options = Train(dataset_config=bundle.toml, dit=models["dit"], task=MODEL.name, output_dir=folder, output_name="x",
                    gradient_accumulation_steps=3, max_train_epochs=NUM_EPOCHS, device="cpu")  # fmt: skip
    return make_plan(options, MODEL, *read_training_samples(options, MODEL))


def read(
    plan: Plan, count: int, rank: int, workers: int, *, step: int = 0, in_step: bool = False
) -> Generator[Group, None, None]:
    """What one of several processes is given."""
    changed = replace(plan, options=replace(plan.options, max_data_loader_n_workers=workers))
    return groups(changed, plan.experts[0], step, Ranks(Launch(rank, count), in_step=in_step))


def uses(group: Group) -> list[list[Use]]:
    """Of every batch that counts what it holds."""
    return [[(epoch, key, repeat) for _, epoch, key, repeat in each.keys] for each in group.counted]


def together(plan: Plan, count: int, workers: int, **more: Any) -> list[list[list[Use]]]:
    """The batches of each step, of all processes in the order of the whole."""
    shares = [[uses(group) for group in read(plan, count, rank, workers, **more)] for rank in range(count)]
    return [
        [step[number % count][number // count] for number in range(sum(map(len, step)))]
        for step in zip(*shares, strict=True)
    ]


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_use_comes_once_an_epoch_in_one_order(plan: Plan, count: int, workers: int, in_step: bool):
    steps = together(plan, count, workers, in_step=in_step)
    assert len(steps) == NUM_EPOCHS * plan.steps_per_epoch == plan.num_steps
    wanted = Counter((cached.latent.content_key, repeat) for cached in plan.samples
                     for repeat in range(cached.sample.entry.num_repeats))  # fmt: skip
    assert sum(wanted.values()) == 15
    for epoch in range(NUM_EPOCHS):
        own = steps[epoch * plan.steps_per_epoch : (epoch + 1) * plan.steps_per_epoch]
        found = [use for step in own for batch in step for use in batch]
        assert {number for number, *_ in found} == {epoch}
        assert Counter((key, repeat) for _, key, repeat in found) == wanted
    assert steps == together(plan, 1, 0)


def test_the_next_epoch_is_read_while_the_last_steps_of_one_are_trained(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    begun = threading.Event()

    def prepared(*arguments: Any) -> prepare.Prepared:
        if arguments[3] == 1:
            begun.set()
        return original(*arguments)

    original = prepare.prepare
    monkeypatch.setattr(prepare, "prepare", prepared)
    with closing(read(plan, 1, 0, 2)) as steps:
        groups_of_one_epoch = [next(steps) for _ in range(plan.steps_per_epoch)]
        assert {group.epoch for group in groups_of_one_epoch} == {0}
        assert begun.wait(20), "nothing of the second epoch is read before its first step"


@pytest.mark.parametrize(("count", "workers"), [(1, 0), (2, 2), (4, 2)])
def test_taken_up_at_any_step_the_rest_is_the_same(plan: Plan, count: int, workers: int):
    whole = together(plan, 1, 0)
    for step in range(plan.num_steps + 1):
        assert together(plan, count, workers, step=step) == whole[step:]


def test_noise_and_timesteps_do_not_depend_on_how_the_work_is_shared(plan: Plan):
    alone = [batch for group in islice(read(plan, 1, 0, 0), 3) for batch in group.counted]
    by_key = {tuple(batch.keys): batch for batch in alone}
    for rank in range(2):
        for group in islice(read(plan, 2, rank, 2), 3):
            for batch in group.counted:
                same = by_key[tuple(batch.keys)]
                assert batch.sigmas.tolist() == same.sigmas.tolist()
                assert batch.noise.equal(same.noise)


def test_items_of_one_picture_have_chances_of_their_own(tiny_run: TinyRun, tmp_path: Path):
    """One file under two names, with two captions, and once more in another block."""
    for name, caption in {"red": "red", "copy": "blue"}.items():
        shutil.copy(tiny_run.folder / "media" / "red.png", tmp_path / f"{name}.png")
        shutil.copy(tiny_run.folder / "media" / f"{caption}.txt", tmp_path / f"{name}.txt")
    block = (f"[[datasets]]\nimage_directory = '{tmp_path.as_posix()}'\nresolution = [64, 64]\nbatch_size = 4\n"
             f"cache_directory = '{(tiny_run.folder / 'cache').as_posix()}'\n")  # fmt: skip
    (tmp_path / "twins.toml").write_text(block + block)
    options = tiny_run.options(tmp_path, dataset_config=tmp_path / "twins.toml", caption_dropout=0.5)
    plan = make_plan(options, MODEL, *read_training_samples(options, MODEL))
    assert len({cached.latent.content_key for cached in plan.samples}) == 1
    (first, *_), (again, *_) = (list(groups(plan, plan.experts[0], 0, Ranks())) for _ in range(2))
    (batch,), (same,) = first.counted, again.counted
    assert len(set(batch.sigmas.tolist())) == len({noise.sum().item() for noise in batch.noise}) == 4
    assert batch.sigmas.equal(same.sigmas)
    dropped = {draw.caption for epoch in range(8) for draws in EpochSampler(plan.samples, 1, 0.5).epoch(epoch)
               for draw in draws}  # fmt: skip
    assert dropped == {0, -1}
    mixed = [{draw.caption for draw in EpochSampler(plan.samples, 1, 0.5).epoch(epoch)[0]} for epoch in range(8)]
    assert {0, -1} in mixed


def fake(number: int, **entry: Any) -> CachedSample:
    """A sample without media."""
    settings = SimpleNamespace(**{"batch_size": 1, "num_repeats": 1, **entry})
    sample = SimpleNamespace(size=(64, 64), count=1 + 4 * (number % 2), entry=settings)
    return cast(CachedSample, SimpleNamespace(sample=sample, texts=("a",), key="k"))


def test_any_batch_is_known_without_those_before_it():
    epoch = EpochSampler([fake(number, batch_size=3, num_repeats=2) for number in range(20)], seed=3).epoch(5)
    in_turn = list(epoch)
    assert len(epoch) == len(in_turn) == 14
    assert [epoch[number] for number in reversed(range(14))] == in_turn[::-1]
    assert epoch[3:7] == in_turn[3:7]
    assert [draw.position for batch in in_turn for draw in batch] == list(range(5 * 40, 6 * 40))
    assert all(len({draw.index % 2 for draw in batch}) == 1 for batch in in_turn), "a batch is of one shape"
    with pytest.raises(IndexError):
        epoch[14]


def test_epochs_and_seeds_have_orders_of_their_own():
    samples = [fake(2 * number) for number in range(50)]
    orders = {tuple(draw.index for batch in EpochSampler(samples, seed).epoch(epoch) for draw in batch)
              for seed in range(3) for epoch in range(3)}  # fmt: skip
    assert len(orders) == 9


def test_an_epoch_mixes_its_batches_anew_and_the_order_of_them():
    samples = [fake(number, batch_size=2) for number in range(40)]
    epochs = [EpochSampler(samples, 3).epoch(number) for number in range(4)]
    together = {frozenset(frozenset(draw.index for draw in batch) for batch in epoch) for epoch in epochs}
    shapes = {tuple(batch[0].index % 2 for batch in epoch) for epoch in epochs}
    assert (len(together), len(shapes)) == (4, 4)


def test_a_caption_is_drawn_anew_for_each_epoch_use_and_item_wherever_that_stands():
    items = [fake(2 * number, num_repeats=2) for number in range(40)]
    for number, item in enumerate(items):
        vars(item).update(key=f"key {number}", texts=("a", "b"))

    def drawn(samples: list[CachedSample], epoch: int) -> dict[tuple[str, int], int]:
        draws = [draw for batch in EpochSampler(samples, 3, 0.3).epoch(epoch) for draw in batch]
        return {(samples[draw.index].key, draw.repeat): draw.caption for draw in draws}

    first = drawn(items, 0)
    assert set(first.values()) == {-1, 0, 1}
    assert drawn(items[::-1], 0) == first
    assert drawn(items, 1) != first
    assert any(first[key, 0] != first[key, 1] for key, _ in first)


def test_a_run_trains_on_the_captions_that_were_drawn(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path, caption_dropout=1.0)
    plan = make_plan(options, MODEL, *read_training_samples(options, MODEL))
    texts = [text for group in groups(plan, plan.experts[0], 0, Ranks())
             for each in group.counted for text in each.batch.texts]  # fmt: skip
    assert len(texts) == 6
    assert all(text.equal(texts[0]) for text in texts), "the empty prompt"


def test_an_item_gets_another_stratum_in_another_epoch(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path, num_timestep_buckets=3, timestep_sampling="uniform", max_train_steps=24)
    plan = make_plan(options, MODEL, *read_training_samples(options, MODEL))
    drawn = [(each.keys[0], int(3 * each.sigmas.item())) for group in groups(plan, plan.experts[0], 0, Ranks())
             for each in group.counted]  # fmt: skip
    for epoch in range(8):
        assert {stratum for key, stratum in drawn if key[1] == epoch} == {0, 1, 2}
    for cached in plan.samples:
        assert len({stratum for key, stratum in drawn if key[2] == cached.key}) > 1


def test_nothing_is_read_beyond_the_last_step(plan: Plan):
    short = replace(plan, experts=(replace(plan.experts[0], num_steps=4),))
    assert plan.steps_per_epoch == 3
    assert [len(list(read(short, 1, 0, 0, step=step))) for step in range(5)] == [4, 3, 2, 1, 0]
