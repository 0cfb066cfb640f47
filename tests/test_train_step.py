"""What a training step computes: clean first frames, weights of items, noise offset, groups of batches."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs
import torch
from fast_dit import fast, inputs_of, vectors_model
from parity import DITS, cases, golden
from runs import samples_of
from safetensors.torch import load_file
from tiny import TinyRun

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.loader import Batch, Draw, read_batch
from wangen.runtime.lora import read_lora
from wangen.runtime.models import family
from wangen.runtime.models.compute import Compute
from wangen.runtime.training.optim import Optimization
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.prepared import Group, Prepared, prepare
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.refusals import resolved
from wangen.runtime.training.step import _passes, dropout_seed, item_losses, num_tokens, optimizer_step
from wangen.runtime.training.timesteps import Sampler

CPU = torch.device("cpu")
TI2V = profiles.model("ti2v-5B")
WAN = family(TI2V)
WEIGHTS = Path(__file__).parent / "vectors" / "dit_ti2v5b" / "model.safetensors"


def options_of(tmp_path: Path, task: str = "ti2v-5B", **changes) -> Train:
    options = Train(dataset_config=tmp_path / "a.toml", dit=WEIGHTS, task=task, output_dir=tmp_path, output_name="a",
                    mixed_precision="no", device="cpu")  # fmt: skip
    return resolved(replace(options, **changes), profiles.model(task), None)


def batch_of(*shape: int, items: int = 2, width: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(
        latents=torch.randn(items, *shape, generator=generator),
        texts=[torch.randn(3 + n, width, generator=generator) for n in range(items)],
        names=[f"item {n}" for n in range(items)],
        keys=[f"key {n}" for n in range(items)],
        weights=torch.ones(items),
    )


def prepared_for(options: Train, batch: Batch, *, epoch: int = 0) -> Prepared:
    model = profiles.model(options.task)
    plan = Plan(options, model, [], [], 1, (ExpertPlan("", WEIGHTS, None, 0.0, 1.0, 1.0, 1),), {})
    draws = [Draw(number, 0, position=number) for number in range(len(batch.keys))]
    return prepare(plan, batch, draws, epoch, Sampler(options))


@pytest.fixture(scope="module")
def transformer():
    return WAN.load_transformer(WEIGHTS, dtype=torch.float32)


def model_of(transformer, *, plain: bool):
    compute = Compute(attention="sdpa", checkpointing="none", plain=plain)
    return WAN.velocity_model(transformer, compute, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("plain", [True, False])
def test_given_frames_stay_clean_have_timestep_0_and_no_part_in_the_loss(transformer, tmp_path, plain):
    options = options_of(tmp_path)
    width = transformer.config.text_dim
    prepared = prepared_for(options, batch_of(48, 3, 4, 4, width=width))
    assert prepared.clean_frames == [1, 1]
    seen = {}
    model = model_of(transformer, plain=plain)

    def watching(latents, timesteps, texts, **more):
        seen.update(latents=latents, timesteps=timesteps)
        return model(latents, timesteps, texts, **more)

    losses, errors = item_losses(WAN, watching, [prepared], options, CPU)
    assert torch.equal(seen["latents"][:, :, 0], prepared.batch.latents[:, :, 0])
    assert not torch.equal(seen["latents"][:, :, 1], prepared.batch.latents[:, :, 1])
    assert seen["timesteps"].shape == (2, 3 * 4)
    assert not seen["timesteps"][:, :4].any()
    assert torch.equal(seen["timesteps"][:, 4:], (1000 * prepared.sigmas)[:, None].expand(2, 8))
    other = prepared.noise.clone()
    other[:, :, 0] += 7  # noise of the frame that is given: nothing may depend on it
    again, _ = item_losses(WAN, model, [replace(prepared, noise=other)], options, CPU)
    assert torch.equal(losses, again)
    assert torch.equal(losses, errors)


def test_the_gradient_of_the_loss_is_zero_on_given_frames(tmp_path):
    """With a model that returns a leaf, the loss's gradient says what it looks at."""
    options = options_of(tmp_path, condition_frames=5)
    prepared = prepared_for(options, batch_of(48, 4, 4, 4))
    assert prepared.clean_frames == [2, 2]
    predicted = torch.zeros_like(prepared.batch.latents).requires_grad_()
    losses, _ = item_losses(WAN, lambda *_words, **_names: predicted, [prepared], options, CPU)
    losses.sum().backward()
    assert not predicted.grad[:, :, :2].any()
    assert predicted.grad[:, :, 2:].all()


def test_still_images_and_dropped_conditions_are_text_to_video(tmp_path):
    assert prepared_for(options_of(tmp_path), batch_of(48, 1, 4, 4)).clean_frames == [0, 0]
    dropped = options_of(tmp_path, condition_dropout=0.5)
    counts = [prepared_for(dropped, batch_of(48, 3, 4, 4), epoch=n).clean_frames for n in range(200)]
    assert 0.4 < sum(map(sum, counts)) / 400 < 0.6
    assert counts[7] == prepared_for(dropped, batch_of(48, 3, 4, 4), epoch=7).clean_frames
    assert any(sum(pair) == 1 for pair in counts), "the items of a batch are drawn one by one"
    always = options_of(tmp_path, condition_dropout=1.0)
    assert prepared_for(always, batch_of(48, 3, 4, 4)).clean_frames == [0, 0]


@pytest.mark.parametrize(("frames", "words"), [(3, "must be 4n"), (-1, "must be 4n")])
def test_given_frames_that_no_latent_holds_are_refused(tmp_path, frames, words):
    with pytest.raises(UsageError, match=words):
        options_of(tmp_path, condition_frames=frames)
    with pytest.raises(UsageError, match="does not take given frames"):
        options_of(tmp_path, task="t2v-1.3B", condition_frames=1)


def test_a_mask_and_given_frames_count_together(tmp_path):
    options = options_of(tmp_path)
    batch = batch_of(48, 3, 4, 4, items=1)
    mask = torch.zeros(1, 1, 3, 4, 4)
    mask[:, :, :, :2] = 1
    prepared = prepared_for(options, replace(batch, loss_mask=mask))
    predicted = torch.zeros_like(batch.latents).requires_grad_()
    losses, _ = item_losses(WAN, lambda *_words, **_names: predicted, [prepared], options, CPU)
    losses.sum().backward()
    assert predicted.grad[:, :, 1:, :2].all()
    assert not predicted.grad[:, :, 0].any()
    assert not predicted.grad[:, :, :, 2:].any()


def test_the_loss_of_an_item_counts_its_weight_and_the_weighting_scheme(tmp_path):
    options = options_of(tmp_path, task="t2v-1.3B", weighting_scheme="cosmap")
    batch = replace(batch_of(16, 1, 4, 4), weights=torch.tensor([1.0, 0.25]))
    prepared = prepared_for(options, batch)
    losses, errors = item_losses(
        WAN, lambda *_words, **_names: torch.zeros_like(batch.latents), [prepared], options, CPU
    )
    sigmas = prepared.sigmas
    scheme = 2 / (torch.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    torch.testing.assert_close(losses, errors * scheme * batch.weights)
    target = prepared.noise - batch.latents
    torch.testing.assert_close(errors, target.square().mean(dim=(1, 2, 3, 4)))


def test_noise_offset_shifts_each_channel_as_a_whole(tmp_path):
    batch = batch_of(16, 2, 8, 8)
    plain = prepared_for(options_of(tmp_path, task="t2v-1.3B"), batch).noise
    offset = prepared_for(options_of(tmp_path, task="t2v-1.3B", noise_offset=0.1), batch).noise
    shift = offset - plain
    assert torch.allclose(shift, shift[:, :, :1, :1, :1].expand_as(shift), atol=1e-6)
    assert 0.05 < shift[:, :, 0, 0, 0].std() < 0.2
    for one, noise in zip(shift[:, :, 0, 0, 0], plain, strict=True):
        assert not torch.allclose(one, 0.1 * noise.flatten()[:16], atol=1e-6), "it is drawn apart from the noise"


def test_a_draw_depends_on_seed_epoch_item_and_repeat_alone(tmp_path):
    options, batch = options_of(tmp_path, task="t2v-1.3B"), batch_of(16, 1, 4, 4)
    first, again = prepared_for(options, batch), prepared_for(options, batch)
    assert torch.equal(first.noise, again.noise)
    assert torch.equal(first.sigmas, again.sigmas)
    later, other = prepared_for(options, batch, epoch=1), prepared_for(replace(options, seed=7), batch)
    assert not torch.equal(first.noise, later.noise)
    assert not torch.equal(first.sigmas, other.sigmas)


def test_regularisation_sets_count_the_prior_loss_weight(tiny_run: TinyRun, tmp_path):
    samples = samples_of(tiny_run)
    entry = replace(samples[0].sample.entry, is_reg=True)
    first = replace(samples[0], sample=replace(samples[0].sample, entry=entry))
    assert read_batch([first], [Draw(0, 0)], 0.3).weights.tolist() == [pytest.approx(0.3)]
    assert read_batch(samples, [Draw(0, 0)], 0.3).weights.tolist() == [1.0]


def test_packed_batches_of_different_shapes_have_the_losses_and_gradients_of_each_alone(tiny_run: TinyRun, tmp_path):
    from wangen.runtime.training.adapter import add_adapter

    options = tiny_run.options(tmp_path)
    model = profiles.model("t2v-1.3B")
    batches = [batch_of(16, 1, 8, 8), batch_of(16, 1, 4, 12, items=1), batch_of(16, 2, 4, 4)]
    passes = [prepared_for(options, batch, epoch=number) for number, batch in enumerate(batches)]
    found = {}
    for way in ("alone", "packed"):
        transformer = WAN.load_transformer(tiny_run.weights["dit"], dtype=torch.float32)
        parameters = add_adapter(transformer, options, model)
        with torch.no_grad():
            for number, parameter in enumerate(parameters.values()):
                generator = torch.Generator().manual_seed(number)
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        velocities = model_of(transformer, plain=False)
        together = [passes] if way == "packed" else [[one] for one in passes]
        losses = [item_losses(WAN, velocities, part, options, CPU)[0] for part in together]
        torch.cat(losses).sum().backward()
        found[way] = (torch.cat(losses), {name: parameter.grad for name, parameter in parameters.items()})
    torch.testing.assert_close(found["packed"][0], found["alone"][0], rtol=2e-6, atol=1e-6)
    for name, gradient in found["alone"][1].items():
        assert (found["packed"][1][name] - gradient).norm() < 1e-5 * gradient.norm(), name


def test_what_drops_out_depends_on_every_item_of_the_batch():
    def drawn(*items: str) -> list[float]:
        with dropout_seed([(1, 0, item, 0) for item in items], CPU):
            return torch.rand(3).tolist()

    assert drawn("a", "b") == drawn("a", "b") != drawn("a", "c")
    assert drawn("a", "b") != drawn("a")


def test_control_images_count_in_the_tokens_of_their_item():
    batch = batch_of(16, 1, 8, 8)
    assert num_tokens(batch, (1, 2, 2)) == [16, 16]
    controls = [[torch.zeros(16, 1, 8, 4), torch.zeros(16, 1, 4, 4)], []]
    assert num_tokens(replace(batch, controls=controls), (1, 2, 2)) == [16 + 8 + 4, 16]


def test_the_gradient_is_clipped_at_the_norm_that_is_given_and_0_clips_nothing(tiny_run: TinyRun, tmp_path):
    found = {}
    for norm in (0.0, 1e9, 1e-4):
        options = tiny_run.options(tmp_path / str(norm), max_train_steps=2, optimizer_type="SGD", max_grad_norm=norm)
        train.run(replace(options, network_alpha=4e3))  # so that the gradients are large
        found[norm] = load_file(options.output_dir / "lora.safetensors")
    first = json.loads((tmp_path / "0.0" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["grad_norm"] > 2
    assert all(torch.equal(found[0.0][name], value) for name, value in found[1e9].items())
    assert not all(torch.equal(found[0.0][name], value) for name, value in found[1e-4].items())


def test_no_layer_changes_its_weight_by_more_than_the_norm_that_is_given(tiny_run: TinyRun, tmp_path):
    """The change as it counts, by alpha over the rank."""
    train.run(tiny_run.options(tmp_path, max_train_steps=3, learning_rate=0.05, network_alpha=2.0,
                               scale_weight_norms=0.25))  # fmt: skip
    lora = read_lora(tmp_path / "lora.safetensors")
    norms = [float((weight.scale * weight.up.float() @ weight.down.float()).norm()) for weight in lora.values()]
    assert max(norms) == pytest.approx(0.25, rel=1e-3)


def test_an_average_is_of_the_weights_whose_norm_is_limited(tiny_run: TinyRun, tmp_path):
    """The first update copies them."""
    train.run(tiny_run.options(tmp_path, max_train_steps=1, learning_rate=0.05, network_alpha=2.0,
                               scale_weight_norms=0.25, ema_decay=0.9))  # fmt: skip
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["keys_scaled"] > 0
    weights, average = (load_file(tmp_path / f"lora{end}.safetensors") for end in ("", "-ema"))
    assert all(torch.equal(average[name], value) for name, value in weights.items())


def test_timesteps_that_depend_on_the_size_count_the_tokens_of_a_frame(tmp_path):
    options = options_of(tmp_path, task="t2v-1.3B", timestep_sampling="flux_shift")
    prepared, sampler = prepared_for(options, batch_of(16, 2, 8, 12)), Sampler(options)
    wanted = [sampler.sigma(key, number, 4 * 6) for number, key in enumerate(prepared.keys)]
    assert prepared.sigmas.tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_what_an_optimizer_draws_is_of_the_run_and_the_step(tiny_run: TinyRun, tmp_path, monkeypatch):
    real, seeds = Optimization.step, []
    monkeypatch.setattr(Optimization, "step", lambda self, factor, seed: (seeds.append(seed), real(self, factor, seed)))
    for seed in (1, 2, 1):
        monkeypatch.setattr("wangen.runtime.training.refusals.try_out", lambda *_words: None)
        train.run(tiny_run.options(tmp_path / str(len(seeds)), max_train_steps=2, seed=seed))
    assert len(set(seeds[:4])) == 4
    assert seeds[4:] == seeds[:2]


def test_the_plain_way_packs_nothing_and_drops_as_without(tiny_run: TinyRun, tmp_path):
    for pack in (False, True):
        out = tmp_path / str(pack)
        train.run(tiny_run.options(out, plain=True, pack=pack, network_dropout=0.3, gradient_accumulation_steps=2,
                                   max_train_steps=2, network_dim=2))  # fmt: skip
    without, given = (load_file(tmp_path / str(pack) / "lora.safetensors") for pack in (False, True))
    assert all(torch.equal(without[name], given[name]) for name in without)


def test_batches_with_given_frames_are_never_packed(tmp_path):
    for frames, sizes in ((0, [2]), (1, [1, 1])):
        options = options_of(tmp_path, condition_frames=frames)
        batches = [prepared_for(options, batch_of(48, 3, 4, 4), epoch=number) for number in range(2)]
        assert [len(together) for together, _ in _passes(Group(0, batches, 2, 4), Ranks(), pack=True)] == sizes
        others = SimpleNamespace(in_step=True, any=lambda _flag: True)  # one of them has given frames
        assert [len(together) for together, _ in _passes(Group(0, batches, 2, 4), others, pack=True)] == [1, 1]


def test_batches_that_are_there_for_other_processes_do_not_count(tmp_path):
    batches = [prepared_for(options_of(tmp_path, condition_frames=0), batch_of(48, 3, 4, 4))] * 2
    for pack, counted in ((False, [2, 0]), (True, [2])):
        assert [number for _, number in _passes(Group(0, batches, 1, 4), Ranks(), pack=pack)] == counted


def test_an_interrupt_breaks_off_the_step_of_a_process_that_is_alone_and_no_other(tiny_run: TinyRun, tmp_path):
    """Others would wait for its gradients."""
    run = runs.make_run(runs.options_of(tiny_run, tmp_path))
    trainee, interrupt = run.trainees[0], SimpleNamespace(requested=True)
    prepared = prepared_for(options_of(tmp_path, task="t2v-1.3B"), batch_of(16, 1, 8, 8))
    assert optimizer_step(run, trainee, Group(0, [prepared], 1, 2), 1.0, interrupt) is None
    assert trainee.step == 2
    run.ranks = SimpleNamespace(count=2, in_step=False, add_up=lambda _tensors: None)
    assert optimizer_step(run, trainee, Group(0, [prepared], 1, 2), 1.0, interrupt)
    assert trainee.step == 3


def test_a_step_begun_again_without_recorded_graphs_has_its_gradient_once(tiny_run: TinyRun, tmp_path, monkeypatch):
    """The memory is full in the second of two passes, after the first has left its gradient."""
    options = options_of(tmp_path, task="t2v-1.3B")
    batches = [prepared_for(options, batch_of(16, 1, 8, 8), epoch=number) for number in range(2)]
    gradients = []
    for full_at in (None, 2):
        run = runs.make_run(runs.options_of(tiny_run, tmp_path))
        trainee, passes = run.trainees[0], []

        def model(*given, real=trainee.model, full_at=full_at, passes=passes, **more):
            passes.append(given)
            if len(passes) == full_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(*given, **more)

        trainee.model = model
        recorded = SimpleNamespace(are_there=True, give_up=lambda _reason: None, release=lambda: None)
        monkeypatch.setattr("wangen.runtime.fast.graphs._all", [recorded])
        optimizer_step(run, trainee, Group(0, batches, 2, 4), 1.0, SimpleNamespace(requested=False))
        assert len(passes) == (2 if full_at is None else 4)
        gradients.append(trainee.optimization.flat.gradients[0].clone())
    assert gradients[0].any()
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in DITS for case in cases(name)])
def test_losses_equal_those_of_the_official_velocities(tmp_path, name: str, case: int):
    """At the vectors' noisy latents and timesteps, for whatever clean latents; within 1e-5 of the loss."""
    inputs, generator = inputs_of(name, case), torch.Generator().manual_seed(2)
    noisy, frames = inputs.latents, [0] * len(inputs.latents)
    sigmas = inputs.timesteps.reshape(len(noisy), -1).amax(dim=1) / 1000
    clean = torch.randn(noisy.shape, generator=generator)
    if inputs.timesteps.ndim > 1:
        frames = [int(not each[0]) for each in inputs.timesteps]
        for number, given in enumerate(frames):
            clean[number, :, :given] = noisy[number, :, :given]
    level = sigmas.view(-1, 1, 1, 1, 1)
    noise = (noisy - (1 - level) * clean) / level
    batch = Batch(clean, inputs.texts, ["a"] * len(noisy), ["a"] * len(noisy), torch.ones(len(noisy)),
                  inputs.condition, inputs.image_tokens)  # fmt: skip
    prepared = Prepared(batch, [(0, 0, "a", 0)] * len(noisy), sigmas, noise, frames)
    with torch.no_grad():
        losses, _ = item_losses(WAN, fast(vectors_model(name)), [prepared], options_of(tmp_path), CPU)
    official = golden(name)[f"case{case}.output"].double()
    wanted = (official - (noise - clean).double()).square()
    means = [one[:, given:].mean() for one, given in zip(wanted, frames, strict=True)]
    torch.testing.assert_close(losses.double(), torch.stack(means), rtol=1e-5, atol=0)
