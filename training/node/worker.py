"""The training loop of one learner: takes leased batches, computes gradients, and lets its strategy apply them.

Rank 0 of a node decides with the coordinator what the node does next, and broadcasts it to the other ranks
(`training.node.scheduler`). The strategy defines what happens between two gradients (`training.node.stepper`).
"""

import json
import logging
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from devices.choice import claim
from storage.batching import derive_seed
from storage.objects import ObjectStore
from storage.quarantine import TooManyShardsError
from training.coordinator.membership import View
from training.coordinator.node_client import NodeClient
from training.exchange.base import Exchange
from training.job import TrainJob
from training.learner.checkpoint import CheckpointError, compute_name, files_by_rank, load_replica
from training.learner.compute import Learner, open_loader, open_set
from training.learner.prefetch import Loader, LoaderProcesses, Prefetcher
from training.learner.sampling import Draws
from training.learner.task import TrainingBatch
from training.node.learner_replica import SharedWeights
from training.node.node_exchange import NodeExchange
from training.node.process_group import NodeGroup
from training.node.replica_writer import ReplicaWriter, Wanted, open_replica_writer
from training.node.scheduler import Orders, Scheduler, count_batches
from training.node.step_counters import StepCounters
from training.node.stepper import Rows, Stepped
from training.node.strategy_setup import build_stepper
from training.parameter_server.client import ServerClient

log = logging.getLogger(__name__)
IDLE_S = 0.02
"""Seconds between two polls of the coordinator's answers when there is nothing to train."""
JOIN_TRIES = 5
MAX_RECOVERIES = 3
"""Times that a node takes a neighbour's weights after non-finite losses before it gives up."""
_REMEDY = "lower train.optimizer.lr or lengthen train.schedule.warmup_epochs"


class DivergedError(RuntimeError):
    """The loss or the gradient is no longer a finite number, and no neighbour has better weights."""


class NoWeightsError(RuntimeError):
    """A newcomer found no weights to start from."""


class Worker:
    """One rank of a node.

    Args:
        job: What to train.
        node: Number of the node.
        learner: Model and optimizer.
        group: The node's ranks.
        exchange: Averages with other nodes; None if there is only one node, or the strategy has no exchange.
        client: Connection to the coordinator; at rank 0 only.
        server: The parameter server, for strategies that use one.
        shared: Memory for the weights, for hogwild.
    """

    def __init__(
        self,
        job: TrainJob,
        node: int,
        learner: Learner,
        group: NodeGroup,
        exchange: Exchange | None,
        client: NodeClient | None,
        server: ServerClient | None = None,
        shared: SharedWeights | None = None,
    ) -> None:
        self.job, self.cfg, self.node = job, job.train, node
        self.learner, self.group, self.client = learner, group, client
        self.ring = NodeExchange(node, group, learner.flat, exchange, learner.moments)
        self.name = f"{node}.{group.rank}"
        self.data = open_set(job, "train")
        self.output = ObjectStore(job.output_url)
        self.draws = Draws(self.data.index, self.cfg.sampling, job.seed)
        batches = count_batches(job, self.data, self.draws)
        self.stepper = build_stepper(job, self.ring, learner, server, shared, batches / self.cfg.nodes)
        self.prefetch = self._open_prefetcher()
        self.step = 0
        self.replica_writer = ReplicaWriter(node, self.stepper, group, self.output, client)
        self.counters: StepCounters | None = None
        self.scheduler: Scheduler | None = None
        if client:
            self.counters = StepCounters(node, group.size, self.cfg.epochs, client, self.stepper.measured)
            self.scheduler = Scheduler(
                job, client, self.data, self.draws, self.stepper, self.replica_writer, self.counters, batches
            )
        self.stop_requested = self.scheduler.stop_requested if self.scheduler else threading.Event()
        self._bad = self._recoveries = 0
        self._ids = open_replica_writer(self.name)

    def _open_prefetcher(self) -> Prefetcher:
        device, loaders = self.learner.device, self.cfg.loaders
        load = Loader(self.data, self.learner.task, device)

        # a new thread's current device is the first GPU, where page-locking would open a context of this process
        def begin() -> None:
            claim(device)

        if not self.cfg.loader_processes:
            return Prefetcher(load, loaders, begin)
        opened = partial(open_loader, self.job, torch.get_num_threads(), self.group.rank)
        processes = LoaderProcesses(load, opened, loaders)
        return Prefetcher(processes, loaders, begin, processes.close)

    # --- joining

    def run(self) -> str:
        """Train until the coordinator says that training is over.

        Returns:
            Why it ended: `done`, `time`, `stop`, or `left` if only this node was asked to leave.

        Raises:
            DivergedError: If this node has no finite weights to continue with.
            NoWeightsError: If it joined a running training and found no weights.
            TooManyShardsError: If damaged shards hold more of the training set than is tolerated.
        """
        deeds = {
            "step": self._train,
            "wait": self._idle,
            "view": self._set_view,
            "rejoin": self._rejoin,
            "leave": self._leave,
            "conclude": self._conclude,
        }
        self._join()
        if self.client:
            self.output.write_json(compute_name(self.node), self.learner.describe())
        while True:
            orders = self.group.tell(self.scheduler.decide(self.step, self.ring.view.number) if self.scheduler else {})
            if orders["do"] == "end":
                return self._end(orders["why"])
            deeds[orders["do"]](orders)

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
            raise NoWeightsError(f"node {self.node} found no weights to start from: no checkpoint, no other node")
        self.stepper.start(self.step)
        if self.scheduler and (facts["source"] == "own" or not facts["finish"]):
            # a node that comes when training has ended has no weights that others may take, or that are evaluated
            self.scheduler.begin()
        log.info("node %d rank %d: weights %s, from step %d", self.node, self.group.rank, facts["source"], self.step)

    def _get_weights(self, facts: Orders) -> bool:
        """Get the weights to start from; False if they should come from a neighbour and none has them."""
        if facts["source"] == "own":
            return True
        if facts["source"] == "neighbour":
            # another process may have made these steps: their seeds must not be used twice
            self.step = max(self.step, facts["step"])
            return self._take_from_neighbour()
        self.stepper.forget()
        if self.step:  # training restarts, and this process has trained already
            self.learner.reset()
            self.step = 0
            if self.counters:
                self.counters.reset()
        if facts["source"] == "checkpoint":
            self._resume(facts["record"], facts["records"])
        self.stepper.begin(facts["session"])
        return True

    def _take_from_neighbour(self) -> bool:
        found = self.stepper.fetch()
        if found and self.learner.ema:  # of other weights
            self.learner.ema.restart()
        return found

    def _resume(self, record: dict[str, Any] | None, records: list[dict[str, Any]]) -> None:
        """Continue with this rank's replica of a checkpoint, or merge all replicas if their number has changed."""
        lots = files_by_rank(record["files"]) if record is not None else []
        if record is not None and len(lots) == (self.group.size if self.stepper.state_per_rank else 1):
            self.stepper.restore(load_replica(self.output, lots[self.group.rank if self.stepper.state_per_rank else 0]))
            self.step = int(record["step"])
            if self.counters:
                self.counters.load(record["totals"])
            return
        replicas = [lot for one in records for lot in files_by_rank(one["files"])]
        self.stepper.merge([load_replica(self.output, lot).weights for lot in replicas])

    def _rejoin(self, _: Orders) -> None:
        """Rejoin as a newcomer, after the coordinator dropped this node because it was suspended or cut off."""
        log.warning("node %d was dropped from the ring and rejoins", self.node)
        self._join(again=True)

    def _set_view(self, orders: Orders) -> None:
        self.ring.set_view(View.from_dict(orders["view"]))

    def _leave(self, orders: Orders) -> None:
        totals = self.counters.to_list() if self.counters else []
        self.replica_writer.leave(Wanted(orders["epoch"], orders["checkpoint"]), self.step, totals)

    def _conclude(self, _: Orders) -> None:
        self.stepper.conclude()

    # --- training

    def _train(self, orders: Orders) -> None:
        turns: list[Orders] = orders["turns"]
        self._fetch(orders["fetch"])
        started, lost = time.monotonic(), None
        for turn in turns:
            lost = self._turn(turn) or lost
        results = self.stepper.results()
        if any(part.lost for result in results for part in result.parts):
            self._give_up(lost)
        if self.scheduler:
            self.scheduler.account(results)
        seconds = (time.monotonic() - started) / len(turns)
        first = self.step - len(turns) + 1
        for number, (turn, result) in enumerate(zip(turns, results, strict=True), first):
            self._report(number, turn, result, seconds)
            self._bad = 0 if result.good else self._bad + 1
        if self._bad >= self.cfg.membership.max_bad_steps:
            self._recover()

    def _fetch(self, rows: list[int]) -> None:
        """Prefetch shards on the node's other machines, once per machine; rank 0 does so on its own."""
        here = self.cfg.learners_per_node // self.cfg.machines_per_node
        if rows and self.group.rank and self.group.rank % here == 0:
            self.data.prefetch(np.asarray(rows, dtype=np.int64))

    def _turn(self, turn: Orders) -> TooManyShardsError | None:
        """Train on one batch: compute its gradient, and pass it to the strategy."""
        batch, lost = self._take(self._share(turn["rows"]), turn["epoch"])
        self.prefetch.hint([(self._share(one["rows"]), one["epoch"]) for one in turn["next"]])
        seed = derive_seed("step", self.job.seed, self.name, self.step)
        self.learner.enter(turn["epoch"])
        losses = self.learner.gradient(batch, seed)
        self.stepper.step(losses, lost is not None, turn["lr"])
        self.step += 1
        if self._ids and batch is not None:
            self._ids.write(json.dumps({"epoch": turn["epoch"], "step": self.step, "ids": batch.ids}) + "\n")
        self.stepper.after(self.step)
        return lost

    def _share(self, rows: list[int]) -> Rows:
        return self.stepper.share(np.asarray(rows, dtype=np.int64))

    def _take(self, rows: Rows, epoch: int) -> tuple[TrainingBatch | None, TooManyShardsError | None]:
        """A batch, or the error: raised at one rank alone, it would leave the node's other ranks waiting."""
        try:
            return self.prefetch.take(rows, epoch), None
        except TooManyShardsError as error:
            return None, error

    def _give_up(self, lost: TooManyShardsError | None) -> None:
        if lost is not None:
            raise lost
        self.data.check()
        raise TooManyShardsError("another learner of this node has found too many damaged shards")

    def _idle(self, _: Orders) -> None:
        time.sleep(IDLE_S)
        self.stepper.idle(self.step)

    def _report(self, step: int, turn: Orders, result: Stepped, seconds: float) -> None:
        if self.counters is None or step % self.cfg.log_steps:
            return
        shared = {
            "step": step,
            "epoch": turn["progress"],
            "lr": turn["lr"],
            "grad_norm": result.norm,
            "elapsed": turn["elapsed"],
            "step_s": seconds,
            "nodes": len(self.ring.view.members),
        }
        if (stats := self.ring.stats()) is not None:
            shared |= {"exchanges": stats.initiated, "answered": stats.answered, "failed": stats.failed}
            shared["averaging_s"] = self.ring.averaging_s
        self.counters.journal(result.parts, **shared)

    def _recover(self) -> None:
        """After too many steps without a finite loss, take a neighbour's weights or give up."""
        self._bad = 0
        what = f"{self.cfg.membership.max_bad_steps} steps in a row without a finite loss or gradient"
        if self.client:
            self.client.journal({"kind": "bad", "learner": self.name, "step": self.step, "what": what})
        self._recoveries += 1
        self.learner.moments.clear()
        if self._recoveries > MAX_RECOVERIES or not self._take_from_neighbour():
            raise DivergedError(f"{what} (node {self.node}, step {self.step}), and no neighbour can help: {_REMEDY}")
        self.stepper.start(self.step)

    def _end(self, why: str) -> str:
        self.replica_writer.close()
        self.prefetch.close()
        self.data.prefetch(np.zeros(0, dtype=np.int64))
        if self.client:
            self.client.leave()
        return why
