"""Batches of speech from shards: waveforms or stored features, and tokens, read ahead by a thread."""

import io
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from recognition.data.state_targets import StateTargets, padded_states
from speech.audio import decode_audio, resample
from speech.features.augment import Drawn
from speech.tokens import TokenError, Tokenizer
from storage.index import ShardIndex
from storage.quarantine import ShardQuarantine
from storage.reading import ShardError, ShardReader

log = logging.getLogger(__name__)
T = TypeVar("T")
_STOP = object()
_TENSORS = ("inputs", "lengths", "tokens", "token_lengths", "states", "state_lengths")
"""The fields of a batch that are tensors, beside the draws."""


@dataclass
class Batch:
    """Utterances, padded to the longest one.

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
    unreadable: int = 0
    """Utterances of this batch that are lost with damaged shards."""
    drawn: dict[str, Drawn] = field(default_factory=dict)
    """Random draws of each augmentation; empty without augmentation."""
    states: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int32))
    """Tied states [B, aligned frames], -1 where there is none; empty unless the objective needs them."""
    state_lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Aligned frames of each utterance [B]; 0 without an alignment."""
    frame_factor: int = 1
    """Aligned frames to an output frame."""
    languages: list[str] = field(default_factory=list)
    """Language of each utterance, a BCP 47 tag; empty unless the tokens depend on it."""

    def pinned(self) -> "Batch":
        """Copy to page-locked memory, from which copies to a GPU are asynchronous."""
        return self.each(lambda tensor: tensor.pin_memory())

    def tensors(self) -> list[Tensor]:
        """All tensors, those of the draws included."""
        return [getattr(self, name) for name in _TENSORS] + [x for drawn in self.drawn.values() for x in drawn.values()]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to each of `tensors`, in an order that depends on their names only."""
        fields: dict[str, Any] = {name: change(getattr(self, name)) for name in _TENSORS}
        return replace(self, **fields, drawn=_each(self.drawn, change))

    def part(self, which: slice) -> "Batch":
        """Some of the utterances, padded to the longest of them; `seconds` and `unreadable` stay the whole batch's."""
        lengths, token_lengths = self.lengths[which], self.token_lengths[which]
        return replace(
            self,
            rows=self.rows[which],
            ids=self.ids[which],
            speakers=self.speakers[which],
            texts=self.texts[which],
            inputs=self.inputs[which, : int(lengths.max())],
            lengths=lengths,
            tokens=self.tokens[which, : int(token_lengths.max())],
            token_lengths=token_lengths,
            drawn=_each(self.drawn, lambda tensor: tensor[which]),
            states=self.states[which],
            state_lengths=self.state_lengths[which],
            languages=self.languages[which],
        )


def _each(drawn: dict[str, Drawn], change: Callable[[Tensor], Tensor]) -> dict[str, Drawn]:
    """Apply a function to each tensor of the draws."""
    return {name: {key: change(tensor) for key, tensor in tensors.items()} for name, tensors in drawn.items()}


def encode(tokenizer: Tokenizer, text: str, lenient: bool = False) -> list[int]:
    """Tokens of a text.

    Raises:
        TokenError: If the text has an unknown symbol, unless `lenient` omits such symbols.
    """
    try:
        return tokenizer.encode(text)
    except TokenError as error:
        if not lenient:
            raise
        unknown = set(error.symbols)
    words = ["".join(c for c in word if c not in unknown) for word in text.split() if word not in unknown]
    return tokenizer.encode(" ".join(word for word in words if word))


def check_vocabulary(tokenizer: Tokenizer, texts: pa.Array) -> None:
    """Check that a tokenizer can encode all transcripts; each distinct word is encoded once.

    Raises:
        TokenError: If it cannot.
    """
    known: set[str] = set()
    spaced = False
    for start in range(0, len(texts), 65536):
        for text in texts[start : start + 65536].to_pylist():
            words = text.split()
            if " ".join(words) != text or (len(words) > 1 and not spaced):
                tokenizer.encode(text)
                spaced = True
            for word in words:
                if word not in known:
                    tokenizer.encode(word)
                    known.add(word)


def _padded(items: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True) if items else torch.zeros(0, 0)


class SpeechDataset:
    """One set's utterances, by row of the index, from verified shards.

    Args:
        index: The set's index.
        reader: Reads its payloads.
        tokenizer: Encodes its transcripts; None leaves tokens empty (for decoding).
        sample_rate: Rate that audio is resampled to, Hz; None keeps the stored rate.
        lenient: Omit symbols that the tokenizer does not know (for validation: a symbol that never occurs in training
            cannot be recognized; it does not count in the loss, but its word is an error in the WER).
        quarantine: Records damaged shards, whose utterances are then omitted from batches; None raises for them.
        targets: Tied states of the utterances, if the objective needs them.
        checked: The tokenizer is known to encode all transcripts: do not read them for that.
        max_seconds: Utterances that are longer are left out of batches.
        min_seconds: Seconds that are computed even for the shortest utterance.
        written: Texts by row that are encoded in place of the transcripts, where they are not null.

    Raises:
        TokenError: If the tokenizer does not know a symbol of a transcript, unless `lenient` or `checked`.
    """

    def __init__(
        self,
        index: ShardIndex,
        reader: ShardReader,
        tokenizer: Tokenizer | None = None,
        sample_rate: int | None = None,
        lenient: bool = False,
        quarantine: ShardQuarantine | None = None,
        targets: StateTargets | None = None,
        checked: bool = False,
        max_seconds: float = math.inf,
        min_seconds: float = 0.0,
        written: Any = None,
    ) -> None:
        self.index = index
        self.reader = reader
        self.sample_rate = sample_rate
        self._targets = targets
        self.durations: NDArray[np.float64] = np.asarray(index.column("duration"), dtype=np.float64)
        self._min_seconds = min_seconds
        # columns stay in Arrow memory and texts are encoded when needed: there may be ten million utterances
        self._ids, self._speakers, self._texts = (index.values(name) for name in ("id", "speaker", "text"))
        self._languages = index.values("language") if tokenizer and tokenizer.languages else None
        self._shard_of = index.column("shard")
        self._lost: set[int] = set()
        self._max_seconds = max_seconds
        self._stored = index.metadata["payload"] == "npy"
        self._tokenizer, self._lenient, self._quarantine = tokenizer, lenient, quarantine
        self._written = written
        if tokenizer and not lenient and not checked:
            check_vocabulary(tokenizer, self._texts)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def computed_seconds(self) -> NDArray[np.float64]:
        """Seconds of each utterance that a network computes, which limit batches; without augmentation."""
        return self.durations.clip(min=self._min_seconds)

    def ids(self, rows: NDArray[np.int64]) -> list[str]:
        """Ids of utterances."""
        return [self._ids[int(row)].as_py() for row in rows]

    def load(self, row: int) -> Tensor:
        """An utterance's waveform [samples], or its stored features [frames, F]."""
        payload = self.reader.payload(row)
        try:
            return self._decode(payload)
        except (ValueError, EOFError):  # shards are verified once: the file may have changed since
            self.reader.recheck(row)
        payload = self.reader.payload(row)
        try:
            return self._decode(payload)
        except (ValueError, EOFError) as error:
            raise self.reader.undecodable(row, error) from error

    def _decode(self, payload: bytes) -> Tensor:
        if self._stored:
            return torch.from_numpy(np.load(io.BytesIO(payload), allow_pickle=False).astype(np.float32))
        wave, rate = decode_audio(payload)
        return resample(wave, rate, self.sample_rate) if self.sample_rate else wave

    def prefetch(self, rows: NDArray[np.int64]) -> None:
        """Fetch and verify the shards of coming utterances in the background, in that order."""
        shards = self._shard_of[self.first_of_shards(rows)]
        self.reader.prefetch(int(shard) for shard in shards if shard not in self._lost)

    def first_of_shards(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first row of each shard, in the order of `rows`."""
        _, first = np.unique(self._shard_of[rows], return_index=True)
        return rows[np.sort(first)]

    def check(self) -> None:
        """Check that the loss to damaged shards is within the limit, including those that other processes found.

        Raises:
            TooManyShardsError: If it is not.
        """
        if self._quarantine is not None:
            self._quarantine.check()

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> Batch:
        """Load and pad the given utterances.

        Raises:
            ShardError: If a shard is damaged and there is no quarantine.
            TooManyShardsError: If there is one, and with this shard more is lost than its limit.
        """
        rows = [int(row) for row in rows if self.durations[int(row)] <= self._max_seconds]
        # a list, not a dictionary: a sampled epoch may draw an utterance twice for one batch
        loaded = [(row, item) for row in rows if (item := self._load_or_quarantine(row)) is not None]
        kept = np.array([row for row, _ in loaded], dtype=np.int64)
        texts = [self._texts[row].as_py() for row, _ in loaded]
        targets = [self._target(row, text) for (row, _), text in zip(loaded, texts, strict=True)]
        encoded = [encode(self._tokenizer, text, self._lenient) if self._tokenizer else [] for text in targets]
        tokens = [torch.tensor(token_ids, dtype=torch.long) for token_ids in encoded]
        ids = [self._ids[row].as_py() for row, _ in loaded]
        batch = Batch(
            rows=kept,
            ids=ids,
            speakers=[self._speakers[row].as_py() for row, _ in loaded],
            texts=texts,
            inputs=_padded([item for _, item in loaded]),
            lengths=torch.tensor([len(item) for _, item in loaded], dtype=torch.long),
            tokens=_padded(tokens),
            token_lengths=torch.tensor([len(item) for item in tokens], dtype=torch.long),
            seconds=float(self.durations[kept].sum()),
            unreadable=len(rows) - len(loaded),
            languages=[self._languages[row].as_py() or "" for row, _ in loaded] if self._languages is not None else [],
        )
        return self._with_states(batch, self._targets) if self._targets else batch

    def _target(self, row: int, text: str) -> str:
        """What a model learns to write for an utterance."""
        written: str | None = None if self._written is None else self._written[row].as_py()
        return text if written is None else written

    def _with_states(self, batch: Batch, targets: StateTargets) -> Batch:
        states = [targets.states(name) for name in batch.ids]
        lengths = torch.tensor([len(aligned) for aligned in states], dtype=torch.long)
        return replace(batch, states=padded_states(states), state_lengths=lengths, frame_factor=targets.frame_factor)

    def _load_or_quarantine(self, row: int) -> Tensor | None:
        shard = int(self._shard_of[row])
        if shard in self._lost:
            return None
        try:
            return self.load(row)
        except ShardError as error:
            if self._quarantine is None:
                raise
            log.warning("%s It is left out.", error)
            self._quarantine.add(error)
            self._lost.add(shard)
            return None


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
