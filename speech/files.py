"""What is checked of a file with weights, and the errors of reading one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from configurable.lazy import torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

from safetensors import SafetensorError, safe_open

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


class ShapeError(ValueError):
    """A tensor of a file has another shape than the model's `config.json` says.

    Attributes:
        name: The tensor.
        shape: Its shape in the file.
        wanted: The shape that is described.
    """

    def __init__(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        super().__init__(f"{name} is {shape}, not {wanted} as config.json says")
        self.name, self.shape, self.wanted = name, shape, wanted


def read_described(
    path: Path, described: Mapping[str, Tensor], own_name: Callable[[str], str | None]
) -> dict[str, Tensor]:
    """Read those tensors of a safetensors file that a network has, after their shapes have been compared.

    Args:
        path: The file.
        described: The network's tensors by name; they may be without memory.
        own_name: The network's name for a tensor of the file; None for one that it has not.

    Returns:
        Tensors in float32 by the network's names.

    Raises:
        ShapeError: One has another shape.
        SafetensorError: The file is damaged.
        OSError: It cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    with safe_open(str(path), "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            own = own_name(name)
            if own is None or own not in described:
                continue
            shape, wanted = tuple(file.get_slice(name).get_shape()), tuple(described[own].shape)
            if shape != wanted:
                raise ShapeError(name, shape, wanted)
            tensors[own] = file.get_tensor(name).float()
    return tensors
