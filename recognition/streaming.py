"""Recognition of speech as it comes: samples in, results out while the recording goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from speech.hypotheses import Word


@dataclass(frozen=True)
class StreamResult:
    """What is recognized of a segment of a stream."""

    segment: int
    """Number of the segment, from 0."""
    text: str
    """The words."""
    words: tuple[Word, ...]
    """The words with their times in the stream."""
    final: bool
    """Whether the segment has ended: later results are of other segments."""
    start_s: float
    """Start of the segment in the stream, seconds."""
    end_s: float
    """End of what has been heard of it, seconds."""


class SpeechStream(Protocol):
    """Recognizes one recording while it goes on."""

    def accept(self, samples: NDArray[np.floating]) -> list[StreamResult]:
        """Hear further samples [num_samples] in ±1; returns what changed, in order."""

    def finish(self) -> list[StreamResult]:
        """Hear that the recording has ended; returns what changed, in order."""
