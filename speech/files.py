"""Files that are there whole or not at all, and weights in them that are numbers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from configurable.lazy import torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

from safetensors import SafetensorError

DAMAGED = (OSError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, SafetensorError)
"""What reading JSON and tensors raises if a file is missing, damaged, or its numbers and shapes do not fit together."""


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a process that is killed meanwhile, finds the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
