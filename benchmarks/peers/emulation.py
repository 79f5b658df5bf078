"""A model whose gradient takes a given time and no processor: many learners fit on few cores.

A third of a step is the forward pass. In the backward pass gradients come part by part, so that systems which send
some while others are computed can do so. A gradient is noise of variance 1, other noise at each learner and step.
"""

import time

import torch
from torch import Tensor, nn

_FORWARD = 1 / 3
_PARTS = 8
_NOISE = 1 << 18
SAMPLES = 1024
"""Weights of which a learner tells the values."""


class EmulatedModel(nn.Module):
    """Weights that need a gradient; the output is a scalar.

    Args:
        params: How many weights.
        step_s: Seconds that forward and backward take together.
        seed: Of the gradients' noise.
    """

    def __init__(self, params: int, step_s: float, seed: int) -> None:
        super().__init__()
        size = -(-params // _PARTS)
        sizes = [min(size, params - start) for start in range(0, params, size)]
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(one)) for one in sizes])
        self._step_s = step_s
        self._random = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(2 * _NOISE, generator=self._random)
        self._began, self._left = 0.0, 0

    def forward(self, _: object) -> Tensor:
        """Wait as long as a forward pass takes. What the batch is does not matter."""
        self._began, self._left = time.monotonic(), len(self.parts)
        self._wait(_FORWARD)
        loss: Tensor = torch.stack([_Part.apply(part, self) for part in self.parts]).sum()
        return loss

    def gradient(self, like: Tensor) -> Tensor:
        """The gradient of a part, when its time has come."""
        self._left -= 1
        self._wait(1 - (1 - _FORWARD) * self._left / len(self.parts))
        found = torch.empty_like(like)
        start = int(torch.randint(_NOISE, (1,), generator=self._random))
        for piece in found.split(_NOISE):
            piece.copy_(self._noise[start : start + len(piece)])
        return found

    def _wait(self, share: float) -> None:
        """Wait until that share of the step is over."""
        time.sleep(max(0.0, self._began + share * self._step_s - time.monotonic()))


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, model):
        ctx.model = model
        ctx.save_for_backward(weights)
        return weights.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.model.gradient(*ctx.saved_tensors), None


def sample(weights: list[Tensor]) -> Tensor:
    """Some of the weights, always the same ones [SAMPLES]."""
    each = -(-SAMPLES // len(weights))
    found = [part.detach().flatten()[:: max(1, part.numel() // each)][:each] for part in weights]
    flat = torch.cat(found)[:SAMPLES]
    return nn.functional.pad(flat, (0, SAMPLES - len(flat)))
