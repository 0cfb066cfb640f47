"""Max-norm regularisation: the change of a weight, not its factors, is what the limit is for."""

import torch

from wangen.runtime.randomness import generator_for
from wangen.runtime.training.weight_norms import scale_weight_norms


def test_weight_norms_are_brought_down_to_the_limit() -> None:
    generator = generator_for("norms")
    pairs = [(torch.randn(4, 30, generator=generator), torch.randn(20, 4, generator=generator), 0.5) for _ in range(3)]
    pairs[1][1].zero_()
    pairs[2][1].mul_(0.001)
    before = [(scale * up @ down).clone() for down, up, scale in pairs]
    num_scaled = scale_weight_norms(pairs, 2.0)
    after = [scale * up @ down for down, up, scale in pairs]
    assert before[0].norm() > 10
    torch.testing.assert_close(after[0], before[0] * (2.0 / before[0].norm()), rtol=1e-5, atol=1e-6)
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[2], before[2])
    assert num_scaled == 1
