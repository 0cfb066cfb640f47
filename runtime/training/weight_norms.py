"""Max-norm regularisation of a LoRA: no module may change its weight by more than a given norm."""

from collections.abc import Iterable

import torch


@torch.no_grad()
def scale_weight_norms(pairs: Iterable[tuple[torch.Tensor, torch.Tensor, float]], max_norm: float) -> torch.Tensor:
    """Shrink the adapters whose change of the weight has a Frobenius norm above the limit, in place, to the limit.

    As `--scale_weight_norms` of kohya-ss/sd-scripts does: both factors take the root of the ratio. The norm of
    `scale * up @ down` comes from two (rank, rank) products, |up down|^2 = sum((up^T up) * (down down^T)), so that the
    change itself, as large as the weight, is never formed.

    Args:
        pairs: for each module lora_A (rank, in), lora_B (out, rank) and the factor on their product (alpha / rank).
        max_norm: the limit, above 0.

    Returns:
        () how many were too large, on the parameters' device, so that nothing waits for it.
    """
    scaled = []
    for down, up, scale in pairs:
        squared = ((up.T @ up) * (down @ down.T)).sum()
        norm = scale * squared.clamp(min=0).sqrt()  # rounding may leave a little below 0
        ratio = (max_norm / norm).clamp(max=1)  # 1 also where the norm is 0: x / 0 is infinite
        down.mul_(ratio.sqrt())
        up.mul_(ratio.sqrt())
        scaled.append(norm > max_norm)
    return torch.stack(scaled).sum()
