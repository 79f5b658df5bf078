"""What a node leaves in the object store while it trains: its replica at epochs' ends, and checkpoints.

Copies are made between two steps, which is quick; writing goes on in a thread. Storage in trouble costs a checkpoint,
not the training.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from storage.objects import ObjectStore
from storage.retries import DiskError
from training.coordinator.messages import checkpoint_folder, replica_name
from training.coordinator.node_client import NodeClient
from training.learner.checkpoint import (
    ReplicaState,
    digests,
    evaluation_name,
    pack_replica,
    write_objects,
    write_weights,
)
from training.node.process_group import NodeGroup
from training.node.stepper import Stepper, Weights

log = logging.getLogger(__name__)


PATIENCE_S = 300.0
"""How long rank 0 waits for the other ranks' parts of a checkpoint."""
PAUSE_S = 0.1


@dataclass(frozen=True)
class Wanted:
    """What the coordinator asks for: the replica at an epoch's end (1 is the first), a checkpoint."""

    epoch: int | None = None
    checkpoint: int | None = None

    def __bool__(self) -> bool:
        return self.epoch is not None or self.checkpoint is not None


class ReplicaWriter:
    """Writes what the coordinator asks for.

    Args:
        node: Number of the node.
        stepper: Has the model, and what a resume needs.
        group: The node's ranks.
        output: The training's output.
        client: Says what is wanted, and is told what is written; at rank 0 only.
    """

    def __init__(
        self, node: int, stepper: Stepper, group: NodeGroup, output: ObjectStore, client: NodeClient | None
    ) -> None:
        self.node, self.stepper, self.group, self.output, self.client = node, stepper, group, output, client
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._begun: set[tuple[str, int]] = set()
        self._closed_before = 0
        self._failed: DiskError | None = None

    def wanted(self) -> Wanted:
        """What the coordinator asks for and has not been given; each thing once.

        Raises:
            DiskError: A replica could not be written: its epoch gives no model, and the coordinator would wait for it.
        """
        assert self.client is not None
        if self._failed is not None:
            raise self._failed
        epoch, checkpoint = self.client.snapshot_wanted(), self.client.checkpoint_wanted()
        if epoch is not None and not self._is_new("epoch", epoch):
            epoch = None
        if checkpoint is not None and not self._is_new("checkpoint", checkpoint):
            checkpoint = None
        return Wanted(epoch, checkpoint)

    def end_of(self, epoch: int) -> Wanted:
        """An epoch has ended: write its replica at once. The coordinator would ask a heartbeat later, some steps on.

        Args:
            epoch: The epoch that has just ended (1 is the first).
        """
        return Wanted(epoch if self._is_new("epoch", epoch) else None)

    def leave(self, wanted: Wanted, step: int, totals: list[dict[str, float]]) -> None:
        """Copy what is wanted, and write it in a thread; where replicas are apart, all ranks call it together.

        Args:
            wanted: What.
            step: Steps that this replica has made.
            totals: The node's learners' counters, for a resume.
        """
        if wanted.epoch is not None:
            weights = self.stepper.model()
            if weights is not None and self.client is not None:
                self._snapshot(self.client, wanted.epoch, weights)
        if wanted.checkpoint is not None:
            record = {"node": self.node, "step": step, "totals": totals}
            self._checkpoint(wanted.checkpoint, record)

    def joined(self, closed: int) -> None:
        """The node has joined anew: what was asked before may be asked again.

        Args:
            closed: Epochs that were over by then.
        """
        self._begun.clear()
        self._closed_before = closed

    def _is_new(self, kind: str, number: int) -> bool:
        if (kind, number) in self._begun:
            return False
        self._begun.add((kind, number))
        return True

    def _snapshot(self, client: NodeClient, epoch: int, weights: Weights) -> None:
        def write() -> None:
            if epoch > self._closed_before or not self._was_left(epoch):
                try:
                    write_weights(self.output, replica_name(epoch, self.node), weights)
                except DiskError as error:
                    self._failed = error
                    raise
            client.snapshot_written(epoch)

        self._submit(write)

    def _was_left(self, epoch: int) -> bool:
        """Whether a replica was left at that epoch's end, before the checkpoint that this process began with."""
        names = (replica_name(epoch, self.node), evaluation_name(epoch))
        return any(self.output.exists(name) for name in names)

    def _checkpoint(self, number: int, record: dict[str, Any]) -> None:
        kept, client = self.stepper.keep(), self.client
        folder = f"{checkpoint_folder(number)}/node-{self.node:03d}"
        if not self.stepper.apart:
            assert client is not None
            seq = client.seq
            self._submit(lambda: self._write_alone(client, number, {**record, "seq": seq}, folder, kept))
            return
        objects = pack_replica(f"{folder}/rank-{self.group.rank:02d}", kept)
        texts = self.group.gather_text(json.dumps(list(digests(objects).items())), limit=1024)
        files = {name: digest for text in texts for name, digest in json.loads(text)}
        if client is None:
            self._submit(lambda: write_objects(self.output, objects))
        else:
            whole = {**record, "seq": client.seq, "files": files}
            self._submit(lambda: self._write_together(client, number, whole, objects))

    def _write_alone(
        self, client: NodeClient, number: int, record: dict[str, Any], folder: str, kept: ReplicaState
    ) -> None:
        objects = pack_replica(folder, kept)
        write_objects(self.output, objects)
        client.checkpoint_done(number, {**record, "files": digests(objects)})

    def _write_together(
        self, client: NodeClient, number: int, record: dict[str, Any], objects: dict[str, bytes]
    ) -> None:
        """Rank 0: a checkpoint counts when every rank's part is there; an object is there only as a whole."""
        write_objects(self.output, objects)
        deadline = time.monotonic() + PATIENCE_S
        while missing := [name for name in record["files"] if not self.output.exists(name)]:
            if time.monotonic() > deadline:
                log.error("checkpoint %d stays incomplete: nobody wrote %s", number, missing[0])
                return
            time.sleep(PAUSE_S)
        client.checkpoint_done(number, record)

    def _submit(self, write: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                write()
            except DiskError as error:
                log.error("node %d could not write its weights: %s", self.node, error)
            except Exception:
                log.exception("node %d could not write its weights", self.node)

        self._writer.submit(guarded)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown(wait=True)


def open_replica_writer(name: str) -> TextIO | None:
    """The file that takes the ids of every step of a learner, if `STARLING_TRACE_IDS` names a folder for it."""
    folder = os.environ.get("STARLING_TRACE_IDS", "")
    # every line is out at once: it must outlive a kill
    return (Path(folder) / f"{name}.jsonl").open("a", buffering=1, encoding="utf-8") if folder else None
