"""Speech as it comes, by a network whose outputs are frames: a state of bounded size from one chunk to the next.

    stream = FrameStream(Recognizer.load(folder), StreamConfig(chunk_ms=160))
    for samples in microphone:
        for result in stream.accept(samples):
            print(result.text, result.final)

The results are those of the whole recording, cut at the endpoints, with the same chunks: features, network and search
are the same, and go on where the chunk before has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from recognition.recognizer import Recognizer
from recognition.streaming import StreamResult
from recognition.systems.acoustic import FrameRecognizer
from speech.audio import AudioError, ResampledStream, check_rate, check_samples
from speech.decoding.base import DecoderStream
from speech.frontend import FeatureStream
from speech.hypotheses import DecodeError, Hypothesis
from speech.models.networks.base import AcousticModel
from speech.words import FrameTimes, timed_words


class EndpointConfig(BaseModel):
    """When a segment of a stream ends: the rules of Kaldi's online decoders (`OnlineEndpointConfig`), of blank frames.

    A frame is silent if the blank is its most probable token.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    after_speech_s: float = Field(default=1.0, ge=0)
    """Seconds of silence after words that end a segment; 0: no silence does."""
    at_start_s: float = Field(default=5.0, ge=0)
    """Seconds of silence without words after which the search starts again; 0: it never does."""
    longest_s: float = Field(default=20.0, gt=0, le=3600)
    """Seconds after which a segment ends in any case: the memory of the search grows with it."""


class StreamConfig(BaseModel):
    """How speech is recognized as it comes."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    chunk_ms: float = Field(default=640.0, gt=0, le=60_000)
    """Audio of a chunk in milliseconds, rounded to output frames: results are as late, and the better the longer it
    is."""
    endpoint: EndpointConfig = EndpointConfig()
    """When a segment ends."""


@dataclass
class _Segment:
    """What has been heard since the last endpoint."""

    search: DecoderStream
    start: int
    """Number of its first output frame in the stream."""
    log_probs: list[Tensor] = field(default_factory=list)
    frames: int = 0
    silent: int = 0
    """Silent frames at its end."""
    spoken: bool = False
    shown: list[str] = field(default_factory=list)
    """Words of the last result."""


class FrameStream:
    """Recognizes one recording while it goes on, see `recognition.streaming.SpeechStream`.

    Args:
        recognizer: With a network that streams, and a decoder that can go on.
        cfg: Chunks and endpoints.
        sample_rate: Of the samples, in Hz; by default the model's.

    Attributes:
        changed_words: Words of results that a later result of the same segment has changed or removed.
        shown_words: Words of final results. The quotient is the unstable partial word ratio (Shangguan et al. 2020,
            arXiv:2006.01416).

    Raises:
        ValueError: The recognizer needs whole utterances; the message has the remedy.
    """

    def __init__(
        self, recognizer: Recognizer[object], cfg: StreamConfig | None = None, sample_rate: int | None = None
    ) -> None:
        kind = recognizer.spec.system.kind
        if not isinstance(recognizer, FrameRecognizer) or not isinstance(recognizer.model, AcousticModel):
            raise DecodeError(
                f"a recognizer of kind {kind} recognizes whole utterances: train one of kind ctc to recognize speech "
                "as it comes"
            )
        self._recognizer, self.cfg = recognizer, cfg or StreamConfig()
        self._model, self._shift = recognizer.model, recognizer.frame_seconds
        chunk = max(1, round(self.cfg.chunk_ms / 1000 / self._shift))
        self._state = self._model.stream_state(1, chunk)
        self._features = FeatureStream(recognizer.frontend)
        rate = recognizer.spec.sample_rate
        self._resampled = ResampledStream(check_rate(sample_rate or rate, "the stream"), rate)
        self._segment = self._begin(0)
        self._frames = self._number = self.changed_words = self.shown_words = 0
        self._finished = False

    @property
    def num_bytes(self) -> int:
        """Memory that the network and the features keep; the search keeps what a segment has, which is limited."""
        return self._state.num_bytes + self._features.num_bytes

    def accept(self, samples: NDArray[np.floating]) -> list[StreamResult]:
        """Hear further samples.

        Args:
            samples: Samples [num_samples] in ±1, any number of them; integers are scaled.

        Returns:
            What is now recognized of segments of which it has changed, in order; the final result of a segment comes
            once, last.

        Raises:
            AudioError: They are no samples; the stream can go on without them.
            DecodeError: The network's outputs are not finite.
            ValueError: The stream is finished.
        """
        return self._hear(self._wave(samples), last=False)

    def finish(self) -> list[StreamResult]:
        """Hear that the recording has ended; returns and errors as for `accept`."""
        results = self._hear(torch.zeros(0), last=True)
        self._finished = True
        return [*results, *self._close()]

    def _wave(self, samples: NDArray[np.floating]) -> Tensor:
        wave = np.asarray(samples)
        if np.issubdtype(wave.dtype, np.integer):
            wave = wave / -float(np.iinfo(wave.dtype).min or -1)
        if wave.ndim != 1:
            text = f"samples of shape {wave.shape} are not those of one channel: give [num_samples]"
            raise AudioError(text, "unreadable")
        checked = torch.from_numpy(wave.astype(np.float32))
        check_samples(checked, "the stream")
        return checked

    def _hear(self, wave: Tensor, last: bool) -> list[StreamResult]:
        if self._finished:
            raise ValueError("this stream is finished: begin another one")
        with torch.inference_mode():
            wave = self._resampled.accept(wave, last).to(self._recognizer.device)
            feats = self._features.accept(wave)
            if last:
                feats = torch.cat((feats, self._features.finish()))
            log_probs, self._state = self._model.forward_chunk(feats[None], self._state, last)
        return self._searched(log_probs[0].cpu())

    def _searched(self, log_probs_TV: Tensor) -> list[StreamResult]:
        """Go on with the search in further output frames."""
        if bool(log_probs_TV.isnan().any()):
            raise DecodeError("log_probs contains NaN: the model has diverged, or its input was damaged")
        results: list[StreamResult] = []
        while len(log_probs_TV):
            count, ended = self._until_endpoint(log_probs_TV)
            self._segment.search.accept(log_probs_TV[:count].numpy())
            self._segment.log_probs.append(log_probs_TV[:count])
            self._frames += count
            results += self._close() if ended else self._partial()
            log_probs_TV = log_probs_TV[count:]
        return results

    def _until_endpoint(self, log_probs_TV: Tensor) -> tuple[int, bool]:
        """Frames until the segment ends, or all of them; and whether it ends."""
        segment, rules = self._segment, self.cfg.endpoint
        for count, token in enumerate(log_probs_TV.argmax(dim=1).tolist(), 1):
            blank = token == self._recognizer.tokenizer.blank
            segment.frames += 1
            segment.silent = segment.silent + 1 if blank else 0
            segment.spoken |= not blank
            limit = rules.after_speech_s if segment.spoken else rules.at_start_s
            silent = limit and segment.silent * self._shift >= limit
            if silent or segment.frames * self._shift >= rules.longest_s:
                return count, True
        return len(log_probs_TV), False

    def _partial(self) -> list[StreamResult]:
        """The result of the segment so far, if its words have changed."""
        best = self._segment.search.best()
        return [self._result(best, final=False)] if best.text.split() != self._segment.shown else []

    def _close(self) -> list[StreamResult]:
        """The final result of the segment, if it has had words; begins another one."""
        segment = self._segment
        hypothesis = segment.search.finish()
        results = [self._result(hypothesis, final=True)] if hypothesis.text or segment.shown else []
        self._number += len(results)
        self._segment = self._begin(self._frames)
        return results

    def _begin(self, start: int) -> _Segment:
        return _Segment(self._recognizer.decoder.stream(), start)

    def _result(self, hypothesis: Hypothesis, final: bool) -> StreamResult:
        segment, words = self._segment, hypothesis.text.split()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(segment.shown, words, strict=False)))
        self.changed_words += len(segment.shown) - same
        self.shown_words += len(words) if final else 0
        segment.shown = words
        start, end = segment.start * self._shift, self._frames * self._shift
        timed = timed_words(
            hypothesis,
            torch.cat(segment.log_probs),
            self._recognizer.tokenizer,
            FrameTimes(self._shift, start, start, end),
        )
        return StreamResult(self._number, hypothesis.text, tuple(timed), final, round(start, 3), round(end, 3))
