"""Features of sets of shards: computed, stored in shards with statistics by speaker, and read again.

Networks read them as any shards; GMM-HMMs read them utterance by utterance, when a step needs them (`FeatureSet`).
"""

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from devices.compute_threads import one_thread
from speech.audio import AudioError, decode_audio
from speech.features import FeatureChoice, FeatureConfig, build_features
from speech.features.cmvn import CmvnStats, normalize_frames
from storage.index import ShardIndex
from storage.intact import DamagedObjectError, damaged, readable
from storage.objects import ObjectMissingError, ObjectStore
from storage.quarantine import QuarantinedShard, ShardQuarantine
from storage.reading import ShardError, ShardReader
from storage.shards import Sample, build_index, load_part, shard_name, write_shard
from tasks.config.home import home
from tasks.dataset.splits import TRAIN
from tasks.stages import progress
from tasks.stages.base import Run
from tasks.stages.folds import train_folder
from tasks.stages.runner import Piece, map_pieces, piece_name, share_out

_NORMALIZATION = "normalization.json"
_COPIED = ("text", "speaker", "corpus", "domain", "language", "duration", "sample_rate")
SpeakerStats = dict[str, CmvnStats]


class Extractor:
    """Computes features of audio, and their statistics.

    Args:
        cfg: Configuration of the features.
        sample_rate: Sample rate of the audio, Hz.
    """

    def __init__(self, cfg: FeatureConfig, sample_rate: int) -> None:
        self.cfg = cfg
        self.extract = build_features(cfg, sample_rate)

    @torch.inference_mode()
    def features(self, wave: Tensor) -> Tensor:
        """Features [frames, F] of one waveform [samples]."""
        feats, frames = self.extract(wave[None], torch.tensor([len(wave)]))
        return torch.as_tensor(feats[0, : int(frames[0])])

    def samples(self, index: ShardIndex, reader: ShardReader, rows: list[int], stats: SpeakerStats) -> Iterator[Sample]:
        """Yields feature samples of some rows, and adds their statistics to `stats`."""
        for i in rows:
            row = index.row(i)
            payload = reader.payload(i)
            try:
                wave, _ = decode_audio(payload)
            except AudioError as error:
                raise reader.undecodable(i, error) from error
            feats = self.features(wave)
            stats.setdefault(row["speaker"], CmvnStats(self.extract.dim)).add(feats[self.extract.speech_mask(feats)])
            yield feature_sample(row, feats)


def feature_sample(row: dict[str, Any], feats: Tensor) -> Sample:
    """An utterance's features [frames, F] as they are stored.

    Args:
        row: What the index says about the utterance.
        feats: The features.
    """
    data = io.BytesIO()
    np.save(data, feats.numpy(), allow_pickle=False)
    fields = {name: row[name] for name in _COPIED} | {"num_frames": len(feats)}
    return Sample(id=row["id"], members={"npy": data.getvalue()}, row=fields)


def note_name(shard: str) -> str:
    """Name of the object with a shard's statistics."""
    return f"stats/{shard.removesuffix('.tar')}.json"


def read_note(store: ObjectStore, shard: str, utterances: int) -> SpeakerStats:
    """A shard's statistics.

    Raises:
        DamagedObjectError: They are damaged, or missing although the shard has utterances.
    """
    value, url = store.read_json(note_name(shard)), store.join(note_name(shard))
    with readable(url):
        if utterances and not value:
            raise damaged(url, f"it lacks the statistics of {utterances} utterances")
        return {str(who): CmvnStats.from_dict(stats) for who, stats in value.items()}


def add_statistics(total: SpeakerStats, more: SpeakerStats) -> None:
    """Add the statistics of further speech to those of its speakers."""
    for who, stats in more.items():
        total[who] = total[who] + stats if who in total else stats


def has_note(store: ObjectStore, shard: str, utterances: int) -> bool:
    """Whether a shard's statistics exist and are intact."""
    try:
        return bool(read_note(store, shard, utterances)) or not utterances
    except (ObjectMissingError, DamagedObjectError):
        return False


def features_piece(piece: Piece) -> int:
    """Compute statistics, and stored features if configured, of some shards of a set; returns the number of shards.

    Damaged shards are quarantined.
    """
    cfg, target = TypeAdapter(FeatureChoice).validate_python(piece["features"]), ObjectStore(piece["target"])
    source = opened(piece["source"], piece["digest"])
    index, reader = source.index, source.reader
    extractor = Extractor(cfg, piece["sample_rate"])
    damaged = ShardQuarantine(target, len(index), piece["limit"])
    shard_of = np.asarray(index.column("shard"))
    for number in piece["numbers"]:
        rows = np.flatnonzero(shard_of == number).tolist()
        try:
            with one_thread():  # pieces are computed in parallel
                _features_of_shard(extractor, index, reader, target, number, rows)
        except ShardError as error:
            damaged.add(error, [index.row(i)["id"] for i in rows])
    return len(piece["numbers"])


def _features_of_shard(
    extractor: Extractor, index: ShardIndex, reader: ShardReader, target: ObjectStore, number: int, rows: list[int]
) -> None:
    stored, name = extractor.cfg.stored, shard_name(number)
    if has_note(target, name, len(rows)) and (not stored or load_part(target, name) is not None):
        return
    stats: SpeakerStats = {}
    samples = extractor.samples(index, reader, rows, stats)
    if stored:
        write_shard(target, name, samples, payload="npy")
    else:
        for _ in samples:
            pass
    target.write_json(note_name(name), {who: value.to_dict() for who, value in sorted(stats.items())})


def _pieces(run: Run, source: ObjectStore, target: ObjectStore, index: ShardIndex) -> Iterator[Piece]:
    for numbers in share_out(len(index.shards), run.runner):
        yield {
            "name": piece_name(numbers),
            "source": source.url,
            "digest": index.digest,
            "target": target.url,
            "numbers": numbers,
            "features": run.config.features.model_dump(mode="json"),
            "sample_rate": run.config.data.sample_rate,
            "limit": run.config.data.max_quarantined,
        }


def features_of_set(
    run: Run, name: str, source: ObjectStore, target: ObjectStore, on_progress: Callable[[int, int], None]
) -> tuple[SpeakerStats, ShardIndex | None, int, list[QuarantinedShard]]:
    """Compute statistics, and stored features if configured, of one set.

    Args:
        run: The run, with the configuration of the features.
        name: The set.
        source: Store of its audio shards.
        target: Store for the output.
        on_progress: Called with the number of finished shards and of all.

    Returns:
        Statistics by speaker, the feature index (None unless features are stored), the number of frames that the
        statistics count, and damaged shards.
    """
    index = ShardIndex.read(source)
    damaged = ShardQuarantine(target, len(index), run.config.data.max_quarantined)
    damaged.clear()  # shards found damaged by an earlier attempt may be repaired
    pieces = _pieces(run, source, target, index)
    done = 0
    for made in map_pieces(run.runner, "tasks.stages.feature_shards:features_piece", pieces, f"features {name}"):
        done += made
        on_progress(done, len(index.shards))
    lost = damaged.entries()
    names = {entry.shard for entry in lost}
    whole = [number for number, shard in enumerate(index.shards) if shard.name not in names]
    total: SpeakerStats = {}
    for number in whole:
        add_statistics(total, read_note(target, shard_name(number), index.shards[number].count))
    frames = sum(value.count for value in total.values())
    if not run.config.features.stored:
        return total, None, frames, lost
    return total, stored_index(target, name, [shard_name(number) for number in whole]), frames, lost


def stored_index(target: ObjectStore, name: str, shards: Iterable[str]) -> ShardIndex:
    """Write the index of a set of stored features.

    Args:
        target: Store of the shards.
        name: The set.
        shards: Names of its shards.
    """
    parts = (part for shard in shards if (part := load_part(target, shard)) is not None)
    index = build_index(parts, {"payload": "npy", "set": name})
    index.write(target)
    return index


class FeatureSet:
    """The shards of a set; if they hold features, these with the statistics of its speakers.

    Args:
        url: Store of the shards: those of features come from `compute_features`.
    """

    def __init__(self, url: str) -> None:
        self.store = ObjectStore(url)
        self.index = ShardIndex.read(self.store)
        self.reader = ShardReader(self.store, self.index, home() / "cache")

    @cached_property
    def _normalization(self) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
        """Mean and standard deviation by speaker, and the floor of normalized features."""
        value = self.store.read_json(_NORMALIZATION)
        speakers = {who: CmvnStats.from_dict(stats) for who, stats in value["speakers"].items()}
        return {who: (stats.mean, stats.std) for who, stats in speakers.items()}, float(value["floor"])

    def read(self, row: int, speaker: str) -> Tensor:
        """Normalized features of an utterance: float32 `[T, F]`."""
        return self.normalized(self.unnormalized(row), speaker)

    def normalized(self, feats: Tensor, speaker: str) -> Tensor:
        """Features of one of a speaker's utterances, normalized: float32 `[T, F]`."""
        speakers, floor = self._normalization
        return normalize_frames(feats, *speakers[speaker], floor)

    def unnormalized(self, row: int) -> Tensor:
        """Features of an utterance as they are stored: float32 `[T, F]`."""
        return torch.from_numpy(np.load(io.BytesIO(self.reader.payload(row)), allow_pickle=False))

    def utterances(self, rows: list[int] | None = None) -> list["StoredUtterance"]:
        """Utterances of the set: those of some rows of the index, or all, sorted by speaker."""
        if rows is None:
            names, speakers = self.index.column("id"), self.index.column("speaker")
            rows = sorted(range(len(self.index)), key=lambda row: (speakers[row], names[row]))
        return [self._utterance(row) for row in rows]

    def _utterance(self, row: int) -> "StoredUtterance":
        value = self.index.row(row)
        words = tuple(value["text"].split())
        return StoredUtterance(value["id"], value["speaker"], words, int(value["num_frames"]), row, self)


@dataclass(frozen=True)
class StoredUtterance:
    """An utterance whose features are read when they are used (`speech.hmm.utterances.TrainingUtterance`)."""

    id: str
    """Its name."""
    speaker: str
    """Its speaker."""
    words: tuple[str, ...]
    """The transcript."""
    num_frames: int
    """Number of frames."""
    row: int
    """Its row in the index of the set."""
    source: FeatureSet = field(repr=False, compare=False)
    """The set."""

    @property
    def features(self) -> Tensor:
        """Normalized features, float32 `[T, F]`."""
        return self.source.read(self.row, self.speaker)


@lru_cache(maxsize=4)
def opened(url: str, digest: str) -> FeatureSet:
    """A set; cached for further work in this process.

    Args:
        url: Store of the shards.
        digest: Digest of their index.
    """
    return FeatureSet(url)


def compute_features(
    run: Run, cfg: FeatureConfig, name: str, target: ObjectStore, stage: str
) -> tuple[FeatureSet, list[QuarantinedShard]]:
    """Compute and store the features of a set; finished shards of an earlier attempt are kept.

    Args:
        run: The run.
        cfg: Kind of features.
        name: The set.
        target: Store for the features.
        stage: The stage that reports progress.

    Returns:
        The features, and damaged audio shards, whose utterances are left out.
    """
    own = replace(run, config=run.config.model_copy(update={"features": cfg.model_copy(update={"stored": True})}))
    folder = train_folder(run.config.data) if name == TRAIN else name
    source = run.result("shard").store.child(folder)

    def on_progress(done: int, total: int) -> None:
        progress.report(stage, done, total, f"features of {folder}")

    stats, _, _, damaged = features_of_set(own, folder, source, target, on_progress)
    speakers = {who: value.to_dict() for who, value in sorted(stats.items())}
    target.write_json(_NORMALIZATION, {"floor": cfg.cmvn_floor, "speakers": speakers})
    return FeatureSet(target.url), damaged
