"""Recognizes a set of shards: a hypothesis for every utterance."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speech.decoding import DecodeConfig, Hypothesis
from speech.features.cmvn import CmvnStats
from speech.recognizer import Recognizer, Scores
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardError, ShardReader
from training.learner.batching import plan_epoch
from training.learner.data import Batch, SpeechDataset, read_ahead
from training.learner.decoding_pool import DecodingPool, useful_processes
from training.learner.microbatches import Portions


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
    store = ObjectStore(url)
    index = ShardIndex.read(store)
    dataset = SpeechDataset(index, ShardReader(store, index, cache), sample_rate=recognizer.spec.sample_rate)
    shard_of = np.asarray(index.column("shard"))
    rows = np.arange(len(index)) if shards is None else np.flatnonzero(np.isin(shard_of, list(shards)))
    domains, corpora = index.column("domain"), index.column("corpus")
    found: dict[int, Decoded] = {}
    portions = Portions()

    def compute(part: Batch) -> Scores:
        return recognizer.scores(part.inputs, part.lengths, part.speakers)

    def take(part: Batch, hypotheses: list[Hypothesis]) -> None:
        for i, hypothesis in enumerate(hypotheses):
            row = int(part.rows[i])
            found[row] = Decoded(
                id=part.ids[i],
                ref=part.texts[i],
                hyp=hypothesis.text,
                score=hypothesis.score,
                confidence=hypothesis.confidence,
                speaker=part.speakers[i],
                domain=domains[row],
                corpus=corpora[row],
                duration=float(dataset.durations[row]),
            )
        if on_progress:
            on_progress(len(found), len(rows))

    decoder = recognizer.decoder
    pool: DecodingPool[Batch] = DecodingPool(decoder, useful_processes(decoder, processes, len(rows)))
    with pool:
        for batch in whole_batches(dataset, rows, batch_seconds, on_damage):
            for computed, scores in portions.each(batch, compute):
                for part, hypotheses in pool.add(computed, scores):
                    take(part, hypotheses)
        for part, hypotheses in pool.rest():
            take(part, hypotheses)
    return [found[row] for row in sorted(found)]


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
