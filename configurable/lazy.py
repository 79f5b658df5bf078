"""Libraries that are imported when they are first used.

Importing torch takes seconds, the others a tenth of one each. Modules that define configurations beside the code that
they configure use

    from configurable.lazy import torch

instead of `import torch`, so that commands that only read configurations start without it. Classes derived from
`torch.nn.Module` need torch when they are defined: they are in modules that configurations import in `build`.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["fsspec", "pyarrow", "pyarrow_compute", "torch", "torchaudio"]


class _LazyModule(ModuleType):
    """A module that is imported when one of its attributes is first used."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)  # found without this method from now on
        return value


if TYPE_CHECKING:
    import fsspec
    import pyarrow
    import pyarrow.compute as pyarrow_compute
    import torch
    import torchaudio
else:
    torch, torchaudio = _LazyModule("torch"), _LazyModule("torchaudio")
    pyarrow, pyarrow_compute = _LazyModule("pyarrow"), _LazyModule("pyarrow.compute")
    fsspec = _LazyModule("fsspec")
