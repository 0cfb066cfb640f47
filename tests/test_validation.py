"""Held-out loss: the same points every time, nothing of the run changed, and the truth about what was learned."""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import CPU, MODEL, make_run, options_of, samples_of
from safetensors.torch import save_file

from wangen.generator.errors import UsageError
from wangen.generator.excerpts import Excerpt
from wangen.generator.footage import clip_name
from wangen.runtime.evaluation.trained import Seen, seen_sources
from wangen.runtime.flow import flow_loss, noised, velocity
from wangen.runtime.loader import Draw, read_batch
from wangen.runtime.models import family
from wangen.runtime.randomness import generator_for
from wangen.runtime.training import watching
from wangen.runtime.training.adapter import disabled
from wangen.runtime.training.held_out import held_out
from wangen.runtime.training.plan import dataset_digest
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.step import item_losses
from wangen.runtime.training.validation import (
    Losses,
    Validation,
    compare,
    evaluating,
    is_better,
    measure,
    stratified_sigmas,
    validation_sigmas,
)

SIGMAS = stratified_sigmas(0.0, 1.0, 3)


def cached(content, *, reg=False, size=(64, 64), name="a.png", excerpt=None):
    """As much of a cached sample as the choice looks at."""
    entry, item = SimpleNamespace(is_reg=reg), SimpleNamespace(path=Path(name), excerpt=excerpt)
    return SimpleNamespace(
        sample=SimpleNamespace(source=SimpleNamespace(digest=content), entry=entry, size=size, item=item)
    )


def digests(samples):
    return {sample.sample.source.digest for sample in samples}


def test_held_out_items_are_chosen_by_content_whatever_their_names_and_order():
    samples = [cached(f"content {number}", name=f"{number}.png") for number in range(20)]
    training, validation = held_out(samples, 5, 42)
    assert len(validation) == 5
    assert len(training) == 15
    assert not digests(training) & digests(validation)
    renamed = [cached(f"content {number}", name="x.png") for number in reversed(range(20))]
    assert digests(held_out(renamed, 5, 42)[1]) == digests(validation)
    assert digests(held_out(samples, 5, 43)[1]) != digests(validation)


def test_a_new_item_moves_at_most_one():
    samples = [cached(f"content {number}") for number in range(20)]
    before = digests(held_out(samples, 5, 42)[1])
    for number in range(100, 130):
        after = digests(held_out([*samples, cached(f"content {number}")], 5, 42)[1])
        assert len(before - after) <= 1


def test_everything_of_one_file_is_on_one_side_and_regularisation_sets_are_never_judged():
    samples = [cached(f"content {n}", size=size) for n in range(6) for size in ((64, 64), (128, 128))]
    reg = [cached(f"reg {n}", reg=True) for n in range(6)] + [cached(f"content {n}", reg=True) for n in range(6)]
    training, validation = held_out(samples + reg, 2, 42)
    assert len(validation) == 4
    assert len(digests(validation)) == 2
    assert not any(sample.sample.entry.is_reg for sample in validation)
    assert not digests(training) & digests(validation)
    assert {f"reg {n}" for n in range(6)} <= digests(training)


def clips_of(film, number):
    """Cached clips of a film, named as `preprocess` names them."""
    return [cached(f"{film} {n}", name=clip_name("film", f"{film:08x}", 81 * n, "mp4")) for n in range(number)]


def films_of(samples):
    return {sample.sample.source.digest.split()[0] for sample in samples}


def test_all_clips_of_a_video_are_on_one_side_and_as_many_are_judged_as_asked():
    samples = [clip for film in range(5) for clip in clips_of(film, 6)]
    training, validation = held_out(samples, 8, 42)
    assert len(validation) == 8
    assert len(films_of(validation)) == 2, "no more videos than need be"
    assert not films_of(training) & films_of(validation)
    assert len(training) == 18
    assert digests(held_out(samples[::-1], 8, 42)[1]) == digests(validation)


def test_clips_that_are_frames_of_longer_videos_are_put_apart_by_video_and_judged_one_by_one():
    samples = [cached(f"shard {n}", excerpt=Excerpt(17 * clip, 1, 17), size=size)
               for n in range(4) for clip in range(30) for size in ((64, 64), (128, 128))]  # fmt: skip
    training, validation = held_out(samples, 8, 42)
    assert len(validation) == 16, "both sizes of eight clips"
    assert len(digests(validation)) == 1
    assert not digests(training) & digests(validation)
    assert len(training) == 3 * 60
    training, validation = held_out(samples[:60], 8, 42)
    assert (len(training), len(validation)) == (44, 16)


def test_one_video_is_always_left_to_train_on_and_clips_of_one_alone_are_said(caplog):
    training, validation = held_out([*clips_of(1, 4), *clips_of(2, 4)], 6, 42)
    assert len(training) == len(validation) == 4
    assert len(films_of(training)) == 1
    assert "4 clips are held out of 6 asked for" in caplog.text
    training, validation = held_out(clips_of(1, 4), 1, 42)
    assert (len(training), len(validation)) == (3, 1)
    assert "cut from one video" in caplog.text


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("lengths", "count", "fewest"), [((9, 1), 3, 9), ((60, 3, 3, 3, 3), 4, 64), ((2, 1), 1, 1)])
def test_a_long_video_is_not_held_out_for_a_few_clips(seed, lengths, count, fewest, caplog):
    training, validation = held_out(
        [clip for film, number in enumerate(lengths) for clip in clips_of(film, number)], count, seed
    )
    assert len(training) >= fewest
    assert len(validation) == min(count, sum(lengths) - fewest)
    assert ("asked for" in caplog.text) == (len(validation) < count)


def test_a_judging_dataset_of_one_video_is_not_said_to_be_trained_on(tiny_run, tmp_path, caplog):
    fingerprint = {"caption_dropout": "0", "validation_items": "0", "seed": "42", "dataset": "another"}
    lora = tmp_path / "lora.safetensors"
    save_file({"a": torch.zeros(1)}, lora, {"wangen.fingerprint": json.dumps(fingerprint)})
    clips = clips_of(1, 4)
    for clip in clips:
        clip.entries, clip.sample.name = (), clip.sample.item.path.name
        clip.sample.entry.num_repeats = clip.sample.entry.batch_size = 1
    assert seen_sources([lora], clips, clips, options_of(tiny_run, tmp_path), MODEL) == Seen(set(), set())
    assert not caplog.records


def test_what_was_trained_on_is_known_by_the_seed_of_the_header(tiny_run, tmp_path):
    items, lora = samples_of(tiny_run), tmp_path / "lora.safetensors"
    usual = digests(held_out(items, 1, 42)[0])
    seed = next(seed for seed in range(99) if digests(held_out(items, 1, seed)[0]) != usual)
    trained, _ = held_out(items, 1, seed)
    told = {"caption_dropout": "0.0", "validation_items": "1", "seed": str(seed), "dataset": dataset_digest(trained)}
    save_file({"a": torch.zeros(1)}, lora, {"wangen.fingerprint": json.dumps(told)})
    options = options_of(tiny_run, tmp_path, seed=42)
    assert seen_sources([lora], items, items, options, MODEL).surely == digests(trained)


@pytest.mark.parametrize("count", [3, 4])
def test_nothing_left_to_train_on_is_refused(count):
    with pytest.raises(UsageError, match="leaves nothing of 3 items"):
        held_out([cached(str(n)) for n in range(3)], count, 42)


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory):
    return make_run(options_of(tiny_run, tmp_path_factory.mktemp("validation"), network_dropout=0.5))


def judge_of(run):
    trainee = run.trainees[0]
    return lambda prepared: item_losses(run.kind, trainee.model, [prepared], run.plan.options, CPU)[1]


def measured(run, samples, **more):
    with evaluating(run.trainees[0].transformer):
        return measure(judge_of(run), samples, SIGMAS, 7, **more)


def test_the_loss_is_the_mean_squared_error_of_the_velocity_at_noise_of_the_item_and_timestep(run, tiny_run):
    samples = samples_of(tiny_run)
    found = measured(run, samples)
    wan, transformer = family(MODEL), run.trainees[0].transformer
    for index, sample in enumerate(samples):
        batch = read_batch(samples, [Draw(index, 0)])
        for number, sigma in enumerate(SIGMAS):
            key = sample.latent.content_key
            noise = torch.randn(batch.latents.shape, generator=generator_for(7, "validation", key, number))
            level = torch.tensor([sigma])
            with torch.no_grad(), evaluating(transformer):
                predicted = wan.predict_velocity(
                    transformer, noised(batch.latents, noise, level), 1000 * level, batch.texts
                )
            expected = flow_loss(predicted, velocity(batch.latents, noise)).item()
            assert found.values[index][number] == pytest.approx(expected, rel=1e-4)


def test_a_measurement_is_the_same_again_alone_and_in_another_order_and_leaves_everything_as_it_was(run, tiny_run):
    samples, trainee = samples_of(tiny_run), run.trainees[0]
    trainee.transformer.train()
    modes = [module.training for module in trainee.transformer.modules()]
    parameters = {name: parameter.detach().clone() for name, parameter in trainee.parameters.items()}
    state = torch.get_rng_state()
    found = measured(run, samples)
    assert measured(run, samples) == found
    assert measured(run, samples[::-1]).values == found.values[::-1]
    assert measured(run, samples[1:2]).values == found.values[1:2]
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in trainee.transformer.modules()] == modes
    assert any(modes)
    for name, parameter in trainee.parameters.items():
        assert torch.equal(parameter, parameters[name])
        assert parameter.requires_grad
        assert parameter.grad is None or not parameter.grad.any()


def test_base_and_adapter_are_compared_at_the_same_points_and_the_base_survives_json(run, tiny_run):
    samples = samples_of(tiny_run)
    adapter = measured(run, samples)
    with disabled(run.trainees[0].transformer):
        base = measured(run, samples)
    again = Losses.from_facts(json.loads(json.dumps(base.as_facts())))
    assert again == base
    found = compare(again, adapter, [str(number) for number in range(len(samples))])
    assert found.num_items == len(samples)
    assert found.mean_base != found.mean_adapter
    assert [row.timestep for row in found.rows] == pytest.approx([1000 * sigma for sigma in SIGMAS])
    assert found.rows[0].base == pytest.approx(sum(row[0] for row in base.values) / len(samples))
    assert found.delta == pytest.approx(found.mean_adapter - found.mean_base)
    assert json.loads(json.dumps(found.as_record()))["validation"]["rows"][0]["adapter"] == found.rows[0].adapter


def test_given_frames_have_no_part_in_the_loss(run, tiny_run):
    samples = [sample for sample in samples_of(tiny_run) if sample.sample.count > 1]
    seen = []

    def judge(prepared):
        seen.append(prepared.clean_frames)
        return torch.ones(1)

    measure(judge, samples, SIGMAS[:1], 7, condition_frames=1)
    measure(judge, samples, SIGMAS[:1], 7, condition_frames=81)
    assert seen == [[1], [1]]  # never all of the two latent frames


def losses(*values):
    return Losses(tuple(str(n) for n in range(len(values))), (0.25, 0.75), 1, tuple(values))


def test_the_difference_has_a_standard_error_over_items_each_compared_with_itself():
    base, adapter = losses((1.0, 3.0), (2.0, 4.0), (3.0, 5.0)), losses((0.5, 2.5), (2.0, 4.0), (3.5, 6.5))
    found = compare(base, adapter, "abc", ema=base)
    assert (found.mean_base, found.mean_adapter, found.mean_ema) == (3.0, pytest.approx(19 / 6), 3.0)
    assert found.delta == pytest.approx((-0.5 + 0.0 + 1.0) / 3)
    assert found.standard_error == pytest.approx(math.sqrt(7 / 12) / math.sqrt(3))
    assert found.num_better == 1
    assert [row.ema for row in found.rows] == [2.0, 4.0]
    assert compare(losses((1.0, 2.0)), losses((1.0, 2.0)), "a").standard_error is None
    assert "better at 1 of 3 items" in found.lines()[0]
    assert found.numbers()["timestep_0250"] == 2.0


def test_rows_of_timesteps_that_lie_close_have_names_of_their_own():
    base = Losses(("a",), (0.9002, 0.9004, 0.904), 1, ((1.0, 2.0, 3.0),))
    rows = {name: value for name, value in compare(base, base, "a").numbers().items() if name.startswith("timestep")}
    assert rows == {"timestep_0900.2": 1.0, "timestep_0900.4": 2.0, "timestep_0904.0": 3.0}


def test_clips_of_one_video_and_sizes_of_one_file_are_one_witness():
    base, adapter = losses(*[(1.0, 1.0)] * 4), losses((0.9, 0.9), (0.8, 0.8), (0.7, 0.7), (0.6, 0.6))
    assert compare(base, adapter, ["film"] * 4).standard_error is None
    found = compare(base, adapter, ["film", "film", "other", "other"])
    means = (-0.15, -0.35)
    assert found.standard_error == pytest.approx(abs(means[0] - means[1]) / 2), "that of the two videos' means"


def test_losses_at_other_points_are_never_compared():
    one = losses((1.0, 2.0))
    for other in (replace(one, seed=2), replace(one, sigmas=(0.1, 0.2)), replace(one, keys=("9",))):
        assert not one.same_points(other)
        with pytest.raises(ValueError, match="different points"):
            compare(one, other, "a")
    with pytest.raises(ValueError, match="at none"):
        compare(losses(), losses(), "")


def test_timesteps_are_even_over_an_experts_range_and_never_at_its_ends():
    sigmas = stratified_sigmas(0.875, 1.0, 4)
    assert sigmas == pytest.approx((0.890625, 0.921875, 0.953125, 0.984375))
    assert stratified_sigmas(0.0, 0.875, 1) == (0.4375,)


@pytest.mark.parametrize(("least", "most", "expected"), [
    (0, 1000, (0.225, 0.675)), (0, 300, (0.075, 0.225)), (500, 1000, (0.6, 0.8)), (500, 600, (0.525, 0.575)),
])  # fmt: skip
def test_an_expert_is_judged_at_the_timesteps_that_it_is_trained_at(least, most, expected):
    options = SimpleNamespace(validation_timesteps=2, min_timestep=least, max_timestep=most)
    assert validation_sigmas(options, SimpleNamespace(low=0.0, high=0.9)) == pytest.approx(expected)


def validation(loss) -> Validation:
    return Validation((), 1.0, loss, None, 1, loss - 1, None, 0)


def test_the_best_is_the_lowest_the_first_of_equals_and_never_what_is_not_finite():
    best, kept = None, []
    for step, loss in enumerate([math.nan, 0.9, 0.7, 0.7, math.inf, 0.8, 0.6]):
        if is_better(validation(loss), best):
            best = loss
            kept.append(step)
    assert kept == [1, 2, 6]


def test_every_module_has_its_own_mode_again_after_a_measurement():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    model[0].eval()
    with evaluating(model):
        assert not any(part.training for part in model.modules())
    assert [part.training for part in model.modules()] == [True, False, True]


@pytest.mark.parametrize(("changes", "draws"), [
    ({}, False), ({"network_dropout": 0.1}, True), ({"network_module": "loha"}, False),
    ({"network_module": "lokr", "network_args": ("rank_dropout=0.2",)}, True),
])  # fmt: skip
def test_a_transformer_trains_in_the_mode_that_drops_out_only_where_that_is_asked(tiny_run, tmp_path, changes, draws):
    """In it peft's LoHa and LoKr draw from the global state, asked or not."""
    assert make_run(options_of(tiny_run, tmp_path, **changes)).trainees[0].transformer.training is draws


def test_a_run_is_judged_with_the_first_frames_that_it_is_given_in_training(run, monkeypatch):
    seen = []

    def measured_with(*_words, condition_frames):
        seen.append(condition_frames)
        return losses((1.0, 2.0))

    monkeypatch.setattr(watching, "measure", measured_with)
    options = replace(run.plan.options, condition_frames=5)
    looking = SimpleNamespace(_options=options, _plan=SimpleNamespace(held_out=["a"]), _ranks=Ranks())
    watching.Watching._measure(looking, run.trainees[0])
    assert seen == [5]


def test_whatever_a_loss_is_measured_at_makes_other_points_of_it():
    def judged(items="a", frames=0, timesteps=3, seed=42, low=0.0, high=1.0, most=1000):
        options = SimpleNamespace(
            validation_timesteps=timesteps, condition_frames=frames, seed=seed, min_timestep=0, max_timestep=most
        )
        trainee = SimpleNamespace(plan=SimpleNamespace(low=low, high=high))
        return watching.Watching._judged(SimpleNamespace(_options=options, _items=items), trainee)

    changes = ({}, {"items": "b"}, {"frames": 1}, {"timesteps": 4}, {"seed": 43}, {"low": 0.5}, {"high": 0.5},
               {"most": 800})  # fmt: skip
    assert len({judged(**change) for change in changes}) == len(changes)
    assert judged() == judged()


def test_clips_of_one_video_are_one_in_what_a_run_says_of_chance(monkeypatch):
    groups: list[list[str]] = []

    def compare(_base, _other, videos, _averaged):
        groups.append(videos)
        return SimpleNamespace(as_record=lambda: {"validation": {}}, numbers=dict, lines=list)

    for name, stand_in in (("compare", compare), ("video_key", str.upper), ("evaluating", contextlib.nullcontext)):
        monkeypatch.setattr(watching, name, stand_in)
    trainee = SimpleNamespace(plan=SimpleNamespace(name=""), transformer=None, ema=None)
    watched = SimpleNamespace(
        _run=SimpleNamespace(activate=lambda _number: trainee, facts={}, step=1, num_steps=9),
        _plan=SimpleNamespace(held_out=["a", "a", "b"]), _judged=lambda _trainee: "",
        _is_changed=lambda _trainee: False,
        _measure_base=lambda _trainee: Losses((), (), 0, ()), _write=lambda _record: None,
        _trackers=SimpleNamespace(log=lambda *_words: None), _keep_best=lambda *_words: None,
    )  # fmt: skip
    watching.Watching._validate(watched, 0)
    assert groups == [["A", "A", "B"]]


def test_a_video_of_half_of_all_clips_is_put_apart():
    training, validation = held_out([*clips_of(1, 3), *clips_of(2, 3)], 1, 42)
    assert (len(training), len(validation)) == (3, 1)


def test_the_clips_of_a_video_that_are_judged_are_drawn_by_the_seed():
    samples = [*clips_of(1, 9), *clips_of(2, 9)]
    judged = {frozenset(digests(held_out(samples, 2, seed)[1])) for seed in range(8)}
    assert len(judged) > 2, "more than one choice of each film"


def test_a_dataset_is_another_where_it_is_batched_repeated_or_regularised_otherwise():
    def sample(**changes):
        entry = SimpleNamespace(**({"num_repeats": 1, "batch_size": 1, "is_reg": False} | changes))
        return SimpleNamespace(sample=SimpleNamespace(name="a.png", entry=entry), entries=[SimpleNamespace(key="k")])

    changes = ({}, {"num_repeats": 2}, {"batch_size": 2}, {"is_reg": True})
    assert len({dataset_digest([sample(**change)]) for change in changes}) == 4
