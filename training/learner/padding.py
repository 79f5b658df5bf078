"""Lengths that batches are padded to on a GPU: few different ones, so that what was planned for one is used again."""

import torch
from torch import Tensor
from torch.nn import functional as F

_FRAMES = 64
"""On a GPU. cuDNN plans its convolutions and its attention for each shape again, tens of milliseconds of the host's
time. At 100 frames a second, utterances of up to 30 s then have 47 lengths instead of 3,000, and padding grows by a
third of a second on average. Behind subsampling by 8 it is still a multiple of 8, as tensor cores want it."""


def frame_multiple(device: torch.device) -> int:
    """Feature frames that batches are padded to a multiple of; 1 where shapes make no difference."""
    return _FRAMES if device.type == "cuda" else 1


def rounded_up(feats_BTF: Tensor, multiple: int) -> Tensor:
    """Features padded with zeros, as the rest of their padding is, to a multiple of frames [B, T', F]."""
    extra = -feats_BTF.shape[1] % multiple
    return F.pad(feats_BTF, (0, 0, 0, extra)) if extra else feats_BTF
