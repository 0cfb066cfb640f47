"""The timestep flags: distributions against published formulas, ranges, experts, strata."""

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.steps import Train
from wangen.generator.train_refusals import require_timesteps
from wangen.runtime.training.distributions import share
from wangen.runtime.training.metadata import metadata
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.timesteps import (
    HIGH,
    LOW,
    Sampler,
    distribution_of,
    expert_shares,
)

N, FEW = 20_000, 4_000
TOKENS = 1560  # 832x480

MODES = [
    *({"timestep_sampling": name} for name in
      ("uniform", "sigmoid", "shift", "logit_normal", "logsnr", "flux_shift", "qwen_shift", "qinglong_flux",
       "qinglong_qwen", "sigma")),
    {"timestep_sampling": "shift", "discrete_flow_shift": 12.0, "sigmoid_scale": 1.5},
    {"timestep_sampling": "logit_normal", "logit_mean": 0.7, "logit_std": 0.4},
    {"timestep_sampling": "logsnr", "logit_mean": -6.0, "logit_std": 2.0},
    {"timestep_sampling": "sigma", "weighting_scheme": "logit_normal", "logit_mean": 1.0},
    {"timestep_sampling": "sigma", "weighting_scheme": "mode"},
    {"timestep_sampling": "sigma", "weighting_scheme": "mode", "mode_scale": -0.8},
    {"timestep_sampling": "sigma", "weighting_scheme": "cosmap"},
]  # fmt: skip
RANGES_OF_EXPERTS = {HIGH: (0.875, 1.0), LOW: (0.0, 0.875)}
RANGES = [(0, 1000, False), (250, 750, False), (250, 750, True)]
RANGED = [
    {**mode, "min_timestep": low, "max_timestep": high, "preserve_distribution_shape": cut}
    for mode in MODES
    for low, high, cut in RANGES
]


def name_of(value) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def train(**flags) -> Train:
    here = Path("somewhere")
    return Train(dataset_config=here, output_dir=here, output_name="x", **flags)


def simulated(flags, number: int = N) -> np.ndarray:
    """Draws by the published formulas, one normal or uniform number each, as other trainers make them."""
    numbers = np.random.default_rng(1)
    normal, uniform = numbers.standard_normal(number), numbers.random(number)
    options = train(**flags)
    mean, deviation = options.logit_mean, options.logit_std

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def shifted(sigma, shift):  # https://arxiv.org/abs/2403.03206, eq. 23
        return shift * sigma / (1 + (shift - 1) * sigma)

    def tokens_shift(most_tokens, most):
        mu = np.interp(TOKENS, [256, most_tokens], [0.5, most])
        return shifted(sigmoid(options.sigmoid_scale * normal), math.exp(mu))

    def log_snr(mean, deviation):
        return sigmoid(-(mean + deviation * normal) / 2)

    def density():
        generator = torch.Generator().manual_seed(1)
        kind = {"logit_mean": mean, "logit_std": deviation, "mode_scale": options.mode_scale, "generator": generator}
        return compute_density_for_timestep_sampling(options.weighting_scheme, number, **kind).numpy()

    def chosen(*parts):
        edges = np.cumsum([part for part, _ in parts])[:-1]
        return np.choose(np.searchsorted(edges, uniform), [draws for _, draws in parts])

    return {
        "uniform": lambda: uniform,
        "sigmoid": lambda: sigmoid(options.sigmoid_scale * normal),
        "shift": lambda: shifted(sigmoid(options.sigmoid_scale * normal), options.discrete_flow_shift),
        "logit_normal": lambda: sigmoid(mean + deviation * normal),
        "logsnr": lambda: log_snr(mean, deviation),
        "flux_shift": lambda: tokens_shift(4096, 1.15),
        "qwen_shift": lambda: tokens_shift(8192, 0.9),
        "qinglong_flux": lambda: chosen(
            (0.79, tokens_shift(4096, 1.15)), (0.11, log_snr(mean, deviation)), (0.10, log_snr(5.36, 1.0))
        ),
        "qinglong_qwen": lambda: chosen((0.95, tokens_shift(8192, 0.9)), (0.05, log_snr(5.36, 1.0))),
        "sigma": density,
    }[options.timestep_sampling]()


def kolmogorov(draws: np.ndarray, cdf) -> float:
    """The largest distance between what was drawn and a distribution, in units of 1 / sqrt(number)."""
    ordered = np.sort(draws)
    expected = np.array([cdf(float(sigma)) for sigma in ordered])
    steps = np.arange(len(ordered) + 1) / len(ordered)
    distance = max(np.abs(expected - steps[:-1]).max(), np.abs(expected - steps[1:]).max())
    return float(distance * math.sqrt(len(ordered)))


# ---- distributions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", MODES, ids=name_of)
def test_every_mode_is_the_published_formula(flags):
    distribution = distribution_of(train(**flags), TOKENS)
    assert kolmogorov(simulated(flags), distribution.cdf) < 1.95  # one in a thousand honest simulations is farther off


@pytest.mark.parametrize("flags", MODES, ids=name_of)
def test_a_uniform_number_becomes_a_draw_of_the_published_formula(flags):
    distribution = distribution_of(train(**flags), TOKENS)
    points = (np.arange(2000) + 0.5) / 2000
    drawn = np.array([distribution.quantile(float(u)) for u in points])
    expected = np.quantile(simulated(flags), points)
    assert np.abs(drawn - expected)[20:-20].max() < 0.02  # of 20,000 draws, between the first and the last percent


@pytest.mark.parametrize("flags", RANGED, ids=name_of)
@settings(max_examples=20)
@given(u=st.floats(0, 1))
def test_cdf_and_quantile_are_inverse(flags, u):
    distribution = distribution_of(train(**flags), TOKENS)
    sigma = distribution.quantile(u)
    assert flags["min_timestep"] / 1000 <= sigma <= flags["max_timestep"] / 1000
    assert distribution.cdf(sigma) == pytest.approx(u, abs=1e-9)


@pytest.mark.parametrize("flags", RANGED, ids=name_of)
@settings(max_examples=20)
@given(pair=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_quantile_and_cdf_rise(flags, pair):
    distribution = distribution_of(train(**flags), TOKENS)
    low, high = sorted(pair)
    assert distribution.quantile(low) <= distribution.quantile(high)
    assert distribution.cdf(low) <= distribution.cdf(high) + 1e-15
    assert (distribution.cdf(0.0), distribution.cdf(1.0)) == pytest.approx((0, 1), abs=1e-12)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"timestep_sampling": "uniform"}, 0.125),
        ({"timestep_sampling": "sigmoid"}, 0.026),
        ({"timestep_sampling": "shift", "discrete_flow_shift": 3.0}, 0.20),
        ({"timestep_sampling": "shift", "discrete_flow_shift": 5.0}, 0.37),
        ({"timestep_sampling": "shift", "discrete_flow_shift": 12.0}, 0.70),
        ({"timestep_sampling": "logit_normal"}, 0.026),
        ({"timestep_sampling": "logsnr"}, 0.00005),
    ],
    ids=name_of,
)
def test_the_known_share_of_each_distribution_lies_in_high_noise(flags, part):
    assert share(distribution_of(train(**flags), TOKENS), 0.875, 1.0) == pytest.approx(part, rel=0.02)


def test_the_shift_of_flux_and_qwen_grows_with_the_frame_and_not_with_the_clip():
    medians = {
        sampling: [distribution_of(train(timestep_sampling=sampling), n).quantile(0.5) for n in (256, 1560, 4096)]
        for sampling in ("flux_shift", "qwen_shift")
    }
    odds = [[m / (1 - m) for m in found] for found in medians.values()]
    assert odds[0] == pytest.approx([math.exp(0.5), math.exp(0.5 + 0.65 * 1304 / 3840), math.exp(1.15)])
    assert odds[1] == pytest.approx(
        [math.exp(0.5), math.exp(0.5 + 0.4 * 1304 / 7936), math.exp(0.5 + 0.4 * 3840 / 7936)]
    )


def test_more_mean_is_more_noise_in_the_sigma_mode_and_in_logit_normal():
    sigma = distribution_of(train(timestep_sampling="sigma", weighting_scheme="logit_normal", logit_mean=1.0), TOKENS)
    assert sigma == distribution_of(train(timestep_sampling="logit_normal", logit_mean=1.0), TOKENS)
    assert sigma.quantile(0.5) > 0.7


# ---- ranges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", MODES, ids=name_of)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("low", "high"), [(250, 750), (500, 1000)])
def test_min_and_max_timestep_mean_what_they_say(flags, cut, low, high):
    options = train(**flags, min_timestep=low, max_timestep=high, preserve_distribution_shape=cut)
    distribution = distribution_of(options, TOKENS)
    whole = simulated(flags, FEW)
    a, b = low / 1000, high / 1000
    expected = whole[(whole >= a) & (whole <= b)] if cut else a + (b - a) * whole
    assert kolmogorov(expected, distribution.cdf) < 1.95
    assert (distribution.quantile(0.0), distribution.quantile(1.0)) == pytest.approx((a, b), abs=1e-9)


def test_a_range_that_is_nearly_never_drawn_is_an_error_in_words():
    options = train(timestep_sampling="logsnr", min_timestep=990, max_timestep=1000, preserve_distribution_shape=True)
    with pytest.raises(UsageError, match=r"logsnr practically never falls between 990 and 1000") as caught:
        distribution_of(options, TOKENS)
    assert "preserve_distribution_shape" in caught.value.cure
    squeezed = dataclasses.replace(options, preserve_distribution_shape=False)
    assert distribution_of(squeezed, TOKENS).quantile(0.5) == pytest.approx(0.995)


@pytest.mark.parametrize("flags", MODES, ids=name_of)
def test_an_experts_range_always_cuts(flags):
    options, whole = train(**flags), simulated(flags, FEW)
    for name, low, high in ((HIGH, 0.7, 1.0), (LOW, 0.0, 0.7)):
        distribution = distribution_of(options, TOKENS, low=low, high=high, expert=name)
        assert kolmogorov(whole[(whole >= low) & (whole <= high)], distribution.cdf) < 1.95


def test_an_expert_cuts_what_min_and_max_have_squeezed():
    options = train(timestep_sampling="uniform", min_timestep=800, max_timestep=1000)
    low, high = (distribution_of(options, TOKENS, low=a, high=b) for a, b in ((0.0, 0.875), (0.875, 1.0)))
    assert (low.quantile(0), low.quantile(1)) == pytest.approx((0.8, 0.875))
    assert (high.quantile(0), high.quantile(1)) == pytest.approx((0.875, 1.0))
    assert expert_shares(options, 0.875) == pytest.approx((0.625, 0.375))


# ---- experts -----------------------------------------------------------------------------------------------------


def test_the_shares_of_the_experts_of_the_shipped_models():
    found = {}
    for name in ("t2v-A14B", "i2v-A14B"):
        model = profiles.model(name)
        assert model.experts
        high, low = expert_shares(train(task=name, **model.defaults["train"]), model.experts.boundary)
        assert high + low == 1
        found[name] = high
    assert found == pytest.approx({"t2v-A14B": 0.705, "i2v-A14B": 0.278}, abs=0.001)


def test_the_share_of_mixed_sizes_is_the_mean_over_the_samples():
    options = train(timestep_sampling="flux_shift")
    small, large = (expert_shares(options, 0.875, {tokens: 1})[0] for tokens in (256, 4096))
    assert small < large
    assert expert_shares(options, 0.875, {256: 3, 4096: 1})[0] == pytest.approx((3 * small + large) / 4)
    assert expert_shares(options, 0.875) == expert_shares(options, 0.875, {TOKENS: 7})  # 832x480 is the model's own


def test_an_expert_that_never_gets_a_timestep_is_refused_before_training():
    options = train(task="t2v-A14B", timestep_sampling="uniform", min_timestep=875)
    Sampler(options, 0.875, 1.0, HIGH).distribution(TOKENS)
    with pytest.raises(UsageError, match=r"for the low-noise expert .* never falls between 0 and 875"):
        Sampler(options, 0.0, 0.875, LOW).distribution(TOKENS)


def test_what_the_model_s_own_resolution_would_never_draw_is_not_asked():
    options = train(timestep_sampling="flux_shift", sigmoid_scale=0.02, max_timestep=640,
                    preserve_distribution_shape=True)  # fmt: skip
    assert Sampler(options).sigma((1, 0, "cat", 0), 0, 256) == pytest.approx(0.62, abs=0.02)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"discrete_flow_shift": 0.0}, "--discrete_flow_shift must be above 0"),
        ({"sigmoid_scale": -1.0}, "--sigmoid_scale must be above 0"),
        ({"logit_std": math.nan}, "--logit_std must be above 0"),
        ({"logit_mean": math.inf}, "--logit_mean must be a number"),
        ({"mode_scale": 1.8}, "--mode_scale must be -1 to 1.75"),
        ({"min_timestep": 900, "max_timestep": 900}, "timesteps 900 to 900 are no range"),
        ({"min_timestep": -1}, "timesteps -1 to 1000 are no range"),
        ({"max_timestep": 1001}, "timesteps 0 to 1001 are no range"),
        ({"num_timestep_buckets": 0}, "--num_timestep_buckets must be above 0"),
        ({"weighting_scheme": "mode"}, "--weighting_scheme mode says how --timestep_sampling sigma draws"),
        ({"weighting_scheme": "logit_normal", "timestep_sampling": "uniform"}, "this run draws uniform"),
    ],
    ids=str,
)
def test_flags_that_describe_no_distribution_are_refused(flags, words):
    with pytest.raises(UsageError) as caught:
        require_timesteps(train(**flags))
    assert words in caught.value.found


# ---- draws -------------------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution_and_depend_on_their_key_alone():
    sampler = Sampler(train())
    keys = [(42, epoch, f"item {item}", 0) for epoch in range(20) for item in range(100)]
    drawn = {key: sampler.sigma(key, number, TOKENS) for number, key in enumerate(keys)}
    assert kolmogorov(np.array(list(drawn.values())), distribution_of(train(), TOKENS).cdf) < 1.95
    assert len(set(drawn.values())) == len(keys)
    random.Random(1).shuffle(keys)
    again = Sampler(train())
    assert {key: again.sigma(key, 0, TOKENS) for key in keys} == drawn  # in another order, at other positions


def test_the_experts_draw_independently():
    options, key = train(timestep_sampling="uniform"), (42, 0, "item", 0)
    high = Sampler(options, 0.5, 1.0, HIGH).sigma(key, 0, TOKENS)
    low = Sampler(options, 0.0, 0.5, LOW).sigma(key, 0, TOKENS)
    assert 0.5 <= high <= 1
    assert 0 <= low <= 0.5
    assert high - 0.5 != pytest.approx(low)


@pytest.mark.parametrize("flags", [{}, {"timestep_sampling": "qinglong_flux"}], ids=str)
@pytest.mark.parametrize("expert", [(0.0, 1.0, ""), (0.875, 1.0, HIGH)])
def test_strata_cover_the_distribution_once_in_every_n_draws(flags, expert):
    low, high, name = expert
    options = train(num_timestep_buckets=8, **flags)
    sampler = Sampler(options, low, high, name)
    distribution = distribution_of(options, TOKENS, low=low, high=high, expert=name)
    epochs = [divmod(position, 20) for position in range(120)]  # which end in the middle of a turn
    drawn = [sampler.sigma((42, epoch, f"item {n}", 0), 20 * epoch + n, TOKENS) for epoch, n in epochs]
    strata = [min(math.floor(8 * distribution.cdf(sigma) + 1e-9), 7) for sigma in drawn]
    turns = [tuple(strata[start : start + 8]) for start in range(0, 120, 8)]
    assert all(sorted(turn) == list(range(8)) for turn in turns)
    assert len(set(turns)) == 15, "the order is another one in every turn"


def test_strata_leave_the_distribution_of_one_draw_as_it_is():
    sampler = Sampler(train(num_timestep_buckets=5))
    drawn = [sampler.sigma((seed, 0, "item", 0), 3, TOKENS) for seed in range(3000)]
    assert kolmogorov(np.array(drawn), distribution_of(train(), TOKENS).cdf) < 1.95


def test_strata_depend_on_key_and_position_alone():
    options = train(num_timestep_buckets=10)
    keys = [(42, 1, f"item {number}", number % 3) for number in range(35)]
    forward, backward = Sampler(options), Sampler(options)
    drawn = [forward.sigma(key, number, TOKENS) for number, key in enumerate(keys)]
    turned = [backward.sigma(key, number, TOKENS) for number, key in reversed(list(enumerate(keys)))]
    assert drawn == turned[::-1]


def test_strata_lower_the_variance_of_a_mean_over_draws():
    def spread(**flags) -> float:
        sampler = Sampler(train(**flags))
        means = [np.mean([sampler.sigma((seed, 0, str(n), 0), n, TOKENS) for n in range(16)]) for seed in range(60)]
        return float(np.var(means))

    assert spread(num_timestep_buckets=16) < spread() / 10


# ---- said in the header ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "high", "low"),
    [({}, ("875", "1000"), ("0", "875")), ({"min_timestep": 250, "max_timestep": 950}, ("875", "950"), ("250", "875"))],
)
def test_the_header_of_each_of_two_experts_says_at_which_timesteps_it_was_trained(
    wanted: dict[str, int], high: tuple[str, str], low: tuple[str, str]
):
    def said(expert: str) -> tuple[str, str]:
        found = metadata(plan, expert, step=10, run_step=40)
        return found["ss_min_timestep"], found["ss_max_timestep"]

    options = train(task="t2v-A14B", network_dim=4, **wanted)
    both = [ExpertPlan(name, Path("dit"), None, *sigmas, 0.5, 20) for name, sigmas in RANGES_OF_EXPERTS.items()]
    plan = Plan(options, profiles.model(options.task), [], [], 4, tuple(both), {})
    assert (said(HIGH), said(LOW)) == (high, low)
    plan = dataclasses.replace(plan, experts=(ExpertPlan("", Path("dit"), None, 0.0, 1.0, 1.0, 40),))
    assert said("") == (str(options.min_timestep), str(options.max_timestep))
