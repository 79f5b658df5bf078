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
from typing_extensions import override

from devices.choice import claim
from storage.batching import derive_seed
from storage.objects import ObjectStore
from storage.quarantine import TooManyShardsError
from training.coordinator.node_client import NodeClient
from training.exchange.base import Exchange
from training.job import TrainJob
from training.learner.checkpoint import compute_name, files_by_rank, load_replica
from training.learner.compute import Learner, open_loader, open_set
from training.learner.prefetch import Loader, LoaderProcesses, Prefetcher
from training.learner.sampling import Draws
from training.learner.task import TrainingBatch
from training.node.learner_replica import SharedWeights
from training.node.node_exchange import Facts, NodeExchange, RingMember
from training.node.pipeline import PipelineLearner, PipelineStepper
from training.node.process_group import NodeGroup
from training.node.program_stepper import ProgramStepper
from training.node.replica_writer import ReplicaWriter, Wanted, open_replica_writer
from training.node.scheduler import Orders, Scheduler, count_batches
from training.node.step_counters import StepCounters
from training.node.stepper import Rows, Stepped, Stepper
from training.parameter_server.client import ServerClient

log = logging.getLogger(__name__)
IDLE_S = 0.02
"""Seconds between two polls of the coordinator's answers when there is nothing to train."""
_LINE_S = 30.0
"""Seconds after which a step has a line in the journal though it is none of every `log_steps`: where a step takes long,
as with a pretrained model on a CPU, the time that is left is known after two of them."""
MAX_RECOVERIES = 3
"""Times that a node takes a neighbour's weights after non-finite losses before it gives up."""
_REMEDY = "lower train.optimizer.lr or lengthen train.schedule.warmup_epochs"


class DivergedError(RuntimeError):
    """The loss or the gradient is no longer a finite number, and no neighbour has better weights."""


def build_stepper(
    job: TrainJob,
    ring: NodeExchange,
    learner: Learner,
    server: ServerClient | None = None,
    shared: SharedWeights | None = None,
    epoch_steps: float = 0.0,
) -> Stepper:
    """Build the stepper of a rank.

    Args:
        job: What to train.
        ring: The node's ranks, and its exchange with other nodes.
        learner: Result of `build_learner`.
        server: The parameter server, for strategies that use one.
        shared: Memory for the weights, for hogwild.
        epoch_steps: Steps of a learner in an epoch, the same at all ranks.
    """
    if isinstance(learner, PipelineLearner):
        return PipelineStepper(learner)
    return ProgramStepper(job, learner, ring, server, shared, epoch_steps)


class Worker(RingMember):
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
        super().__init__(NodeExchange(node, group, learner.flat, exchange, learner.moments), client)
        self.job, self.cfg, self.node = job, job.train, node
        self.learner, self.group = learner, group
        self.name = f"{node}.{group.rank}"
        self.data = open_set(job, "train")
        self.output = ObjectStore(job.output_url)
        self.draws = Draws(self.data.index, self.cfg.sampling, job.seed)
        batches = count_batches(job, self.data, self.draws)
        self.stepper = build_stepper(job, self.ring, learner, server, shared, batches / self.cfg.nodes)
        self.prefetch = self._open_prefetcher()
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
        self._line_at = time.monotonic()
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
            "view": self.set_view,
            "rejoin": lambda _: self.join(again=True),
            "leave": self._leave,
            "conclude": self._conclude,
        }
        self.join()
        if self.client:
            self.output.write_json(compute_name(self.node), self.learner.describe())
        while True:
            orders = self.group.tell(self.scheduler.decide(self.step, self.ring.view.number) if self.scheduler else {})
            if orders["do"] == "end":
                return self._end(orders["why"])
            deeds[orders["do"]](orders)

    @override
    def _take_from_neighbour(self, facts: Facts) -> bool:
        return bool(facts["finish"]) or self._fetch_weights()

    @override
    def _set_weights(self, facts: Facts) -> None:
        if facts["finish"] or facts["source"] == "own":
            return
        self.stepper.forget()
        if self.step:  # training restarts, and this process has trained already
            self.learner.reset()
            self.step = 0
            if self.counters:
                self.counters.reset()
        if facts["source"] == "checkpoint":
            self._resume(facts["record"], facts["records"], int(facts["step"]))
        self.stepper.begin(facts["session"])

    @override
    def _begin(self, facts: Facts) -> None:
        self.stepper.start(self.step)
        if self.scheduler and (facts["source"] == "own" or not facts["finish"]):
            # a node that comes when training has ended has no weights that others may take, or that are evaluated
            self.scheduler.begin()

    def _fetch_weights(self) -> bool:
        fetched = self.stepper.fetch()
        if fetched and self.learner.ema:  # of other weights
            self.learner.ema.restart()
        return fetched

    def _resume(self, record: dict[str, Any] | None, records: list[dict[str, Any]], step: int) -> None:
        """Continue with this rank's replica of a checkpoint, or merge all replicas if their number has changed.

        Args:
            record: This node's record, if the same nodes train as then.
            records: All nodes' records.
            step: Steps that a node of this number has made: the journal has their lines, and their seeds were used.
        """
        lots = files_by_rank(record["files"]) if record is not None else []
        if record is not None and len(lots) == (self.group.size if self.stepper.state_per_rank else 1):
            self.stepper.restore(load_replica(self.output, lots[self.group.rank if self.stepper.state_per_rank else 0]))
            self.step = step
            if self.counters:
                self.counters.load(record["totals"])
            return
        replicas = [lot for entry in records for lot in files_by_rank(entry["files"])]
        self.stepper.merge([load_replica(self.output, lot).weights for lot in replicas])
        self.step = step

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
        self.prefetch.hint([(self._share(turn_ahead["rows"]), turn_ahead["epoch"]) for turn_ahead in turn["next"]])
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
        if self.counters is None or (step % self.cfg.log_steps and time.monotonic() - self._line_at < _LINE_S):
            return
        self._line_at = time.monotonic()
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
        if self._recoveries > MAX_RECOVERIES or not self._fetch_weights():
            raise DivergedError(f"{what} (node {self.node}, step {self.step}), and no neighbour can help: {_REMEDY}")
        self.stepper.start(self.step)

    def _end(self, why: str) -> str:
        self.replica_writer.close()
        self.prefetch.close()
        self.data.prefetch(np.zeros(0, dtype=np.int64))
        if self.client:
            self.client.leave()
        return why
