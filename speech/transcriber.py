"""Audio in, text out: a bundle, ready to use on files, bytes and arrays of any length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.audio import AudioError, load_audio, resample
from speech.bundle import load_bundle
from speech.decoding import DecodeConfig, Hypothesis, build_decoder

Audio = str | Path | bytes | NDArray[np.floating] | Tensor


@dataclass(frozen=True)
class Transcript:
    """What was recognized in one recording, or why nothing could be."""

    text: str
    """The recognized words."""
    seconds: float
    """Length of the recording."""
    confidence: float
    """Mean posterior of the recognized tokens, 0 to 1."""
    error: str = ""
    """Why the recording could not be read; empty if it could."""


@dataclass(frozen=True)
class _Piece:
    recording: int
    wave: Tensor


def split_long(wave: Tensor, rate: int, max_seconds: float = 30.0) -> list[Tensor]:
    """Cut a recording into pieces of at most `max_seconds`, each cut at the quietest 50 ms of the piece's last third.

    Args:
        wave: Samples [num_samples].
        rate: Samples per second.
        max_seconds: Longest piece.
    """
    limit = max(3, int(max_seconds * rate))
    hop = max(1, min(int(0.05 * rate), limit // 3))
    pieces: list[Tensor] = []
    while len(wave) > limit:
        tail_start = limit * 2 // 3
        frames = wave[tail_start:limit].unfold(0, hop, hop)
        quietest = int(frames.square().mean(dim=1).argmin())
        cut = tail_start + quietest * hop + hop // 2
        pieces.append(wave[:cut])
        wave = wave[cut:]
    return [*pieces, wave]


class Transcriber:
    """A loaded bundle.

    Args:
        folder: The bundle.
        decode: Decoding parameters, instead of the bundle's own.
        device: Where to run, for example `cpu` or `cuda`.
        batch_seconds: Seconds of audio recognized at once.
    """

    def __init__(
        self, folder: Path, decode: DecodeConfig | None = None, device: str = "cpu", batch_seconds: float = 120.0
    ) -> None:
        self.spec, model = load_bundle(Path(folder))
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.frontend = self.spec.build_frontend().to(self.device)
        self.decoder = build_decoder(decode or self.spec.decode, self.spec.build_tokenizer())
        self.batch_seconds = batch_seconds

    @property
    def sample_rate(self) -> int:
        """Rate that arrays are expected at unless another is named, Hz."""
        return self.spec.sample_rate

    def transcribe(
        self, audio: Sequence[Audio] | str | Path | bytes, sample_rate: int | None = None
    ) -> list[Transcript]:
        """Recognize recordings; one that cannot be read gets its error and stops no other.

        Args:
            audio: Paths, encoded files as bytes, or arrays [num_samples]: floats in ±1, or integer PCM.
            sample_rate: Rate of the arrays, Hz; the model's own by default.
        """
        if isinstance(audio, str | Path | bytes):  # one recording; a text would else be read letter by letter
            audio = [audio]
        waves: list[Tensor | str] = [self._load(item, sample_rate) for item in audio]
        pieces = [
            _Piece(i, part)
            for i, wave in enumerate(waves)
            if isinstance(wave, Tensor)
            for part in split_long(wave, self.sample_rate)
        ]
        found: dict[int, list[Hypothesis]] = {i: [] for i in range(len(waves))}
        order = sorted(range(len(pieces)), key=lambda n: len(pieces[n].wave))
        hypotheses: dict[int, Hypothesis] = {}
        for rows in self._batches(order, pieces):
            for row, hypothesis in zip(rows, self._recognize([pieces[row].wave for row in rows]), strict=True):
                hypotheses[row] = hypothesis
        for row, piece in enumerate(pieces):
            found[piece.recording].append(hypotheses[row])
        return [self._transcript(wave, found[i]) for i, wave in enumerate(waves)]

    def _load(self, item: Audio, sample_rate: int | None) -> Tensor | str:
        try:
            if isinstance(item, str | Path | bytes):
                return load_audio(item, self.sample_rate)
            samples = np.asarray(item)
            if np.issubdtype(samples.dtype, np.integer):  # PCM as read from a file
                samples = samples / -float(np.iinfo(samples.dtype).min or -1)
            wave = torch.as_tensor(samples.astype(np.float32))
            if wave.ndim != 1 or len(wave) == 0 or not torch.isfinite(wave).all():
                return f"an array of shape {tuple(wave.shape)} is no audio: give finite samples [num_samples] in ±1"
            return resample(wave, sample_rate or self.sample_rate, self.sample_rate)
        except AudioError as error:
            return str(error)
        except (TypeError, ValueError) as error:
            return f"a {type(item).__name__} is no audio: give a path, bytes or an array of samples ({error})"

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

    @torch.inference_mode()
    def _recognize(self, waves: list[Tensor]) -> list[Hypothesis]:
        inputs = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True).to(self.device)
        lengths = torch.tensor([len(wave) for wave in waves], device=self.device)
        log_probs, frames = self.model(*self.frontend(inputs, lengths))
        return self.decoder.decode(log_probs.cpu(), frames.cpu())

    def _transcript(self, wave: Tensor | str, parts: list[Hypothesis]) -> Transcript:
        if isinstance(wave, str):
            return Transcript(text="", seconds=0.0, confidence=0.0, error=wave)
        tokens = sum(len(part.tokens) for part in parts)
        confidence = sum(part.confidence * len(part.tokens) for part in parts) / tokens if tokens else 0.0
        text = " ".join(part.text for part in parts if part.text)
        return Transcript(text=text, seconds=len(wave) / self.sample_rate, confidence=confidence)
