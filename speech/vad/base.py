"""The interface of voice activity detectors: samples in, intervals of speech out."""

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from configurable.choices import Choice

Interval = tuple[int, int]
"""First sample, and the one after the last."""


class VadConfig(Choice, ABC):
    """Base class of the detectors' configurations.

    Attributes:
        packages: Packages that the detector needs besides those of every recognizer.
    """

    packages: ClassVar[tuple[str, ...]] = ()

    pause_s: float | None = Field(default=None, ge=0)
    """Pauses that are at least this long, in seconds, separate pieces that are recognized on their own; by default as
    long as suits the model, 0.3 for most."""
    pad_s: float = Field(default=0.3, ge=0)
    """Seconds of the pause that stay before and after each piece, so that soft sounds at its ends are not lost."""

    @abstractmethod
    def build(self) -> "Vad":
        """Make the detector."""


class Vad(ABC):
    """Finds speech in a recording.

    Args:
        cfg: Its configuration.
    """

    def __init__(self, cfg: VadConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def speech(self, wave: Tensor, sample_rate: int) -> list[Interval]:
        """Find the speech in a waveform.

        Args:
            wave: Samples [num_samples] in ±1.
            sample_rate: In Hz.

        Returns:
            Disjoint intervals in order, within the waveform.
        """
