"""Checkpoints of trainings that may be continued, beside the stages' outputs: of trials of a search that have paused.

A training with more epochs, utterances or minutes, and else the same configuration, continues from them, and gives the
same model as from the start, as a resumed training does: so its address does not tell how it was made. That holds if
the learning rate does not depend on the number of epochs, where that differs (`ScheduleConfig.fixed`); other trainings
are not continued.

A paused training is the output `paused/<address of the training>`: `starling storage du` shows it, and garbage
collection keeps it while it has a record.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from configurable.files import replace_file
from storage.intact import DamagedObjectError
from storage.objects import ObjectStore
from storage.stages import StageOutput
from training.coordinator.checkpoints import find_checkpoint
from training.coordinator.journal import parse_lines
from training.coordinator.messages import checkpoint_folder
from training.learner.checkpoint import COMPUTE, evaluation_name, snapshot_name

PAUSED = "paused"
_JOURNAL = "journal.jsonl"
_COMPLETE = "complete.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrialPart:
    """What makes a run a part of a trial's training.

    Attributes:
        before: How far the part before has trained, which it continues: the fields of `train` that end a training, as
            that part had them; empty: none.
        keep: Whether it may be continued in turn.
        tags: Tags of its MLflow run.
        watch: Called about once a second while it trains; raises to end it after a checkpoint.
        limited: Whether `watch` has a limit of time, so that it is called while stages before the training work, too,
            and ends them.
    """

    before: Mapping[str, float] = field(default_factory=dict)
    keep: bool = False
    tags: Mapping[str, str] | None = None
    watch: Callable[[], None] = lambda: None
    limited: bool = False


def paused_output(store: ObjectStore, key: str) -> StageOutput:
    """The checkpoints of a training that has paused.

    Args:
        store: The store of all stage outputs.
        key: The training's address.
    """
    return StageOutput(store, PAUSED, key)


def keep_paused(training: StageOutput, paused: StageOutput, identity: str, journal: Path) -> None:
    """Keep what a longer training needs to continue one that has ended.

    Args:
        training: The training's output, with its checkpoints.
        paused: Where to.
        identity: Object with the identity of the training.
        journal: Its journal.
    """
    found = find_checkpoint(training.store, training.key)
    if found is None:
        _log.warning("the training %s has no checkpoint, so that a longer one starts anew", training.key)
        return
    paused.clear()
    number, document = found
    epochs = int(document["count"])
    # of whole epochs: what an epoch had given halfway is not what it will give
    whole = {name(epoch) for epoch in range(1, epochs + 1) for name in (evaluation_name, snapshot_name)}
    names = [name for folder in ("replicas", "snapshots") for name in training.store.list(folder) if name in whole]
    for folder in (checkpoint_folder(number), COMPUTE):
        names += training.store.list(folder)
    for name in (*names, identity):
        paused.store.write(name, training.store.read(name))
    paused.store.write_file(_JOURNAL, journal)
    paused.publish({"counts": {"epochs": epochs, "utterances": int(document["totals"]["utterances"])}})


def continue_paused(paused: StageOutput, training: StageOutput, journal: Path) -> bool:
    """Let a training begin with the checkpoint of a shorter one, unless it has one of its own.

    Args:
        paused: The shorter one, as `keep_paused` has left it.
        training: The longer one's output.
        journal: The longer one's journal; gets the lines of the shorter one.

    Returns:
        Whether it does. If not, it starts from the beginning, or resumes an attempt that was interrupted.
    """
    if find_checkpoint(training.store, training.key) is not None:
        return False  # it was interrupted, and resumes
    try:
        if paused.record() is None or paused.lacking():
            return False
        names = sorted(paused.promised() or {})
        [complete] = [name for name in names if name.endswith(f"/{_COMPLETE}")]
        for name in names:
            if name not in (complete, _JOURNAL):
                training.store.write(name, paused.read(name))
        document = paused.read_json(complete)
        lines = paused.read(_JOURNAL).decode("utf-8", errors="replace").splitlines(keepends=True)
    except DamagedObjectError as error:
        _log.warning("a paused training cannot be continued, and starts anew: %s", error)
        return False
    # the end of the shorter training is none of the longer one, which says again what the checkpoint does not know
    known = {entry["epoch"] for entry in document["history"]}

    def again(line: str) -> bool:
        return any(
            e["kind"] == "end" or (e["kind"] == "valid" and e["epoch"] not in known) for e in parse_lines([line])
        )

    kept = [line for line in lines if not again(line)]
    journal.parent.mkdir(parents=True, exist_ok=True)
    replace_file(journal, "".join(kept).encode())
    training.store.write_json(complete, {**document, "run": training.key})  # last: it makes the checkpoint valid
    return True
