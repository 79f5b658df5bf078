"""Forced alignment of any transcribed speech, with a GMM-HMM or a CTC model: what `starling align` does.

The speech goes through the stages prepare and shard, as in a pipeline: every corpus layout can be aligned, and
utterances that cannot be used are quarantined.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from recognition.bundle import load_spec
from recognition.forced_alignment import align_set, load_recognizer
from recognition.timings import TimedUtterance, low_confidences, low_scores
from speech.features.cmvn import CmvnStats
from speech.hmm.aligner import Aligner
from speech.hmm.confidence import frame_confidences, timed_units
from speech.hmm.utterances import make_shards
from speech.text import NormalizerConfig
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardError
from tasks.config.pipeline import PipelineConfig, parse_config
from tasks.dataset.sources import SourceConfig
from tasks.stages.align import align_options
from tasks.stages.align_data import compute_features
from tasks.stages.align_model import AlignmentModel
from tasks.stages.base import Run
from tasks.stages.features import FEATURES
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD

SET = "train"
_Report = Callable[[float, float], object]


@dataclass
class Alignments:
    """The alignments of a corpus."""

    found: list[TimedUtterance] = field(default_factory=list)
    """Aligned utterances, sorted by name."""
    failures: dict[str, str] = field(default_factory=dict)
    """The reason for each utterance that could not be aligned."""
    quarantined: int = 0
    """Utterances that could not be used at all: unreadable audio, empty transcripts and the like."""
    texts: dict[str, str] = field(default_factory=dict)
    """Normalized transcripts of all utterances that could be used, by name."""
    heard: dict[str, str] = field(default_factory=dict)
    """What the model hears in them; empty for a GMM-HMM, which has no language model here to recognize with."""
    units: str = "phones"
    """What the units are: `phones`, or `tokens` of a CTC model."""

    def suspicious(self, deviations: float) -> list[tuple[str, str, TimedUtterance | None]]:
        """Utterances whose transcripts are probably wrong: name, reason and alignment.

        Failures come first, then low scores, then low confidences.

        Args:
            deviations: How many standard deviations below the median a score is low.
        """
        by_name = {one.id: one for one in self.found}
        low = low_scores({one.id: one.score for one in self.found}, deviations)
        unsure = low_confidences({one.id: one.confidence for one in self.found})
        failed = [(name, reason, None) for name, reason in sorted(self.failures.items())]
        scores = [(n, f"score {d:.1f} times the usual spread below the median", by_name[n]) for n, d in low.items()]
        confidences = [
            (n, f"confidence {c:.2f}, less than half the median", by_name[n]) for n, c in unsure.items() if n not in low
        ]
        return [*failed, *scores, *confidences]


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
            "sources": [one.model_dump(mode="json", exclude_defaults=True) | own for one in sources],
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


def _quarantined(run: Run) -> int:
    return int(run.result("prepare").counts["quarantined"]) + int(run.result("shard").counts["quarantined"])


def align_with_gmm(
    model: AlignmentModel, sources: Sequence[SourceConfig], report: _Report, base: PipelineConfig | None = None
) -> Alignments:
    """Align a corpus with a GMM-HMM.

    Args:
        model: The model.
        sources: The sources of the corpus.
        report: Called with the number of finished utterances and of all.
        base: A configuration that gives storage and runner.
    """
    run = data_run(sources, model.sample_rate, model.normalizer, base)
    cfg = model.config
    with tempfile.TemporaryDirectory() as folder:
        features, damaged = compute_features(run, cfg.features, SET, ObjectStore(folder), "align")
        utterances = features.utterances()
        lexicon = model.pronunciations(word for one in utterances for word in one.words)
        aligner = Aligner(model.model, lexicon, model.spoken, align_options(cfg))
        shards = make_shards(utterances, device=cfg.device)
        aligned = aligner.align(shards)
        result = Alignments(failures=dict(aligned.aligned.failures))
        result.texts = {one.id: " ".join(one.words) for one in utterances}
        result.quarantined = _quarantined(run) + sum(entry.utterances for entry in damaged)
        seconds = cfg.features.hop_ms / 1000
        names = model.model.tree.phones.names
        acoustic = model.model.to(cfg.device)
        for shard in shards:
            for one, frames in zip(shard.utterances, shard.features(acoustic.chain, aligned.adaptations), strict=True):
                found = aligned.aligned.alignments.get(one.id)
                if found is None:
                    continue
                confidences = frame_confidences(acoustic, frames, found)
                words, phones = timed_units(found, one.words, names, confidences, seconds)
                score = found.score / cfg.acoustic_scale
                duration = found.num_frames * seconds
                result.found.append(TimedUtterance(one.id, one.speaker, duration, words, phones, score))
                report(len(result.found), len(utterances))
    result.found.sort(key=lambda one: one.id)
    return result


def align_with_ctc(bundle: Path, sources: Sequence[SourceConfig], device: str, report: _Report) -> Alignments:
    """Align a corpus with a CTC model.

    Args:
        bundle: Folder of the model.
        sources: The sources of the corpus.
        device: Device that the model runs on.
        report: Called with the number of finished utterances and of all.
    """
    spec = load_spec(bundle)
    run = data_run(sources, spec.sample_rate, spec.normalizer)
    speakers: dict[str, CmvnStats] = {}
    if spec.features.cmvn == "speaker":
        run = replace(run, config=run.config.model_copy(update={"features": spec.features}))
        stats = FEATURES.execute(run).record["speakers"]
        speakers = {who: CmvnStats.from_dict(value) for who, value in stats.items()}
    recognizer = load_recognizer(bundle, device, speakers)
    store = run.result("shard").store.child(SET)
    index = ShardIndex.read(store)
    result = Alignments(quarantined=_quarantined(run), units="tokens")
    lost: list[ShardError] = []
    for aligned in align_set(recognizer, store.url, cache=run.cache_folder, on_damage=lost.append):
        about, found = index.row(aligned.row), aligned.alignment
        result.texts[about["id"]], result.heard[about["id"]] = aligned.text, aligned.heard
        if isinstance(found, str):
            result.failures[about["id"]] = found
        else:
            one = TimedUtterance(
                about["id"], about["speaker"], float(about["duration"]), found.words, found.tokens, found.score
            )
            result.found.append(one)
        report(len(result.found) + len(result.failures), len(index))
    result.quarantined += len(index) - len(result.found) - len(result.failures)
    result.found.sort(key=lambda one: one.id)
    return result
