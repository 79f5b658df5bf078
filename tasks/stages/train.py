"""Stage train: builds tokens from the training transcripts, then trains in separate processes."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NotRequired
from uuid import uuid4

import psutil
import pyarrow.compute as pc
import torch
from pydantic import BaseModel

from configurable.addresses import address_content
from configurable.wording import counted
from recognition.bundle import BundleSpec, TiedStates
from recognition.data.segments import cut_set
from recognition.data.state_targets import read_alignments
from recognition.initial_weights import FOLDER as INITIAL
from recognition.initial_weights import InitialWeights, Transfer, save_initial
from recognition.systems import system_of
from recognition.systems.base import SpeechTaskConfig
from speech.hmm.priors import log_priors
from speech.models.networks.base import TrainableNetwork
from speech.tokens import TOKENIZERS, TokenError, TrainedTokenizer, tokenizer_from_dict
from storage.disks import size_text
from storage.index import ShardIndex
from storage.intact import readable
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine
from storage.stages import StageOutput, digest_json
from tasks.config.home import work_folder
from tasks.config.training import training_content
from tasks.engine import know_tasks
from tasks.figures import percent
from tasks.locking.slots import training_slot
from tasks.orchestration.nodes import NodeRuns, node_runs
from tasks.search.config import BUDGET_FIELDS
from tasks.stages import progress
from tasks.stages.base import Artifact, Inputs, Run, Stage, StageError, StageResult, note_use
from tasks.stages.decoder_files import augment_digest
from tasks.stages.features import FEATURES
from tasks.stages.initial import (
    about_pretrained,
    begins_with,
    initial_model,
    initial_stats,
    initial_tags,
    initial_tokens,
    model_config,
    pretrained_model,
    system_config,
    transfer_initial,
)
from tasks.stages.paused import continue_paused, keep_paused, paused_output
from tasks.stages.preflight import run_preflight
from tasks.stages.quarantined import DamageRecord, add_damaged
from tasks.stages.reporter import Reporter
from tasks.stages.run_sets import set_digest, set_url, train_stats
from tasks.stages.shard import SHARD, set_texts
from tasks.tracking.datasets import set_inputs
from tasks.tracking.forwarding import Forwarder, Sender
from tasks.tracking.metrics import is_number
from tasks.tracking.provenance import run_tags
from tasks.tracking.runs import TrainingRun, flatten
from training.config import TrainConfig
from training.job import TrainJob
from training.launch.training_process import run_training
from training.learner.checkpoint import COMPUTE
from training.learner.compute import damage_folder
from training.learner.trained import trained_network

_FEW_LEARNERS = 8
"""Maximum number of learners whose own curves are worth a look."""
_EPOCHS = 50
"""Maximum number of epochs in a table."""
_IDENTITY = "tracking.json"
_SEGMENTS = "segments"
NOT_OF_THE_MODEL = ("source", "revision", "licence", "trained_on")
"""Fields of a pretrained model's configuration of which its digest tells what affects the training."""
_ENDS = {name: unit.removesuffix("s") for unit, name in BUDGET_FIELDS.items()}
"""What each field counts that ends a training."""
_ADAPTERS = 2
"""Raised when the same `train.lora` would train other adapters: since 2, LSTMs get some, too."""
_LANGUAGES = 2
"""Raised when the same languages would be trained otherwise: since 2, their tokens are predicted, too."""
_COUNTED = {"epochs": "epoch", "steps": "step", "utterances": "utterances", "unalignable": "unalignable"}


def _content(run: Run) -> dict[str, Any]:
    """The configuration that affects the model: of the strategies and other components, that of the chosen ones."""
    config = run.config
    parts: dict[str, BaseModel] = {
        "model": config.model,
        "tokens": config.tokens,
        "features": config.features,
        "normalizer": config.data.normalizer,
    }
    own = config.system != system_of(config.train.objective)  # else the objective says it
    return {
        "train": training_content(config.train),
        **({"system": address_content(config.system)} if own else {}),
        **{name: address_content(part, without=NOT_OF_THE_MODEL) for name, part in parts.items()},
        **({"adapters": _ADAPTERS} if config.train.lora else {}),
        **({"languages": _LANGUAGES} if system_config(run).tells_languages else {}),
        "sample_rate": config.data.sample_rate,
        "seed": config.training_seed,
    }


def _inputs(run: Run) -> Inputs:
    if "valid" not in SHARD.record(run)["sets"]:
        raise StageError(
            "there is no validation set: give a source `set: valid`, or remove `set: train` from one and set "
            f"data.valid_share above 0 (it is {run.config.data.valid_share:g}): its speakers are then divided"
        )
    # the statistics themselves, not the features stage's key: a forced rerun with the same result changes nothing
    stats = {"stats": train_stats(run), "speakers": FEATURES.record(run)["speakers"]}
    digests = {"stats": digest_json(stats)} | {name: set_digest(run, name) for name in ("train", "valid")}
    if pretrained := pretrained_model(run):
        digests["pretrained"] = pretrained.digest
    if initial := initial_model(run):
        digests["init"] = initial.source.digest
    augment = run.config.train.augment
    if augment.file_lists():
        digests["augment"] = augment_digest(augment)
    if uses_alignments(run):
        tables = {name: read_alignments(alignments(run), name).digest for name in ("train", "valid")}
        digests["alignments"] = digest_json(tables)
    if "restore" in run.results:
        digests["texts"] = run.result("restore").key
    return _content(run), digests


def uses_alignments(run: Run) -> bool:
    """Whether training needs the states of forced alignments."""
    return run.config.system.targets == "states"


def alignments(run: Run) -> ObjectStore:
    """The sets' alignments: those that the objective names, or the output of the stage `realign`, or of `align`.

    Raises:
        StageError: Neither exists.
    """
    if folder := run.config.train.objective.alignments_folder:
        return ObjectStore(folder)
    if "align" not in run.results:
        raise StageError(
            f"train.objective {run.config.train.objective.kind} needs alignments: add a section align, or name a "
            "folder with train.parquet and valid.parquet in train.objective.alignments"
        )
    return run.result("realign" if "realign" in run.results else "align").store.child("alignments")


def tied_states(run: Run) -> TiedStates | None:
    """The states that the model's outputs stand for, with their priors in the training set; None for tokens."""
    if not uses_alignments(run):
        return None
    table = read_alignments(alignments(run), "train")
    priors = log_priors(table.counts())
    return TiedStates(model=table.info.model, frame_shift_ms=table.info.frame_shift_ms, log_priors=priors)


def forward_note(key: str, training: str) -> Path:
    """File that records which part of a training's journal MLflow has acknowledged."""
    folder = work_folder("train", key)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"forward-{hashlib.sha256(training.encode()).hexdigest()[:12]}.json"


def _tokens(run: Run) -> dict[str, Any]:
    """The model's tokens, with those of the training set's languages if these precede its texts.

    Raises:
        StageError: No utterance has a language.
    """
    value, tells = initial_tokens(run, partial(set_texts, run, "train")), system_config(run).tells_languages
    if not (tells or value.get("languages")) or not issubclass(TOKENIZERS[value["kind"]], TrainedTokenizer):
        return value
    tokenizer = tokenizer_from_dict(value)
    assert isinstance(tokenizer, TrainedTokenizer)
    tokenizer = tokenizer.with_languages([*tokenizer.languages, *_languages(run, "train")] if tells else [])
    if tells and not tokenizer.languages:
        raise StageError(
            "recognizer.decoder_network.language is auto, and no utterance of the training set has a language: give "
            "that of each source in data.sources, or set recognizer.decoder_network.language to none"
        )
    return tokenizer.to_dict()


def _languages(run: Run, name: str) -> list[str]:
    """The languages of a set's utterances, sorted; empty for utterances without."""
    languages = pc.unique(ShardIndex.read(ObjectStore(set_url(run, name))).values("language"))
    return sorted({language or "" for language in languages.to_pylist()})


def make_spec(run: Run) -> BundleSpec:
    """What a run's model is described by; the tokens come from the training transcripts, or from `train.init`."""
    config = run.config
    provenance = {"name": config.name, "train": set_digest(run, "train"), "valid": set_digest(run, "valid")}
    return BundleSpec(
        sample_rate=config.data.sample_rate,
        features=config.features.model_copy(update={"stored": False}),
        stats=initial_stats(run, train_stats(run)),
        tokenizer=_tokens(run),
        model=model_config(run),
        normalizer=config.data.normalizer,
        provenance=provenance | ({"pretrained": about} if (about := about_pretrained(run)) else {}),
        states=tied_states(run),
        system=system_config(run),
    )


def make_job(
    run: Run, output: StageOutput, spec: BundleSpec | None = None, initial: InitialWeights | None = None
) -> TrainJob:
    """The training job of a run.

    Args:
        run: The run.
        output: The training's output.
        spec: What `make_spec` has returned, if it has been called.
        initial: The weights that training begins with, once they are written; otherwise they are random.
    """
    config, features = run.config, FEATURES.record(run)
    spec = spec or make_spec(run)
    if initial is None and (transfer := transfer_initial(run, spec)):
        initial = InitialWeights(new=transfer.incomplete)
    assert config.system.task_config is not None
    objective: dict[str, Any] = {}
    if config.system.objectives:
        objective["objective"] = config.train.objective
    if uses_alignments(run):
        objective["alignments_url"] = alignments(run).url
    if "restore" in run.results:
        objective["texts_url"] = run.result("restore").url
    return TrainJob(
        run=output.key,
        seed=config.training_seed,
        train=config.train.engine_part(),
        task=config.system.task_config(
            spec=spec,
            initial=initial,
            augment=config.train.augment,
            speakers=features["speakers"],
            train_url=output.store.child(_SEGMENTS).url if config.train.segments else set_url(run, "train"),
            valid_url=set_url(run, "valid"),
            **objective,
        ),
        output_url=output.store.url,
        journal=work_folder("train", output.key) / "journal.jsonl",
        cache=run.cache_folder,
        cache_bytes=int(run.config.storage.cache_gb * 1e9),
    )


def training_run(run: Run, training: str) -> TrainingRun:
    """Description of a training for its MLflow run.

    Args:
        run: The pipeline's run.
        training: Identity of the training.
    """
    content = _content(run)
    if run.trial:
        for name in _ENDS:
            content["train"].pop(name, None)  # one MLflow run has all parts of a trial
    data = {"sample_rate": content.pop("sample_rate"), "normalizer": content.pop("normalizer")}
    return TrainingRun(
        training,
        run.config.name,
        run.run_id,
        run_tags(run) | initial_tags(run) | dict((run.trial and run.trial.tags) or {}),
        flatten(content | {"data": data} | ({"init": begun} if (begun := begins_with(run)) else {})),
        set_inputs(run, ("train", "valid")),
        _learner_metrics(run.config.train),
    )


def _learner_metrics(train: TrainConfig) -> bool:
    """Whether the MLflow run has the figures of single learners."""
    if train.learner_metrics == "auto":
        return train.learners <= _FEW_LEARNERS
    return train.learner_metrics == "always"


def training_identity(store: ObjectStore) -> str:
    """Identity of the training with checkpoints in a store; created on first use, and kept by a resume."""
    if not store.exists(_IDENTITY):
        store.write_json(_IDENTITY, {"training": uuid4().hex})
    value = store.read_json(_IDENTITY)
    with readable(store.join(_IDENTITY)):
        return str(value["training"])


@contextmanager
def _helpers(run: Run, job: TrainJob, training: str) -> Iterator[tuple[Forwarder, NodeRuns | None]]:
    """Run a training's helpers: forwarding of metrics to MLflow, and the nodes' Prefect runs if there are any."""
    note = forward_note(job.run, training)
    sender = Sender(job.journal, note, training_run(run, training))
    with ExitStack() as stack:
        forwarder = stack.enter_context(Forwarder(sender))
        # exits first: the nodes' processes must end soon, forwarding may take a moment
        nodes = stack.enter_context(node_runs(run, job)) if job.train.launch.kind == "prefect" else None
        yield forwarder, nodes


def _train(run: Run, job: TrainJob, training: str) -> None:
    reporter = Reporter(job.journal, job.train.nodes)
    say = partial(progress.announce, "train")
    with training_slot(run.config, run.holder, say), _helpers(run, job, training) as (forwarder, nodes):
        reporter.forwarder = forwarder

        def on_poll() -> None:
            reporter()
            if run.trial:
                run.trial.watch()
            if nodes is not None:
                nodes.alive = reporter.present
                nodes.poll()

        know_tasks()
        run_training(job, job.journal.parent, on_poll)


def _keep(job: TrainJob, store: ObjectStore, transfer: Transfer) -> None:
    """Write the model that a training would begin with, and what the engine writes beside a trained one.

    Raises:
        StageError: Some of its weights are random.
    """
    if new := transfer.incomplete:
        raise StageError(
            f"train.epochs is 0, but {len(new)} of the model's tensors would begin with random values, such as "
            f"{new[0]}: train for an epoch or more, or choose recognizer and tokens that are those of the model that "
            "training begins with"
        )
    with TemporaryDirectory(prefix="starling-kept-") as folder:
        job.task.save(Path(folder), transfer.weights, {"run": job.run, "epochs": []})
        for name in job.task.members:
            store.write_file(f"model/{name}", Path(folder) / name)
    store.write_json(
        "result.json",
        dict.fromkeys(("epoch", "step", "utterances", "unalignable", "trained_parameters"), 0)
        | {"parameters": sum(tensor.numel() for tensor in transfer.weights.values()), "elapsed": 0.0}
        | {"history": [], "averaged_epochs": [], "valid": {}, "device": "no device: it is kept as it was"}
        | {name: getattr(job.train, name) for name in ("nodes", "learners_per_node")}
        | {"strategy": job.train.strategy.kind},
    )
    job.journal.parent.mkdir(parents=True, exist_ok=True)
    job.journal.write_text("", encoding="utf-8")


def cut_segments(run: Run, store: ObjectStore) -> None:
    """Cut the training set into segments beside the training's other intermediate files, if it is so configured.

    Args:
        run: The run, whose earlier stages are done.
        store: The training's output.
    """
    segments, source = run.config.train.segments, ObjectStore(set_url(run, "train"))
    if segments is None:
        return
    total = len(ShardIndex.read(source))
    damaged = ShardQuarantine(store, total, run.config.train.max_unreadable, damage_folder("train"))
    hop_s = run.config.features.hop_ms / 1000
    cut_set(source, store.child(_SEGMENTS), segments, hop_s, run.cache_folder, damaged)


def too_long(run: Run, spec: BundleSpec) -> list[dict[str, str]]:
    """Utterances that are longer than the model can read, as a stage's record lists them.

    Raises:
        StageError: If no utterance of a set is left.
    """
    utterances: list[dict[str, str]] = []
    for name in ("train", "valid"):
        index = ShardIndex.read(ObjectStore(set_url(run, name)))
        durations, ids = index.column("duration"), index.values("id")
        rows = [row for row, seconds in enumerate(durations) if seconds > spec.max_seconds]
        if rows and len(rows) == len(index):
            raise StageError(
                f"all utterances of the set {name} are longer than the {spec.max_seconds:g} s that model "
                f"{spec.network.kind} can read: use shorter ones, or another model"
            )
        limit = f"the model reads up to {spec.max_seconds:g} s"
        utterances += [
            {"id": ids[row].as_py(), "reason": "too-long", "detail": f"{durations[row]:.1f} s, {limit}"} for row in rows
        ]
    return utterances


def check_languages(run: Run, spec: BundleSpec) -> None:
    """Check that the tokens have the languages of a run's utterances, if these are part of what is trained.

    Raises:
        StageError: They have not.
    """
    tokenizer = None if spec.states else spec.build_tokenizer()
    if tokenizer is None or not tokenizer.languages:
        return
    other = "none" if isinstance(tokenizer, TrainedTokenizer) else "one for all"
    for name in ("train", "valid"):
        for language in _languages(run, name):
            try:
                tokenizer.start_of(language)
            except TokenError as error:
                raise StageError(
                    f"recognizer.decoder_network.language is auto, and the language of some utterances of the set "
                    f"{name} cannot be trained: {error}. Give the language of each source in data.sources, or {other} "
                    "in recognizer.decoder_network.language"
                ) from error


class TrainRecord(DamageRecord):
    """What a training has made."""

    result: dict[str, Any]
    """The engine's `result.json`: epoch, step, utterances, parameters, elapsed seconds, device, and more."""
    tracking: dict[str, Any]
    """`training`: identity of the training, by which its MLflow run is found."""
    digest: str
    """SHA-256 of the model's files."""
    quarantined: NotRequired[list[dict[str, str]]]
    """Id, reason and detail of utterances that are longer than the model can read."""
    pretrained: NotRequired[dict[str, str]]
    """The pretrained model that the encoder is from: revision, digest, and what its card states."""
    initial: NotRequired[dict[str, Any]]
    """The model that training began with, and what was taken from it."""


_MOST_LAYERS = 1000
"""Largest number of layers of one kind; even without memory for its weights, each takes milliseconds to build."""


def check_sizes(spec: BundleSpec) -> TrainableNetwork:
    """Check that this machine can hold a model's weights, before any is allocated.

    Args:
        spec: What the finished bundle will be.

    Returns:
        The network, without weights.

    Raises:
        StageError: It cannot, or a size is impossible.
    """
    room = psutil.virtual_memory().total
    if (layers := getattr(spec.model, "layers", 0)) > _MOST_LAYERS:
        raise StageError(f"model.layers is {layers:,}: choose at most {_MOST_LAYERS:,}")
    try:
        with torch.device("meta"):
            network = spec.build_model()
    except (RuntimeError, ValueError) as error:  # a RuntimeError for a size that no tensor can have
        raise StageError(f"the model cannot be built ({error}): choose smaller sizes in model") from error
    size = sum(weights.numel() * weights.element_size() for weights in network.parameters())
    if size > room:
        raise StageError(
            f"the model's weights take {size_text(size)}, and this machine has {size_text(room)} of memory: choose "
            "smaller sizes in model"
        )
    return network


def _check_trained(job: TrainJob) -> None:
    """Check the model's sizes, and that the patterns of the parameters to train fit it, before processes are started.

    Raises:
        StageError: If they do not; the message has the names that there are.
    """
    assert isinstance(job.task, SpeechTaskConfig)
    network = check_sizes(job.task.spec)
    try:
        with torch.device("meta"):
            trained_network(network, job.train, job.task.new_parameters)
    except ValueError as error:
        raise StageError(str(error)) from error


def _work(run: Run, output: StageOutput) -> TrainRecord:
    if output.store.url.startswith("memory:"):
        raise StageError(
            "storage.url is memory://, which the training process cannot see: use a folder or s3:// (memory:// serves "
            "sharding and features only)"
        )
    run_preflight(run)
    spec = make_spec(run)
    check_languages(run, spec)
    left_out = too_long(run, spec)
    transfer = transfer_initial(run, spec)
    initial = save_initial(transfer, output.store) if transfer else None
    job = make_job(run, output, spec, initial)
    _check_trained(job)
    if transfer:
        progress.announce("train", f"begins with {begins_with(run)['model']}: {transfer.text()}")
    if run.forced("train"):
        job.journal.unlink(missing_ok=True)
    store = output.store
    _continue_trial(run, output, job)
    training = training_identity(store)
    for name in ("train", "valid"):
        damaged_shards(store, name).clear()  # shards found damaged by an earlier attempt may be repaired
    if job.train.epochs:
        cut_segments(run, store)
        _train(run, job, training)
    else:
        assert transfer, "the configuration names a model to begin with"
        _keep(job, store, transfer)
    result = store.read_json("result.json")
    # the journal moves beside the model, so that the object store has the learning curves
    store.write_file("journal.jsonl", job.journal)
    if run.trial and run.trial.keep:
        paused = paused_output(run.store, output.key)
        keep_paused(output, paused, _IDENTITY, job.journal)
        note_use(run, paused)
    for folder in ("checkpoints", "snapshots", "replicas", COMPUTE, _SEGMENTS, INITIAL):
        store.delete_tree(folder)
    store.delete(_IDENTITY)
    counts = {name: result[field] for name, field in _COUNTED.items()}
    if result.get("repeated") or run.config.train.learners > 1:
        counts["repeated"] = result.get("repeated", 0)
    if result.get("unreadable"):
        counts["unreadable"] = result["unreadable"]
    record: TrainRecord = {
        "counts": counts,
        "result": result,
        "tracking": {"training": training},
        "digest": model_digest(store),
    }
    if about := about_pretrained(run):
        record["pretrained"] = about
    if transfer:
        record["initial"] = begins_with(run) | transfer.summary()
    if left_out:
        record["quarantined"] = left_out
        record["counts"]["quarantined"] = len(left_out)
    add_damage(record, store)
    return record


def _continue_trial(run: Run, output: StageOutput, job: TrainJob) -> None:
    """Let the training of a trial begin where its part before has paused."""
    before = run.trial.before if run.trial else {}
    if not before or ("epochs" in before and not run.config.train.schedule.fixed):
        return
    train = run.config.train.model_copy(update=dict(before))
    shorter = replace(run, config=run.config.model_copy(update={"train": train}), results=dict(run.results))
    paused = paused_output(run.store, TRAIN.output(shorter).key)
    if continue_paused(paused, output, job.journal):
        trained = ", ".join(counted(int(number), _ENDS[name]) for name, number in before.items())
        progress.announce("train", f"continues after {trained}")


def damaged_shards(store: ObjectStore, name: str) -> ShardQuarantine:
    """Shards of the set `train` or `valid` that a training found damaged.

    Args:
        store: The training's output.
        name: The set.
    """
    return ShardQuarantine(store, 0, folder=damage_folder(name))


def add_damage(record: TrainRecord, store: ObjectStore) -> None:
    """Note damaged shards in a training's record; its model stays valid even if they are repaired later."""
    damaged = [(name, entry) for name in ("train", "valid") for entry in damaged_shards(store, name).entries()]
    add_damaged(record, [entry for _, entry in damaged])
    if damaged:
        shards = [entry.summary() | {"set": name, "shard": f"{name}/{entry.shard}"} for name, entry in damaged]
        record["quarantined_shards"] = shards


def model_digest(store: ObjectStore) -> str:
    """SHA-256 over a model's two files."""
    both = hashlib.sha256(store.read("model/model.safetensors"))
    both.update(store.read("model/bundle.json"))
    return both.hexdigest()


def _artifacts(run: Run, result: StageResult) -> Iterator[Artifact]:
    """A table of the training's validations, and its curves."""
    from tasks.tracking.plots import curves_png, stored_journal  # imports matplotlib

    journal = stored_journal(result.output)
    yield Artifact(f"{result.markdown}\n\n{validation_table(journal)}", "Training by epoch")
    yield Artifact(curves_png(journal), "Curves of the training", name="curves")


def validation_table(journal: list[dict[str, Any]]) -> str:
    """Losses and rates of a training's last epochs, as Markdown.

    Args:
        journal: Valid entries, in order.
    """
    columns = {"valid_wer": "WER", "valid_frame_accuracy": "frame accuracy"}
    rows = [entry for entry in journal if entry["kind"] == "valid"]
    shown = {name: label for name, label in columns.items() if any(row.get(name) is not None for row in rows)}
    heads = ["epoch", "training loss", "validation loss", *shown.values()]
    lines = [f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    for row in rows[-_EPOCHS:]:
        losses = (_loss(row.get(name)) for name in ("train_loss", "valid_loss"))
        cells = [str(row["epoch"]), *losses, *(percent(row.get(name)) for name in shown)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _loss(value: Any) -> str:
    return f"{value:.3f}" if is_number(value) else "–"


TRAIN = Stage(
    "train",
    5,
    _inputs,
    _work,
    artifacts=_artifacts,
    watches=True,
    reads="shards, statistics",
    writes="`model/` (safetensors and JSON), `journal.jsonl`, `result.json`",
)
