"""Voice activity by Silero VAD, a small recurrent network whose weights come with its package (MIT licence)."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from devices.compute_threads import one_thread
from speech.audio import resample
from speech.vad.base import Interval, Vad, VadConfig
from speech.vad.levels import leveled

_FRAMES = {8000: 256, 16000: 512}
"""Samples of a frame, 32 ms, at the sample rates that the network knows."""
_AT_ONCE = 64
"""Frames that are computed together: more gain nothing, and memory grows with them."""


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
        find, networks = _silero()
        rate = sample_rate if sample_rate in networks else 16000
        with one_thread(), torch.inference_mode():
            wave_at_rate = resample(leveled(wave, sample_rate), sample_rate, rate)
            intervals = find(
                networks[rate].probabilities(wave_at_rate).tolist(),
                sampling_rate=rate,
                audio_length_samples=len(wave_at_rate),
                threshold=self.cfg.threshold,
                min_speech_duration_ms=int(1000 * self.cfg.min_speech_s),
                speech_pad_ms=0,
            )
        times = [[min(len(wave), part[edge] * sample_rate // rate) for edge in ("start", "end")] for part in intervals]
        return [(start, end) for start, end in times if start < end]


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("silero_vad") is not None


class _Network:
    """The package's network for a sample rate, for many frames at once.

    Its function goes from frame to frame, although only the LSTM remembers anything: that takes five to eight times as
    long. What it keeps between two calls is kept here by the caller, so that several threads can compute.

    Args:
        network: The package's, as TorchScript.
        frame: Samples of a frame.
    """

    def __init__(self, network: Any, frame: int) -> None:
        self._network, self._frame, self._before = network, frame, int(network.context_size_samples)
        cell = network.decoder.rnn
        hidden, inputs = cell.weight_hh.shape[1], cell.weight_ih.shape[1]
        self._lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self._lstm.load_state_dict({name: getattr(cell, name.removesuffix("_l0")) for name in self._lstm.state_dict()})

    def probabilities(self, wave: Tensor) -> Tensor:
        """Probability of speech in each frame of a waveform [samples], of which the last is filled with zeros."""
        padded = nn.functional.pad(wave, (self._before, -len(wave) % self._frame))
        if len(padded) == self._before:
            return wave.new_zeros(0)
        memory, parts = None, []
        frames = padded.unfold(0, self._before + self._frame, self._frame)
        for some in torch.split(frames, _AT_ONCE):
            encoded = self._network.encoder(self._network.run_extractors(some)).squeeze(-1)
            hidden, memory = self._lstm(encoded[None], memory)
            parts.append(self._network.decoder.decoder(hidden[0].unsqueeze(-1)).flatten())
        return torch.cat(parts)


@cache
def _silero() -> tuple[Callable[..., list[dict[str, int]]], dict[int, _Network]]:
    """The package's function that finds intervals of speech, and its network by sample rate."""
    threads = torch.get_num_threads()
    from silero_vad import get_speech_timestamps_from_probs, load_silero_vad

    torch.set_num_threads(threads)  # importing the package sets one
    both = load_silero_vad()
    networks = {8000: both._model_8k, 16000: both._model}
    return get_speech_timestamps_from_probs, {rate: _Network(networks[rate], size) for rate, size in _FRAMES.items()}
