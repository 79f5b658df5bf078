"""Mel-frequency cepstral coefficients (Kaldi's `compute-mfcc-feats`).

Log-mel energies, orthonormal cosine transform, cepstral lifter; with `use_energy` the frame's log energy takes the
place of the first coefficient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from speech.features.config import FrameEnergyConfig
from speech.features.mel import FeatureError, dct_matrix, lifter_weights
from speech.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


class MfccConfig(FrameEnergyConfig):
    """Mel-frequency cepstral coefficients."""

    kind: Literal["mfcc"] = "mfcc"
    num_ceps: int = Field(default=13, ge=1)
    """Number of cepstral coefficients, at most `num_mels`."""
    cepstral_lifter: float = Field(default=22.0, ge=0)
    """Length of the cepstral lifter; 0 is none."""

    @property
    @override
    def width(self) -> int:
        return self.num_ceps

    @override
    def tables(self, sample_rate: int) -> dict[str, Tensor]:
        if self.num_ceps > self.num_mels:
            raise FeatureError(
                f"features.num_ceps={self.num_ceps} exceeds features.num_mels={self.num_mels}: lower the first"
            )
        cosines = dct_matrix(self.num_mels, self.num_ceps) * lifter_weights(self.num_ceps, self.cepstral_lifter)
        # back to log energies, without the details that the cepstrum leaves out
        return {"cosines": cosines, "smoothed": torch.linalg.pinv(cosines)}

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        centred = bank.centred(frames)
        cepstra = torch.matmul(bank.log(bank.energies(centred)), bank.get_buffer("cosines"))
        if self.use_energy:
            cepstra[..., :1] = bank.log_energy(centred, self.energy_floor)
        return cepstra

    @override
    def levels(self, bank: FilterBank, feats: Tensor) -> Tensor:
        if self.use_energy:
            return feats[..., 0]
        return bank.level(torch.matmul(feats, bank.get_buffer("smoothed")))
