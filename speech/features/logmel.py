"""Log-mel filter-bank energies (Kaldi's `compute-fbank-feats --use-energy=false`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from speech.features.config import FilterBankConfig

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


class LogMelConfig(FilterBankConfig):
    """Log-mel filter-bank energies."""

    kind: Literal["logmel"] = "logmel"

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        return bank.log(bank.energies(bank.centred(frames)))
