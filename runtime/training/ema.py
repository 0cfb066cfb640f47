"""The exponential moving average of the trained weights."""

from collections.abc import Mapping

import torch

from wangen.runtime.training.flat import FlatParameters


class Ema:
    """An average of the weights that follows them slowly and is often better than they are.

    After each step: average += (1 - d) (weights - average), with d = min(decay, (1 + n) / (10 + n)) and n the updates
    before this one, of which the first copies. So a short run's average is not held back by where the run began.

    The formula is that of `diffusers.training_utils.EMAModel`, with which the tests compare. That class is not used
    itself: it needs a second copy of all weights at each update, knows them by their order only, and importing it takes
    longer than the first steps of a small run. Here an update is one operation per buffer.

    Attributes:
        decay: the weight of the past, once the run is long enough.
        num_updates: done so far; with the averages it is the whole state.
    """

    def __init__(self, parameters: FlatParameters, decay: float) -> None:
        """Start at the weights as they are; the decay is above 0 and below 1."""
        self.decay = decay
        self.num_updates = 0
        self._parameters = parameters
        self._averages = [buffer.clone() for buffer in parameters.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Follow the weights after an optimizer step."""
        before = self.num_updates
        decay = min(self.decay, (1 + before) / (10 + before)) if before else 0.0
        for average, weights in zip(self._averages, self._parameters.weights, strict=True):
            average.lerp_(weights, 1 - decay)
        self.num_updates += 1

    def weights(self) -> dict[str, torch.Tensor]:
        """The averages by parameter name: views, which the next update changes."""
        return self._parameters.views(self._averages)

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor], num_updates: int) -> None:
        """Go on from saved averages, of the same names and shapes, after so many updates."""
        own = self.weights()
        assert own.keys() == weights.keys()
        for name, view in own.items():
            view.copy_(weights[name])
        self.num_updates = num_updates
