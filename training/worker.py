"""One learner at work: takes batches from the store's leases, computes gradients, averages with the neighbours.

Rank 0 of a node decides, with the store, what the node does next, and tells the others; all ranks hold the same
weights. A step is: gradient of the weights as they are; all-reduce within the node; add what averaging with neighbours
has brought meanwhile; apply the gradient (ADPSGD, arXiv:1904.04956 and 1710.06952; with several ranks a node H-ADPSGD,
arXiv:1907.05701). Nothing here waits for the network between nodes.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.objects import ObjectStore
from storage.quarantine import TooManyShardsError
from training.accounts import Accounts, Part, together
from training.batching import derive_seed, plan_node
from training.checkpoint import CheckpointError, load_replica, mean_weights
from training.compute import Learner, open_set
from training.data import Batch
from training.exchange.base import Exchange
from training.group import GradientReducer, NodeGroup
from training.job import TrainJob
from training.membership import View
from training.optim import load_optimizer_tensors
from training.prefetch import Prefetcher
from training.ring import Ring
from training.sampling import Draws
from training.schedule import learning_rate
from training.store.node_client import NodeClient
from training.store.worklist import WHOLE, Assignment
from training.traces import Traces, open_trace

log = logging.getLogger(__name__)
Orders = dict[str, Any]
Rows = NDArray[np.int64]

IDLE_S = 0.02
"""Between two looks at the store's answers when there is nothing to train."""
READ_AHEAD = 3
"""Batches that one thread loads ahead."""
FETCH_AHEAD = 200
"""Batches whose shards are fetched ahead, as far as the cache has room."""
FETCH_EVERY = 16
"""Steps after which the shards of what comes are looked at again."""
JOIN_TRIES = 5
MAX_RECOVERIES = 3
"""Times that a node takes a neighbour's weights after non-finite losses before it gives up."""
_REMEDY = "lower train.optimizer.lr or lengthen train.schedule.warmup_epochs"


class DivergedError(RuntimeError):
    """The loss or the gradient is no longer a finite number, and no neighbour has better weights."""


class NoWeightsError(RuntimeError):
    """A newcomer found nobody to take weights from."""


class Worker:
    """One rank of a node.

    Args:
        job: What to train.
        node: Number of the node.
        learner: Model and optimizer.
        group: The node's ranks.
        exchange: Averages with other nodes; None if there is one node only.
        client: Speaks with the store; at rank 0 only.
    """

    def __init__(
        self,
        job: TrainJob,
        node: int,
        learner: Learner,
        group: NodeGroup,
        exchange: Exchange | None,
        client: NodeClient | None,
    ) -> None:
        self.job, self.cfg, self.node = job, job.train, node
        self.learner, self.group, self.client = learner, group, client
        self.ring = Ring(node, group, learner.flat, exchange)
        self.name = f"{node}.{group.rank}"
        self.data = open_set(job, job.train_url)
        self.output = ObjectStore(job.output_url)
        self.reducer = GradientReducer(group, learner.flat)
        self.draws = Draws(self.data.index, self.cfg.sampling, job.seed)
        self.prefetch = Prefetcher(self.data.batch, self.cfg.loader_threads)
        self.step = 0
        self.accounts = Accounts(node, group.size, self.cfg.epochs, client) if client else None
        self.traces = Traces(node, learner, self.output, client) if client else None
        self.stop_requested = threading.Event()
        self.slow = 1.0
        self._bad = self._recoveries = 0
        self._current: Assignment | None = None
        self._mean_batch = 0.0
        self._ids = open_trace(self.name)
        self._ahead = READ_AHEAD - 1 + self.cfg.loader_threads

    # --- joining

    def run(self) -> str:
        """Train until the store says that training is over.

        Returns:
            Why it ended: `done`, `time`, `stop`, or `left` if this node alone was asked to go.

        Raises:
            DivergedError: If this node has nothing finite to go on with.
            NoWeightsError: If it joined in mid-run and found no weights.
            TooManyShardsError: If more of the training set is lost with damaged shards than may be.
        """
        self._join()
        while True:
            orders = self.group.tell(self._decide() if self.group.rank == 0 else {})
            if orders["do"] == "end":
                return self._end(orders["why"])
            {"step": self._train, "wait": self._idle, "view": self._set_view, "rejoin": self._rejoin}[orders["do"]](
                orders
            )

    def _join(self, again: bool = False) -> None:
        damaged = ""
        for _ in range(JOIN_TRIES):
            endpoints = self.ring.endpoints()
            facts: Orders = {}
            if self.client:
                join = self.client.rejoin if again else self.client.join
                facts = join(endpoints, damaged=damaged).facts()
            facts = self.group.tell(facts)
            self._set_view(facts)
            try:
                if facts["finish"] or self._get_weights(facts):
                    break
            except CheckpointError as error:
                log.warning("%s; asking for an older one", error)
                damaged = str(facts["resume"])
                continue
            again = True
        else:
            raise NoWeightsError(f"node {self.node} found no weights to begin with, neither a checkpoint's nor others'")
        self.ring.start(self.step)
        self._current = None
        if self.client and self.traces:
            self.traces.joined(self.client.progress().closed)
            self.client.begin(self._plan, self.draws.shard, self._fetch_ahead)
        log.info("node %d rank %d: weights %s, from step %d on", self.node, self.group.rank, facts["source"], self.step)

    def _get_weights(self, facts: Orders) -> bool:
        """Weights to begin with; False if a neighbour should give them and none does."""
        if facts["source"] == "own":
            return True
        if facts["source"] == "neighbour":
            # it may be another process that made these steps: their seeds must not come twice
            self.step = max(self.step, facts["step"])
            return self.ring.take_from_neighbour()
        if self.step:  # training begins anew, and this process has trained already
            self.learner.reset()
            self.step = 0
            if self.accounts:
                self.accounts.reset()
        if facts["source"] == "checkpoint":
            self._resume(facts["record"], facts["records"])
        return True

    def _resume(self, record: dict[str, Any] | None, records: list[dict[str, Any]]) -> None:
        """Continue this node's replica, or start from the average if the number of nodes has changed."""
        if record is not None:
            weights, optimizer = load_replica(self.output, record["files"])
            load_optimizer_tensors(self.learner.optimizer, optimizer)
            self.step = int(record["step"])
            if self.accounts:
                self.accounts.load(record["totals"])
        else:
            weights = mean_weights(load_replica(self.output, one["files"])[0] for one in records)
        self.learner.model.load_state_dict(weights)

    def _plan(self, epoch: int, rows: Rows, plan: str) -> list[Rows]:
        """Cut a lease into this node's batches."""
        seed = self.job.seed if plan == WHOLE else derive_seed(self.job.seed, plan)
        durations = self.data.durations[self.draws.rows(epoch, rows)]
        return [rows[batch] for batch in plan_node(self.cfg, durations, seed, epoch)]

    def _fetch_ahead(self, new: Sequence[Assignment] = ()) -> None:
        """Have the shards of what comes next fetched, those of a new lease while the last one is trained."""
        assert self.client is not None
        coming = [self.draws.rows(one.epoch, one.rows) for one in [*self.client.peek(FETCH_AHEAD), *new]]
        if coming:
            self.data.prefetch(np.concatenate(coming[:FETCH_AHEAD]))

    def _rejoin(self, _: Orders) -> None:
        """The store had given this node up, because it was stopped or cut off: come back as a newcomer."""
        log.warning("node %d was dropped from the ring and rejoins", self.node)
        self._join(again=True)

    def _set_view(self, orders: Orders) -> None:
        self.ring.set_view(View.from_dict(orders["view"]))

    # --- deciding (rank 0)

    def _decide(self) -> Orders:
        client = self.client
        assert client is not None
        if self.stop_requested.is_set():
            return {"do": "end", "why": "left"}
        if client.dropped():
            return {"do": "rejoin"}
        if self.traces and self.accounts:
            self.traces.leave(self.step, self.accounts.to_list())
        if why := client.finish():
            return {"do": "end", "why": why}
        view = client.view()
        if view.number != self.ring.view.number:
            return {"do": "view", "view": view.to_dict()}
        work = client.next()
        if work is None:
            return {"do": "wait"}
        if self.traces and self.cfg.nodes == 1 and self._current and work.epoch > self._current.epoch:
            # a node alone knows to the step when an epoch is over: its evaluations repeat bit for bit
            self.traces.end_epoch(work.epoch)
        return self._orders(work, client)

    def _orders(self, work: Assignment, client: NodeClient) -> Orders:
        self._current = work
        if self.step % FETCH_EVERY == 0:
            self._fetch_ahead()
        progress = client.progress()
        # the rate at the middle of the step: the first step of a warm-up from zero moves, too
        epochs = progress.epochs + 0.5 * len(work.rows) / len(self.data)
        if not self._mean_batch:
            self._mean_batch = len(self.data) / max(1, len(self._plan(0, np.arange(len(self.data)), WHOLE)))
        batch = self._mean_batch * max(1, progress.live)
        lr = learning_rate(self.cfg.schedule, self.cfg.optimizer.lr, epochs, self.cfg.epochs, batch)
        return {
            "do": "step",
            "rows": self.draws.rows(work.epoch, work.rows).tolist(),
            "epoch": work.epoch,
            "progress": epochs,
            "lr": lr,
            "elapsed": progress.elapsed,
            "next": [self.draws.rows(one.epoch, one.rows).tolist() for one in client.peek(self._ahead)],
        }

    # --- training

    def _train(self, orders: Orders) -> None:
        started, worked = time.monotonic(), time.thread_time()
        rank, size = self.group.rank, self.group.size
        batch, lost = self._take(_rows(orders["rows"])[rank::size])
        self.prefetch.hint([_rows(rows)[rank::size] for rows in orders["next"]])
        seed = derive_seed("step", self.job.seed, self.name, self.step)
        losses = self.learner.gradient(batch, seed, orders["epoch"])
        self.reducer.finish()
        part = Part.of(losses, self.ring.ready(), self.ring.stats(), lost is not None)
        parts = [Part.from_list(values) for values in self.group.gather_numbers(part.to_list())]
        if any(part.lost for part in parts):
            self._give_up(lost)
        sums = together(parts)
        norm = self.learner.scale_gradient(sums.tokens)
        good = math.isfinite(norm) and math.isfinite(sums.loss)
        if all(part.ready for part in parts):
            self.ring.average()
        if good and sums.utterances:
            self.learner.update(orders["lr"])
        self.step += 1
        if self._ids and batch is not None:
            self._ids.write(json.dumps({"epoch": orders["epoch"], "step": self.step, "ids": batch.ids}) + "\n")
        if self.slow > 1.0:  # a fault that tests inject: a machine that is so many times slower
            time.sleep((time.thread_time() - worked) * (self.slow - 1.0))
        self.ring.after_step(self.step)
        self._report(orders, parts, norm, good, time.monotonic() - started)
        self._bad = 0 if good else self._bad + 1
        if self._bad >= self.cfg.membership.max_bad_steps:
            self._recover()

    def _take(self, rows: Rows) -> tuple[Batch | None, TooManyShardsError | None]:
        """A batch, or why there is none: an error here alone would leave the node's other ranks waiting."""
        try:
            return self.prefetch.take(rows), None
        except TooManyShardsError as error:
            return None, error

    def _give_up(self, lost: TooManyShardsError | None) -> None:
        if lost is not None:
            raise lost
        self.data.check()
        raise TooManyShardsError("another learner of this node has found more damaged shards than may be")

    def _idle(self, _: Orders) -> None:
        time.sleep(IDLE_S)
        self.ring.idle(self.step)

    def _report(self, orders: Orders, parts: list[Part], norm: float, good: bool, seconds: float) -> None:
        if self.accounts is None or self._current is None:
            return
        self.accounts.step(self._current, parts, good)
        if self.step % self.cfg.log_steps:
            return
        shared = {
            "step": self.step,
            "epoch": orders["progress"],
            "lr": orders["lr"],
            "grad_norm": norm,
            "elapsed": orders["elapsed"],
            "step_s": seconds,
            "nodes": len(self.ring.view.members),
        }
        if (stats := self.ring.stats()) is not None:
            shared |= {"exchanges": stats.initiated, "answered": stats.answered, "failed": stats.failed}
            shared["averaging_s"] = self.ring.averaging_s
        self.accounts.journal(parts, **shared)

    def _recover(self) -> None:
        """Too many steps without a finite loss: take a neighbour's weights, or give up."""
        self._bad = 0
        what = f"{self.cfg.membership.max_bad_steps} steps in a row without a finite loss or gradient"
        if self.client:
            self.client.journal({"kind": "bad", "learner": self.name, "step": self.step, "what": what})
        self._recoveries += 1
        if self._recoveries > MAX_RECOVERIES or not self.ring.take_from_neighbour():
            raise DivergedError(f"{what} (node {self.node}, step {self.step}), and no neighbour can help: {_REMEDY}")
        self.learner.optimizer.state.clear()
        self.ring.start(self.step)

    def _end(self, why: str) -> str:
        if self.traces:
            self.traces.close()
        self.prefetch.close()
        self.data.reader.prefetch(())
        if self.client:
            self.client.leave()
        return why


def _rows(values: list[int]) -> Rows:
    return np.asarray(values, dtype=np.int64)
