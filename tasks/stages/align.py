"""Optional stage align: trains a GMM-HMM on the training set, and aligns the training and validation sets with it.

The output has the model (`model/`), `alignments/<set>.parquet` (`speech.alignments`), fMLLR transforms by set and
speaker (`speakers.safetensors`), the lexicon with estimated probabilities of pronunciations and silence (`lexicon/`),
the configuration that their use needs (`align.json`), the utterances that failed (`failures.json`), and figures of all
iterations (`iterations.jsonl`). `AlignmentModel` reads it, to align other data and to recognize speech.

Training saves a checkpoint after every iteration in the data folder, and resumes there. Its steps run on shards, in
threads of this process or in the workers of the pipeline's runner (`StepMapper`).
"""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NotRequired
from uuid import uuid4

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor

from configurable.addresses import address_content
from speech.alignments import AlignmentInfo, AlignmentTable, write_alignments
from speech.files import DAMAGED
from speech.hmm.aligner import Aligner
from speech.hmm.checkpoint import Checkpoint
from speech.hmm.config import AlignConfig
from speech.hmm.graphs import GraphOptions
from speech.hmm.model import FeatureChain, HmmModel, ModelError, model_digest, write_json, write_tensors
from speech.hmm.pronunciations import (
    count_pronunciations,
    graph_options,
    load_lexicon,
    save_lexicon,
    word_pronunciations,
)
from speech.hmm.serialization import STEPS, dump_value, load_value, step_parts
from speech.hmm.steps import AlignedShard
from speech.hmm.topology import PhoneSet
from speech.hmm.train import STAGES, Trainer, TrainingError, TrainingProgress
from speech.hmm.utterances import Adaptations, Shard, TrainingUtterance, make_shards
from speech.hmm.viterbi import AlignOptions
from speech.lexicon import Built, Lexicon, LexiconChoice, LexiconConfig, LexiconError, build_lexicon
from speech.text import NormalizerConfig
from storage.intact import readable
from storage.objects import ObjectStore
from storage.quarantine import QuarantinedShard
from storage.stages import StageOutput
from tasks.config.home import work_folder
from tasks.config.pipeline import PipelineConfig, RunnerConfig
from tasks.dataset.sets import VALID
from tasks.dataset.speeds import is_copy
from tasks.dataset.splits import TRAIN
from tasks.stages import progress
from tasks.stages.base import Inputs, Run, Stage, StageError
from tasks.stages.decoder_files import file_digest, with_digests
from tasks.stages.feature_shards import FeatureSet, StoredUtterance, compute_features, opened
from tasks.stages.folds import train_folder
from tasks.stages.quarantined import DamageRecord, add_damaged, found_whole
from tasks.stages.runner import Piece, Workers
from tasks.stages.shard import SHARD, set_texts
from tasks.tracking.stage_runs import log_stage

_NAMED = 100
"""Failed utterances and unknown words that the record names."""
_WORK = "work"
_CONFIG = "align.json"
_MODEL_FILES = ("model/model.json", "model/model.safetensors", "lexicon/lexiconp.txt", "lexicon/silence.json", _CONFIG)
"""The files of a stage's output that are the model."""
_TRANSFORMS = "speakers.safetensors"
_BY_UTTERANCE = ("alignments", "graphs")
"""Arguments of steps that are mappings by utterance."""


def config_of(run: Run) -> AlignConfig:
    """The section `align`; the stage runs only with it."""
    assert run.config.align is not None
    return run.config.align


def aligned_sets(run: Run) -> list[str]:
    """The sets that are aligned."""
    present = SHARD.record(run)["sets"]
    return [name for name in (TRAIN, VALID) if name == TRAIN or name in present]


@dataclass(frozen=True)
class AlignmentModel:
    """A trained GMM-HMM with its lexicon and the configuration of its features."""

    model: HmmModel
    """The model."""
    lexicon: Lexicon
    """The lexicon of the training."""
    spoken: GraphOptions
    """Probabilities of pronunciations and silence."""
    config: AlignConfig
    """Configuration of features and alignment."""
    sample_rate: int
    """Sample rate of the audio, Hz."""
    normalizer: NormalizerConfig
    """How transcripts are normalized."""
    source: LexiconConfig
    """Where the pronunciations of further words come from."""

    @classmethod
    def load(cls, folder: Path) -> "AlignmentModel":
        """Load a model from a folder with the files of a stage's output.

        Raises:
            ModelError: A file is missing or damaged.
        """
        lexicon, spoken = load_lexicon(folder / "lexicon")
        try:
            value = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            config, rate = AlignConfig.model_validate(value["align"]), int(value["sample_rate"])
            normalizer = NormalizerConfig.model_validate(value["normalizer"])
            source: LexiconConfig = TypeAdapter(LexiconChoice).validate_python(value["lexicon"])
        except DAMAGED as error:
            raise ModelError(f"{folder / _CONFIG} is no configuration of an alignment ({error!r})") from error
        model = HmmModel.load(folder / "model")
        if model.num_features != config.features.width:
            raise ModelError(
                f"{folder} has a model of {model.num_features} features, and a configuration of "
                f"{config.features.width}: align again"
            )
        return cls(model, lexicon, spoken, config, rate, normalizer, source)

    @classmethod
    def fetch(cls, output: StageOutput, folder: Path) -> "AlignmentModel":
        """Load a model from the output of the stage align, by way of a local folder."""
        for name in _MODEL_FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(output.read(name))
        return cls.load(folder)

    def pronunciations(self, words: Iterable[str]) -> dict[str, list[tuple[str, ...]]]:
        """Pronunciations of some words that the model's phones can express.

        Words that the lexicon of the training lacks come from its source, if that can still be read.
        """
        wanted = sorted(set(words))
        known = word_pronunciations(self.lexicon, wanted)
        missing = [word for word in wanted if word not in known]
        try:
            more = build_lexicon(self.source, dict.fromkeys(missing, 1)).lexicon if missing else None
        except LexiconError:
            more = None
        variants = known | (word_pronunciations(more, missing) if more is not None else {})
        usable = {self.model.tree.phones.base(phone) for phone in range(1, len(self.model.tree.phones) + 1)}
        kept = {word: [spoken for spoken in listed if usable.issuperset(spoken)] for word, listed in variants.items()}
        return {word: listed for word, listed in kept.items() if listed}


@lru_cache(maxsize=2)
def chain_and_transforms(align: str) -> tuple[FeatureChain, dict[str, Tensor]]:
    """LDA and MLLT, and the fMLLR transforms by set and speaker; cached for further work in this process.

    Args:
        align: URL of the stage's output.
    """
    output = StageOutput.at(align)
    with tempfile.TemporaryDirectory() as folder:
        model = AlignmentModel.fetch(output, Path(folder)).model
        path = output.fetch(_TRANSFORMS, Path(folder))
        with readable(f"{align}/{_TRANSFORMS}"):
            transforms = load_file(path)
            dim = model.gmm.dim
            if not all(matrix.shape == (dim, dim + 1) and matrix.isfinite().all() for matrix in transforms.values()):
                raise ValueError(f"a transform is not of {dim} features, or has numbers that are infinite or NaN")
        return model.chain, transforms


def write_config(config: PipelineConfig, folder: Path) -> None:
    """Write what a model needs of the pipeline's configuration into the folder of its files."""
    assert config.align is not None
    value: dict[str, Any] = {
        "align": config.align.model_dump(mode="json"),
        "sample_rate": config.data.sample_rate,
        "normalizer": config.data.normalizer.model_dump(mode="json"),
        "lexicon": config.lexicon.model_dump(mode="json"),
    }
    write_json(folder / _CONFIG, value)


def is_alignment_model(folder: Path) -> bool:
    """Whether a folder has the files of a stage's output."""
    return (folder / _CONFIG).is_file()


class StepMapper(AbstractContextManager["StepMapper"]):
    """Applies steps to shards (`speech.hmm.train.Mapper`); use it as a context manager.

    Args:
        runner: Where the steps run.
        store: For arguments and results, which are deleted after use; not used by threads.
    """

    def __init__(self, runner: RunnerConfig, store: ObjectStore) -> None:
        self._runner, self._store = runner, store
        self._stack = ExitStack()
        self._threads: ThreadPoolExecutor | None = None
        self._workers: Workers | None = None
        if runner.local:
            self._threads = self._stack.enter_context(ThreadPoolExecutor(runner.count))
        else:
            store.delete_tree("")  # of an attempt that was killed
            self._workers = self._stack.enter_context(Workers(runner, traced=False))

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)

    def __call__(self, step: Callable[[Shard], Any], shards: Sequence[Shard]) -> Iterator[Any]:
        """Yields the step's result for each shard, in order."""
        if self._threads is not None:
            yield from self._threads.map(step, shards)
            return
        assert self._workers is not None
        name, args, keywords = step_parts(step)
        call = f"{name}-{uuid4().hex[:12]}"
        common = {key: value for key, value in keywords.items() if key not in _BY_UTTERANCE}
        self._store.write(f"{call}/step", dump_value((name, args, common)))
        pieces = (self._piece(call, number, shard, keywords) for number, shard in enumerate(shards))
        try:
            for result in self._workers.map("tasks.stages.align:step_piece", pieces, name):
                value = load_value(self._store.read(result))
                self._store.delete(result)
                yield value
        finally:
            self._store.delete_tree(call)

    def _piece(self, call: str, number: int, shard: Shard, keywords: Mapping[str, Any]) -> Piece:
        names = {utterance.id for utterance in shard.utterances}
        own = {key: _part(keywords[key], names) for key in _BY_UTTERANCE if key in keywords}
        self._store.write(f"{call}/own-{number}", dump_value(own))
        source, rows = _rows(shard.utterances)
        return {
            "name": str(number),
            "store": self._store.url,
            "step": f"{call}/step",
            "own": f"{call}/own-{number}",
            "result": f"{call}/result-{number}",
            "features": source.store.url,
            "digest": source.index.digest,
            "rows": rows,
            "device": shard.device,
            "threads": max(1, torch.get_num_threads() // self._runner.count),
        }


def _part(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _rows(utterances: Sequence[TrainingUtterance]) -> tuple[Any, list[int]]:
    """The set of some stored utterances, and their rows."""
    stored = [utterance for utterance in utterances if isinstance(utterance, StoredUtterance)]
    assert len(stored) == len(utterances), "workers read features from the object store"
    sources = {utterance.source.store.url: utterance.source for utterance in stored}
    assert len(sources) == 1, "a shard has utterances of one set"
    return next(iter(sources.values())), [utterance.row for utterance in stored]


@lru_cache(maxsize=8)
def _stored_shard(url: str, digest: str, rows: tuple[int, ...], device: str) -> Shard:
    """A shard; its transformed features are cached for further steps in this process."""
    return Shard(opened(url, digest).utterances(list(rows)), device)


@lru_cache(maxsize=2)
def _step(url: str, name: str) -> Any:
    return load_value(ObjectStore(url).read(name))


def step_piece(piece: Piece) -> str:
    """Apply a step to a shard; returns the name of the object with the result."""
    torch.set_num_threads(piece["threads"])
    store = ObjectStore(piece["store"])
    name, args, keywords = _step(piece["store"], piece["step"])
    own = load_value(store.read(piece["own"]))
    shard = _stored_shard(piece["features"], piece["digest"], tuple(piece["rows"]), piece["device"])
    store.write(piece["result"], dump_value(STEPS[name](*args, shard=shard, **keywords, **own)))
    result: str = piece["result"]
    return result


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
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # the process was killed while it wrote the line
                    continue
                rows[row["stage"], row["iteration"]] = row
        order = {str(name): place for place, name in enumerate(STAGES)}
        return [rows[key] for key in sorted(rows, key=lambda key: (order[key[0]], key[1]))]


def _inputs(run: Run) -> Inputs:
    sets = SHARD.record(run)
    config = {
        "align": address_content(config_of(run), without=("device", "recognize")),
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
    speeds = run.config.data.speeds
    utterances = [utterance for utterance in train.utterances() if cfg.copies or not is_copy(utterance.id, speeds)]
    words = {word for utterance in utterances for word in utterance.words}
    pronunciations = word_pronunciations(built.lexicon).values()
    phones = PhoneSet.of((spoken for variants in pronunciations for spoken in variants), cfg.positions)
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
) -> tuple[dict[str, tuple[AlignedShard, Adaptations]], GraphOptions]:
    """Alignments of all sets by the final model, and the probabilities of pronunciations and silence."""
    cfg, model = config_of(run), result.model
    train = sets["train"].utterances()
    transcripts = {utterance.id: utterance.words for utterance in train}
    counts = count_pronunciations(result.aligned.alignments, transcripts, model.tree.phones)
    lexicon = word_pronunciations(built.lexicon)
    spoken = graph_options(counts, lexicon, by_word=cfg.word_silence)
    aligner = Aligner(model, lexicon, spoken, align_options(cfg), mapper)
    aligned: dict[str, tuple[AlignedShard, Adaptations]] = {}
    adapted = {"train": result.adaptations}
    for name, features in sets.items():
        progress.report("align", len(aligned), len(sets), f"aligning {name}")
        shards = make_shards(features.utterances(), device=cfg.device)
        aligned[name] = aligner.align(shards, adapted.get(name))
    return aligned, spoken


def _write(
    run: Run,
    sets: Mapping[str, FeatureSet],
    aligned: Mapping[str, tuple[AlignedShard, Adaptations]],
    folder: Path,
) -> dict[str, Any]:
    """Write the alignments; returns what the record says about each set. The folder has the model."""
    model, digest = HmmModel.load(folder / "model"), model_digest(folder / "model")
    info = AlignmentInfo(config_of(run).features.hop_ms, model.gmm.num_pdfs, digest)
    about: dict[str, Any] = {}
    transforms: dict[str, Tensor] = {}
    for name, (of_set, adaptations) in aligned.items():
        words = {utterance.id: utterance.words for utterance in sets[name].utterances()}
        file, paths = folder / "alignments" / f"{name}.parquet", of_set.alignments
        write_alignments(file, info, (path.alignment(who, words[who], model.tree) for who, path in paths.items()))
        transforms |= {f"{name}/{who}": matrix for who, matrix in adaptations.items()}
        about[name] = {
            "aligned": len(paths),
            "failed": len(of_set.failures),
            "frames": sum(path.num_frames for path in paths.values()),
            "score": of_set.score,
            "digest": AlignmentTable.read(file).digest,
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
    if not run.config.system.is_trained and cfg.recognize.arpa:
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
    failures = {name: dict(of_set.failures) for name, (of_set, _) in aligned.items()}
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
        "failures": {name: dict(list(reasons.items())[:_NAMED]) for name, reasons in failures.items()},
        "unknown": dict(unknown.most_common(_NAMED)),
        "unknown_running": unknown.total(),
        "lexicon": built.record(),
    }


def figures(record: AlignRecord) -> dict[str, float]:
    """Metrics of the stage's record."""
    metrics = {f"align.{name}": float(value) for name, value in record["counts"].items()}
    metrics["align.log_likelihood"] = record["log_likelihood"]
    metrics["align.silence_probability"] = record["silence_probability"]
    metrics["align.unknown_running"] = record["unknown_running"]
    for name, entry in record["sets"].items():
        metrics |= {f"align.{name}.{figure}": entry[figure] for figure in ("aligned", "failed", "frames", "score")}
    return metrics


ALIGN = Stage(
    "align",
    3,
    _inputs,
    _work,
    found_whole,
    pieces=_WORK,
    reads="training and validation shards, lexicon",
    writes="GMM-HMM in `model/`, `alignments/`, `lexicon/`, `speakers.safetensors`",
    only="with a section `align`",
)
