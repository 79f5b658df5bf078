"""Optional stage align: trains a GMM-HMM on the training set, and aligns the training and validation sets with it.

The output has the model (`model/`), `alignments/<set>.parquet` (`speech.hmm.alignments`), fMLLR transforms by set and
speaker (`speakers.safetensors`), the lexicon with estimated probabilities of pronunciations and silence (`lexicon/`),
the configuration that their use needs (`align.json`),
the utterances that failed (`failures.json`), and figures of all iterations (`iterations.jsonl`). Training saves a
checkpoint after every iteration in the data folder, and resumes there.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired

from torch import Tensor

from configurable.addresses import address_content
from speech.hmm.aligner import AlignedSet, Aligner
from speech.hmm.alignments import AlignmentInfo, AlignmentTable, aligned_utterance, write_alignments
from speech.hmm.checkpoint import Checkpoint
from speech.hmm.config import AlignConfig
from speech.hmm.graphs import GraphOptions
from speech.hmm.model import HmmModel, model_digest, write_tensors
from speech.hmm.pronunciations import count_pronunciations, graph_options, save_lexicon, word_pronunciations
from speech.hmm.steps import AlignOptions
from speech.hmm.topology import PhoneSet
from speech.hmm.train import STAGES, Trainer, TrainingError, TrainingProgress
from speech.hmm.utterances import make_shards
from speech.lexicon import Built, LexiconError, build_lexicon
from storage.quarantine import QuarantinedShard
from storage.stages import StageOutput
from tasks.config.home import work_folder
from tasks.dataset.speeds import is_copy
from tasks.stages import progress
from tasks.stages.align_data import FeatureSet, aligned_sets, compute_features, config_of
from tasks.stages.align_model import write_config
from tasks.stages.align_steps import StepMapper
from tasks.stages.base import Inputs, Run, Stage, StageError, has_network
from tasks.stages.decoder_files import file_digest, with_digests
from tasks.stages.folds import train_folder
from tasks.stages.quarantined import DamageRecord, add_damaged, found_whole
from tasks.stages.run_sets import set_texts
from tasks.stages.shard import SHARD
from tasks.tracking.stage_runs import log_stage

_NAMED = 100
"""Failed utterances and unknown words that the record names."""
_WORK = "work"


class IterationLog:
    """Reports training's progress, and keeps the figures of each iteration across restarts.

    Args:
        cfg: Configuration of the training.
        path: JSON lines; an iteration that is repeated after a kill is counted once.
    """

    def __init__(self, cfg: AlignConfig, path: Path) -> None:
        self.path = path
        stages = STAGES[: STAGES.index(cfg.stage) + 1]
        sizes = [getattr(cfg, name).iterations for name in stages]
        self._before = {name: sum(sizes[:place]) for place, name in enumerate(stages)}
        self._total = sum(sizes)

    def __call__(self, done: TrainingProgress) -> None:
        """Take the figures of an iteration."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(done)) + "\n")
        text = (
            f"{done.stage} {done.iteration}/{done.iterations}: log-likelihood {done.log_likelihood:.2f} per frame, "
            f"{done.gaussians:,} Gaussians"
        )
        progress.report("align", self._before[done.stage] + done.iteration, self._total, text)
        if done.iteration == done.iterations:
            progress.announce("align", text)

    def rows(self) -> list[dict[str, Any]]:
        """Figures of all iterations, in order."""
        found: dict[tuple[str, int], dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # the process was killed while it wrote the line
                    continue
                found[row["stage"], row["iteration"]] = row
        order = {name: place for place, name in enumerate(STAGES)}
        return [found[key] for key in sorted(found, key=lambda key: (order[key[0]], key[1]))]  # type: ignore[index]


def _inputs(run: Run) -> Inputs:
    sets = SHARD.record(run)
    config = {
        "align": address_content(config_of(run), without=("device", "shard_frames", "recognize")),
        "lexicon": address_content(with_digests(run.config.lexicon, "lexicon")),
        "normalizer": address_content(run.config.data.normalizer),  # is part of the model, for further transcripts
        "sample_rate": run.config.data.sample_rate,
    }
    folders = {name: train_folder(run.config.data) if name == "train" else name for name in aligned_sets(run)}
    known = sets["sets"] | sets.get("unions", {})
    return config, {name: known[folder]["digest"] for name, folder in folders.items()}


def _lexicon(run: Run, sets: Mapping[str, FeatureSet]) -> Built:
    """The lexicon for the words of all transcripts."""
    counts: Counter[str] = Counter()
    for name in sets:
        for text in set_texts(run, name):
            counts.update(text.split())
    try:
        return build_lexicon(run.config.lexicon, counts)
    except LexiconError as error:
        raise StageError(str(error)) from error


def _trained(run: Run, train: FeatureSet, built: Built, mapper: StepMapper, log: IterationLog, key: str) -> Checkpoint:
    """The result of training; an interrupted training continues after its last iteration."""
    cfg = config_of(run)
    utterances = [one for one in train.utterances() if cfg.copies or not is_copy(one.id, run.config.data.speeds)]
    words = {word for one in utterances for word in one.words}
    phones = PhoneSet.of((one for ones in word_pronunciations(built.lexicon).values() for one in ones), cfg.positions)
    lexicon = word_pronunciations(built.lexicon, sorted(words))
    try:
        trainer = Trainer(utterances, lexicon, cfg, work_folder("align", key), log, mapper, phones, cfg.device)
        return trainer.run(cfg.stage)
    except TrainingError as error:
        raise StageError(str(error)) from error


def align_options(cfg: AlignConfig) -> AlignOptions:
    """Beams and scales of a configuration."""
    return AlignOptions(cfg.beam, cfg.retry_beam, cfg.acoustic_scale)


def _aligned(
    run: Run, sets: Mapping[str, FeatureSet], built: Built, result: Checkpoint, mapper: StepMapper
) -> tuple[dict[str, AlignedSet], GraphOptions]:
    """Alignments of all sets by the final model, and the probabilities of pronunciations and silence."""
    cfg, model = config_of(run), result.model
    train = sets["train"].utterances()
    counts = count_pronunciations(result.aligned.alignments, {one.id: one.words for one in train}, model.tree.phones)
    lexicon = word_pronunciations(built.lexicon)
    spoken = graph_options(counts, lexicon, by_word=cfg.word_silence)
    aligner = Aligner(model, lexicon, spoken, align_options(cfg), mapper, cfg.silence_weight)
    found: dict[str, AlignedSet] = {}
    adapted = {"train": result.adaptations}
    for name, one in sets.items():
        progress.report("align", len(found), len(sets), f"aligning {name}")
        shards = make_shards(one.utterances(), cfg.shard_frames, cfg.device)
        found[name] = aligner.align(shards, adapted.get(name))
    return found, spoken


def _write(run: Run, sets: Mapping[str, FeatureSet], aligned: Mapping[str, AlignedSet], folder: Path) -> dict[str, Any]:
    """Write the alignments; returns what the record says about each set. The folder has the model."""
    model, digest = HmmModel.load(folder / "model"), model_digest(folder / "model")
    info = AlignmentInfo(config_of(run).features.hop_ms, model.gmm.num_pdfs, digest)
    about: dict[str, Any] = {}
    transforms: dict[str, Tensor] = {}
    for name, found in aligned.items():
        words = {one.id: one.words for one in sets[name].utterances()}
        path = folder / "alignments" / f"{name}.parquet"
        alignments = found.aligned.alignments
        write_alignments(
            path, info, (aligned_utterance(one, alignments[one], words[one], model.tree) for one in alignments)
        )
        transforms |= {f"{name}/{who}": matrix for who, matrix in found.adaptations.items()}
        about[name] = {
            "aligned": len(alignments),
            "failed": len(found.aligned.failures),
            "frames": sum(one.num_frames for one in alignments.values()),
            "score": found.aligned.score,
            "digest": AlignmentTable.read(path).digest,
        }
    write_tensors(folder / "speakers.safetensors", transforms)
    return about


def _publish(output: StageOutput, folder: Path) -> None:
    """Copy the files to the object store."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            output.store.write_file(path.relative_to(folder).as_posix(), path)


class AlignRecord(DamageRecord):
    """Figures of the GMM-HMM's training and of its alignments."""

    log_likelihood: float
    """Of a frame, in the last iteration."""
    silence_probability: float
    """Between two words."""
    sets: dict[str, dict[str, Any]]
    """Aligned and failed utterances, frames, score, and digest of each set's table."""
    failures: dict[str, dict[str, str]]
    """Why the first utterances of each set could not be aligned."""
    unknown: dict[str, int]
    """The most frequent words without a pronunciation of the lexicon's source, with their counts."""
    unknown_running: int
    """Occurrences of all such words."""
    lexicon: dict[str, Any]
    """Where the pronunciations come from."""
    tracking: NotRequired[dict[str, Any]]
    """The MLflow run."""


def _work(run: Run, output: StageOutput) -> AlignRecord:
    cfg, work = config_of(run), work_folder("align", output.key)
    if not has_network(run.config) and cfg.recognize.arpa:
        file_digest(cfg.recognize.arpa, "align.recognize.arpa")  # a missing file is named before hours of training
    if run.forced("align"):
        shutil.rmtree(work, ignore_errors=True)
    store = output.store.child(_WORK)
    sets: dict[str, FeatureSet] = {}
    damaged: list[QuarantinedShard] = []
    for name in aligned_sets(run):
        sets[name], bad = compute_features(run, cfg.features, name, store.child(f"features-{name}"), "align")
        damaged += bad
    built = _lexicon(run, sets)
    log = IterationLog(cfg, work / "iterations.jsonl")
    with StepMapper(run.runner, store.child("steps")) as mapper:
        result = _trained(run, sets["train"], built, mapper, log, output.key)
        aligned, spoken = _aligned(run, sets, built, result, mapper)
    folder = work / "output"
    shutil.rmtree(folder, ignore_errors=True)
    result.model.save(folder / "model")
    save_lexicon(folder / "lexicon", built.lexicon, spoken)
    write_config(run.config, folder)
    about = _write(run, sets, aligned, folder)
    failures = {name: dict(found.aligned.failures) for name, found in aligned.items()}
    (folder / "failures.json").write_text(json.dumps(failures, indent=1), encoding="utf-8")
    (folder / "iterations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log.rows()), encoding="utf-8")
    _publish(output, folder)
    record = _record(result, about, failures, built, spoken, log.rows()[-1]["log_likelihood"])
    record["tracking"] = log_stage(run, "align", output.key, figures(record), log.rows())
    store.delete_tree("")
    shutil.rmtree(work, ignore_errors=True)
    add_damaged(record, damaged)
    return record


def _record(
    result: Checkpoint,
    about: dict[str, Any],
    failures: dict[str, dict[str, str]],
    built: Built,
    spoken: GraphOptions,
    log_likelihood: float,
) -> AlignRecord:
    unknown = built.coverage.unknown
    return {
        "counts": {
            "aligned": sum(entry["aligned"] for entry in about.values()),
            "failed": sum(entry["failed"] for entry in about.values()),
            "states": result.model.gmm.num_pdfs,
            "gaussians": result.model.gmm.num_components,
            "unknown": len(unknown),
        },
        "log_likelihood": log_likelihood,
        "silence_probability": spoken.silence_probability,
        "sets": about,
        "failures": {name: dict(list(found.items())[:_NAMED]) for name, found in failures.items()},
        "unknown": dict(unknown.most_common(_NAMED)),
        "unknown_running": unknown.total(),
        "lexicon": built.record(),
    }


def figures(record: AlignRecord) -> dict[str, float]:
    """Metrics of the stage's record."""
    found = {f"align.{name}": float(value) for name, value in record["counts"].items()}
    found["align.log_likelihood"] = record["log_likelihood"]
    found["align.silence_probability"] = record["silence_probability"]
    found["align.unknown_running"] = record["unknown_running"]
    for name, entry in record["sets"].items():
        found |= {f"align.{name}.{figure}": entry[figure] for figure in ("aligned", "failed", "frames", "score")}
    return found


ALIGN = Stage(
    "align",
    3,
    _inputs,
    _work,
    found_whole,
    pieces=_WORK,
    runs=lambda config: config.align is not None,
    reads="training and validation shards, lexicon",
    writes="GMM-HMM in `model/`, `alignments/`, `lexicon/`, `speakers.safetensors`",
    only="with a section `align`",
)
