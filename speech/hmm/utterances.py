"""Utterances that GMM-HMMs are trained on and aligned, and shards of them that are processed together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from speech.hmm.model import FeatureChain

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")
Adaptations = Mapping[str, Tensor]
"""fMLLR transforms by speaker."""
SHARD_FRAMES = 200_000
"""Frames of a shard, the unit of parallel work: half an hour of speech, whose features take about 30 MB."""


class TrainingUtterance(Protocol):
    """A transcribed utterance; its features may be read only when they are used."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def speaker(self) -> str:
        """Its speaker."""

    @property
    def words(self) -> tuple[str, ...]:
        """The transcript."""

    @property
    def num_frames(self) -> int:
        """Number of frames, T."""

    @property
    def features(self) -> Tensor:
        """float32 `[T, F]`, static and normalized."""


@dataclass(frozen=True)
class InMemoryUtterance:
    """An utterance with its features in memory.

    Attributes:
        id: Its name.
        speaker: Its speaker.
        features: float32 `[T, F]`, normalized.
        words: The transcript.
    """

    id: str
    speaker: str
    features: Tensor
    words: tuple[str, ...]

    @property
    def num_frames(self) -> int:
        """Number of frames, T."""
        return len(self.features)


@dataclass
class Shard:
    """Utterances that are processed together.

    The features of the last chain and adaptations are kept.

    Attributes:
        utterances: The utterances.
        device: Device for the computation on frames.
    """

    utterances: Sequence[TrainingUtterance]
    device: str = "cpu"
    _key: tuple[FeatureChain, Adaptations] | None = field(default=None, repr=False)
    _features: list[Tensor] = field(default_factory=list, repr=False)

    def features(self, chain: FeatureChain, adaptations: Adaptations | None = None) -> list[Tensor]:
        """Transformed features of each utterance; without a transform, a speaker's features are not adapted."""
        known = adaptations or {}
        if self._key is None or not _same(self._key, (chain, known)):
            self._features = [
                chain(utterance.features.to(self.device), known.get(utterance.speaker)) for utterance in self.utterances
            ]
            self._key = (chain, known)
        return self._features

    def part(self, utterances: Sequence[TrainingUtterance]) -> Shard:
        """Some of the utterances, on the same device."""
        return Shard(utterances, self.device)


Mapper = Callable[[Callable[[Shard], T], Sequence[Shard]], Iterable[T]]
"""Applies a function to all shards, here or elsewhere; like the built-in `map`."""


def _same(first: tuple[FeatureChain, Adaptations], second: tuple[FeatureChain, Adaptations]) -> bool:
    """Whether features are the same: by value, since another process has copies of the same transforms."""
    (chain, adaptations), (other, others) = first, second
    if chain.context != other.context or (chain.matrix is None) != (other.matrix is None):
        return False
    if (
        chain.matrix is not None
        and other.matrix is not None
        and not torch.equal(chain.matrix, other.matrix.to(chain.matrix))
    ):
        return False
    return adaptations.keys() == others.keys() and all(torch.equal(adaptations[who], others[who]) for who in others)


def by_speaker(speakers: Iterable[S]) -> dict[S, list[int]]:
    """Positions of each speaker's utterances."""
    places: dict[S, list[int]] = {}
    for place, speaker in enumerate(speakers):
        places.setdefault(speaker, []).append(place)
    return places


def make_shards(utterances: Iterable[TrainingUtterance], frames: int | None = None, device: str = "cpu") -> list[Shard]:
    """Divide utterances into shards of about this many frames.

    Args:
        utterances: The utterances.
        frames: Frames of a shard; by default `SHARD_FRAMES`.
        device: Device for the computation on frames.
    """
    shards: list[list[TrainingUtterance]] = [[]]
    count = 0
    for utterance in utterances:
        if count >= (frames or SHARD_FRAMES):
            shards.append([])
            count = 0
        shards[-1].append(utterance)
        count += utterance.num_frames
    return [Shard(part, device) for part in shards if part]
