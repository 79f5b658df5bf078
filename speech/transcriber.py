"""Transcribes files, bytes and arrays of any length with the model of a bundle."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.alternatives import TimedAlternative, joined_alternatives, timed_alternatives
from speech.audio import AudioError, check_samples, resample, stream_audio
from speech.bundle import own_decoder
from speech.decoding import DecodeConfig, DecodeError, Hypothesis
from speech.hmm.utterances import by_speaker
from speech.recognizer import Recognizer
from speech.vad import VadConfig, build_vad, cut, default_vad
from speech.words import Word, timed_words

MAX_SECONDS = 30.0
"""Longest piece that is recognized at once, in seconds; longer recordings are split."""
_WINDOW = 4  # batches that are read ahead and sorted by length

Audio = str | Path | bytes | NDArray[np.floating] | Tensor


@dataclass(frozen=True)
class Transcript:
    """The result for one recording, or the reason why there is none."""

    text: str
    """The recognized words."""
    seconds: float
    """Duration of the recording; 0 if it could not be recognized."""
    confidence: float
    """Mean posterior of the recognized tokens, 0 to 1."""
    error: str = ""
    """Why the recording could not be read or recognized; empty on success."""
    words: tuple[Word, ...] = ()
    """The words with their times, if requested."""
    nbest: tuple[TimedAlternative, ...] = ()
    """The best hypotheses including this one, best first, if more than one is requested."""


@dataclass(frozen=True)
class _Piece:
    recording: int
    wave: Tensor
    start: float
    """Start within the recording, in seconds."""
    speaker: int
    """Number of the speaker; without speakers, of the recording."""
    features: Tensor | None = None
    """Features that are adapted to the speaker, for models that read these."""

    @property
    def inputs(self) -> Tensor:
        """What the model's front end reads."""
        return self.wave if self.features is None else self.features


@dataclass(frozen=True)
class _Part:
    """The result for one piece."""

    hypothesis: Hypothesis
    words: list[Word]
    nbest: list[TimedAlternative] = field(default_factory=list)


@dataclass
class _Recording:
    """The results for a recording so far."""

    seconds: float = 0.0
    parts: list[_Part] = field(default_factory=list)
    error: str = ""

    def transcript(self, nbest: int) -> Transcript:
        if self.error:
            return Transcript(text="", seconds=0.0, confidence=0.0, error=self.error)
        found = [part.hypothesis for part in self.parts]
        sizes = [len(one.tokens) or len(one.text.split()) for one in found]  # a search of states has no tokens
        total = sum(one.confidence * size for one, size in zip(found, sizes, strict=True))
        confidence = total / sum(sizes) if any(sizes) else 0.0
        text = " ".join(one.text for one in found if one.text)
        words = tuple(word for part in self.parts for word in part.words)
        others = joined_alternatives((part.nbest for part in self.parts), nbest) if nbest > 1 else []
        return Transcript(text=text, seconds=self.seconds, confidence=confidence, words=words, nbest=tuple(others))


class Transcriber:
    """Transcribes audio with a bundle's model.

    Args:
        folder: The bundle's folder.
        decode: Decoding parameters; the bundle's own by default.
        device: Device to run on, for example `cpu` or `cuda`.
        batch_seconds: Seconds of audio per batch, padding included.
        vad: Voice activity detection, by default Silero VAD: only pieces with speech are recognized.
        nbest: Number of hypotheses to give of each recording.

    Raises:
        BundleError: The folder is not a bundle, or the bundle is damaged.
        DecodeError: More than one hypothesis is requested, and the decoder finds one only.
    """

    def __init__(
        self,
        folder: Path,
        decode: DecodeConfig | None = None,
        device: str = "cpu",
        batch_seconds: float = 120.0,
        vad: VadConfig | None = None,
        nbest: int = 1,
    ) -> None:
        self.vad = build_vad(vad or default_vad())
        if nbest > 1:
            decode = (decode or own_decoder(folder)).with_nbest(nbest)
        self.recognizer = Recognizer.load(folder, decode, device)
        self.spec, self.batch_seconds, self.nbest = self.recognizer.spec, batch_seconds, nbest

    @property
    def sample_rate(self) -> int:
        """Default sample rate of arrays: that of the model, in Hz."""
        return self.spec.sample_rate

    def transcribe(
        self,
        audio: Sequence[Audio] | str | Path | bytes,
        sample_rate: int | None = None,
        *,
        words: bool = False,
        speakers: Sequence[str] | None = None,
        on_seconds: Callable[[float], object] | None = None,
    ) -> list[Transcript]:
        """Recognize recordings; one that cannot be read gets an error and does not affect the others.

        Files are read while they are recognized, so memory depends neither on their length nor on their number.

        Args:
            audio: Paths, encoded files as bytes, or arrays [num_samples]: floats in ±1, or integer PCM.
            sample_rate: Sample rate of the arrays in Hz; the model's own by default.
            words: Whether to return the words' times, too.
            speakers: Speaker of each recording: a model whose features are adapted to speakers adapts to all recordings
                of a speaker together (by default, to each recording). Of those, eight minutes are in memory at once.
            on_seconds: Called after each batch with the seconds of audio recognized in it.
        """
        if isinstance(audio, str | Path | bytes):  # one recording; otherwise a string would be iterated by character
            audio = [audio]
        found = [_Recording() for _ in audio]
        window: list[_Piece] = []
        waiting = 0.0
        for piece in self._pieces(audio, sample_rate, found, speakers):
            window.append(piece)
            waiting += len(piece.wave) / self.sample_rate
            if waiting >= _WINDOW * self.batch_seconds:
                window, later = self._complete(window)
                self._flush(window, found, words, on_seconds)
                window, waiting = later, sum(len(one.wave) for one in later) / self.sample_rate
        self._flush(window, found, words, on_seconds)
        return [recording.transcript(self.nbest) for recording in found]

    def _complete(self, window: list[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
        """Pieces to recognize now, and those that wait for more of the last speaker, unless they fill the window."""
        last = window[-1].speaker
        before = [piece for piece in window if piece.speaker != last]
        return (before, window[len(before) :]) if before and self.recognizer.adapts else (window, [])

    def _pieces(
        self,
        audio: Sequence[Audio],
        sample_rate: int | None,
        found: list[_Recording],
        speakers: Sequence[str] | None,
    ) -> Iterator[_Piece]:
        """Yield the recordings' pieces at the model's rate, by speaker; records durations and errors."""
        if speakers is not None and len(speakers) != len(audio):
            raise ValueError(f"there are {len(audio)} recordings, but {len(speakers)} speakers: name one for each")
        first = {who: number for number, who in reversed(list(enumerate(speakers or ())))}
        groups = [first[who] for who in speakers] if speakers is not None else list(range(len(audio)))
        for number in sorted(range(len(audio)), key=groups.__getitem__):
            item, recording = audio[number], found[number]
            try:
                for piece in cut(self.vad, _counting(recording, self._blocks(item, sample_rate)), MAX_SECONDS):
                    wave = resample(piece.wave, piece.sample_rate, self.sample_rate)
                    yield _Piece(number, wave, piece.start, groups[number])
            except AudioError as error:
                recording.error = str(error)
            except (TypeError, ValueError) as error:
                what = type(item).__name__
                recording.error = f"a {what} is not audio: give a path, bytes or an array of samples ({error})"

    def _blocks(self, item: Audio, sample_rate: int | None) -> Iterator[tuple[Tensor, int]]:
        if isinstance(item, str | Path | bytes):
            yield from stream_audio(item)
            return
        samples = np.asarray(item)
        if np.issubdtype(samples.dtype, np.integer):  # PCM as read from a file
            samples = samples / -float(np.iinfo(samples.dtype).min or -1)
        wave = torch.as_tensor(samples.astype(np.float32))
        if wave.ndim != 1 or len(wave) == 0:
            text = f"an array of shape {tuple(wave.shape)} is not audio: give finite samples [num_samples] in ±1"
            raise AudioError(text, "unreadable")
        check_samples(wave, f"an array of shape {tuple(wave.shape)}")
        yield wave, sample_rate or self.sample_rate

    def _flush(
        self,
        window: list[_Piece],
        found: list[_Recording],
        words: bool,
        on_seconds: Callable[[float], object] | None,
    ) -> None:
        """Recognize pieces in batches of similar length, and append the results to their recordings in order."""
        if self.recognizer.adapts:
            window = self._adapted(window)
        parts: dict[int, _Part] = {}
        order = sorted(range(len(window)), key=lambda n: len(window[n].wave))
        for rows in self._batches(order, window):
            batch = [window[row] for row in rows]
            parts |= zip(rows, self._recognize_each(batch, found, words), strict=True)
            if on_seconds is not None:
                on_seconds(sum(len(piece.wave) for piece in batch) / self.sample_rate)
        for row, piece in enumerate(window):
            found[piece.recording].parts.append(parts[row])

    def _adapted(self, window: list[_Piece]) -> list[_Piece]:
        """The pieces with features that are adapted to their speakers."""
        found = list(window)
        for rows in by_speaker([piece.speaker for piece in window]).values():
            feats = self.recognizer.adapted([window[row].wave for row in rows])
            for row, one in zip(rows, feats, strict=True):
                found[row] = replace(window[row], features=one)
        return found

    def _batches(self, order: list[int], pieces: list[_Piece]) -> Iterator[list[int]]:
        rows: list[int] = []
        for row in order:
            longest = len(pieces[row].wave) / self.sample_rate
            if rows and longest * (len(rows) + 1) > self.batch_seconds:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _recognize_each(self, pieces: list[_Piece], found: list[_Recording], words: bool) -> list[_Part]:
        """Like `_recognize`, but a piece without usable scores fails its own recording only."""
        try:
            return self._recognize(pieces, words)
        except DecodeError as error:
            if len(pieces) > 1:
                return [part for piece in pieces for part in self._recognize_each([piece], found, words)]
            found[pieces[0].recording].error = (
                f"the model gives no usable scores for it ({error}): check the audio, and fetch the model again if "
                "other recordings fail, too"
            )
            return [_Part(Hypothesis(), [])]

    def _recognize(self, pieces: list[_Piece], words: bool) -> list[_Part]:
        given, recognizer = [piece.inputs for piece in pieces], self.recognizer
        inputs = torch.nn.utils.rnn.pad_sequence(given, batch_first=True)
        scores = recognizer.scores(inputs, torch.tensor([len(one) for one in given]))
        found = recognizer.decode(scores)
        parts = []
        for row, (one, piece) in enumerate(zip(found, pieces, strict=True)):
            log_probs, begin = scores.log_probs[row, : int(scores.frames[row])], piece.start + float(scores.starts[row])
            shift = recognizer.frame_seconds
            spoken = timed_words(one, log_probs, recognizer.tokenizer, shift, begin) if words else []
            parts.append(_Part(one, spoken, timed_alternatives(one, shift, begin) if self.nbest > 1 else []))
        return parts


def _counting(recording: _Recording, blocks: Iterator[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
    """Yield the blocks and add their duration to the recording's."""
    for block, rate in blocks:
        recording.seconds += len(block) / rate
        yield block, rate
