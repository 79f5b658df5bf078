"""Recognizes a set of shards: a hypothesis for every utterance."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from devices.portions import Portions
from recognition.data.dataset import Batch, SpeechDataset, read_ahead
from recognition.decoding_pool import DecodingPool, useful_processes
from recognition.recognizer import Recognizer, Scores
from speech.decoding import DecodeConfig, Hypothesis
from speech.features.cmvn import CmvnStats
from speech.hmm.utterances import by_speaker
from storage.batching import plan_epoch
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardError, ShardReader

_ADAPTED_S = 3600.0
"""Seconds of a speaker that are in memory at once, and that features are adapted to."""


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
    bundle: Path,
    url: str,
    *,
    decode: DecodeConfig,
    cache: Path,
    device: str = "cpu",
    speakers: Mapping[str, CmvnStats] | None = None,
    batch_seconds: float = 240.0,
    on_progress: Callable[[int, int], None] | None = None,
    on_damage: Callable[[ShardError], object] | None = None,
    shards: Sequence[int] | None = None,
    processes: int = 1,
) -> list[Decoded]:
    """Recognize a set.

    Args:
        bundle: Folder of the model.
        url: Store of the set's index and shards (audio, or features of the model's kind).
        decode: Decoding parameters.
        cache: Local folder for copies of remote shards.
        device: Device that the model runs on.
        speakers: Statistics by speaker, for `cmvn: speaker`.
        batch_seconds: Seconds of audio in a batch, padding included.
        on_progress: Called with the number of finished utterances and of all.
        on_damage: Called once for each damaged shard; may raise to stop. Without it the first damaged shard raises.
        shards: Numbers of shards in the index: recognize only their utterances.
        processes: Processes for a slow search, as far as the set is worth them.

    Returns:
        One entry per utterance, in the order of the index, without those of damaged shards.

    Raises:
        TooLargeError: If the device's memory does not hold a single utterance.
    """
    recognizer = Recognizer.load(bundle, decode, device, speakers)
    dataset = open_set(url, recognizer.spec.sample_rate, cache)
    rows = None
    if shards is not None:
        rows = np.flatnonzero(np.isin(np.asarray(dataset.index.column("shard")), list(shards))).tolist()
    decoded = recognize_set(
        recognizer,
        dataset,
        batch_seconds=batch_seconds,
        on_progress=on_progress,
        on_damage=on_damage,
        rows=rows,
        processes=processes,
    )
    return [decoded[row] for row in sorted(decoded)]


def recognize_set(
    recognizer: Recognizer,
    dataset: SpeechDataset,
    *,
    batch_seconds: float = 240.0,
    on_progress: Callable[[int, int], None] | None = None,
    on_damage: Callable[[ShardError], object] | None = None,
    rows: Sequence[int] | None = None,
    processes: int = 1,
) -> dict[int, Decoded]:
    """Recognize an open set, or some of its utterances.

    Args:
        recognizer: The model.
        dataset: The set, as `open_set` returns it.
        batch_seconds: Seconds of audio in a batch, padding included.
        on_progress: Called with the number of finished utterances and of all.
        on_damage: Called once for each damaged shard.
        rows: Rows of the index; all by default.
        processes: Processes for a slow search.

    Returns:
        Hypotheses by row, without those of damaged shards.
    """
    wanted = np.arange(len(dataset.index)) if rows is None else np.asarray(rows, dtype=np.int64)
    decoded: dict[int, Decoded] = {}
    decoder = recognizer.decoder
    pool: DecodingPool[Batch] = DecodingPool(decoder, useful_processes(decoder, processes, len(wanted)))
    with pool:
        scored = _scored(recognizer, dataset, wanted, batch_seconds, on_damage)
        for part, hypotheses in _recognize(pool, scored):
            decoded |= zip(map(int, part.rows), _decoded(part, hypotheses, dataset), strict=True)
            if on_progress:
                on_progress(len(decoded), len(wanted))
    return decoded


def _recognize(
    pool: DecodingPool[Batch], scored: Iterable[tuple[Batch, Scores]]
) -> Iterator[tuple[Batch, list[Hypothesis]]]:
    """Search batches of scores; yields the batches with their hypotheses."""
    for part, scores in scored:
        yield from pool.add(part, scores)
    yield from pool.rest()


def _decoded(part: Batch, hypotheses: list[Hypothesis], dataset: SpeechDataset) -> Iterator[Decoded]:
    """Join the hypotheses of a batch with what is known about its utterances."""
    domains, corpora = dataset.index.values("domain"), dataset.index.values("corpus")
    for i, (row, hypothesis) in enumerate(zip(map(int, part.rows), hypotheses, strict=True)):
        yield Decoded(
            id=part.ids[i],
            ref=part.texts[i],
            hyp=hypothesis.text,
            score=hypothesis.score,
            confidence=hypothesis.confidence,
            speaker=part.speakers[i],
            domain=domains[row].as_py(),
            corpus=corpora[row].as_py(),
            duration=float(dataset.durations[row]),
        )


def score_some(
    bundle: Path,
    url: str,
    *,
    decode: DecodeConfig,
    utterances: int,
    seed: int,
    cache: Path,
    device: str = "cpu",
    speakers: Mapping[str, CmvnStats] | None = None,
    batch_seconds: float = 240.0,
    on_damage: Callable[[ShardError], object] | None = None,
) -> list[tuple[list[str], Scores]]:
    """Run the model, without decoding, on utterances of a set that are drawn at random.

    Args:
        bundle: Folder of the model.
        url: Store of the set's index and shards.
        decode: Decoding parameters, for features that are adapted with hypotheses.
        utterances: Number of utterances; a smaller set is used whole.
        seed: Seed of the draw.
        cache: Local folder for copies of remote shards.
        device: Device that the model runs on.
        speakers: Statistics by speaker, for `cmvn: speaker`.
        batch_seconds: Seconds of audio in a batch, padding included.
        on_damage: As for `decode_set`.

    Returns:
        Batches: the transcripts, and the model's output.
    """
    recognizer = Recognizer.load(bundle, decode, device, speakers)
    dataset = open_set(url, recognizer.spec.sample_rate, cache)
    rows = np.sort(np.random.default_rng(seed).permutation(len(dataset.index))[:utterances])
    return [(list(part.texts), scores) for part, scores in _scored(recognizer, dataset, rows, batch_seconds, on_damage)]


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


def _scored(
    recognizer: Recognizer,
    dataset: SpeechDataset,
    rows: NDArray[np.int64],
    batch_seconds: float,
    on_damage: Callable[[ShardError], object] | None,
) -> Iterator[tuple[Batch, Scores]]:
    """Batches of utterances with the model's output, as far as the device's memory allows."""
    portions = Portions()

    def compute(part: Batch) -> Scores:
        return recognizer.scores(part.inputs, part.lengths, part.speakers)

    if recognizer.adapts:
        batches = _adapted_batches(recognizer, dataset, rows, batch_seconds, on_damage)
    else:
        batches = whole_batches(dataset, rows, batch_seconds, on_damage)
    for batch in batches:
        yield from portions.each(batch, compute)


def _adapted_batches(
    recognizer: Recognizer,
    dataset: SpeechDataset,
    rows: NDArray[np.int64],
    batch_seconds: float,
    on_damage: Callable[[ShardError], object] | None,
) -> Iterator[Batch]:
    """Batches of speaker-adapted features, computed from all utterances of a speaker, an hour at a time."""
    speakers = dataset.index.values("speaker")
    for places in by_speaker(speakers[int(row)].as_py() for row in rows).values():
        own = rows[places]
        hours = (np.cumsum(dataset.durations[own]) // _ADAPTED_S).tolist()
        for part in by_speaker(hours).values():
            given = list(whole_batches(dataset, own[part], batch_seconds, on_damage))
            waves = [one[:size] for batch in given for one, size in zip(batch.inputs, batch.lengths, strict=True)]
            feats = iter(recognizer.adapted(waves))
            for batch in given:
                found = list(islice(feats, len(batch.ids)))
                inputs = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
                yield replace(batch, inputs=inputs, lengths=torch.tensor([len(one) for one in found]))


def whole_batches(
    dataset: SpeechDataset,
    left: NDArray[np.int64],
    batch_seconds: float,
    on_damage: Callable[[ShardError], object] | None,
) -> Iterator[Batch]:
    """Batches without the utterances of damaged shards; after each such shard, the rest is planned again."""
    shard_of = np.asarray(dataset.index.column("shard"))
    while True:
        plan = plan_epoch(dataset.durations[left], batch_seconds=batch_seconds, max_batch=256)
        given: list[NDArray[np.int64]] = []
        try:
            for batch in read_ahead(dataset.batch, [left[rows] for rows in plan]):
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
