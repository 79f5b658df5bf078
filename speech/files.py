"""What is checked of a file with weights, and the errors of reading one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from configurable.lazy import torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

from safetensors import SafetensorError

DAMAGED = (OSError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, SafetensorError)
"""What reading JSON and tensors raises if a file is missing, damaged, or its numbers and shapes do not fit together."""


def check_finite(tensors: Mapping[str, Tensor | np.ndarray]) -> None:
    """Check that weights from a file are finite: a model with others recognizes nothing, without an error.

    Args:
        tensors: Tensors or arrays by name.

    Raises:
        ValueError: One has NaN or infinite numbers.
    """
    for name, tensor in tensors.items():
        wrong = int((~torch.isfinite(torch.as_tensor(tensor))).sum())
        if wrong:
            raise ValueError(f"{wrong} of the {torch.as_tensor(tensor).numel()} numbers of {name} are not finite")
