"""Speech as it comes, by a network whose outputs are frames: a state of bounded size from one chunk to the next.

    stream = FrameStream(Recognizer.load(folder), FrameStreamConfig(chunk_ms=160))
    for samples in microphone:
        for result in stream.accept(samples):
            print(result.text, result.final)

The results are those of the whole recording, cut at the endpoints, with the same chunks: features, network and search
are the same, and go on where the chunk before has ended. A chunk is too small for several threads: a stream computes in
one, and streams in threads of their own use the cores side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from configurable.configuration import Configuration
from devices.compute_threads import one_thread
from recognition.recognizer import Recognizer
from recognition.streaming import StreamResult
from recognition.systems.acoustic import FrameRecognizer
from recognition.systems.transducer import TransducerRecognizer
from speech.audio import AudioError, ResampledStream, check_rate, check_samples
from speech.frontend import FeatureStream
from speech.hypotheses import DecodeError, Hypothesis, Word
from speech.models.networks.base import AcousticModel, Advance
from speech.words import FrameTimes, placed_words, timed_words


class EndpointConfig(Configuration):
    """When a segment of a stream ends: the rules of Kaldi's online decoders (`OnlineEndpointConfig`), of silent frames.

    A frame is silent if the blank is its most probable token, or silence has its most probable state.
    """

    after_speech_s: float = Field(default=1.0, ge=0)
    """Seconds of silence after words that end a segment; 0: no silence does."""
    at_start_s: float = Field(default=5.0, ge=0)
    """Seconds of silence without words after which the search starts again; 0: it never does."""
    longest_s: float = Field(default=20.0, gt=0, le=3600)
    """Seconds after which a segment ends in any case: the memory of the search grows with it."""


class FrameStreamConfig(Configuration):
    """How speech is recognized as it comes."""

    chunk_ms: float = Field(default=640.0, gt=0, le=60_000)
    """Audio of a chunk in milliseconds, rounded to output frames: results are as late, and the better the longer it
    is."""
    endpoint: EndpointConfig = EndpointConfig()
    """When a segment ends."""
    partials: bool = True
    """Whether there are results of segments that have not ended."""


class _FrameSearch(ABC):
    """The search in one segment."""

    @abstractmethod
    def step(self, frame: Tensor) -> bool:
        """Go on with what the network puts out for a frame; returns whether it is silent."""

    @abstractmethod
    def best(self, final: bool) -> Hypothesis:
        """The best hypothesis of the frames so far; `final`: nothing follows."""

    @abstractmethod
    def words(self, hypothesis: Hypothesis, times: FrameTimes) -> list[Word]:
        """The words of a hypothesis with their times."""


class _PosteriorSearch(_FrameSearch):
    """Of log posteriors of tokens or states; what comes between two results is searched at once."""

    def __init__(self, recognizer: FrameRecognizer) -> None:
        self._tokenizer, self._search = recognizer.tokenizer, recognizer.decoder.stream()
        self._silence = recognizer.decoder.silence
        self._log_probs: list[Tensor] = []
        self._searched = 0

    @override
    def step(self, frame: Tensor) -> bool:
        self._log_probs.append(frame)
        return int(frame.argmax()) in self._silence

    @override
    def best(self, final: bool) -> Hypothesis:
        if new := self._log_probs[self._searched :]:
            self._search.accept(torch.stack(new).numpy())
            self._searched += len(new)
        return self._search.finish() if final else self._search.best()

    @override
    def words(self, hypothesis: Hypothesis, times: FrameTimes) -> list[Word]:
        return timed_words(hypothesis, torch.stack(self._log_probs), self._tokenizer, times)


class _TransducerSearch(_FrameSearch):
    """Of an encoder's frames."""

    def __init__(self, recognizer: TransducerRecognizer) -> None:
        self._model, self._search = recognizer.model, recognizer.stream()

    @override
    def step(self, frame: Tensor) -> bool:
        with torch.inference_mode():
            posteriors = self._model.posteriors(frame[None])
        return self._search.step(frame, None if posteriors is None else posteriors[0])

    @override
    def best(self, final: bool) -> Hypothesis:
        return self._search.best(final)

    @override
    def words(self, hypothesis: Hypothesis, times: FrameTimes) -> list[Word]:
        confidences = hypothesis.word_confidences
        return placed_words(hypothesis.text, hypothesis.word_frames, confidences, times)


@dataclass
class _Segment:
    """What has been heard since the last endpoint."""

    search: _FrameSearch
    start: int
    """Number of its first output frame in the stream."""
    frames: int = 0
    silent: int = 0
    """Silent frames at its end."""
    spoken: bool = False
    shown: list[str] = field(default_factory=list)
    """Words of the last result."""


def streaming_encoder(recognizer: Recognizer[object]) -> AcousticModel:
    """The network of a recognizer that computes chunk by chunk, if its configuration lets it.

    Raises:
        DecodeError: It has none; the message has the remedy.
    """
    encoder: object = None
    if isinstance(recognizer, FrameRecognizer):
        encoder = recognizer.model
    elif isinstance(recognizer, TransducerRecognizer):
        encoder = recognizer.model.encoder
    if not isinstance(encoder, AcousticModel):
        raise DecodeError(
            f"a recognizer of kind {recognizer.spec.system.kind} recognizes whole utterances: train one of kind "
            "ctc, transducer or hybrid to recognize speech as it comes"
        )
    return encoder


class FrameStream:
    """Recognizes one recording while it goes on, see `recognition.streaming.SpeechStream`.

    Args:
        recognizer: With a network that streams, and a decoder that can go on.
        cfg: Chunks and endpoints.
        sample_rate: Of the samples, in Hz; by default the model's.
        advance: Computes the network's chunks, such as `ChunkBatches.advance`, which several streams share.

    Attributes:
        changed_words: Words of results that a later result of the same segment has changed or removed.
        shown_words: Words of final results. The quotient is the unstable partial word ratio (Shangguan et al. 2020,
            arXiv:2006.01416).

    Raises:
        ValueError: The recognizer needs whole utterances; the message has the remedy.
    """

    def __init__(
        self,
        recognizer: Recognizer[object],
        cfg: FrameStreamConfig | None = None,
        sample_rate: int | None = None,
        advance: Advance | None = None,
    ) -> None:
        self._new_search: Callable[[], _FrameSearch]
        encoder = streaming_encoder(recognizer)
        if isinstance(recognizer, FrameRecognizer):
            self._new_search, outputs = partial(_PosteriorSearch, recognizer), encoder.forward_chunk
        else:
            assert isinstance(recognizer, TransducerRecognizer)
            self._new_search, outputs = partial(_TransducerSearch, recognizer), encoder.chunk_outputs
        self._encoder, self._outputs = encoder, partial(outputs, advance=advance)
        self._device, self._shift, self.cfg = recognizer.device, recognizer.frame_seconds, cfg or FrameStreamConfig()
        # searches of posteriors read them on the host: one copy for a chunk, not one for each frame
        self._searched_on = torch.device("cpu") if isinstance(recognizer, FrameRecognizer) else recognizer.device
        self._state = encoder.stream_state(1, max(1, round(self.cfg.chunk_ms / 1000 / self._shift)))
        self._features = FeatureStream(recognizer.frontend)
        rate = recognizer.spec.sample_rate
        self._resampled = ResampledStream(check_rate(sample_rate or rate, "the stream"), rate)
        self._waiting: list[Tensor] = []
        self._heard = self._read = 0
        self._due = self._next_chunk()
        self._segment = self._begin(0)
        self._frames = self._number = self.changed_words = self.shown_words = 0
        self._finished = False

    @property
    def num_bytes(self) -> int:
        """Memory that the network and the features keep; the search keeps what a segment has, which is limited."""
        waiting = sum(wave.untyped_storage().nbytes() for wave in self._waiting)
        return self._state.num_bytes + self._features.num_bytes + waiting

    @property
    def wanted(self) -> int:
        """Samples, at least 1, that complete the next chunk: fewer are only kept."""
        return max(1, self._resampled.missing_samples(self._due - self._heard))

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
        with one_thread():
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
        with one_thread():
            with torch.inference_mode():
                self._waiting.append(self._resampled.accept(wave, last))
                self._heard += len(self._waiting[-1])
                if not last and self._heard < self._due:
                    return []  # to compute features and frames in small parts would take twice the time
                outputs = self._chunks(last)
            return self._searched(outputs.to(self._searched_on))

    def _chunks(self, last: bool) -> Tensor:
        """What the network puts out for what has been heard since the last chunk [frames, ...]."""
        wave = torch.cat(self._waiting).to(self._device)
        self._waiting.clear()
        feats = self._features.accept(wave)
        if last:
            feats = torch.cat((feats, self._features.finish()))
        outputs, self._state = self._outputs(feats[None], self._state, last)
        self._read += len(feats)
        self._due = self._next_chunk()
        return outputs[0]

    def _next_chunk(self) -> int:
        """Samples of the stream, at the model's rate, with which the network can compute the next chunk."""
        return self._features.samples_for(self._encoder.frames_for_chunk(self._state, self._read))

    def _searched(self, outputs: Tensor) -> list[StreamResult]:
        """Go on with the search in further output frames [frames, ...]."""
        if bool(outputs.isnan().any()):
            raise DecodeError("the network's output contains NaN: it has diverged, or its input was damaged")
        results: list[StreamResult] = []
        for frame in outputs:
            if self._ends(self._segment.search.step(frame)):
                results += self._close()
        return [*results, *self._partial()] if self._segment.frames and self.cfg.partials else results

    def _ends(self, silent: bool) -> bool:
        """Whether the segment ends with a further frame."""
        segment, rules = self._segment, self.cfg.endpoint
        self._frames += 1
        segment.frames += 1
        segment.silent = segment.silent + 1 if silent else 0
        segment.spoken |= not silent
        limit = rules.after_speech_s if segment.spoken else rules.at_start_s
        if limit and segment.silent * self._shift >= limit:
            return True
        return segment.frames * self._shift >= rules.longest_s

    def _partial(self) -> list[StreamResult]:
        """The result of the segment so far, if its words have changed."""
        best = self._segment.search.best(final=False)
        return [self._result(best, final=False)] if best.text.split() != self._segment.shown else []

    def _close(self) -> list[StreamResult]:
        """The final result of the segment, if it has had words; begins another one."""
        segment = self._segment
        hypothesis = segment.search.best(final=True)
        results = [self._result(hypothesis, final=True)] if hypothesis.text or segment.shown else []
        self._number += len(results)
        self._segment = self._begin(self._frames)
        return results

    def _begin(self, start: int) -> _Segment:
        return _Segment(self._new_search(), start)

    def _result(self, hypothesis: Hypothesis, final: bool) -> StreamResult:
        segment, words = self._segment, hypothesis.text.split()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(segment.shown, words, strict=False)))
        self.changed_words += len(segment.shown) - same
        self.shown_words += len(words) if final else 0
        segment.shown = words
        start, end = segment.start * self._shift, self._frames * self._shift
        timed = segment.search.words(hypothesis, FrameTimes(self._shift, start, start, end)) if words else ()
        place = round(start, 3), round(end, 3)
        return StreamResult(self._number, hypothesis.text, tuple(timed), final, *place, round(hypothesis.confidence, 4))
