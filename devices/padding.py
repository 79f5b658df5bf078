"""Pads batches to few distinct lengths where each new one costs time: cuDNN's plans, compiled code."""

import torch
from torch import Tensor
from torch.nn import functional as F

_FRAMES = 64
"""cuDNN plans convolutions and attention for each new shape, which takes tens of milliseconds of host time.
At 100 frames per second, utterances of up to 30 s then have 47 lengths instead of 3,000, and padding grows by a third
of a second on average. After subsampling by 8, lengths are still multiples of 8, as tensor cores require. Compiled code
is for any length above one, but one frame and lengths of other remainders need code of their own."""


def frame_multiple(device: torch.device, compiled: bool = False) -> int:
    """Number of feature frames that batches are padded to a multiple of; 1 on a CPU, unless the model is compiled."""
    return _FRAMES if device.type == "cuda" or compiled else 1


def rounded_up(feats_BTF: Tensor, multiple: int) -> Tensor:
    """Pad features with zeros, like the padding that they have already, to a multiple of frames [B, T', F]."""
    extra = -feats_BTF.shape[1] % multiple
    return F.pad(feats_BTF, (0, 0, 0, extra)) if extra else feats_BTF
