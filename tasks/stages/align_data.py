"""Features that GMM-HMMs are trained on: computed once per set, stored in shards, read when a step needs them."""

import io
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from speech.features import CmvnStats, FeatureConfig
from speech.features.cmvn import normalize_frames
from speech.hmm.config import AlignConfig
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard
from storage.reading import ShardReader
from tasks.config.home import home
from tasks.dataset.sets import VALID
from tasks.dataset.splits import TRAIN
from tasks.stages.base import Run
from tasks.stages.feature_shards import features_of_set
from tasks.stages.folds import train_folder
from tasks.stages.shard import SHARD

_NORMALIZATION = "normalization.json"


def config_of(run: Run) -> AlignConfig:
    """The section `align`; the stage runs only with it."""
    assert run.config.align is not None
    return run.config.align


def aligned_sets(run: Run) -> list[str]:
    """The sets that are aligned."""
    present = SHARD.record(run)["sets"]
    return [name for name in (TRAIN, VALID) if name == TRAIN or name in present]


class FeatureSet:
    """Stored features of a set, with the statistics of its speakers.

    Args:
        url: Store of the feature shards, from `compute_features`.
    """

    def __init__(self, url: str) -> None:
        self.store = ObjectStore(url)
        self.index = ShardIndex.read(self.store)
        self._reader = ShardReader(self.store, self.index, home() / "cache")

    @cached_property
    def _normalization(self) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
        """Mean and standard deviation by speaker, and the floor of normalized features."""
        value = self.store.read_json(_NORMALIZATION)
        stats = {who: CmvnStats.from_dict(one) for who, one in value["speakers"].items()}
        return {who: (one.mean, one.std) for who, one in stats.items()}, float(value["floor"])

    def read(self, row: int, speaker: str) -> Tensor:
        """Normalized features of an utterance: float32 `[T, F]`."""
        return self.normalized(self.unnormalized(row), speaker)

    def normalized(self, feats: Tensor, speaker: str) -> Tensor:
        """Features of one of a speaker's utterances, normalized: float32 `[T, F]`."""
        speakers, floor = self._normalization
        return normalize_frames(feats, *speakers[speaker], floor)

    def unnormalized(self, row: int) -> Tensor:
        """Features of an utterance as they are stored: float32 `[T, F]`."""
        return torch.from_numpy(np.load(io.BytesIO(self._reader.payload(row)), allow_pickle=False))

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
        url: Store of the feature shards.
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
    stats, _, _, damaged = features_of_set(own, folder, run.result("shard").store.child(folder), target, stage)
    speakers = {who: value.to_dict() for who, value in sorted(stats.items())}
    target.write_json(_NORMALIZATION, {"floor": cfg.cmvn_floor, "speakers": speakers})
    return FeatureSet(target.url), damaged
