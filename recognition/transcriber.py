"""Transcribes files, bytes and arrays of any length with the model of a bundle."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recognition.alternatives import (
    TimedAlternative,
    joined_alternatives,
    joined_confidence,
    joined_language,
    timed_alternatives,
)
from recognition.bundle import load_spec, own_decoder
from recognition.recognizer import Adapter, Recognizer
from speech.audio import AudioError, check_rate, check_samples, stream_audio
from speech.decoding import DecodeConfig, DecodeError, Hypothesis
from speech.hmm.utterances import by_speaker
from speech.hypotheses import Word
from speech.vad import PAUSE_S, SpeechSegment, VadConfig, build_vad, cut_windows, default_vad

MAX_SECONDS = 30.0
"""Longest piece that is recognized at once, in seconds; longer recordings are split."""
_LONGEST_PAUSE_S = 0.6
"""Longest pause within a piece, for encoders that compute silence behind each piece, such as Whisper's 30 s. With up to
2 s, recognition takes 0.6 of the time, but half a percent more of the words differ (`benchmarks.segmentation`, Whisper
base, 2,767 words)."""
_UNHEARD_S = 1.0
"""Seconds of speech between two pauses without a word that are recognized by themselves: Whisper sometimes leaves out
what resembles something before it, or takes a text for finished in a pause."""
_LONGEST_WORD_S = 2.0
"""A longer word is not in the middle of its time: it is beside speech that was left out."""
_EDGE_S = 0.2
"""How long before speech a word in it may begin, and how long after it the word may end."""
_LONGEST_REASON = 200  # characters of an error that may repeat its input
_WINDOW = 4  # batches that are read ahead and sorted by length
_SILENT_S = 4.0  # what a window without speech counts for in a batch
_FIRST_WINDOW = 1 / 8  # of a batch: the first results come soon, and pauses between results grow with the time passed

Audio = str | Path | bytes | NDArray[np.floating] | Tensor


@dataclass(frozen=True)
class SpokenPiece:
    """A piece of a recording that was recognized at once: usually what is said between two pauses."""

    start: float
    """Seconds from the start of the recording."""
    seconds: float
    """Its duration."""
    text: str
    """The recognized words."""
    confidence: float
    """Mean posterior of its tokens, 0 to 1."""
    least: float | None = None
    """Confidence of its least certain word, if the search gives words confidences, or their times are asked for."""

    @classmethod
    def of(cls, start: float, seconds: float, text: str, confidence: float, by_word: Iterable[float]) -> "SpokenPiece":
        """A piece, and the confidences of its words as far as they are known."""
        return cls(start, seconds, text, confidence, min(by_word, default=None))

    @property
    def num_words(self) -> int:
        """Number of its words."""
        return len(self.text.split())

    @property
    def words_per_second(self) -> float:
        """How fast is spoken, pauses included."""
        return self.num_words / max(self.seconds, 1e-3)


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
    language: str = ""
    """Code of the language that the model was told, or has found; empty if it knows nothing of languages."""
    pieces: tuple[SpokenPiece, ...] = ()
    """What it was recognized from: the pieces with speech, in order."""


@dataclass(frozen=True)
class _Piece:
    recording: int
    wave: Tensor
    start: float
    """Start within the recording, in seconds."""
    speaker: int
    """Number of the speaker; without speakers, of the recording."""
    language: str = ""
    """Its language, if it is given."""
    features: Tensor | None = None
    """Features that are adapted to the speaker, for models that read these."""
    speech: tuple[tuple[float, float], ...] = ()
    """Start and end, in seconds of the recording, of the speech between its pauses."""

    @classmethod
    def of(cls, segment: SpeechSegment, recording: int, speaker: int, language: str) -> "_Piece":
        """A segment of a recording."""
        return cls(recording, segment.wave, segment.start, speaker, language, speech=segment.speech)

    @property
    def inputs(self) -> Tensor:
        """What the model's front end reads."""
        return self.wave if self.features is None else self.features

    def parts(self, words: Sequence[Word], sample_rate: int) -> list["_Piece"]:
        """What is before speech without words between two pauses, that speech, and what is after it.

        Args:
            words: The words that were recognized.
            sample_rate: Of the piece, in Hz.

        Returns:
            At least two parts, which begin and end in pauses; none if no such speech is found.
        """
        borders = [0, *_first_unheard(self.speech, words), len(self.speech)]
        parts = [self._part(first, last, sample_rate) for first, last in pairwise(borders) if first < last]
        return parts if len(parts) > 1 and self.features is None else []

    def _part(self, first: int, last: int, sample_rate: int) -> "_Piece":
        """The part with some of its speech, and with the pauses around it up to `PAUSE_S`, or to their middle."""
        speech = self.speech[first:last]
        start, end = speech[0][0] - PAUSE_S, speech[-1][1] + PAUSE_S
        if first:
            start = max(start, (self.speech[first - 1][1] + speech[0][0]) / 2)
        if last < len(self.speech):
            end = min(end, (speech[-1][1] + self.speech[last][0]) / 2)
        at, to = (max(0, round((time - self.start) * sample_rate)) for time in (start, end))
        return replace(self, wave=self.wave[at:to], start=self.start + at / sample_rate, speech=speech)


@dataclass(frozen=True)
class _Part:
    """The result for one piece."""

    start: float
    seconds: float
    hypothesis: Hypothesis
    words: list[Word]
    nbest: list[TimedAlternative] = field(default_factory=list)

    @property
    def spoken(self) -> SpokenPiece:
        """The result without what only the recording's needs."""
        best = self.hypothesis
        confidences = [word.confidence for word in self.words] or best.word_confidences
        return SpokenPiece.of(self.start, self.seconds, best.text, best.confidence, confidences)


@dataclass
class _Recording:
    """The results for a recording so far."""

    seconds: float = 0.0
    parts: list[_Part] = field(default_factory=list)
    error: str = ""

    def transcript(self, nbest: int) -> Transcript:
        if self.error:
            return Transcript(text="", seconds=0.0, confidence=0.0, error=self.error)
        hypotheses = [part.hypothesis for part in self.parts]
        confidence = joined_confidence(hypotheses)
        text = " ".join(hypothesis.text for hypothesis in hypotheses if hypothesis.text)
        words = tuple(word for part in self.parts for word in part.words)
        others = joined_alternatives((part.nbest for part in self.parts), nbest) if nbest > 1 else []
        language, pieces = joined_language(hypotheses), tuple(part.spoken for part in self.parts)
        nbests = tuple(others)
        return Transcript(text, self.seconds, confidence, words=words, nbest=nbests, language=language, pieces=pieces)


@dataclass
class OpenRecording:
    """A recording of which `Transcriber.advance` recognizes more with each call."""

    words: bool
    """Whether to find the words' times."""
    nbest: int
    windows: Iterator[list[SpeechSegment]]
    """What has not been read yet: pieces at the model's rate."""
    result: _Recording
    language: str = ""
    """Its language, if it is given."""
    failure: Exception | None = None
    """Why the recognizer failed; a recording that cannot be read has an error in its transcript instead."""
    finished: bool = False
    """Whether all of it has been recognized, or never will be."""
    turns: int = 0
    """How often more of it has been recognized."""

    def __post_init__(self) -> None:
        self._ahead: list[SpeechSegment] | None = None

    def take(self) -> list[SpeechSegment]:
        """The next pieces. One window is read ahead, so that the last one is known to be the last."""
        now = self._ahead if self.turns else next(self.windows, None)
        self._ahead = None if now is None else next(self.windows, None)
        self.finished = self._ahead is None
        self.turns += 1
        return now or []

    @property
    def seconds(self) -> float:
        """How much of it has been read."""
        return self.result.seconds

    @property
    def transcript(self) -> Transcript:
        """The result; so far, if it is not finished."""
        return self.result.transcript(self.nbest)


class Transcriber:
    """Transcribes audio with a bundle's model.

    Args:
        folder: The bundle's folder.
        decode: Decoding parameters; the bundle's own by default.
        device: Device to run on, for example `cpu` or `cuda`.
        batch_seconds: Seconds of audio per batch, padding included.
        vad: Voice activity detection, by default Silero VAD: only pieces with speech are recognized.
        nbest: Number of hypotheses to give of each recording.
        hot_words: A file with phrases whose score is raised (`speech.decoding.hot_words`), instead of the decoder's
            own.
        hot_score: Added for each letter of these; by default as `HotWordsConfig` says.

    Raises:
        BundleError: The folder is not a bundle, or the bundle is damaged.
        DecodeError: The decoder does not search what the model puts out; more than one hypothesis is requested, and
            the recognizer or its decoder finds one only; or there are hot words, and the decoder takes none, or they
            cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        decode: DecodeConfig | None = None,
        device: str = "cpu",
        batch_seconds: float = 120.0,
        vad: VadConfig | None = None,
        nbest: int = 1,
        hot_words: str | Path = "",
        hot_score: float | None = None,
    ) -> None:
        self.folder, self.vad = folder, build_vad(vad or default_vad())
        if hot_words:
            decode = (decode or own_decoder(folder)).with_hot_words(str(hot_words), hot_score)
        if nbest > 1:
            load_spec(folder).system.require("several hypotheses")
            decode = (decode or own_decoder(folder)).with_nbest(nbest)
        self.recognizer = Recognizer.load(folder, decode, device)
        self.recognizer.spec.system.check_decoder(self.recognizer.cfg.kind)
        if hot_words:
            self.recognizer.prepare()  # what is wrong with them is said before the first recording
        self.spec, self.batch_seconds, self.nbest = self.recognizer.spec, batch_seconds, nbest
        # another piece costs as much silence as is computed at least, a longer piece only the pause that it contains
        self._pause_s = max(PAUSE_S, min(self.spec.min_seconds, _LONGEST_PAUSE_S))

    @property
    def sample_rate(self) -> int:
        """Default sample rate of arrays: that of the model, in Hz."""
        return self.spec.sample_rate

    def transcribe(
        self,
        audio: Sequence[Audio] | Audio,
        sample_rate: int | None = None,
        *,
        words: bool = False,
        speakers: Sequence[str] | None = None,
        language: str = "",
        on_seconds: Callable[[float], object] | None = None,
    ) -> list[Transcript]:
        """Recognize recordings; one that cannot be read gets an error and does not affect the others.

        Files are read while they are recognized, so memory depends neither on their length nor on their number.

        Args:
            audio: Paths, encoded files as bytes, or arrays [num_samples]: floats in ±1, or integer PCM; or one of them.
            sample_rate: Sample rate of the arrays in Hz; the model's own by default.
            words: Whether to return the words' times, too.
            speakers: Speaker of each recording: a model whose features are adapted to speakers adapts to all recordings
                of a speaker together (by default, to each recording). Of those, eight minutes are in memory at once.
            language: BCP 47 tag of the language that all of them are in, for models with tokens of languages; by
                default such a model finds that of each piece.
            on_seconds: Called after each batch with the seconds of audio recognized in it.

        Raises:
            DecodeError: Times are asked for, and the recognizer does not know when words are; or the model cannot be
                told the language.
        """
        if isinstance(audio, str | Path | bytes) or (isinstance(audio, np.ndarray | Tensor) and audio.ndim == 1):
            audio = [audio]  # one recording, not one for each character or sample
        if speakers is not None and len(speakers) != len(audio):
            raise ValueError(f"there are {len(audio)} recordings, but {len(speakers)} speakers: name one for each")
        first = {who: number for number, who in reversed(list(enumerate(speakers or ())))}
        voices = [first[who] for who in speakers] if speakers is not None else list(range(len(audio)))
        order = sorted(range(len(audio)), key=voices.__getitem__)
        spoken = ((audio[number], voices[number]) for number in order)
        transcripts = dict(
            zip(
                order,
                self.stream(spoken, sample_rate, words=words, language=language, on_seconds=on_seconds),
                strict=True,
            )
        )
        return [transcripts[number] for number in range(len(audio))]

    def stream(
        self,
        audio: Iterable[tuple[Audio, int]],
        sample_rate: int | None = None,
        *,
        words: bool = False,
        language: str = "",
        on_seconds: Callable[[float], object] | None = None,
    ) -> Iterator[Transcript]:
        """Recognize recordings like `transcribe`, and yield transcripts in order as they are finished.

        Short recordings are recognized together: each call of the network and of the decoder has its costs.

        Args:
            audio: Recordings as for `transcribe`, read as they are needed, each with the number of its speaker; all of
                a speaker follow one another.
            sample_rate: As for `transcribe`, like the others.
            words: Whether to find the words' times.
            language: As for `transcribe`.
            on_seconds: Called after each batch.
        """
        language = self._asked(words, language)
        recordings: dict[int, _Recording] = {}
        window: list[_Piece] = []
        most = _WINDOW * self.batch_seconds
        waiting, limit = 0.0, _FIRST_WINDOW * self.batch_seconds
        for number, piece, seconds in self._read(audio, sample_rate, recordings, language):
            waiting += seconds
            window += [piece] if piece else []
            if waiting < limit:
                continue
            ready, later = self._complete(window, waiting >= most)
            if later and not ready:
                continue
            self._flush(ready, recordings, words, on_seconds)
            window, waiting = later, sum(len(piece.wave) for piece in later) / self.sample_rate
            limit = min(2 * limit, most)
            yield from self._finished(recordings, later[0].recording if later else number if piece else number + 1)
        self._flush(window, recordings, words, on_seconds)
        yield from self._finished(recordings)

    def open(
        self, audio: Audio, sample_rate: int | None = None, *, words: bool = False, language: str = ""
    ) -> OpenRecording:
        """Begin a recording that `advance` recognizes among others, with the same result as `transcribe`.

        Args:
            audio: As one of the recordings of `transcribe`.
            sample_rate: As for `transcribe`.
            words: Whether to find the words' times.
            language: As for `transcribe`.

        Raises:
            DecodeError: As of `transcribe`.
        """
        language, result = self._asked(words, language), _Recording()
        return OpenRecording(words, self.nbest, self._windows(audio, sample_rate, result), result, language)

    def _asked(self, words: bool, language: str) -> str:
        """Check that the model can do what is asked for; returns the code of the language."""
        if words:
            self.spec.system.require("word times")
        if language:
            self.recognizer.check_language(language)
        return self.recognizer.known_language(language)

    def advance(self, recordings: Sequence[OpenRecording]) -> None:
        """Recognize a batch: some pieces of each recording in turn, so that short ones do not wait for long ones.

        A model that adapts to speakers gets one recording at a time, which it adapts to as a whole.

        Args:
            recordings: Those that are not finished.
        """
        adapted = self.recognizer.adapter is not None
        turns = deque(enumerate(recordings[:1] if adapted else recordings))
        left = _WINDOW * self.batch_seconds if adapted else self.batch_seconds
        window: list[_Piece] = []
        while turns and left > 0:
            number, recording = turns.popleft()
            try:
                pieces = recording.take()
            except Exception as error:  # a library's, for audio that it does not expect
                recording.failure, recording.finished = error, True
                continue
            window += [_Piece.of(piece, number, number, recording.language) for piece in pieces]
            # to find that a window has no speech takes time, too
            left -= sum(len(piece.wave) for piece in pieces) / self.sample_rate or _SILENT_S
            if not recording.finished:
                turns.append((number, recording))
        self._flush_apart(window, recordings)

    def _flush_apart(self, window: list[_Piece], recordings: Sequence[OpenRecording]) -> None:
        """Recognize pieces of several recordings; where that fails, those of each on their own."""
        numbers = sorted({piece.recording for piece in window})
        results = {number: recordings[number].result for number in numbers}
        counts = {number: len(result.parts) for number, result in results.items()}
        try:
            self._flush(window, results, any(recordings[number].words for number in numbers), None)
        except Exception as error:
            for number in numbers:
                del results[number].parts[counts[number] :]
                if len(numbers) > 1:
                    self._flush_apart([piece for piece in window if piece.recording == number], recordings)
                else:
                    recordings[number].failure, recordings[number].finished = error, True

    def warm_up(self) -> None:
        """Recognize a second of noise: reads what the search reads at first use, and shows whether the model works.

        Raises:
            DecodeError: It gives no usable scores.
        """
        self.recognizer.prepare()
        noise = 0.01 * torch.randn(self.sample_rate, generator=torch.Generator().manual_seed(1))
        recording = _Recording()
        self._flush([_Piece(0, noise, 0.0, 0)], {0: recording}, False, None)
        if recording.error:
            raise DecodeError(recording.error)

    def _finished(self, recordings: dict[int, _Recording], end: int | None = None) -> Iterator[Transcript]:
        """Remove the recordings, those before a number if there is one, and yield their transcripts."""
        for number in [number for number in recordings if end is None or number < end]:
            yield recordings.pop(number).transcript(self.nbest)

    def _complete(self, window: list[_Piece], full: bool) -> tuple[list[_Piece], list[_Piece]]:
        """Pieces to recognize now, and those that wait for more of the last speaker, unless they fill the window."""
        if self.recognizer.adapter is None or not window:
            return window, []
        before = [piece for piece in window if piece.speaker != window[-1].speaker]
        return (before, window[len(before) :]) if before or not full else (window, [])

    def _read(
        self,
        audio: Iterable[tuple[Audio, int]],
        sample_rate: int | None,
        recordings: dict[int, _Recording],
        language: str,
    ) -> Iterator[tuple[int, _Piece | None, float]]:
        """Yield the number of a recording with each of its pieces and, last, with None; adds it to those found.

        The third value is the piece's duration in seconds. With None it is that of the audio without speech, since
        recordings without speech also have to be output from time to time; 0 for models that adapt to speech.
        """
        for number, (item, speaker) in enumerate(audio):
            recordings[number] = recording = _Recording()
            silent = 0.0
            for piece in self._pieces(item, sample_rate, recording):
                seconds = len(piece.wave) / self.sample_rate
                silent -= seconds
                yield number, _Piece.of(piece, number, speaker, language), seconds
            silent += recording.seconds
            yield number, None, max(0.0, silent) if self.recognizer.adapter is None else 0.0

    def _pieces(self, item: Audio, sample_rate: int | None, recording: _Recording) -> Iterator[SpeechSegment]:
        """Yield a recording's pieces at the model's rate; records its duration, or its error."""
        for pieces in self._windows(item, sample_rate, recording):
            yield from pieces

    def _windows(self, item: Audio, sample_rate: int | None, recording: _Recording) -> Iterator[list[SpeechSegment]]:
        """The same, the pieces of up to `MAX_SECONDS` of the recording at a time."""
        try:
            blocks = _counting(recording, self._blocks(item, sample_rate))
            for pieces in cut_windows(self.vad, blocks, MAX_SECONDS, self._pause_s):
                yield [piece.at(self.sample_rate) for piece in pieces]
        except AudioError as error:
            recording.error = str(error)
        except (TypeError, ValueError) as error:
            what, why = type(item).__name__, str(error)
            why = why if len(why) <= _LONGEST_REASON else f"{why[:_LONGEST_REASON]}…"
            recording.error = f"a {what} is not audio: give a path, bytes or an array of samples ({why})"

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
        name = f"an array of shape {tuple(wave.shape)}"
        check_samples(wave, name)
        yield wave, check_rate(sample_rate or self.sample_rate, name)

    def _flush(
        self,
        window: list[_Piece],
        recordings: dict[int, _Recording],
        words: bool,
        on_seconds: Callable[[float], object] | None,
    ) -> None:
        """Recognize pieces in batches of similar length, and append the results to their recordings in order."""
        if (adapter := self.recognizer.adapter) is not None:
            window = _adapted(adapter, window)
        parts: dict[int, list[_Part]] = {}
        order = sorted(range(len(window)), key=lambda n: len(window[n].wave))
        for rows in self._batches(order, window):
            batch = [window[row] for row in rows]
            parts |= zip(rows, self._recognize_each(batch, recordings, words), strict=True)
            if on_seconds is not None:
                on_seconds(sum(len(piece.wave) for piece in batch) / self.sample_rate)
        for row, piece in enumerate(window):
            recordings[piece.recording].parts.extend(parts[row])

    def _batches(self, order: list[int], pieces: list[_Piece]) -> Iterator[list[int]]:
        rows: list[int] = []
        for row in order:
            longest = max(self.spec.min_seconds, len(pieces[row].wave) / self.sample_rate)
            if rows and longest * (len(rows) + 1) > self.batch_seconds:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _recognize_each(
        self, pieces: list[_Piece], recordings: dict[int, _Recording], words: bool
    ) -> list[list[_Part]]:
        """Like `_recognize`, but a piece without usable scores fails its own recording only."""
        try:
            return self._recognize(pieces, words)
        except DecodeError as error:
            if len(pieces) > 1:
                return [part for piece in pieces for part in self._recognize_each([piece], recordings, words)]
            recordings[pieces[0].recording].error = (
                f"the model gives no usable scores for it ({error}): check the audio, and fetch the model again if "
                "other recordings fail, too"
            )
            return [[_Part(pieces[0].start, 0.0, Hypothesis(), [])]]

    @property
    def times_cost(self) -> bool:
        """Whether it is faster without times of words."""
        return self.recognizer.cfg.untimed != self.recognizer.cfg

    @cached_property
    def _untimed(self) -> Recognizer[Any]:
        """What searches if nobody asks for times: for Whisper base, they take a fifth of the search's time."""
        return self.recognizer.with_decoder(self.recognizer.cfg.untimed) if self.times_cost else self.recognizer

    def _recognize(self, pieces: list[_Piece], words: bool) -> list[list[_Part]]:
        """Recognize pieces in one batch; one whose text leaves out some of its speech is recognized in parts."""
        given = [piece.inputs for piece in pieces]
        several = [len(piece.speech) > 1 for piece in pieces]
        recognizer = self.recognizer if words or self.nbest > 1 or any(several) else self._untimed
        inputs = torch.nn.utils.rnn.pad_sequence(given, batch_first=True)
        lengths = torch.tensor([len(piece_inputs) for piece_inputs in given])
        encoded = recognizer.encode(inputs, lengths, languages=[piece.language for piece in pieces])
        results, divided = [], {}
        for row, (hypothesis, piece) in enumerate(zip(recognizer.search(encoded), pieces, strict=True)):
            end = piece.start + len(piece.wave) / self.sample_rate
            times = recognizer.times(encoded, row, piece.start, end)
            asked = words or several[row]
            spoken = recognizer.timed_words(encoded, row, hypothesis, times) if asked and times else []
            others = timed_alternatives(hypothesis, times) if self.nbest > 1 else []
            if several[row] and (parts := piece.parts(spoken, self.sample_rate)):
                divided[row] = parts
            results.append([_Part(piece.start, end - piece.start, hypothesis, spoken if words else [], others)])
        again = [part for parts in divided.values() for part in parts]
        batches = self._batches(list(range(len(again))), again)
        found = (result for rows in batches for result in self._recognize([again[row] for row in rows], words))
        for row, parts in divided.items():
            results[row] = [part for result in islice(found, len(parts)) for part in result]
        return results


def _adapted(adapter: Adapter, window: list[_Piece]) -> list[_Piece]:
    """The pieces with features that are adapted to their speakers."""
    adapted = list(window)
    for rows in by_speaker([piece.speaker for piece in window]).values():
        feats = adapter([window[row].wave for row in rows])
        for row, features in zip(rows, feats, strict=True):
            adapted[row] = replace(window[row], features=features)
    return adapted


def _first_unheard(speech: Sequence[tuple[float, float]], words: Sequence[Word]) -> tuple[int, int]:
    """The first stretches of speech in which no word is, for `_UNHEARD_S` together.

    Args:
        speech: Start and end of each, in seconds.
        words: The words, with times in the same seconds.

    Returns:
        Number of the first one, and of the one after the last; zeros if there are none.
    """
    for heard, group in groupby(
        range(len(speech)), lambda number: any(_is_in(word, *speech[number]) for word in words)
    ):
        numbers = list(group)
        if not heard and sum(speech[number][1] - speech[number][0] for number in numbers) >= _UNHEARD_S:
            return numbers[0], numbers[-1] + 1
    return 0, 0


def _is_in(word: Word, start: float, end: float) -> bool:
    """Whether a word was said in the speech from `start` to `end`, as far as attention tells."""
    first, last = word.start, word.start + word.duration
    if start - _EDGE_S <= first < end or start < last <= end + _EDGE_S:
        return True
    return word.duration <= _LONGEST_WORD_S and start <= (first + last) / 2 <= end


def _counting(recording: _Recording, blocks: Iterator[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
    """Yield the blocks and add their duration to the recording's."""
    for block, rate in blocks:
        recording.seconds += len(block) / rate
        yield block, rate
