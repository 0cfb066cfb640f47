"""The mathematics of flow matching, against closed forms and the library's own weights."""

import math

import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3

from wangen.runtime.flow import flow_loss, loss_weight, noised, velocity
from wangen.runtime.randomness import generator_for


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
    assert flow_loss(predicted, target).tolist() == [1.0, 9.0]
    assert (flow_loss(predicted, target) * loss_weight("sigma_sqrt", sigmas)).tolist() == [4.0, 36.0]
    assert loss_weight("cosmap", torch.tensor([0.5])).item() == pytest.approx(4 / math.pi)


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap", "logit_normal", "mode"])
def test_the_weights_are_the_librarys_on_its_thousand_levels_of_noise(scheme):
    sigmas = torch.arange(1, 1001) / 1000
    expected = compute_loss_weighting_for_sd3(scheme, sigmas)
    torch.testing.assert_close(loss_weight(scheme, sigmas), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap", "logit_normal", "mode"])
def test_no_weight_is_larger_below_the_lowest_of_them(scheme):
    sigmas = torch.tensor([0.0, 1e-9, 5e-4])
    lowest = loss_weight(scheme, torch.tensor([1e-3]))
    assert (loss_weight(scheme, sigmas) <= lowest).all()
    assert (loss_weight(scheme, sigmas) > 0).all()


def test_where_the_mask_is_black_all_over_nothing_counts():
    predicted, target = torch.ones(2, 3, 1, 2, 2, requires_grad=True), torch.zeros(2, 3, 1, 2, 2)
    mask = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1, 1).expand(2, 1, 1, 2, 2)
    losses = flow_loss(predicted, target, mask)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 1.0]
    assert predicted.grad.isfinite().all()


def test_what_a_codec_leaves_in_a_black_mask_does_not_count_as_a_whole_item():
    predicted, target = torch.full((3, 16, 2, 4, 4), 2.0), torch.zeros(3, 16, 2, 4, 4)
    mask = torch.zeros(3, 1, 2, 4, 4)
    mask[0, 0, 1, 2, 1:3] = 5e-4
    mask[1, 0, 1, 2, 1] = 0.25
    mask[2, 0, 0, 0, 0] = 1.0
    torch.testing.assert_close(flow_loss(predicted, target, mask), torch.tensor([0.004, 1.0, 4.0]))


def test_the_loss_of_half_precision_is_computed_in_float32():
    predicted, target = torch.full((1, 1, 1, 1, 2), 3.0), torch.full((1, 1, 1, 1, 2), 2.0)
    target[..., 1] = 1 / 256
    found = flow_loss(predicted.bfloat16(), target)
    half = flow_loss(predicted.bfloat16(), target.bfloat16())
    assert found.dtype == half.dtype == torch.float32
    assert half.item() == flow_loss(predicted, target).item()
