"""Recognizes a set of shards: a hypothesis for every utterance."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from devices.portions import Portions
from recognition.data.dataset import Batch, SpeechDataset, read_ahead
from recognition.decoding_pool import DecodingPool, useful_processes
from recognition.recognizer import Adapter, Recognizer
from speech.decoding import Hypothesis
from speech.hmm.utterances import by_speaker
from storage.batching import plan_epoch
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardError, ShardReader

BATCH_SECONDS = 240.0
"""Seconds of audio in a batch, padding included."""
E = TypeVar("E")


@dataclass(frozen=True)
class Decoded:
    """One utterance, with its transcript and the hypothesis."""

    id: str
    ref: str
    hyp: str
    score: float
    confidence: float
    speaker: str
    domain: str
    corpus: str
    duration: float


def decode_set(
    recognizer: Recognizer[Any],
    dataset: SpeechDataset,
    *,
    rows: Sequence[int] | None = None,
    batch_seconds: float = BATCH_SECONDS,
    processes: int = 1,
    known: Mapping[int, Decoded] | None = None,
    on_decoded: Callable[[dict[int, Decoded]], object] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_damage: Callable[[ShardError], object] | None = None,
) -> dict[int, Decoded]:
    """Recognize a set, or some of its utterances.

    Args:
        recognizer: The model.
        dataset: The set, as `open_set` returns it.
        rows: Rows of the index; all by default.
        batch_seconds: Seconds of audio in a batch, padding included.
        processes: Processes for a slow search, as far as the set is worth them.
        known: Hypotheses by row, of an interrupted call: batches of which all are known are not recognized again. The
            others are the same batches as before, and so are their hypotheses.
        on_decoded: Called with the hypotheses of each batch.
        on_progress: Called with the number of finished utterances and of all.
        on_damage: Called once for each damaged shard; may raise to stop. Without it the first damaged shard raises.

    Returns:
        Hypotheses by row, in the order of the index, without those of damaged shards.

    Raises:
        TooLargeError: If the device's memory does not hold a single utterance.
    """
    wanted = np.arange(len(dataset.index)) if rows is None else np.asarray(rows, dtype=np.int64)
    decoded = {row: known[row] for row in map(int, wanted) if row in known} if known else {}
    with DecodingPool[Batch](recognizer, useful_processes(recognizer, processes, len(wanted) - len(decoded))) as pool:
        encoded = encode_set(recognizer, dataset, wanted, batch_seconds, on_damage, frozenset(decoded))
        for part, hypotheses in pool.each(encoded):
            texts = map(recognizer.spec.comparable, hypotheses)
            made = dict(zip(map(int, part.rows), _decoded(part, hypotheses, texts, dataset), strict=True))
            decoded |= made
            if on_decoded:
                on_decoded(made)
            if on_progress:
                on_progress(len(decoded), len(wanted))
    return dict(sorted(decoded.items()))


def _decoded(
    part: Batch, hypotheses: list[Hypothesis], texts: Iterable[str], dataset: SpeechDataset
) -> Iterator[Decoded]:
    """Join the hypotheses of a batch, and their texts, with what is known about its utterances."""
    domains, corpora = dataset.index.values("domain"), dataset.index.values("corpus")
    for i, (row, hypothesis, text) in enumerate(zip(map(int, part.rows), hypotheses, texts, strict=True)):
        yield Decoded(
            id=part.ids[i],
            ref=part.texts[i],
            hyp=text,
            score=hypothesis.score,
            confidence=hypothesis.confidence,
            speaker=part.speakers[i],
            domain=domains[row].as_py(),
            corpus=corpora[row].as_py(),
            duration=float(dataset.durations[row]),
        )


def drawn_rows(dataset: SpeechDataset, utterances: int, seed: int) -> NDArray[np.int64]:
    """Rows of utterances that are drawn at random, ascending; a smaller set is used whole."""
    return np.sort(np.random.default_rng(seed).permutation(len(dataset.index))[:utterances])


def open_set(url: str, sample_rate: int, cache: Path) -> SpeechDataset:
    """Open a set for a trained model.

    Args:
        url: Store of the set's index and shards (audio, or features of the model's kind).
        sample_rate: The model's, in Hz.
        cache: Local folder for copies of remote shards.
    """
    store = ObjectStore(url)
    index = ShardIndex.read(store)
    return SpeechDataset(index, ShardReader(store, index, cache), sample_rate=sample_rate)


def encode_set(
    recognizer: Recognizer[E],
    dataset: SpeechDataset,
    rows: NDArray[np.int64],
    batch_seconds: float = BATCH_SECONDS,
    on_damage: Callable[[ShardError], object] | None = None,
    known: frozenset[int] = frozenset(),
) -> Iterator[tuple[Batch, E]]:
    """Batches of some utterances with what the encoder gives for them, as far as the device's memory allows.

    Args:
        recognizer: The model.
        dataset: The set.
        rows: Rows of its index.
        batch_seconds: As of `decode_set`.
        on_damage: As of `decode_set`.
        known: Rows that need not be encoded if their whole batch is among them, or, where a recognizer adapts to
            speakers, all of what it adapts to together.
    """
    portions = Portions()
    spoken = dataset.index.values("language") if recognizer.cfg.languages_given else None

    def compute(part: Batch) -> E:
        languages = None
        if spoken is not None:
            languages = [recognizer.known_language(spoken[int(row)].as_py() or "") for row in part.rows]
        return recognizer.encode(part.inputs, part.lengths, part.speakers, languages)

    if (adapter := recognizer.adapter) is not None:
        batches = _adapted_batches(adapter, recognizer.together_s, dataset, rows, batch_seconds, on_damage, known)
    else:
        batches = whole_batches(dataset, rows, batch_seconds, on_damage, recognizer.spec.min_seconds, known)
    for batch in batches:
        yield from portions.each(batch, compute)


def _adapted_batches(
    adapter: Adapter,
    together_s: float,
    dataset: SpeechDataset,
    rows: NDArray[np.int64],
    batch_seconds: float,
    on_damage: Callable[[ShardError], object] | None,
    known: frozenset[int],
) -> Iterator[Batch]:
    """Batches of speaker-adapted features, made from up to `together_s` seconds of a speaker's utterances at once."""
    speakers = dataset.index.values("speaker")
    for places in by_speaker(speakers[int(row)].as_py() for row in rows).values():
        own = rows[places]
        spans = (np.cumsum(dataset.durations[own]) // together_s).tolist()
        for part in by_speaker(spans).values():
            if known.issuperset(own[part].tolist()):
                continue
            heard: list[Batch] = []
            feats = iter(adapter(_waves(whole_batches(dataset, own[part], batch_seconds, on_damage), heard)))
            for batch in heard:
                adapted = list(islice(feats, len(batch.ids)))
                inputs = torch.nn.utils.rnn.pad_sequence(adapted, batch_first=True)
                yield replace(batch, inputs=inputs, lengths=torch.tensor([len(features) for features in adapted]))


def _waves(batches: Iterable[Batch], heard: list[Batch]) -> Iterator[Tensor]:
    """The waveforms of batches; adds each batch without them, since only its features stay in memory."""
    for batch in batches:
        heard.append(replace(batch, inputs=batch.inputs.new_zeros(len(batch.ids), 0)))
        yield from (wave[:size] for wave, size in zip(batch.inputs, batch.lengths, strict=True))


def whole_batches(
    dataset: SpeechDataset,
    left: NDArray[np.int64],
    batch_seconds: float,
    on_damage: Callable[[ShardError], object] | None,
    min_seconds: float = 0.0,
    known: frozenset[int] = frozenset(),
) -> Iterator[Batch]:
    """Batches without the utterances of damaged shards; after each such shard, the rest is planned again.

    Args:
        dataset: The set.
        left: Rows of its index.
        batch_seconds: Seconds that are computed for a batch at most, padding included.
        on_damage: As of `decode_set`.
        min_seconds: Seconds that are computed even for the shortest utterance.
        known: Rows whose batches are left out, if all of a batch are among them.
    """
    shard_of = np.asarray(dataset.index.column("shard"))
    while True:
        seconds = dataset.durations[left].clip(min=min_seconds)
        plan = plan_epoch(seconds, batch_seconds=batch_seconds, max_batch=256)
        planned = [left[rows] for rows in plan]
        given: list[NDArray[np.int64]] = []
        try:
            for batch in read_ahead(dataset.batch, [rows for rows in planned if not known.issuperset(rows.tolist())]):
                given.append(batch.rows)
                yield batch
            return
        except ShardError as error:
            if on_damage is None or error.shard is None:
                raise
            on_damage(error)
            done = np.concatenate([np.zeros(0, dtype=np.int64), *given])
            left = left[(shard_of[left] != dataset.index.shards.index(error.shard)) & ~np.isin(left, done)]
            if not len(left):
                return
