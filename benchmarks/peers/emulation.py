"""A model whose gradients take a given time but no CPU, so that many learners fit on few cores.

A third of a step is the forward pass. In the backward pass, gradients become available part by part, so that systems
can overlap communication with it. Gradients are noise of variance 1, different for each learner and step.
"""

import time

import torch
from torch import Tensor, nn

_FORWARD = 1 / 3
_PARTS = 8
_NOISE = 1 << 18
SAMPLES = 1024
"""Number of weights that a learner reports."""


class EmulatedModel(nn.Module):
    """Trainable weights with emulated gradients; the output is a scalar.

    Args:
        params: Number of weights.
        step_s: Seconds of a forward and backward pass.
        seed: Seed of the gradients' noise.
    """

    def __init__(self, params: int, step_s: float, seed: int) -> None:
        super().__init__()
        size = -(-params // _PARTS)
        sizes = [min(size, params - start) for start in range(0, params, size)]
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self._step_s = step_s
        self._random = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(2 * _NOISE, generator=self._random)
        self._began, self._left = 0.0, 0

    def forward(self, _: object) -> Tensor:
        """Wait for the duration of a forward pass; the input is ignored."""
        self._began, self._left = time.monotonic(), len(self.parts)
        self._wait(_FORWARD)
        loss: Tensor = torch.stack([_Part.apply(part, self) for part in self.parts]).sum()
        return loss

    def gradient(self, like: Tensor) -> Tensor:
        """Wait until a part's gradient would be computed, and return it."""
        self._left -= 1
        self._wait(1 - (1 - _FORWARD) * self._left / len(self.parts))
        noise = torch.empty_like(like)
        start = int(torch.randint(_NOISE, (1,), generator=self._random))
        for piece in noise.split(_NOISE):
            piece.copy_(self._noise[start : start + len(piece)])
        return noise

    def _wait(self, share: float) -> None:
        """Wait until a share of the step's duration has passed."""
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
    """A fixed selection of the weights [SAMPLES]."""
    each = -(-SAMPLES // len(weights))
    pieces = [part.detach().flatten()[:: max(1, part.numel() // each)][:each] for part in weights]
    flat = torch.cat(pieces)[:SAMPLES]
    return nn.functional.pad(flat, (0, SAMPLES - len(flat)))
