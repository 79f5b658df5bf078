"""Dropout with fast masks on a CPU."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Module):
    """Zeroes elements with probability `p` and scales the rest by 1 / (1 - p).

    On a CPU, torch draws masks one Bernoulli variable at a time, which takes a quarter of a Conformer's training step.
    Here, a mask uses one random byte per element, which rounds `p` to a multiple of 1/256. Masks are seeded by torch's
    global generator and so remain reproducible. On other devices, and in compiled models, this is torch's own dropout.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to a tensor of any shape."""
        if not self.training or self.p == 0.0:
            return x
        threshold = round(256 * self.p)
        # compiled code draws masks fast by itself, and every mask of ours would be a constant that needs its own code
        if x.device.type != "cpu" or threshold in (0, 256) or torch.compiler.is_compiling():
            return F.dropout(x, self.p, True)
        seed = int(torch.randint(2**62, ()))
        data = bytearray(np.random.Generator(np.random.SFC64(seed)).bytes(x.numel()))
        keep = torch.frombuffer(data, dtype=torch.uint8).view(x.shape) >= threshold
        return x * keep.to(x.dtype).mul_(256.0 / (256 - threshold))

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"p={self.p}"
