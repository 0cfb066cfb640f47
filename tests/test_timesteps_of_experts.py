"""What the timestep flags leave for each of two experts, what is said of one that starves, the models' own flags."""

import dataclasses
from pathlib import Path

import pytest
from test_timesteps import TOKENS, train

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.train_refusals import require_timesteps
from wangen.runtime.training.plan import plan_experts
from wangen.runtime.training.refusals import resolved
from wangen.runtime.training.timesteps import (
    HIGH,
    LOW,
    STARVED,
    Sampler,
    distribution_of,
    expert_ranges,
    expert_shares,
    left_to_the_other,
    model_tokens,
    more_draws,
    share,
    starving,
)

A14B = profiles.model("t2v-A14B")
FAR_DOWN = {"timestep_sampling": "logit_normal", "logit_mean": -5.0, "logit_std": 0.3}
DOCS = (Path(__file__).parent.parent / "docs" / "timesteps.md").read_text(encoding="utf-8")


def test_a_starving_expert_is_named():
    options = train(task="t2v-A14B", timestep_sampling="logsnr")
    high, low = expert_shares(options, 0.875)
    assert starving(options, A14B, {HIGH: high, LOW: low}) == [
        "the high-noise expert gets 0.005 % of the samples and is hardly trained: give --high_noise_share 0.5, or "
        "another --timestep_sampling"
    ]
    assert starving(options, A14B, {HIGH: 0.3, LOW: 0.7}) == []
    assert starving(options, A14B, {HIGH: STARVED, LOW: 1 - STARVED}) == []
    assert starving(train(), profiles.model("t2v-14B"), {"": 1.0}) == []


@pytest.mark.parametrize(
    ("flags", "expert", "cure", "follows"),
    [
        ({"max_timestep": 800}, HIGH, "other --min_timestep and --max_timestep", {"max_timestep": 950}),
        ({"min_timestep": 900}, LOW, "other --min_timestep and --max_timestep", {"min_timestep": 800}),
        (FAR_DOWN, HIGH, "another --timestep_sampling", {"timestep_sampling": "logsnr", "logit_mean": -4.0}),
        ({**FAR_DOWN, "min_timestep": 100}, HIGH, "other --min_timestep and --max_timestep or another"
         " --timestep_sampling", {"min_timestep": 874}),
        ({**FAR_DOWN, "min_timestep": 100}, HIGH, "other --min_timestep and --max_timestep or another"
         " --timestep_sampling", {"timestep_sampling": "shift"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_said_to_an_expert_that_gets_nothing_helps_it(flags, expert, cure, follows):
    files = {"dit": Path("low"), "dit_high_noise": Path("high")}
    options = resolved(train(task="t2v-A14B", **files, **flags), A14B, None)
    low, high = expert_ranges(options, A14B)[expert]
    assert more_draws(options, low, high) == cure
    high_share, low_share = expert_shares(options, 0.875)
    assert starving(options, A14B, {HIGH: high_share, LOW: low_share})[0].endswith(f": give {cure}")
    with pytest.raises(UsageError, match="practically never falls") as error:
        distribution_of(options, TOKENS, low=low, high=high, expert=expert)
    assert error.value.cure == f"give {cure}, or train the other expert alone"
    with pytest.raises(UsageError, match="would get none") as error:
        plan_experts(options, A14B, 1000)
    assert error.value.cure == f"give {cure}, or train the other one alone with --experts"
    plan_experts(dataclasses.replace(options, **follows), A14B, 1000)


@pytest.mark.parametrize(
    ("share", "num_steps", "why", "cure"),
    [
        (None, 3, r"12\.5% of the timesteps are its own",
         "--high_noise_share 0.5, --max_train_steps 5 or more, another --timestep_sampling"),
        (None, 1, r"12\.5% of the timesteps are its own", "--max_train_steps 5 or more, another --timestep_sampling"),
        (0.001, 400, r"--high_noise_share 0\.001 leaves it 0\.10% of them",
         "--high_noise_share 0.5, --max_train_steps 501 or more"),
        (0.5, 1, r"--high_noise_share 0\.5 leaves it 50\.00% of them", "--max_train_steps 2 or more"),
    ],
)  # fmt: skip
def test_what_gives_an_expert_a_step_is_said_by_why_it_has_none(share, num_steps, why, cure):
    files = {"dit": Path("low"), "dit_high_noise": Path("high")}
    flags = {"timestep_sampling": "uniform", "high_noise_share": share}
    options = resolved(train(task="t2v-A14B", **files, **flags), A14B, None)
    with pytest.raises(UsageError, match=f"the high-noise expert would get none \\({why}\\)") as error:
        plan_experts(options, A14B, num_steps)
    assert error.value.cure == f"give {cure}, or train the other one alone with --experts"
    enough = int(cure.split("--max_train_steps ")[1].split()[0])
    assert plan_experts(options, A14B, enough)[0].num_steps == 1
    with pytest.raises(UsageError, match="would get none"):
        plan_experts(options, A14B, enough - 1)


@pytest.mark.parametrize("name", profiles.model_names())
def test_every_models_own_timestep_flags_are_sound_documented_and_feed_each_expert(name):
    model = profiles.model(name)
    options = train(task=name, **model.defaults.get("train", {}))
    require_timesteps(options)
    assert model_tokens(model) > 256
    boundary = model.experts.boundary if model.experts else None
    high, _ = expert_shares(options, boundary or 0.875)
    cells = next(line for line in DOCS.splitlines() if line.startswith(f"| `{name}`")).split("|")
    assert [cell.strip() for cell in cells[2:6]] == [
        f"`{options.timestep_sampling}`", f"{options.discrete_flow_shift:g}", f"{boundary:g}" if boundary else "",
        f"{100 * high:.0f} %",
    ]  # fmt: skip
    if model.experts:
        shares = dict(zip((HIGH, LOW), expert_shares(options, model.experts.boundary), strict=True))
        assert starving(options, model, shares) == []


def test_a_range_that_keeps_the_shape_is_cut_for_each_expert_too():
    given = {"task": "t2v-A14B", "timestep_sampling": "sigmoid"}
    whole = distribution_of(train(**given), TOKENS)
    options = train(**given, min_timestep=200, max_timestep=950, preserve_distribution_shape=True)
    high, _ = expert_shares(options, 0.875)
    assert high == pytest.approx(share(whole, 0.875, 0.95) / share(whole, 0.2, 0.95))
    for low, top in ((0.0, 0.875), (0.875, 1.0)):
        own = distribution_of(options, TOKENS, low=low, high=top)
        least, most = max(low, 0.2), min(top, 0.95)
        middle = own.quantile(0.5)
        assert share(whole, least, middle) == pytest.approx(share(whole, middle, most))


def test_timesteps_beyond_those_of_the_expert_that_trains_alone_are_named():
    for given, low, high in (({"min_timestep": 500}, 0.875, 1.0), ({"max_timestep": 950}, 0.0, 0.875)):
        alone = train(task="t2v-A14B", experts="high" if low else "low", **given)
        (line,) = left_to_the_other(alone, low, high)
        assert f"from {alone.min_timestep} to {alone.max_timestep} are the other expert's" in line
        assert left_to_the_other(dataclasses.replace(alone, experts="both"), low, high) == []
    assert left_to_the_other(train(task="t2v-A14B", experts="high", min_timestep=875), 0.875, 1.0) == []


def test_the_strata_of_the_experts_come_in_orders_of_their_own():
    options = train(task="t2v-A14B", num_timestep_buckets=8)
    orders = [[int(8 * Sampler(options, *ends, name)._uniform((1, 0, "a", 0), position)) for position in range(16)]
              for name, ends in expert_ranges(options, A14B).items()]  # fmt: skip
    assert all(sorted(order[:8]) == sorted(order[8:]) == list(range(8)) for order in orders)
    assert orders[0] != orders[1]
