"""Filter-bank energy ratio: each band's share of the frame's energy in all bands.

r_b = (E_b + ε) / Σ_k (E_k + ε): shares are positive, add up to one and do not change with the level of the
recording; ε, Kaldi's floor, makes them equal in digital silence. With `log_energies: true`, ln r_b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import override

from speech.features.config import FilterBankConfig

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


class FberConfig(FilterBankConfig):
    """Filter-bank energy ratios: each band's share of the frame's energy; they add up to one."""

    kind: Literal["fber"] = "fber"
    has_levels: ClassVar[bool] = False
    log_energies: bool = False
    """Logarithms of the ratios."""

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        energies = bank.energies(bank.centred(frames)).add_(bank.epsilon)
        shares = energies.div_(energies.sum(-1, keepdim=True))
        return shares.log_() if self.log_energies else shares
