"""The samples themselves, in blocks: the input of networks that read raw audio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from speech.features.config import FeatureConfig
from speech.features.mel import FeatureError

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


class WaveformConfig(FeatureConfig):
    """Blocks of samples as they are, for networks that read raw audio."""

    kind: Literal["waveform"] = "waveform"
    tiny: ClassVar[dict[str, Any]] = {"samples": 80}
    frame_ms: float = Field(default=10.0, gt=0, le=1000)
    """Length of a block in milliseconds: blocks that are longer than `hop_ms` overlap."""
    samples: int = Field(default=160, ge=2)
    """Samples of a block: those of `frame_ms` at the sample rate, such as 160 for 10 ms at 16 kHz, or 80 at 8 kHz."""

    @property
    @override
    def width(self) -> int:
        return self.samples

    @override
    def tables(self, sample_rate: int) -> dict[str, Tensor]:
        length = int(sample_rate * 0.001 * self.frame_ms)
        if length != self.samples:
            raise FeatureError(
                f"features.samples is {self.samples}, but {self.frame_ms:g} ms at {sample_rate} Hz are {length} "
                f"samples: set features.samples to {length}"
            )
        return {}

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        return bank.dithered(frames)

    @override
    def levels(self, bank: FilterBank, feats: Tensor) -> Tensor:
        return bank.log_energy(feats - feats.mean(-1, keepdim=True)).squeeze(-1)
