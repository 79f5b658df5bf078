"""Writes a node's replicas to the object store during training: at the end of each epoch, and for checkpoints.

Weights are copied between two steps, which is quick, and written in a thread. A storage failure costs a checkpoint, not
the training.
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
"""Seconds that rank 0 waits for the other ranks' parts of a checkpoint."""
PAUSE_S = 0.1


@dataclass(frozen=True)
class Wanted:
    """What to write: the replica at the end of an epoch (from 1), a checkpoint, both or neither."""

    epoch: int | None = None
    checkpoint: int | None = None

    def __bool__(self) -> bool:
        return self.epoch is not None or self.checkpoint is not None


class ReplicaWriter:
    """Writes the replicas and checkpoints that the coordinator requests.

    Args:
        node: Number of the node.
        stepper: Provides the model and the state for a resume.
        group: The node's ranks.
        output: Store of the training's output.
        client: Connection to the coordinator; at rank 0 only.
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
        """New requests of the coordinator; each is returned once.

        Raises:
            DiskError: If a replica could not be written: the coordinator would wait for it forever.
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
        """The replica of an epoch that has just ended, unless requested before.

        It is written at once: the coordinator would request it a heartbeat later, after further steps.

        Args:
            epoch: The epoch, from 1.
        """
        return Wanted(epoch if self._is_new("epoch", epoch) else None)

    def leave(self, wanted: Wanted, step: int, totals: list[dict[str, float]]) -> None:
        """Copy what is wanted, and write it in a thread; if the ranks' replicas differ, all ranks call it together.

        Args:
            wanted: What to write.
            step: Steps that this replica has made.
            totals: Counters of the node's learners, for a resume.
        """
        if wanted.epoch is not None:
            weights = self.stepper.model()
            if weights is not None and self.client is not None:
                self._snapshot(self.client, wanted.epoch, weights)
        if wanted.checkpoint is not None:
            record = {"node": self.node, "step": step, "totals": totals}
            self._checkpoint(wanted.checkpoint, record)

    def joined(self, closed: int) -> None:
        """Called when the node has joined or rejoined: earlier requests may be repeated.

        Args:
            closed: Number of epochs that are over.
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
        """Whether an earlier process of this node wrote the epoch's replica, or the epoch was evaluated."""
        names = (replica_name(epoch, self.node), evaluation_name(epoch))
        return any(self.output.exists(name) for name in names)

    def _checkpoint(self, number: int, record: dict[str, Any]) -> None:
        kept, client = self.stepper.keep(), self.client
        folder = f"{checkpoint_folder(number)}/node-{self.node:03d}"
        if not self.stepper.state_per_rank:
            assert client is not None
            seq = client.seq
            self._submit(lambda: self._write_alone(client, number, {**record, "seq": seq}, folder, kept))
            return
        objects = pack_replica(f"{folder}/rank-{self.group.rank:02d}", kept)
        texts = self.group.gather_text(json.dumps(list(digests(objects).items())))
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
        """At rank 0: report a checkpoint once every rank's part exists; objects are written atomically."""
        write_objects(self.output, objects)
        deadline = time.monotonic() + PATIENCE_S
        while missing := [name for name in record["files"] if not self.output.exists(name)]:
            if time.monotonic() > deadline:
                log.error("checkpoint %d is incomplete: %s was not written", number, missing[0])
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
        """Wait until all writes have finished."""
        self._writer.shutdown(wait=True)


def open_replica_writer(name: str) -> TextIO | None:
    """Open a file for the utterance ids of each of a learner's steps, if `STARLING_TRACE_IDS` names a folder."""
    folder = os.environ.get("STARLING_TRACE_IDS", "")
    # line-buffered: lines must survive a kill
    return (Path(folder) / f"{name}.jsonl").open("a", buffering=1, encoding="utf-8") if folder else None
