"""Recognition of speech as it comes: samples in, partial and final results out.

    stream = open_stream(transcriber.recognizer, transcribe, transcriber.vad, sample_rate=16000)
    for samples in microphone:
        for result in stream.accept(samples):
            print(result.text, "" if result.final else "…")
    results = stream.finish()

A network that streams reads chunk by chunk (`recognition.frame_stream`). `SegmentStream` works with every recognizer:
voice activity finds where speech ends, and the segment is then recognized like a file of its own. While it grows, it is
recognized again and again, for partial results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from speech.audio import check_rate, check_samples
from speech.decoding import DecodeError
from speech.hypotheses import Word
from speech.vad import Vad, cut_whole

if TYPE_CHECKING:
    from recognition.recognizer import Recognizer
    from recognition.transcriber import Transcript
    from speech.models.networks.base import Advance

Samples = NDArray[np.floating[Any]]
_CHUNK_MS = 640.0
"""Longest chunk of a network that streams."""
_LOOK_S = 0.3
"""Audio between two looks for speech."""
_CONTEXT_S = 3.0
"""Audio that is searched for speech at a look: a detector needs some context."""
_LEAD_S = 0.5
"""Audio kept before the start of speech, and after its end: more than what separates pieces of a file."""


@dataclass(frozen=True)
class StreamResult:
    """What has been recognized of a segment of speech."""

    segment: int
    """Number of the segment, from 0. A result replaces earlier ones of its segment."""
    text: str
    """The words of the segment so far."""
    words: tuple[Word, ...]
    """The words with times since the start of the stream, if the recognizer knows times."""
    final: bool
    """Whether no other result of the segment follows."""
    start_s: float
    """Start of the segment, in seconds since the start of the stream."""
    end_s: float
    """Its end, or what has been heard of it so far."""
    confidence: float = 0.0
    """Mean posterior of the tokens, 0 to 1."""


class SpeechStream(Protocol):
    """Recognizes one stream of audio; not safe for several threads at once."""

    @property
    def wanted(self) -> int:
        """Samples that it must hear, at least 1, before there can be further results: fewer are only kept."""

    def accept(self, samples: Samples) -> list[StreamResult]:
        """Hear more of the stream.

        Args:
            samples: Samples [num_samples] in ±1 that follow those before; any number.

        Returns:
            Finished segments, in order, and last a partial result if there is a new one.

        Raises:
            AudioError: Samples are not finite, or far beyond full scale.
            DecodeError: The model gives no usable scores.
        """

    def finish(self) -> list[StreamResult]:
        """End the stream; gives the results of what it has heard and not finished."""


STREAM_LIMITS = {"partial_s": (0.0, 60.0), "silence_s": (0.1, 2.5), "longest_s": (2.0, 30.0)}
"""Smallest and largest values of `StreamConfig`, in seconds."""


@dataclass(frozen=True)
class StreamConfig:
    """How a stream is cut into segments, and how often it gives partial results."""

    partial_s: float = 0.5
    """Seconds of audio between two partial results at least; 0 gives none."""
    silence_s: float = 0.6
    """Seconds of silence after speech that end a segment."""
    longest_s: float = 20.0
    """Seconds after which a segment is cut in its last pause."""

    def __post_init__(self) -> None:
        for name, (low, high) in STREAM_LIMITS.items():
            if not low <= getattr(self, name) <= high:  # false for NaN, too
                raise ValueError(f"{name} is {getattr(self, name)}: give a number from {low} to {high}")


def open_stream(
    recognizer: Recognizer[Any],
    transcribe: Callable[[Samples, int], Transcript],
    vad: Vad,
    sample_rate: int | None = None,
    cfg: StreamConfig | None = None,
    advance: Advance | None = None,
) -> SpeechStream:
    """A stream for a recognizer; the one place that chooses which kind.

    Args:
        recognizer: The recognizer.
        transcribe: Recognizes samples [num_samples] of a rate in Hz like a file, such as `Transcriber.transcribe`.
        vad: Finds speech.
        sample_rate: Of the stream, in Hz; the model's own by default.
        cfg: Segments and partial results.
        advance: As for `FrameStream`.

    Raises:
        AudioError: No speech has such a sample rate.
    """
    from recognition.frame_stream import EndpointConfig, FrameStream, FrameStreamConfig  # which imports this module

    rate, cfg = recognizer.spec.sample_rate if sample_rate is None else sample_rate, cfg or StreamConfig()
    chunks = FrameStreamConfig(
        chunk_ms=min(1000 * cfg.partial_s or _CHUNK_MS, _CHUNK_MS),
        endpoint=EndpointConfig(after_speech_s=cfg.silence_s, longest_s=cfg.longest_s),
        partials=cfg.partial_s > 0,
    )
    try:
        return FrameStream(recognizer, chunks, rate, advance)
    except ValueError:  # its network or its search needs whole utterances
        return SegmentStream(transcribe, vad, rate, cfg)


class SegmentStream:
    """Recognizes each segment of speech like a file; keeps no more than the longest segment in memory.

    Args:
        transcribe: As for `open_stream`.
        vad: Finds speech.
        sample_rate: In Hz.
        cfg: Segments and partial results.
    """

    def __init__(
        self,
        transcribe: Callable[[Samples, int], Transcript],
        vad: Vad,
        sample_rate: int,
        cfg: StreamConfig | None = None,
    ) -> None:
        self._transcribe, self._vad, self._cfg = transcribe, vad, cfg or StreamConfig()
        self._rate = check_rate(sample_rate, "the stream")
        self._look_size = max(1, int(_LOOK_S * self._rate))
        self._wave = np.zeros(0, dtype=np.float32)
        """The segment so far, or what may be the start of one."""
        self._start = 0
        """Samples of the stream before it."""
        self._speaking = False
        self._segment = 0
        self._unheard = 0
        """Samples since the last look for speech."""
        self._told = 0
        """Samples of the segment that the last partial result has heard."""
        self._partial = ""

    @property
    def wanted(self) -> int:
        """Samples, at least 1, until the next look for speech or the next partial result: fewer are only kept."""
        wanted = self._look_size - self._unheard
        if self._speaking and self._cfg.partial_s:
            wanted = min(wanted, math.ceil(self._cfg.partial_s * self._rate) - (len(self._wave) - self._told))
        return max(1, wanted)

    def accept(self, samples: Samples) -> list[StreamResult]:
        """Hear more of the stream; see `SpeechStream`."""
        samples = np.asarray(samples, dtype=np.float32)
        if samples.ndim != 1:
            raise ValueError(f"samples have shape {samples.shape}: give one channel [num_samples]")
        check_samples(torch.from_numpy(samples), "the stream")
        results: list[StreamResult] = []
        while len(samples):
            missing = self._look_size - self._unheard
            block, samples = samples[:missing], samples[missing:]
            self._wave = np.concatenate([self._wave, block])
            self._unheard += len(block)
            if self._unheard >= self._look_size:
                self._unheard = 0
                results += self._look()
        return results + self._partial_result()

    def finish(self) -> list[StreamResult]:
        """End the stream; see `SpeechStream`."""
        results = self._finals(len(self._wave)) if len(self._wave) else []
        self._speaking = False
        return results

    def _look(self) -> list[StreamResult]:
        """Look for the start or end of a segment in the last seconds."""
        tail = max(0, len(self._wave) - int(_CONTEXT_S * self._rate))
        speech = self._vad.speech(torch.from_numpy(self._wave[tail:]), self._rate)
        lead = int(_LEAD_S * self._rate)
        if not self._speaking:
            self._speaking = bool(speech)
            self._drop(max(0, tail + speech[0][0] - lead) if speech else tail)
            return []
        end = tail + (speech[-1][1] if speech else 0)
        if len(self._wave) - end >= self._cfg.silence_s * self._rate:
            self._speaking = False
            return self._finals(min(len(self._wave), end + lead))
        most = int(self._cfg.longest_s * self._rate)
        if len(self._wave) > most:
            return self._finals(len(cut_whole(self._vad, torch.from_numpy(self._wave), self._rate, most)[0]))
        return []

    def _drop(self, count: int) -> None:
        """Forget the first samples of the segment."""
        self._wave, self._start = self._wave[count:], self._start + count

    def _finals(self, count: int) -> list[StreamResult]:
        """The result of the segment, which ends after so many samples; none if it has no words and never had any."""
        result = self._recognized(self._wave[:count], final=True)
        spoken = bool(result.text or self._partial)
        self._drop(count)
        self._told, self._partial = 0, ""
        self._segment += spoken
        return [result] if spoken else []

    def _partial_result(self) -> list[StreamResult]:
        """A partial result, if enough has been heard since the last one and the words have changed."""
        if not self._speaking or not 0 < self._cfg.partial_s * self._rate <= len(self._wave) - self._told:
            return []
        result = self._recognized(self._wave, final=False)
        self._told = len(self._wave)
        if result.text == self._partial:
            return []
        self._partial = result.text
        return [result]

    def _recognized(self, wave: Samples, final: bool) -> StreamResult:
        transcript = self._transcribe(wave, self._rate)
        if transcript.error:
            raise DecodeError(transcript.error)
        begin = self._start / self._rate
        words = tuple(replace(word, start=word.start + begin) for word in transcript.words)
        end = begin + len(wave) / self._rate
        return StreamResult(self._segment, transcript.text, words, final, begin, end, transcript.confidence)
