"""The samples themselves, in blocks: the input of networks that read raw audio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from configurable.lazy import torch
from speech.features.cmvn import frame_mask
from speech.features.config import FeatureConfig
from speech.features.mel import FeatureError

if TYPE_CHECKING:
    from torch import Tensor

    from speech.features.kaldi import FilterBank


_EPSILON = 1e-7
"""Added to the variance, as `Wav2Vec2FeatureExtractor` of the library `transformers` does."""


class WaveformConfig(FeatureConfig):
    """Blocks of samples as they are, for networks that read raw audio."""

    kind: Literal["waveform"] = "waveform"
    tiny: ClassVar[dict[str, Any]] = {"samples": 80}
    frame_ms: float = Field(default=10.0, gt=0, le=1000)
    """Length of a block in milliseconds: blocks that are longer than `hop_ms` overlap."""
    samples: int = Field(default=160, ge=2)
    """Samples of a block: those of `frame_ms` at the sample rate, such as 160 for 10 ms at 16 kHz, or 80 at 8 kHz."""
    normalize: bool = False
    """Give each utterance zero mean and unit variance over all its samples, as most wav2vec 2.0 models expect it
    (`do_normalize` of a model's preprocessor_config.json)."""

    @property
    @override
    def whole_utterance(self) -> str:
        if self.normalize:
            return "features.normalize needs all samples of the utterance: set features.normalize=false"
        return super().whole_utterance

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
    def waves_before(self, bank: FilterBank, waves: Tensor, lengths: Tensor) -> Tensor:
        if not self.normalize:
            return waves
        mask = frame_mask(lengths, waves.shape[1], waves.device)
        counts = lengths.to(waves.device).clamp(min=1).unsqueeze(1)
        mean = waves.masked_fill(~mask, 0.0).sum(1, keepdim=True) / counts
        centred = (waves - mean).masked_fill_(~mask, 0.0)
        variance = centred.square().sum(1, keepdim=True) / counts
        return centred * torch.rsqrt(variance + _EPSILON)

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        return bank.dithered(frames)

    @override
    def levels(self, bank: FilterBank, feats: Tensor) -> Tensor:
        return bank.log_energy(feats - feats.mean(-1, keepdim=True)).squeeze(-1)
