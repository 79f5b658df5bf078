"""Mel-frequency cepstral coefficients (Kaldi's `compute-mfcc-feats`).

Log-mel energies, orthonormal cosine transform, cepstral lifter; with `use_energy` the frame's log energy takes the
place of the first coefficient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from configurable.lazy import torch
from speech.features.cepstra import CepstraConfig
from speech.features.mel import FeatureError, dct_matrix, lifter_weights

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


class MfccConfig(CepstraConfig):
    """Mel-frequency cepstral coefficients."""

    kind: Literal["mfcc"] = "mfcc"

    @override
    def tables(self, sample_rate: int) -> dict[str, Tensor]:
        if self.num_ceps > self.num_mels:
            raise FeatureError(
                f"features.num_ceps={self.num_ceps} exceeds features.num_mels={self.num_mels}: lower the first"
            )
        cosines = dct_matrix(self.num_mels, self.num_ceps) * lifter_weights(self.num_ceps, self.cepstral_lifter)
        return {"cosines": cosines, "smoothed": torch.linalg.pinv(cosines)}

    @override
    def cepstra(self, bank: FilterBank, centred: Tensor) -> Tensor:
        return torch.matmul(bank.log(bank.energies(centred)), bank.get_buffer("cosines"))

    @override
    def smoothed(self, bank: FilterBank, cepstra: Tensor) -> Tensor:
        return torch.matmul(cepstra, bank.get_buffer("smoothed"))
