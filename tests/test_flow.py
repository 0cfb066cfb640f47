"""The mathematics of flow matching, against closed forms and against the distributions that the facts state."""

import math

import pytest
import torch

from wangen.generator.errors import WangenError
from wangen.runtime.flow import TimestepDistribution, flow_loss, loss_weight, noised, velocity
from wangen.runtime.randomness import generator_for

N = 4000


def draws(**fields) -> torch.Tensor:
    distribution = TimestepDistribution(**fields)
    return torch.tensor([distribution.draw(generator_for("draw", number)) for number in range(N)])


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        # Share of draws with sigma >= 0.875, the range of the high-noise expert.
        ({"sampling": "uniform"}, 0.125),
        ({"sampling": "sigmoid"}, 0.026),
        ({"sampling": "shift", "shift": 3.0}, 0.20),
        ({"sampling": "shift", "shift": 5.0}, 0.37),
        ({"sampling": "shift", "shift": 12.0}, 0.70),
        ({"sampling": "logit_normal"}, 0.026),
    ],
)
def test_each_distribution_puts_its_known_share_into_high_noise(fields, share):
    found = (draws(**fields) >= 0.875).float().mean().item()
    assert found == pytest.approx(share, abs=4 * math.sqrt(share / N) + 0.005)


@pytest.mark.parametrize("sampling", ["uniform", "sigmoid", "shift", "logit_normal"])
@pytest.mark.parametrize("cut", [False, True])
def test_min_and_max_mean_what_they_say(sampling, cut):
    sigmas = draws(sampling=sampling, shift=5.0, low=0.25, high=0.75, cut=cut)
    assert sigmas.min() >= 0.25
    assert sigmas.max() <= 0.75
    assert sigmas.std() > 0.05


def test_cutting_keeps_the_shape_and_squeezing_does_not():
    cut = draws(sampling="sigmoid", low=0.5, high=1.0, cut=True)
    squeezed = draws(sampling="sigmoid", low=0.5, high=1.0)
    assert cut.mean() < 0.70  # the upper half of a bell around 0.5
    assert squeezed.mean() == pytest.approx(0.75, abs=0.01)  # the whole bell, moved


def test_an_empty_range_is_an_error_in_words():
    with pytest.raises(WangenError, match=r"never falls between 999\.99 and 1000"):
        TimestepDistribution(sampling="sigmoid", low=0.99999, high=1.0, cut=True).draw(generator_for("x"))


def test_noising_and_target_are_consistent():
    clean, noise = torch.randn(2, 2, 3, 2, 4, 4, generator=generator_for("latents"))
    sigmas = torch.tensor([0.3, 0.9])
    noisy = noised(clean, noise, sigmas)
    step = velocity(clean, noise)
    level = sigmas.view(2, 1, 1, 1, 1)
    assert torch.allclose(noisy - level * step, clean, atol=1e-6)  # going back along the velocity
    assert torch.allclose(noisy + (1 - level) * step, noise, atol=1e-6)


def test_loss_is_the_mean_square_error_per_sample_times_its_weight():
    predicted, target = torch.zeros(2, 1, 1, 2, 2), torch.ones(2, 1, 1, 2, 2)
    target[1] *= 3
    sigmas = torch.tensor([0.5, 0.5])
    assert flow_loss(predicted, target, sigmas).tolist() == [1.0, 9.0]
    assert flow_loss(predicted, target, sigmas, "sigma_sqrt").tolist() == [4.0, 36.0]
    assert loss_weight("cosmap", torch.tensor([0.5])).item() == pytest.approx(4 / math.pi)
    assert loss_weight("sigma_sqrt", torch.tensor([0.0])).isfinite()
