"""The timestep flags: what they draw sigma from, for each expert, and the drawing itself.

sigma is the noise level in [0, 1]: 0 is the clean latent, 1 is noise; the timesteps of the flags are 1000 sigma.
"""

import math
from collections.abc import Mapping

import torch

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.steps import Train
from wangen.generator.train_refusals import is_narrowed
from wangen.runtime.randomness import generator_for
from wangen.runtime.training.distributions import (
    Cut,
    Distribution,
    LogitNormal,
    Mixture,
    Mode,
    Squeezed,
    Uniform,
    share,
)

HIGH, LOW = "high_noise", "low_noise"
"""Names of the two experts."""

STARVED = 0.05
"""Share of the samples below which an expert is said to starve."""

LEAST_SHARE = 1e-9
"""Share of a distribution below which a range counts as empty: rounding would decide what is drawn from it."""

_DETAIL = (5.36, 1.0)
"""Mean and deviation of the log-SNR draws that the qinglong modes add, near the clean end."""


def distribution_of(
    options: Train, tokens_per_frame: int, *, low: float = 0.0, high: float = 1.0, expert: str = ""
) -> Distribution:
    """The distribution of sigma that the timestep flags describe, cut to an expert's range.

    `--min_timestep` and `--max_timestep` squeeze the whole distribution between them, or cut it there with
    `--preserve_distribution_shape`. The range of an expert always cuts: the other part is the other expert's.

    Args:
        options: the flags, as `require_timesteps` wants them.
        tokens_per_frame: (h / 2) (w / 2) for a latent of h x w cells; counts for flux_shift, qwen_shift and their kin.
        low: lowest sigma of the expert.
        high: highest sigma of the expert.
        expert: `HIGH` or `LOW` for the messages; empty where there is one transformer.

    Raises:
        UsageError: practically no draw falls into the range.
    """
    found = _sampling(options, tokens_per_frame)
    drawn = f"--timestep_sampling {options.timestep_sampling}"
    if is_narrowed(options):
        least, most = options.min_timestep / 1000, options.max_timestep / 1000
        if options.preserve_distribution_shape:
            cure = "leave --preserve_distribution_shape out, or choose another --timestep_sampling"
            found = _cut(found, least, most, drawn, cure)
        else:
            found = Squeezed(found, least, most)
    if (low, high) != (0.0, 1.0):
        cure = f"give {more_draws(options, low, high)}, or train the other expert alone"
        found = _cut(found, low, high, f"for the {expert.replace('_', '-')} expert {drawn}", cure)
    return found


def expert_shares(
    options: Train, boundary: float, tokens_per_frame: Mapping[int, int] | None = None
) -> tuple[float, float]:
    """The shares of the draws that fall into the high-noise and into the low-noise expert's range; they sum to 1.

    Args:
        options: the flags, as `require_timesteps` wants them; `--high_noise_share` is not looked at.
        boundary: sigma at which the high-noise expert begins.
        tokens_per_frame: how many draws have how many tokens per frame; None takes the model's own resolution.

    Raises:
        UsageError: as `distribution_of`.
    """
    counts = tokens_per_frame or {model_tokens(profiles.model(options.task)): 1}
    total = sum(counts.values())
    high = math.fsum(
        count / total * share(distribution_of(options, tokens), boundary, 1.0) for tokens, count in counts.items()
    )
    return high, 1 - high


def model_tokens(model: profiles.Model) -> int:
    """Tokens of a frame at a model's own resolution.

    >>> model_tokens(profiles.model("t2v-14B"))
    1560
    """
    width, height = model.resolution
    return (width // model.bucket_step) * (height // model.bucket_step)


def expert_ranges(options: Train, model: profiles.Model) -> dict[str, tuple[float, float]]:
    """The lowest and the highest sigma of each of a model's two experts."""
    assert model.experts is not None
    boundary = model.experts.boundary if options.timestep_boundary is None else options.timestep_boundary
    return {HIGH: (boundary, 1.0), LOW: (0.0, boundary)}


def trained_range(options: Train, low: float, high: float) -> tuple[float, float]:
    """The lowest and highest timestep, 0 to 1000, at which an expert is trained whose sigmas are `low` to `high`.

    It is empty, with the first above the second, where the wanted timesteps are all the other expert's.
    """
    return max(1000 * low, options.min_timestep), min(1000 * high, options.max_timestep)


def more_draws(options: Train, low: float, high: float) -> str:
    """What lets draws fall into an expert's range into which practically none does.

    Args:
        options: the flags.
        low: lowest sigma of the expert.
        high: highest sigma of the expert.
    """
    ways = ["other --min_timestep and --max_timestep"] if is_narrowed(options) else []
    least, most = trained_range(options, low, high)
    if least < most:
        ways.append("another --timestep_sampling")
    return " or ".join(ways)


def starving(options: Train, model: profiles.Model, shares: Mapping[str, float]) -> list[str]:
    """A warning for each of two experts that gets less than `STARVED` of the samples, with what gives it more.

    Args:
        options: the flags.
        model: the profile of `--task`.
        shares: expert -> its share of the samples.
    """
    lines = []
    for name, part in shares.items():
        if part >= STARVED:
            continue
        cure = "--high_noise_share 0.5, or another --timestep_sampling"
        if part < LEAST_SHARE and options.high_noise_share is None:  # then no share of the steps would help
            cure = more_draws(options, *expert_ranges(options, model)[name])
        lines.append(f"the {name.replace('_', '-')} expert gets {100 * part:.2g} % of the samples and is hardly "
                     f"trained: give {cure}")  # fmt: skip
    return lines


def left_to_the_other(options: Train, low: float, high: float) -> list[str]:
    """What to say of the wanted timesteps that lie beyond the sigmas of the one expert that is trained."""
    reaches_over = options.min_timestep < 1000 * low or options.max_timestep > 1000 * high
    if options.experts == "both" or not is_narrowed(options) or not reaches_over:
        return []
    return [f"the others from {options.min_timestep} to {options.max_timestep} are the other expert's, and not trained "
            "(--timestep_boundary)"]  # fmt: skip


class Sampler:
    """Draws the sigma of each sample of one expert, each from one uniform number of its own.

    With `--num_timestep_buckets` N the distribution is parted into N strata of equal share, and N draws in a row fall
    into each stratum once, in an order that changes with every N draws. The distribution of a single draw stays what it
    is, and the gradient varies less from step to step.

    Args:
        options: the flags, as `require_timesteps` wants them.
        low: lowest sigma of the expert.
        high: highest sigma of the expert.
        expert: `HIGH` or `LOW`; empty where there is one transformer. The experts draw independently.
    """

    def __init__(self, options: Train, low: float = 0.0, high: float = 1.0, expert: str = "") -> None:
        self._options = options
        self._low, self._high, self._expert = low, high, expert
        self._distributions: dict[int, Distribution] = {}

    def distribution(self, tokens_per_frame: int) -> Distribution:
        """What is drawn from for a sample of so many tokens per frame. Raises UsageError as `distribution_of`."""
        if tokens_per_frame not in self._distributions:
            self._distributions[tokens_per_frame] = distribution_of(
                self._options, tokens_per_frame, low=self._low, high=self._high, expert=self._expert
            )
        return self._distributions[tokens_per_frame]

    def sigma(self, key: tuple[int, int, str, int], position: int, tokens_per_frame: int) -> float:
        """The noise level of one sample, a function of the arguments alone.

        Args:
            key: seed, epoch, the sample's key in the cache, and its repeat.
            position: number of this draw among those of this expert, from 0; counts for strata only.
            tokens_per_frame: (h / 2) (w / 2) for a latent of h x w cells.

        Raises:
            UsageError: as `distribution_of`.
        """
        return self.distribution(tokens_per_frame).quantile(self._uniform(key, position))

    def _uniform(self, key: tuple[int, int, str, int], position: int) -> float:
        generator = generator_for("sigma", self._expert, *key)
        uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
        strata = self._options.num_timestep_buckets
        if strata is None:
            return uniform
        turn, place = divmod(position, strata)
        order = torch.randperm(strata, generator=generator_for("strata", self._expert, key[0], turn))
        return (int(order[place]) + uniform) / strata


def _sampling(options: Train, tokens_per_frame: int) -> Distribution:
    """The distribution of `--timestep_sampling` on the whole of [0, 1]."""
    scale, mean, deviation = options.sigmoid_scale, options.logit_mean, options.logit_std
    match options.timestep_sampling:
        case "uniform":
            return Uniform()
        case "sigmoid":
            return LogitNormal(0.0, scale)
        case "shift":
            return LogitNormal(math.log(options.discrete_flow_shift), scale)
        case "logit_normal":
            return LogitNormal(mean, deviation)
        case "logsnr":
            return _log_snr(mean, deviation)
        case "flux_shift":
            return LogitNormal(_flux_mean(tokens_per_frame), scale)
        case "qwen_shift":
            return LogitNormal(_qwen_mean(tokens_per_frame), scale)
        case "qinglong_flux":
            shifted = LogitNormal(_flux_mean(tokens_per_frame), scale)
            return Mixture(((0.79, shifted), (0.11, _log_snr(mean, deviation)), (0.10, _log_snr(*_DETAIL))))
        case "qinglong_qwen":
            shifted = LogitNormal(_qwen_mean(tokens_per_frame), scale)
            return Mixture(((0.95, shifted), (0.05, _log_snr(*_DETAIL))))
        case "sigma":
            return _density(options)


def _density(options: Train) -> Distribution:
    """What `--timestep_sampling sigma` draws: `--weighting_scheme` is a density there, or says nothing about it."""
    if options.weighting_scheme == "logit_normal":
        return LogitNormal(options.logit_mean, options.logit_std)
    return Mode(options.mode_scale) if options.weighting_scheme == "mode" else Uniform()


def _log_snr(mean: float, deviation: float) -> LogitNormal:
    """Draws of a normal log-SNR l = 2 log((1 - sigma) / sigma), so sigmoid(-l / 2): https://arxiv.org/abs/2411.14793."""
    return LogitNormal(-mean / 2, deviation / 2)


def _flux_mean(tokens: int) -> float:
    """The log of S of flux_shift: 0.5 at 256 tokens and 1.15 at 4096, straight on beyond.

    Source: https://github.com/black-forest-labs/flux, `get_schedule`.

    >>> _flux_mean(256), round(_flux_mean(4096), 12)
    (0.5, 1.15)
    """
    return 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)


def _qwen_mean(tokens: int) -> float:
    """The log of S of qwen_shift: 0.5 at 256 tokens and 0.9 at 8192, straight on beyond.

    Source: the scheduler's configuration in https://huggingface.co/Qwen/Qwen-Image.

    >>> _qwen_mean(256), round(_qwen_mean(8192), 12)
    (0.5, 0.9)
    """
    return 0.5 + (0.9 - 0.5) * (tokens - 256) / (8192 - 256)


def looks_at_size(options: Train) -> bool:
    """Whether the flags draw otherwise for a picture of another size."""
    return _sampling(options, 256) != _sampling(options, 8192)


def _cut(base: Distribution, low: float, high: float, what: str, cure: str) -> Cut:
    if share(base, low, high) < LEAST_SHARE:
        raise UsageError(f"{what} practically never falls between {low * 1000:g} and {high * 1000:g}", cure=cure)
    return Cut(base, low, high)
