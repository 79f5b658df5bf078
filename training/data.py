"""Batches of speech from shards: payloads, decoded audio or stored features, tokens; read ahead by a thread."""

import io
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.audio import decode_audio, resample
from speech.tokens import TokenError, Tokenizer
from storage.index import ShardIndex
from storage.reading import ShardReader

T = TypeVar("T")
_STOP = object()


@dataclass
class Batch:
    """Utterances padded to the longest.

    `inputs` holds waveforms [B, samples] in ±1, or stored features [B, frames, F]; `lengths` counts samples or frames.
    """

    rows: NDArray[np.int64]
    ids: list[str]
    speakers: list[str]
    texts: list[str]
    inputs: Tensor
    lengths: Tensor
    tokens: Tensor
    token_lengths: Tensor
    seconds: float


def encode(tokenizer: Tokenizer, text: str, lenient: bool = False) -> list[int]:
    """Tokens of a text.

    Raises:
        TokenError: If it has a symbol that the tokenizer does not know, unless `lenient` leaves it out.
    """
    try:
        return tokenizer.encode(text)
    except TokenError as error:
        if not lenient:
            raise
        unknown = set(error.symbols)
    words = ["".join(c for c in word if c not in unknown) for word in text.split() if word not in unknown]
    return tokenizer.encode(" ".join(word for word in words if word))


class SpeechDataset:
    """One set's utterances, by number, from verified shards.

    Args:
        index: The set's index.
        reader: Reads its payloads.
        tokenizer: Encodes its transcripts; None leaves tokens empty (for decoding).
        sample_rate: Rate that audio is brought to, Hz; None leaves it as stored.
        lenient: Leave symbols that the tokenizer does not know out of the tokens (for validation: a word that never
            occurs in training cannot be said, costs no loss, and counts as an error in the WER).
    """

    def __init__(
        self,
        index: ShardIndex,
        reader: ShardReader,
        tokenizer: Tokenizer | None = None,
        sample_rate: int | None = None,
        lenient: bool = False,
    ) -> None:
        self.index = index
        self.reader = reader
        self.sample_rate = sample_rate
        self.durations: NDArray[np.float64] = np.asarray(index.column("duration"), dtype=np.float64)
        self._ids = list(index.column("id"))
        self._speakers = list(index.column("speaker"))
        self._texts = list(index.column("text"))
        self._stored = index.metadata["payload"] == "npy"
        self._tokens = [encode(tokenizer, text, lenient) if tokenizer else [] for text in self._texts]

    def __len__(self) -> int:
        return len(self._ids)

    def load(self, row: int) -> Tensor:
        """An utterance's waveform [samples], or its stored features [frames, F]."""
        payload = self.reader.payload(row)
        if self._stored:
            return torch.from_numpy(np.load(io.BytesIO(payload), allow_pickle=False).astype(np.float32))
        wave, rate = decode_audio(payload)
        return resample(wave, rate, self.sample_rate) if self.sample_rate else wave

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """Load and pad the given utterances."""
        items = [self.load(int(row)) for row in rows]
        tokens = [torch.tensor(self._tokens[int(row)], dtype=torch.long) for row in rows]
        return Batch(
            rows=np.asarray(rows, dtype=np.int64),
            ids=[self._ids[int(row)] for row in rows],
            speakers=[self._speakers[int(row)] for row in rows],
            texts=[self._texts[int(row)] for row in rows],
            inputs=torch.nn.utils.rnn.pad_sequence(items, batch_first=True),
            lengths=torch.tensor([len(item) for item in items]),
            tokens=torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
            token_lengths=torch.tensor([len(item) for item in tokens]),
            seconds=float(self.durations[np.asarray(rows)].sum()),
        )


def read_ahead(load: Callable[[T], Batch], plan: Sequence[T], depth: int = 3) -> Iterator[Batch]:
    """Load the batches of a plan in order in a thread, at most `depth` ahead of the consumer.

    An error in the thread is raised at the consumer; a consumer that stops early stops the thread.
    """
    ahead: queue.Queue[object] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: object) -> None:
        while not stop.is_set():
            try:
                ahead.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in plan:
                if stop.is_set():
                    return
                put(load(item))
            put(_STOP)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="read-ahead", daemon=True)
    thread.start()
    try:
        while (item := ahead.get()) is not _STOP:
            if isinstance(item, BaseException):
                raise item
            assert isinstance(item, Batch)
            yield item
    finally:
        stop.set()
        thread.join(timeout=30)
