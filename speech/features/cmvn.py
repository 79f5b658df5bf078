"""Cepstral mean and variance normalization (Viikki & Laurila 1998) by training set, speaker or utterance.

Statistics are sums in float64 that can be added over shards, speakers and processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from configurable.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


STD_FLOOR = 1e-3
"""Smallest standard deviation, so that constant features are not amplified."""
_LOUDEST = 10


class CmvnError(ValueError):
    """Statistics are empty, damaged, or do not match the dimension of the features."""


def frame_mask(lengths: Tensor, num_frames: int, device: torch.device | None = None) -> Tensor:
    """Mask of the frames that are not padding: bool `[B, num_frames]`, on `device` (default: that of `lengths`)."""
    lengths = lengths.to(device or lengths.device)
    return torch.arange(num_frames, device=lengths.device) < lengths.unsqueeze(1)


def loud_frames(levels: Tensor, lengths: Tensor, range_db: float) -> Tensor:
    """Mask of the frames within `range_db` of the utterance's loudest ones: speech rather than pauses.

    The reference is the tenth loudest frame, which neither clicks nor the amount of silence affect.

    Args:
        levels: `[B, T]`, natural logarithms of the frames' energies; padding may contain any values.
        lengths: `[B]`, frames of each utterance.
        range_db: how far below the reference a frame of speech may be, in dB.

    Returns:
        bool `[B, T]`, false in the padding.
    """
    inside = frame_mask(lengths, levels.shape[1], levels.device)
    if levels.shape[1] == 0:
        return inside
    return inside & (levels >= tenth_loudest(levels, lengths) - range_db * math.log(10) / 10)


def tenth_loudest(levels: Tensor, lengths: Tensor) -> Tensor:
    """Level of each utterance's tenth loudest frame, or of its softest if it has fewer: `[B, 1]`.

    Args:
        levels: `[B, T]`, in any unit; padding may contain any values.
        lengths: `[B]`, frames of each utterance.
    """
    inside = frame_mask(lengths, levels.shape[1], levels.device)
    # padded, so that as many can be taken of any number of frames: an exported graph takes a constant number
    heard = torch.nn.functional.pad(levels.masked_fill(~inside, -math.inf), (0, _LOUDEST), value=-math.inf)
    loudest = heard.topk(_LOUDEST, dim=1).values
    place = lengths.to(levels.device).clamp(1, loudest.shape[1]).unsqueeze(1) - 1
    return loudest.gather(1, place)


class CmvnStats:
    """Count, sum and sum of squares of feature frames.

    Args:
        dim: number of features in a frame, F.

    Attributes:
        count: number of frames.
        sum: float64 `[F]`.
        sumsq: float64 `[F]`.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self.sum = torch.zeros(dim, dtype=torch.float64)
        self.sumsq = torch.zeros(dim, dtype=torch.float64)

    @property
    def dim(self) -> int:
        """Number of features in a frame."""
        return len(self.sum)

    def add(self, feats: Tensor, lengths: Tensor | None = None) -> CmvnStats:
        """Add the frames of a batch `[B, T, F]` with `lengths` `[B]`, or without lengths all frames of `[..., F]`.

        Returns:
            These statistics.

        Raises:
            CmvnError: the dimension of the features does not match.
        """
        if feats.shape[-1] != self.dim:
            raise CmvnError(f"statistics of {self.dim} features cannot take frames of {feats.shape[-1]}")
        frames = feats.detach().to(torch.float64)
        if lengths is not None:
            # Select frames instead of multiplying by the mask: padding may contain NaN.
            frames = frames[frame_mask(lengths, feats.shape[1], feats.device)]
        frames = frames.reshape(-1, self.dim)
        self.count += len(frames)
        self.sum += frames.sum(0).cpu()
        self.sumsq += frames.square().sum(0).cpu()
        return self

    def __add__(self, other: CmvnStats) -> CmvnStats:
        if self.dim != other.dim:
            raise CmvnError(f"statistics of {self.dim} and of {other.dim} features cannot be added")
        total = CmvnStats(self.dim)
        total.count = self.count + other.count
        total.sum = self.sum + other.sum
        total.sumsq = self.sumsq + other.sumsq
        return total

    @property
    def mean(self) -> Tensor:
        """Mean, float32 `[F]`.

        Raises:
            CmvnError: no frame has been added.
        """
        return self._mean().float()

    @property
    def std(self) -> Tensor:
        """Standard deviation, at least `STD_FLOOR`, float32 `[F]`.

        Raises:
            CmvnError: no frame has been added.
        """
        variance = (self.sumsq / max(self.count, 1) - self._mean().square()).clamp(min=0)
        return variance.sqrt().clamp(min=STD_FLOOR).float()

    def _mean(self) -> Tensor:
        if self.count == 0:
            raise CmvnError("no frame has been added to these statistics: was every utterance shorter than a frame?")
        return self.sum / self.count

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON value, exact in float64."""
        return {"count": self.count, "sum": self.sum.tolist(), "sumsq": self.sumsq.tolist()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> CmvnStats:
        """The inverse of `to_dict`.

        Raises:
            CmvnError: a field is missing or damaged, or the lengths of the fields differ.
        """
        try:
            count, sums, squares = int(value["count"]), _vector(value["sum"]), _vector(value["sumsq"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CmvnError(f"these are not CMVN statistics ({error!r}): compute them again") from error
        if count < 0 or len(sums) != len(squares) or not torch.isfinite(sums + squares).all():
            raise CmvnError("CMVN statistics are damaged (count, sum and sumsq do not match): compute them again")
        stats = cls(len(sums))
        stats.count, stats.sum, stats.sumsq = count, sums, squares
        return stats


def _vector(values: list[float]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def normalize_frames(frames: Tensor, mean: Tensor, std: Tensor, floor: float) -> Tensor:
    """Normalize frames without padding.

    Args:
        frames: `[..., F]`.
        mean: `[F]`.
        std: `[F]`.
        floor: Features are at least this many standard deviations below the mean; 0: no floor.

    Returns:
        `[..., F]`.
    """
    normalized = (frames - mean) / std
    return normalized.clamp(min=-floor) if floor else normalized


def normalize(feats: Tensor, lengths: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Subtract the mean, divide by the standard deviation, set padding to zero.

    Args:
        feats: `[B, T, F]`.
        lengths: `[B]`, frames of each utterance.
        mean: `[F]`, or one for each utterance `[B, F]`.
        std: like `mean`.

    Returns:
        `[B, T, F]`.

    Raises:
        CmvnError: the dimensions of features and statistics differ.
    """
    if mean.shape[-1] != feats.shape[-1] or std.shape[-1] != feats.shape[-1]:
        raise CmvnError(f"CMVN statistics of {mean.shape[-1]} features do not match frames of {feats.shape[-1]}")
    mean, scale = mean.to(feats), std.to(feats).clamp(min=STD_FLOOR).reciprocal()
    if mean.dim() == 2:
        mean = mean.unsqueeze(1)
    if scale.dim() == 2:
        scale = scale.unsqueeze(1)
    padding = ~frame_mask(lengths, feats.shape[1], feats.device)
    return (feats - mean).mul_(scale).masked_fill_(padding.unsqueeze(2), 0.0)


def utterance_stats(feats: Tensor, lengths: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each utterance.

    Args:
        feats: `[B, T, F]`.
        lengths: `[B]`, frames of each utterance.
        counted: bool `[B, T]`, the frames to use; by default all frames of an utterance.

    Returns:
        Means and standard deviations (at least `STD_FLOOR`), `[B, F]` each; 0 and 1 for an utterance without frames.
    """
    mask = (frame_mask(lengths, feats.shape[1], feats.device) if counted is None else counted).unsqueeze(2)
    numbers = lengths.to(feats.device) if counted is None else counted.sum(1)
    counts = numbers.clamp(min=1).unsqueeze(1).to(feats.dtype)
    mean = torch.where(mask, feats, 0.0).sum(1) / counts
    # Two passes: in float32 the difference of two large squares would lose the variance.
    variance = torch.where(mask, feats - mean.unsqueeze(1), 0.0).square().sum(1) / counts
    std = variance.sqrt().clamp(min=STD_FLOOR)
    return mean, torch.where(numbers.unsqueeze(1) > 0, std, 1.0)
