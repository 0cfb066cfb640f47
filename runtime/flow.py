"""Flow matching: noising, target and loss, as pure functions.

sigma is the noise level in [0, 1]: 0 is the clean latent, 1 is noise; the model's timestep is 1000 sigma.
Conventions of Wan 2.1 (https://github.com/Wan-Video/Wan2.1): x_sigma = (1 - sigma) x0 + sigma eps, and the model
predicts the velocity eps - x0.
"""

import math

import torch


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), for any x.

    >>> sigmoid(0.0), sigmoid(-1000.0)
    (0.5, 0.0)
    """
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def noised(clean: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """x_sigma = (1 - sigma) x0 + sigma eps, for latents (B, C, F, h, w) and sigmas (B,).

    >>> noised(torch.zeros(1, 1, 1, 1, 1), torch.ones(1, 1, 1, 1, 1), torch.tensor([0.25])).item()
    0.25
    """
    level = sigmas.to(clean.dtype).view(-1, 1, 1, 1, 1)
    return (1 - level) * clean + level * noise


def velocity(clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The target eps - x0.

    >>> velocity(torch.tensor([1.0]), torch.tensor([3.0])).item()
    2.0
    """
    return noise - clean


def loss_weight(scheme: str, sigmas: torch.Tensor) -> torch.Tensor:
    """Weight of each sample's loss, (B,): `sigma_sqrt` sigma^-2, `cosmap` 2 / (pi (1 - 2 sigma + 2 sigma^2)), else 1.

    `logit_normal` and `mode` are no weights: they say how sigma is drawn. Source: diffusers,
    `compute_loss_weighting_for_sd3` (https://arxiv.org/abs/2403.03206), which knows a thousand levels of noise: below
    the lowest of them, sigma = 0.001, sigma_sqrt stays at its largest weight, a million.

    >>> loss_weight("none", torch.tensor([0.5])).item(), loss_weight("sigma_sqrt", torch.tensor([0.5])).item()
    (1.0, 4.0)
    """
    if scheme == "sigma_sqrt":
        return sigmas.clamp_min(1e-3) ** -2
    if scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    return torch.ones_like(sigmas)


def flow_loss(predicted: torch.Tensor, target: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Each sample's mean squared error in float32, (B,); `loss_weight` is not in it.

    Args:
        predicted: (B, C, F, h, w) velocity.
        target: the same of the truth.
        mask: (B, 1, F, h, w) in [0, 1]: how much each cell counts in the mean; None counts all alike. Where it sums to
            less than one cell, as the noise that a codec leaves in black, the sample counts so much less.

    >>> mask = torch.tensor([1.0, 0.0]).view(1, 1, 1, 1, 2)
    >>> flow_loss(torch.tensor([1.0, 9.0]).view(1, 1, 1, 1, 2), torch.zeros(1, 1, 1, 1, 2), mask)
    tensor([1.])
    """
    error = (predicted.float() - target.float()).square()
    if mask is None:
        return error.mean(dim=(1, 2, 3, 4))
    weights = mask.to(error).expand_as(error)
    one_cell = error.shape[1]
    return (error * weights).sum(dim=(1, 2, 3, 4)) / weights.sum(dim=(1, 2, 3, 4)).clamp_min(one_cell)
