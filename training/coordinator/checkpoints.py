"""Checkpoints on the coordinator's side: the nodes' records, and exactly the rows that their weights have trained.

Layout below the training's output: `checkpoints/<number>/...` with the nodes' files, then `complete.json`. A checkpoint
without `complete.json` does not exist.
"""

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from storage.objects import ObjectMissingError, ObjectStore
from training.coordinator.core import Settings
from training.coordinator.epochs import ClosedEpoch, Epoch, Repeats, Totals
from training.coordinator.ledger import Accepted, Books, Counters, Ledger
from training.coordinator.messages import CoordinatorError, JsonObject, checkpoint_folder

log = logging.getLogger(__name__)
_FORMAT = 1


def _complete_name(number: int) -> str:
    return f"{checkpoint_folder(number)}/complete.json"


def _numbers(store: ObjectStore) -> tuple[set[int], set[int]]:
    """Numbers of all checkpoints, and of the complete ones."""
    every: set[int] = set()
    complete: set[int] = set()
    for name in store.list("checkpoints"):
        part = name.split("/")[1]
        if part.isdigit() and name.count("/") >= 2:
            every.add(int(part))
            if name == _complete_name(int(part)):
                complete.add(int(part))
    return every, complete


def last_number(store: ObjectStore) -> int:
    """The highest checkpoint number in use, complete or not."""
    return max(_numbers(store)[0], default=0)


def find_checkpoint(store: ObjectStore, run: str) -> tuple[int, JsonObject] | None:
    """Number and document of the newest complete checkpoint; unreadable documents are skipped.

    Raises:
        CoordinatorError: If it belongs to another run.
    """
    for number in sorted(_numbers(store)[1], reverse=True):
        try:
            document = store.read_json(_complete_name(number))
        except (ObjectMissingError, ValueError) as error:
            log.warning("checkpoint %d is skipped: %s", number, error)
            continue
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            log.warning("checkpoint %d is skipped: unknown format", number)
            continue
        if document["run"] != run:
            raise CoordinatorError(
                f"{store.join(_complete_name(number))} belongs to another configuration: remove the folder, or train "
                "with --from train"
            )
        return number, document
    return None


def discard(store: ObjectStore, number: int) -> None:
    """Mark a checkpoint as incomplete, because its files are damaged."""
    store.delete(_complete_name(number))


def make_document(ledger: Ledger, run: str, nodes: int, records: Mapping[str, JsonObject]) -> JsonObject:
    """Content of `complete.json`.

    Args:
        ledger: The current state, with the reports `accepted` since the checkpoint was started.
        run: Identity of the run.
        nodes: Number of nodes that the job asks for.
        records: Each incarnation's record; `seq` is the last report that its weights contain.
    """
    seqs = {name: int(record["seq"]) for name, record in records.items()}
    later = [entry for entry in ledger.accepted or [] if entry.incarnation in seqs]
    later = [entry for entry in later if entry.seq > seqs[entry.incarnation]]
    # a report without new rows must not reopen an epoch: there would be nothing left to train that could close it
    closed = min([ledger.values.closed, *(entry.epoch for entry in later if len(entry.rows))])
    totals = Totals(**vars(ledger.totals))
    for entry in later:
        totals.add(entry.counts, -1)
    numbers = range(closed, max([ledger.values.closed - 1, closed - 1, *ledger.epochs]) + 1)
    steps = dict(ledger.books.steps)
    steps.update({str(record["node"]): int(record["step"]) for record in records.values()})
    return {
        "format": _FORMAT,
        "run": run,
        "nodes": nodes,
        "size": ledger.size,
        "records": sorted(records.values(), key=lambda record: int(record["node"])),
        "closed": {str(n): part.to_dict() for n, part in ledger.closed.items() if n < closed},
        "epochs": [_without(ledger, n, later) for n in numbers if n in ledger.epochs or n in ledger.closed],
        "count": closed,
        "totals": vars(totals),
        "elapsed": ledger.values.elapsed,
        "steps": steps,
        "history": [entry for entry in ledger.books.history if entry["epoch"] <= closed],
        "snapshots": {n: nodes for n, nodes in ledger.books.snapshots.items() if int(n) <= closed},
    }


def _without(ledger: Ledger, number: int, later: list[Accepted]) -> JsonObject:
    """State of an epoch without some reports and without leases."""
    epoch = Epoch(number, ledger.shards, ledger.seed)
    source: Epoch | ClosedEpoch = ledger.epochs[number] if number in ledger.epochs else ledger.closed[number]
    epoch.trained = source.trained.copy() if isinstance(source, Epoch) else np.ones(ledger.size, dtype=np.bool_)
    epoch.repeats = Repeats(source.repeats.count, list(source.repeats.rows))
    epoch.totals = Totals(**vars(source.totals))
    for entry in later:
        if entry.epoch == number:
            epoch.trained[entry.rows] = False
            epoch.totals.add(entry.counts, -1)
    return epoch.to_dict()


def restored_state(ledger: Ledger, run: str, session: str, number: int, document: JsonObject | None) -> JsonObject:
    """Initial state of a session, in the form that `Ledger.load` takes.

    Args:
        ledger: The previous state; numbers that must stay unique continue from it.
        run: Identity of the run.
        session: Name of the session.
        number: Number of the checkpoint; 0 for none.
        document: Content of `complete.json`; None for a start from scratch.

    Raises:
        CoordinatorError: If the checkpoint was made with another index.
    """
    old = ledger.values
    values = Counters(
        run=run,
        session=session,
        view=old.view + 1,
        leases=old.leases,
        checkpoint=max(old.checkpoint, number),
        restored=number,
    )
    books, totals = Books(), Totals()
    epochs: list[JsonObject] = []
    closed: dict[str, JsonObject] = {}
    if document is not None:
        if document["size"] != ledger.size:
            raise CoordinatorError(
                f"checkpoint {number} was made with an index of {document['size']} utterances, this index has "
                f"{ledger.size}: train with --from train"
            )
        values.closed, values.elapsed = int(document["count"]), float(document["elapsed"])
        books = Books(
            steps=document["steps"],
            records=document["records"],
            snapshots=document["snapshots"],
            history=document["history"],
        )
        totals, epochs, closed = Totals(**document["totals"]), document["epochs"], document["closed"]
    return {
        "values": vars(values),
        "books": vars(books),
        "totals": vars(totals),
        "seats": [],
        "epochs": epochs,
        "closed": closed,
    }


class Publisher:
    """Writes `complete.json` and deletes old checkpoints in a background thread, because object stores may be slow.

    Args:
        store: The training's output.
        keep: Number of complete checkpoints to keep.
    """

    def __init__(self, store: ObjectStore, keep: int) -> None:
        self._store, self._keep = store, keep
        self._tasks: queue.Queue[tuple[int, JsonObject] | None] = queue.Queue()
        self._done: queue.Queue[tuple[int, bool]] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, number: int, document: JsonObject) -> None:
        """Queue a checkpoint for publication; returns at once."""
        self._tasks.put((number, document))

    def finished(self) -> list[tuple[int, bool]]:
        """Checkpoints whose publication has ended since the last call, each with whether it succeeded."""
        ended = []
        while not self._done.empty():
            ended.append(self._done.get_nowait())
        return ended

    def close(self, patience_s: float = 5.0) -> None:
        """Finish the queued checkpoints and end the thread."""
        self._tasks.put(None)
        self._thread.join(patience_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            number, document = task
            try:
                self._store.write_json(_complete_name(number), document)
                self._done.put((number, True))
                self._prune(number)
            except Exception:
                # a storage error costs a checkpoint, not the training
                log.exception("checkpoint %d could not be published", number)
                self._done.put((number, False))

    def _prune(self, newest: int) -> None:
        every, complete = _numbers(self._store)
        kept = set(sorted(number for number in complete if number <= newest)[-self._keep :])
        for number in sorted(number for number in every - kept if number < newest):
            # first `complete.json`: without it the checkpoint does not exist, even if the rest is not deleted
            discard(self._store, number)
            self._store.delete_tree(checkpoint_folder(number))


# --- checkpoint rounds


PATIENCE_S = 120.0
"""A node that does not answer within this time is left out of the checkpoint."""


@dataclass
class CheckpointRound:
    """One checkpoint in the making.

    Attributes:
        number: The checkpoint's number.
        waiting: Incarnations that have not answered.
        records: Records of the nodes that have written their part, by incarnation.
        deadline: Monotonic time after which missing answers are left out.
        publishing: Whether it was handed to the publisher.
    """

    number: int
    waiting: set[str]
    deadline: float
    records: dict[str, JsonObject] = field(default_factory=dict)
    publishing: bool = False


class CheckpointRounds:
    """Starts checkpoints and publishes them, one at a time.

    Args:
        settings: The job.
        ledger: The state.
        output: The training's output.
    """

    def __init__(self, settings: Settings, ledger: Ledger, output: ObjectStore) -> None:
        self.settings, self.ledger = settings, ledger
        self.publisher = Publisher(output, settings.checkpoint_keep)
        self.current: CheckpointRound | None = None
        self.reset()

    def reset(self) -> None:
        """Abandon the current round, after a change of session or a start of the coordinator."""
        self.current = None
        self.ledger.accepted = None
        self._steps, self._closed = self.ledger.totals.steps, self.ledger.values.closed

    @property
    def fresh(self) -> bool:
        """Whether nothing was trained since the last checkpoint was started."""
        return self._steps == self.ledger.totals.steps

    def due(self) -> bool:
        """Whether to start a checkpoint: after enough steps, or because an epoch has closed."""
        if self.current is not None or self.fresh:
            return False
        steps = self.ledger.totals.steps - self._steps
        enough = steps >= self.settings.checkpoint_steps * max(1, len(self.ledger.states))
        return enough or self.ledger.values.closed > self._closed

    def begin(self, number: int, now: float) -> None:
        """Start a checkpoint: ask all members that have weights."""
        waiting = {name for name, state in self.ledger.states.items() if state.ready}
        self.current = CheckpointRound(number, waiting, now + PATIENCE_S)
        self.ledger.accepted = []
        self._steps, self._closed = self.ledger.totals.steps, self.ledger.values.closed

    def asked(self, incarnation: str) -> int | None:
        """Number of the checkpoint that a member must still write, or None."""
        current = self.current
        return current.number if current is not None and incarnation in current.waiting else None

    def answer(self, incarnation: str, number: int, record: JsonObject) -> None:
        """Record that a member has written its part."""
        current = self.current
        if current is None or current.number != number or incarnation not in current.waiting:
            return
        current.waiting.discard(incarnation)
        current.records[incarnation] = record

    def tick(self, now: float) -> None:
        """Publish the round once it is complete; leave out nodes that have left or are too late."""
        for number, _ in self.publisher.finished():
            if self.current is not None and self.current.number == number:
                self.current = None
        current = self.current
        if current is None or current.publishing:
            return
        current.waiting &= self.ledger.states.keys()
        if current.waiting and now < current.deadline:
            return
        if not current.records:
            self.current, self.ledger.accepted = None, None
            return
        document = make_document(self.ledger, self.settings.run, self.settings.nodes, current.records)
        self.ledger.accepted = None
        current.publishing = True
        self.publisher.publish(current.number, document)
