"""Decides what a node does next: rank 0 asks the coordinator and broadcasts orders to the other ranks."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.batching import derive_seed, plan_epoch
from training.config import TrainConfig
from training.coordinator.messages import Progress
from training.coordinator.node_client import NodeClient
from training.coordinator.worklist import WHOLE, Assignment
from training.job import TrainJob
from training.learner.sampling import Draws
from training.learner.schedule import learning_rate
from training.learner.task import TrainingSet
from training.node.replica_writer import ReplicaWriter, Wanted
from training.node.step_counters import StepCounters
from training.node.stepper import Rows, Stepped, Stepper

Orders = dict[str, Any]

READ_AHEAD = 3
"""Batches loaded ahead with one loader thread or process; each further one adds one."""
FETCH_AHEAD = 200
"""Batches whose shards are fetched ahead, as far as the cache has room."""
FETCH_EVERY = 16
"""Steps between two checks which shards are needed next."""


def count_batches(job: TrainJob, data: TrainingSet, draws: Draws) -> int:
    """Number of batches in the first epoch if one node trains it alone, without augmentation; equal at all ranks.

    Args:
        job: What to train.
        data: The training set.
        draws: Maps positions of an epoch to utterances.

    Raises:
        BatchError: If the set is empty, or a duration is not a positive number.
    """
    return len(_batches(job.train, data.computed_seconds[draws.rows(0, np.arange(len(data)))], job.seed))


def _batches(cfg: TrainConfig, seconds: NDArray[np.float64], seed: int, epoch: int = 0) -> list[Rows]:
    """Batches of one node: its share of the global batch; the ranks then divide each batch among themselves."""
    return plan_epoch(
        seconds,
        batch_seconds=cfg.batch_seconds / cfg.nodes,
        max_batch=max(1, cfg.max_batch // cfg.nodes),
        bucket_batches=cfg.bucket_batches,
        seed=seed,
        epoch=epoch,
    )


class Scheduler:
    """Decides rank 0's next action.

    Args:
        job: What to train.
        client: Connection to the coordinator.
        data: The training set.
        draws: Maps positions of an epoch to utterances.
        stepper: The strategy's stepper at rank 0.
        replica_writer: Writes replicas and checkpoints.
        counters: The node's counters.
        batches: Result of `count_batches`.
    """

    def __init__(
        self,
        job: TrainJob,
        client: NodeClient,
        data: TrainingSet,
        draws: Draws,
        stepper: Stepper,
        replica_writer: ReplicaWriter,
        counters: StepCounters,
        batches: int,
    ) -> None:
        self.job, self.cfg, self.client, self.data, self.draws = job, job.train, client, data, draws
        self.stepper, self.replica_writer, self.counters = stepper, replica_writer, counters
        self.stop_requested = threading.Event()
        self._ahead = READ_AHEAD - 1 + self.cfg.loaders
        self._given: list[Assignment] = []
        self._held: Assignment | None = None
        self._mean_batch = len(data) / batches
        self._concluded = False
        self._next_fetch = 0
        self._coming: list[int] = []

    def begin(self) -> None:
        """Start to request work; the node has weights."""
        self._given, self._held, self._concluded = [], None, False
        self._next_fetch = 0
        self.replica_writer.joined(self.client.progress().closed)
        self.client.begin(self._plan, self.draws.shard, self._fetch_ahead)

    def _plan(self, epoch: int, rows: Rows, plan: str) -> list[Rows]:
        """Cut a lease into this node's batches."""
        seed = self.job.seed if plan == WHOLE else derive_seed(self.job.seed, plan)
        drawn = self.draws.rows(epoch, rows)
        # durations after augmentation: planned by the original ones, slowed-down utterances would add much padding
        seconds = self.stepper.learner.task.heard_seconds(self.data.ids(drawn), self.data.durations[drawn], epoch)
        return [rows[batch] for batch in _batches(self.cfg, seconds, seed, epoch)]

    def _fetch_ahead(self, new: Sequence[Assignment] = ()) -> None:
        """Prefetch the shards of the next batches, including those of a new lease while the last one is trained."""
        coming = [self.draws.rows(work.epoch, work.rows) for work in [*self.client.peek(FETCH_AHEAD), *new]]
        if coming:
            rows = np.concatenate(coming[:FETCH_AHEAD])
            self.data.prefetch(rows)
            self._coming = self.data.first_of_shards(rows).tolist() if self.cfg.machines_per_node > 1 else []

    def decide(self, step: int, view: int) -> Orders:
        """Decide the node's next orders.

        Args:
            step: Steps that the node has made.
            view: Number of the view that it uses.
        """
        client = self.client
        if self.stop_requested.is_set():
            return {"do": "end", "why": "left"}
        if client.dropped():
            return {"do": "rejoin"}
        progress = client.progress()
        if not self._concluded and self._held is None and progress.trained >= progress.size * progress.total:
            self._concluded = True
            return {"do": "conclude"}
        if (wanted := self.replica_writer.wanted()) and (orders := self._leave(wanted, step)):
            return orders
        if why := client.finish():
            return {"do": "end", "why": why}
        known = client.view()
        if known.number != view:
            return {"do": "view", "view": known.to_dict()}
        if self._limited(progress.trained):
            return {"do": "wait"}  # until the coordinator has heard of it, and ends training
        work, self._held = self._held or client.next(), None
        if work is None:
            return {"do": "wait"}
        if self._ends_epoch(work) and (orders := self._leave(self.replica_writer.end_of(work.epoch), step)):
            self._held = work
            return orders
        turns = self._turns(work, step, progress)
        fetch, self._coming = self._coming, []
        return {"do": "step", "turns": turns, "fetch": fetch}

    def _leave(self, wanted: Wanted, step: int) -> Orders | None:
        """Write what is wanted at once if rank 0 can do so alone; otherwise return orders for all ranks."""
        if not wanted:
            return None
        if self.stepper.state_per_rank:
            return {"do": "leave", "epoch": wanted.epoch, "checkpoint": wanted.checkpoint}
        self.replica_writer.leave(wanted, step, self.counters.to_list())
        return None

    def _ends_epoch(self, work: Assignment) -> bool:
        """Whether an epoch ends before this batch. With one node that is exact, so evaluations repeat bit for bit."""
        return self.cfg.nodes == 1 and bool(self._given) and work.epoch > self._given[-1].epoch

    def _limited(self, trained: int) -> bool:
        """Whether so many utterances are all that are to be trained."""
        return 0 < self.cfg.max_utterances <= trained

    def _turns(self, work: Assignment, step: int, progress: Progress) -> list[Orders]:
        """This batch, and those of the same epoch that ranks may train on before they communicate again."""
        self._given = []
        turns, ahead = [], 0
        following: Assignment | None = work
        while following is not None:
            self._given.append(following)
            turns.append(self._turn(following, progress, ahead))
            ahead += len(following.rows)
            if len(turns) >= self.stepper.turns or self._limited(progress.trained + ahead):
                break
            following = self.client.next()
            if following is not None and self._ends_epoch(following):
                self._held = following
                break
        if step + len(turns) > self._next_fetch:
            self._next_fetch = step + FETCH_EVERY
            self._fetch_ahead()
        return turns

    def _turn(self, work: Assignment, progress: Progress, ahead: int) -> Orders:
        # the rate at the middle of the step, so that the first step of a warm-up is not zero
        epochs = progress.epochs + (ahead + 0.5 * len(work.rows)) / len(self.data)
        batch = self._mean_batch * max(1, progress.live)
        return {
            **self._drawn(work),
            "progress": epochs,
            "lr": learning_rate(self.cfg.schedule, self.cfg.optimizer.lr, epochs, self.cfg.epochs, batch),
            "elapsed": progress.elapsed,
            "next": [self._drawn(work) for work in self.client.peek(self._ahead)],
        }

    def _drawn(self, work: Assignment) -> Orders:
        """The utterances of a batch, and its epoch."""
        return {"rows": self.draws.rows(work.epoch, work.rows).tolist(), "epoch": work.epoch}

    def account(self, results: Sequence[Stepped]) -> None:
        """Count the results of the batches ordered last."""
        for assignment, result in zip(self._given, results, strict=True):
            self.counters.step(assignment, result.parts, result.good)
