"""Forced alignment of any transcribed speech, with a GMM-HMM or a CTC model: what `starling align` does.

The speech goes through the stages prepare and shard, as in a pipeline: every corpus layout can be aligned, and
utterances that cannot be used are quarantined.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from recognition.alignment import CtcAligner, align_set
from recognition.bundle import load_spec
from recognition.inference import open_set
from speech.alignments import AlignedUtterance, Alignment
from speech.features.cmvn import CmvnStats
from speech.hmm.aligner import Aligner
from speech.hmm.utterances import make_shards
from speech.text import NormalizerConfig
from storage.corpora import Utterance
from storage.index import ShardIndex
from storage.objects import ObjectStore
from tasks.config.pipeline import PipelineConfig, parse_config
from tasks.dataset.sources import SourceConfig
from tasks.stages.align import AlignmentModel, align_options
from tasks.stages.base import Run
from tasks.stages.feature_shards import compute_features
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD
from tasks.stages.sources import open_numbered, select

SET = "train"


@dataclass
class AlignedCorpus:
    """The alignments of a corpus."""

    utterances: list[AlignedUtterance] = field(default_factory=list)
    """All utterances that could be used, sorted by name."""
    quarantined: int = 0
    """Utterances that could not be used at all: unreadable audio, empty transcripts and the like."""
    units: str = "phones"
    """What the units of alignments are: `phones`, or `tokens` of a CTC model."""
    sources: Sequence[SourceConfig] = ()
    """What it was read from."""

    @property
    def alignments(self) -> list[Alignment]:
        """The alignments, sorted by the names of utterances."""
        return [utterance.alignment for utterance in self.utterances if utterance.alignment is not None]

    def original(self) -> Iterator[tuple[Utterance, AlignedUtterance]]:
        """The utterances as the corpus has them, in its order, each with what became of it.

        Their confidence is that of the alignment: 0 if there is none.
        """
        known = {utterance.id: utterance for utterance in self.utterances}
        for number, source in enumerate(self.sources):
            for utterance in select(number, source, open_numbered(number, source)):
                aligned = known.pop(utterance.id, None)
                if aligned is not None:
                    confidence = aligned.alignment.confidence if aligned.alignment else 0.0
                    yield replace(utterance, confidence=round(confidence, 4)), aligned


class CorpusAligner(ABC):
    """Aligns the utterances of a run whose only set is prepared and sharded."""

    units: ClassVar[str]
    """What the units of its alignments are."""

    @property
    @abstractmethod
    def audio(self) -> tuple[int, NormalizerConfig]:
        """Sample rate of the model in Hz, and how its transcripts are normalized."""

    @abstractmethod
    def align(self, run: Run) -> Iterator[AlignedUtterance]:
        """Yields all utterances but those of damaged shards."""


@dataclass(frozen=True)
class GmmCorpusAligner(CorpusAligner):
    """Aligns with a GMM-HMM; needs no network, and adapts to the speakers if the model does."""

    model: AlignmentModel
    """The output of a stage align."""
    units = "phones"

    @property
    @override
    def audio(self) -> tuple[int, NormalizerConfig]:
        return self.model.sample_rate, self.model.normalizer

    @override
    def align(self, run: Run) -> Iterator[AlignedUtterance]:
        model, cfg = self.model, self.model.config
        with tempfile.TemporaryDirectory() as folder:
            features, _ = compute_features(run, cfg.features, SET, ObjectStore(folder), "align")
            utterances = features.utterances()
            lexicon = model.pronunciations(word for utterance in utterances for word in utterance.words)
            hmm = Aligner(model.model, lexicon, model.spoken, align_options(cfg))
            shards = make_shards(utterances, device=cfg.device)
            yield from hmm.aligned_utterances(shards, cfg.features.hop_ms / 1000)


@dataclass(frozen=True)
class CtcCorpusAligner(CorpusAligner):
    """Aligns with a CTC model."""

    bundle: Path
    """Folder of the model."""
    device: str = "cpu"
    """Device that the model runs on."""
    units = "tokens"

    @property
    @override
    def audio(self) -> tuple[int, NormalizerConfig]:
        spec = load_spec(self.bundle)
        return spec.sample_rate, spec.normalizer

    @override
    def align(self, run: Run) -> Iterator[AlignedUtterance]:
        spec, speakers = load_spec(self.bundle), {}
        if spec.features.cmvn == "speaker":
            own = replace(run, config=run.config.model_copy(update={"features": spec.features}))
            FEATURES.execute(own)
            speakers = {who: CmvnStats.from_dict(value) for who, value in FEATURES.record(own)["speakers"].items()}
        network = CtcAligner.load(self.bundle, self.device, speakers)
        dataset = open_set(run.result("shard").store.child(SET).url, spec.sample_rate, run.cache_folder)
        for _, utterance in align_set(network, dataset, on_damage=lambda _: None):
            yield utterance


def align_corpus(
    aligner: CorpusAligner,
    sources: Sequence[SourceConfig],
    report: Callable[[float, float], object],
    base: PipelineConfig | None = None,
) -> AlignedCorpus:
    """Align a corpus.

    Args:
        aligner: With what.
        sources: The sources of the corpus.
        report: Called with the number of finished utterances and of all.
        base: A configuration that gives storage and runner.
    """
    run = data_run(sources, *aligner.audio, base)
    count = len(ShardIndex.read(run.result("shard").store.child(SET)))
    corpus = AlignedCorpus(units=aligner.units, sources=sources)
    for utterance in aligner.align(run):
        corpus.utterances.append(utterance)
        report(len(corpus.utterances), count)
    corpus.utterances.sort(key=lambda utterance: utterance.id)
    refused = sum(int(run.result(stage).counts["quarantined"]) for stage in ("prepare", "shard"))
    corpus.quarantined = refused + count - len(corpus.utterances)
    return corpus


def data_run(
    sources: Sequence[SourceConfig],
    sample_rate: int,
    normalizer: NormalizerConfig,
    base: PipelineConfig | None = None,
) -> Run:
    """A run whose only set is the speech to align, prepared and sharded.

    Args:
        sources: The sources of the corpus.
        sample_rate: Sample rate of the model, Hz.
        normalizer: How its transcripts are normalized.
        base: A configuration that gives storage and runner.
    """
    own = {"set": SET, "own_split": False}
    value = {
        "name": "align",
        "data": {
            "sources": [source.model_dump(mode="json", exclude_defaults=True) | own for source in sources],
            "sample_rate": sample_rate,
            "normalizer": normalizer.model_dump(mode="json"),
            "max_quarantined": 1.0,
            "max_seconds": 120.0,
        },
    }
    config = parse_config(value, "--data")
    if base is not None:
        config = config.model_copy(update={"storage": base.storage, "runner": base.runner})
    run = Run(config, "align")
    PREPARE.execute(run)
    SHARD.execute(run)
    return run
