"""Log-mel energies as Whisper reads them (Radford et al. 2022, arXiv:2212.04356; `WhisperFeatureExtractor`).

They differ from Kaldi's: frames are centred at their hop and longer than the filters are narrow, the window is Hann's,
the mel scale and the filters' heights are Slaney's, logarithms are decimal, at most 8 below the utterance's largest.
Whisper's own extractor pads each utterance with silence to 30 s; here, utterances keep their length, and the frames
that they have are the same. Those of the silence follow from them (`followed_by_silence`), so that they are neither
stored nor augmented: a model adds them if it is to hear them.
"""

from __future__ import annotations

import math
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

_RANGE = 8.0
"""Decades below an utterance's largest energy at which energies are floored."""
_FLOOR = 1e-10
"""Smallest energy."""
_WHOLE_S = 30
"""Whisper's extractor follows utterances shorter than this with zeros; longer ones are mirrored at their end, too."""
_BREAK_HZ, _HZ_PER_MEL, _MELS_PER_LOG = 1000.0, 200.0 / 3, 27.0 / math.log(6.4)
"""Slaney's mel scale is linear below 1,000 Hz and logarithmic above."""


def slaney_hz(mels: Tensor) -> Tensor:
    """Slaney's mels to Hz."""
    start = _BREAK_HZ / _HZ_PER_MEL
    return torch.where(mels < start, mels * _HZ_PER_MEL, _BREAK_HZ * torch.exp((mels - start) / _MELS_PER_LOG))


def slaney_mel(hz: float) -> float:
    """A frequency in Hz to Slaney's mels."""
    return hz / _HZ_PER_MEL if hz < _BREAK_HZ else _BREAK_HZ / _HZ_PER_MEL + math.log(hz / _BREAK_HZ) * _MELS_PER_LOG


def slaney_filters(num_mels: int, fft_size: int, sample_rate: int) -> Tensor:
    """Triangular filters of equal area from 0 Hz to half the sample rate: float64 `[fft_size // 2 + 1, num_mels]`.

    Raises:
        FeatureError: A filter is narrower than the resolution of the Fourier transform.
    """
    edges = slaney_hz(torch.linspace(0, slaney_mel(sample_rate / 2), num_mels + 2, dtype=torch.float64))
    bins = torch.linspace(0, sample_rate / 2, fft_size // 2 + 1, dtype=torch.float64).unsqueeze(1)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins - left) / (centre - left), (right - bins) / (right - centre)
    weights = torch.minimum(rising, falling).clamp(min=0) * (2 / (right - left))
    if not (weights.sum(0) > 0).all():
        raise FeatureError(
            f"{num_mels} filters up to {sample_rate / 2:g} Hz are narrower than the resolution of "
            f"{sample_rate / fft_size:g} Hz: lower features.num_mels or raise features.frame_ms"
        )
    return weights


def followed_by_silence(feats: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Features of utterances that silence follows, as if waveforms had been padded with zeros.

    Args:
        feats: `[B, T, F]`, with `tail`; what stands beyond an utterance may have any values.
        lengths: `[B]`, frames of each utterance; of longer ones than `total`, the rest is cut off.
        total: Frames of each utterance with the silence.

    Returns:
        `[B, total, F]`.
    """
    feats = torch.nn.functional.pad(feats, (0, 0, 0, total - feats.shape[1]))
    own = frame_mask(lengths, total, feats.device).unsqueeze(2)
    return torch.where(own, feats, _silence_beside(feats, own))


def _silence_beside(feats: Tensor, own: Tensor) -> Tensor:
    """The value that silence has beside utterances: `[B, 1, 1]`; `own` `[B, T, 1]` is the mask of their frames."""
    largest = feats.masked_fill(~own, -math.inf).amax((1, 2), keepdim=True)
    return (largest - _RANGE / 4).clamp(min=(math.log10(_FLOOR) + 4) / 4)


class WhisperLogMelConfig(FeatureConfig):
    """Log-mel energies of Whisper's definition, for Whisper's encoder; 16 kHz."""

    kind: Literal["whisper_logmel"] = "whisper_logmel"
    tiny: ClassVar[dict[str, Any]] = {"num_mels": 15}
    num_mels: int = Field(default=80, ge=3, le=1024)
    """Number of filters: 80, or 128 for the models `large-v3` and those made from it."""
    cmvn: Literal["none", "global", "speaker", "utterance", "sliding"] = "none"
    """Normalization of mean and variance; Whisper's encoder expects none."""
    tail: bool = False
    """Keep the one or two frames after an utterance's end that its last samples still reach into, for `model.silence`;
    otherwise there are as many frames as whole hops."""

    @property
    @override
    def whole_utterance(self) -> str:
        return f"features.kind={self.kind} floors energies by the utterance's largest: set features.kind=logmel"

    @property
    @override
    def width(self) -> int:
        return self.num_mels

    @override
    def tables(self, sample_rate: int) -> dict[str, Tensor]:
        size = int(sample_rate * 0.001 * self.frame_ms)
        filters = slaney_filters(self.num_mels, size, sample_rate)
        return {"window": torch.hann_window(size, dtype=torch.float64), "filters": filters}

    @override
    def num_frames(self, bank: FilterBank, lengths: Tensor) -> Tensor:
        hop = bank.hop_length
        frames = torch.div(lengths, hop, rounding_mode="floor")
        if not self.tail:
            return frames
        reached = torch.div(lengths + bank.frame_length // 2 + hop - 1, hop, rounding_mode="floor")
        reached = reached.clamp(max=_WHOLE_S * bank.sample_rate // hop).masked_fill(lengths == 0, 0)
        return frames.maximum(reached)

    @override
    def waves_before(self, bank: FilterBank, waves: Tensor, lengths: Tensor) -> Tensor:
        half, whole = bank.frame_length // 2, _WHOLE_S * bank.sample_rate
        waves = waves.masked_fill(~frame_mask(lengths, waves.shape[1], waves.device), 0.0)
        longest = waves.shape[1]
        # enough to be mirrored at the start, however short, and for all frames
        waves = torch.nn.functional.pad(waves, (0, bank.frame_length + 1))
        if longest > whole - half:
            waves = self._mirrored_ends(waves, lengths, half, whole)
        return torch.nn.functional.pad(waves, (half, 0), mode="reflect")

    @staticmethod
    def _mirrored_ends(waves: Tensor, lengths: Tensor, half: int, whole: int) -> Tensor:
        """Mirror the last `half` samples of utterances that have `whole` of them with the zeros after them, or more."""
        lengths = lengths.to(waves.device).clamp(min=whole).unsqueeze(1)
        waves = torch.nn.functional.pad(waves, (0, max(0, whole + half - waves.shape[1])))
        places = lengths + torch.arange(half, device=waves.device)  # in the zeros after each utterance
        return waves.scatter(1, places, waves.gather(1, 2 * lengths - 2 - places))

    @override
    def compute(self, bank: FilterBank, frames: Tensor) -> Tensor:
        spectrum = torch.view_as_real(torch.fft.rfft(bank.dithered(frames) * bank.window))
        power = spectrum[..., 0].square().addcmul_(spectrum[..., 1], spectrum[..., 1])
        return torch.matmul(power, bank.filters).clamp_(min=_FLOOR).log10_()

    @override
    def finished(self, feats: Tensor, num_frames: Tensor) -> Tensor:
        if not feats.numel():
            return feats
        outside = ~frame_mask(num_frames, feats.shape[1], feats.device).unsqueeze(2)
        largest = feats.masked_fill(outside, math.log10(_FLOOR)).amax((1, 2), keepdim=True)
        return torch.maximum(feats, largest - _RANGE).add_(4.0).div_(4.0).masked_fill_(outside, 0.0)

    @override
    def silence(self, bank: FilterBank, feats: Tensor, num_frames: Tensor) -> Tensor:
        feats = torch.nn.functional.pad(feats, (0, 0, 0, 1))  # one frame at least: there may be none
        own = frame_mask(num_frames, feats.shape[1], feats.device).unsqueeze(2)
        return _silence_beside(feats, own).expand(-1, 1, feats.shape[2])

    @override
    def levels(self, bank: FilterBank, feats: Tensor) -> Tensor:
        return torch.logsumexp((feats * 4.0 - 4.0) * math.log(10), dim=-1)
