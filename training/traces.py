"""What a node leaves in the object store while it trains: its replica at epochs' ends, and checkpoints.

Copies are made between two steps, which is quick; writing goes on in a thread. Storage in trouble costs a checkpoint,
not the training.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from storage.objects import ObjectStore
from training.checkpoint import cpu_weights, evaluation_name, save_replica, write_weights
from training.compute import Learner
from training.optim import optimizer_tensors
from training.store.messages import checkpoint_folder, replica_name
from training.store.node_client import NodeClient

log = logging.getLogger(__name__)


class Traces:
    """Writes what the store asks for.

    Args:
        node: Number of the node.
        learner: Model and optimizer.
        output: The training's output.
        client: Says what is wanted, and is told what is written.
    """

    def __init__(self, node: int, learner: Learner, output: ObjectStore, client: NodeClient) -> None:
        self.node, self.learner, self.output, self.client = node, learner, output, client
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._begun: set[tuple[str, int]] = set()
        self._closed_before = 0

    def leave(self, step: int, totals: list[dict[str, float]]) -> None:
        """Copy what is wanted of this replica, if anything is; each thing once.

        Args:
            step: Steps that this replica has made.
            totals: Its learners' counters, for a resume.
        """
        epoch, checkpoint = self.client.snapshot_wanted(), self.client.checkpoint_wanted()
        if epoch is not None and self._is_new("epoch", epoch):
            self._snapshot(epoch)
        if checkpoint is not None and self._is_new("checkpoint", checkpoint):
            self._checkpoint(checkpoint, {"node": self.node, "step": step, "seq": self.client.seq, "totals": totals})

    def end_epoch(self, epoch: int) -> None:
        """Leave the replica without being asked: the store asks a beat after an epoch's end, some steps later.

        Args:
            epoch: The epoch that has just ended (1 is the first).
        """
        if self._is_new("epoch", epoch):
            self._snapshot(epoch)

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

    def _snapshot(self, epoch: int) -> None:
        weights = cpu_weights(self.learner.model)

        def write() -> None:
            if epoch > self._closed_before or not self._was_left(epoch):
                write_weights(self.output, replica_name(epoch, self.node), weights)
            self.client.snapshot_written(epoch)

        self._submit(write)

    def _was_left(self, epoch: int) -> bool:
        """Whether a replica was left at that epoch's end, before the checkpoint that this process began with."""
        names = (replica_name(epoch, self.node), evaluation_name(epoch))
        return any(self.output.exists(name) for name in names)

    def _checkpoint(self, number: int, record: dict[str, Any]) -> None:
        weights, optimizer = cpu_weights(self.learner.model), optimizer_tensors(self.learner.optimizer)

        def write() -> None:
            folder = f"{checkpoint_folder(number)}/node-{self.node:03d}"
            files = save_replica(self.output, folder, weights, optimizer)
            self.client.checkpoint_done(number, {**record, "files": files})

        self._submit(write)

    def _submit(self, write: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                write()
            except Exception:
                log.exception("node %d could not write its weights", self.node)

        self._writer.submit(guarded)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown(wait=True)


def open_trace(name: str) -> TextIO | None:
    """The file that takes the ids of every step of a learner, if `STARLING_TRACE_IDS` names a folder for it."""
    folder = os.environ.get("STARLING_TRACE_IDS", "")
    # every line is out at once: it must outlive a kill
    return (Path(folder) / f"{name}.jsonl").open("a", buffering=1, encoding="utf-8") if folder else None
