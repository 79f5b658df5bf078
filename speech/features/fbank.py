"""Filter-bank energies with all of Kaldi's choices: logarithmic or linear, with the frame's energy in front.

With `log_energies: false` they are energies on the scale of squared 16-bit samples (`--use-log-fbank=false`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from configurable.lazy import torch
from speech.features.config import FrameEnergyConfig

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


class FbankConfig(FrameEnergyConfig):
    """Filter-bank energies, logarithmic or linear, with or without the frame's energy."""

    kind: Literal["fbank"] = "fbank"
    log_energies: bool = True
    """Logarithms of the energies."""

    @property
    @override
    def width(self) -> int:
        return self.num_mels + self.use_energy

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        centred = bank.centred(frames)
        energies = bank.energies(centred)
        if self.log_energies:
            energies = bank.log(energies)
        if not self.use_energy:
            return energies
        return torch.cat([bank.log_energy(centred), energies], dim=-1)

    @override
    def levels(self, bank: FilterBank, feats: Tensor) -> Tensor:
        energies = feats[..., int(self.use_energy) :]
        return bank.level(energies if self.log_energies else bank.log(energies.clone()))
