"""Voice activity by Silero VAD, a small recurrent network whose weights come with its package (MIT licence)."""

import threading
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from devices.compute_threads import one_thread
from speech.audio import resample
from speech.vad.base import Interval, Vad, VadConfig
from speech.vad.levels import leveled

_RATES = (8000, 16000)
_ONE_AT_A_TIME = threading.Lock()
"""The network keeps a state from frame to frame, and a server recognizes in several threads."""


class SileroConfig(VadConfig):
    """Voice activity by Silero VAD."""

    kind: Literal["silero"] = "silero"
    threshold: float = Field(default=0.4, gt=0, lt=1)
    """Probability from which a frame of 32 ms counts as speech."""
    min_speech_s: float = Field(default=0.1, ge=0)
    """Shorter speech is ignored."""

    packages: ClassVar[tuple[str, ...]] = ("silero-vad",)

    @override
    def build(self) -> Vad:
        return SileroVad(self)


class SileroVad(Vad):
    """Silero VAD 6 (https://github.com/snakers4/silero-vad), for 8 and 16 kHz; other rates are resampled to 16 kHz."""

    cfg: SileroConfig

    def __init__(self, cfg: SileroConfig) -> None:
        if not is_installed():
            raise ValueError(
                "voice activity detection by silero needs the package silero-vad: `pip install silero-vad`, or choose "
                "the detector energy"
            )
        super().__init__(cfg)

    def speech(self, wave: Tensor, sample_rate: int) -> list[Interval]:
        """The intervals that the network takes for speech; it would miss quiet speech, which is amplified therefore."""
        find, network = _silero()
        rate = sample_rate if sample_rate in _RATES else 16000
        with _ONE_AT_A_TIME, one_thread(), torch.inference_mode():
            intervals = find(
                resample(leveled(wave, sample_rate), sample_rate, rate),
                network,
                sampling_rate=rate,
                threshold=self.cfg.threshold,
                min_speech_duration_ms=int(1000 * self.cfg.min_speech_s),
                speech_pad_ms=0,
            )
        times = [[min(len(wave), part[edge] * sample_rate // rate) for edge in ("start", "end")] for part in intervals]
        return [(start, end) for start, end in times if start < end]


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("silero_vad") is not None


@cache
def _silero() -> tuple[Any, Any]:
    """The package's function and its network."""
    threads = torch.get_num_threads()
    from silero_vad import get_speech_timestamps, load_silero_vad

    torch.set_num_threads(threads)  # importing the package sets one
    return get_speech_timestamps, load_silero_vad()
