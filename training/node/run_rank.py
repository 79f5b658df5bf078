"""What the process of one rank does: it builds the learner and its connections, trains, and says why it ended."""

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from devices.choice import claim, inventory, pick_device, share_gpu
from devices.portions import TooLargeError
from storage.quarantine import TooManyShardsError
from training.coordinator.node_client import NodeClient
from training.exchange import Exchange, ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.exchange.device import unshared
from training.job import TrainJob
from training.learner.compute import Learner, use_threads
from training.node.learner_replica import SharedWeights
from training.node.node_exchange import NoWeightsError
from training.node.pipeline import PipelineLearner
from training.node.process_group import NodeGroup
from training.node.rank import DIVERGED, GAVE_UP, STOPPED, NodeSetup
from training.node.rendezvous import RankPlacement, Rendezvous, RendezvousError
from training.node.system_figures import SystemFigures
from training.node.worker import DivergedError, Worker
from training.parameter_server.client import ServerClient
from training.processes.children import on_termination
from training.processes.exit_reason import leave_reason
from training.processes.keys import RingKey
from training.processes.sockets import beside

log = logging.getLogger(__name__)


@dataclass
class RankParts:
    """A rank's learner and its group.

    Attributes:
        learner: Model and optimizer, on the rank's device.
        group: The node's ranks.
        rendezvous: The node's machines; None if there is one.
    """

    learner: Learner
    group: NodeGroup
    rendezvous: Rendezvous | None


def run_rank(job: TrainJob, setup: NodeSetup, place: RankPlacement, here: int) -> int:
    """Train as one rank of a node.

    Args:
        job: The training.
        setup: The node, and this machine.
        place: This rank's place in its node.
        here: Ranks of the node on this machine.

    Returns:
        The process's exit status, see `training.node.rank.main`.
    """
    use_threads(job.train.threads, setup.learners_here or here)
    key = RingKey.load(setup.key_file) if setup.key_file else None
    try:
        parts = _build(job, setup, place, here, key)
    except (ValueError, RendezvousError, TooLargeError) as error:
        log.error("%s", error)
        leave_reason(str(error), setup.folder / GAVE_UP)
        return DIVERGED
    with ExitStack() as stack:
        stack.callback(parts.group.close)
        if parts.rendezvous:
            stack.callback(parts.rendezvous.close)
        return _train(job, setup, place, key, parts, stack)


def _build(job: TrainJob, setup: NodeSetup, place: RankPlacement, here: int, key: RingKey | None) -> RankParts:
    wanted = "cpu" if job.train.traits.shared else job.train.device
    devices = inventory()
    if devices.trouble and wanted != "cpu":
        log.warning("training on the CPU: %s", devices.trouble)
    device = pick_device(wanted, setup.first_gpu + place.rank % here, devices)
    claim(device)
    share_gpu(device, setup.learners_here or here, devices)
    rendezvous = None
    if setup.machines > 1:
        rendezvous = Rendezvous(setup, place, key, job.train.membership.coordinator_patience_s)
    store = rendezvous.store if rendezvous else setup.folder / f"meet-{place.token}"
    group = NodeGroup(place.rank, place.size, store, device)
    return RankParts(build_learner(job, device, group), group, rendezvous)


def _train(
    job: TrainJob, setup: NodeSetup, place: RankPlacement, key: RingKey | None, parts: RankParts, stack: ExitStack
) -> int:
    client, learner = None, parts.learner
    try:
        size = learner.flat.weights.numel()
        if server := connect(job, setup.node, setup.coordinator, key, size):
            stack.callback(server.close)
        if exchange := _build_exchange(job, setup, place.rank, key, parts):
            stack.callback(exchange.close)
        if place.rank == 0:
            client = coordinator = NodeClient(setup.coordinator, key, setup.node, folder=setup.folder)
            stack.callback(client.close)
            figures = SystemFigures(setup.node, client.journal, lambda: coordinator.progress().elapsed)
            stack.callback(figures.close)
        shared = share_memory(job, setup.node, setup.shared_files, size)
        worker = Worker(job, setup.node, learner, parts.group, exchange, client, server, shared)
        _leave_on_signals(worker.stop_requested, parts.rendezvous)
        why = worker.run()
    except (DivergedError, NoWeightsError, TooLargeError, TooManyShardsError) as error:
        log.error("%s", error)
        if isinstance(error, NoWeightsError):
            return 1  # a restart may find weights
        leave_reason(str(error), setup.folder / GAVE_UP)
        if client:
            client.fail(str(error))
        return DIVERGED
    log.info("node %d rank %d: training is over (%s) after %d steps", setup.node, place.rank, why, worker.step)
    return 0 if why in ("done", "limit") else STOPPED


def _build_exchange(
    job: TrainJob, setup: NodeSetup, rank: int, key: RingKey | None, parts: RankParts
) -> Exchange | None:
    if job.train.nodes == 1 or not job.train.traits.exchange:
        return None
    begin, end = parts.group.share(parts.learner.flat.weights.numel())
    moments = parts.learner.moments
    return build_exchange(
        _chosen(job, parts.learner.device, setup.learners_here, end - begin),
        ExchangeSetup(
            node=setup.node,
            rank=rank,
            size=end - begin,
            key=key if job.train.exchange.encrypt else None,
            folder=setup.folder,
            bind_host=setup.bind_host,
            advertise_host=setup.advertise_host,
            seed=job.seed,
            moments=len(moments.names) if job.train.gossip.newcomer == "weights+optimizer" else 0,
            optimizer=moments.optimizer,
            gossip=job.train.gossip,
        ),
    )


def _chosen(job: TrainJob, device: torch.device, learners: int, size: int) -> ExchangeConfig:
    """The configuration of the exchange, with its kind."""
    cfg = job.train.exchange
    if cfg.kind != "auto":
        return cfg
    if job.train.launch.kind != "local":
        why = "learners may be on several machines"
    elif cfg.wire != "fp32" or cfg.daemons > 1:
        why = "exchange.wire or exchange.daemons is set"
    else:
        why = unshared(device, learners, size)
    log.info("exchange.kind auto: %s", f"zmq, since {why}" if why else "cuda, in GPU memory")
    return cfg.model_copy(update={"kind": "zmq" if why else "cuda"})


def _leave_on_signals(wish: threading.Event, rendezvous: Rendezvous | None) -> None:
    if rendezvous:  # the signal may reach a machine without rank 0, which decides
        rendezvous.leaving, wish = wish, rendezvous.wants_to_leave
    on_termination(wish.set)


# --- what a strategy needs


def build_learner(job: TrainJob, device: torch.device, group: NodeGroup) -> Learner:
    """Build the learner of a rank, with the whole model or a pipeline's stage of it.

    Raises:
        ValueError: If a pipeline has more ranks than the model has layers, or ranks that share a GPU.
    """
    if job.train.traits.split and group.size > 1:
        return PipelineLearner(job, device, group)
    return Learner(job, device)


def connect(job: TrainJob, node: int, coordinator: str, key: RingKey | None, size: int) -> ServerClient | None:
    """Connect a node to the parameter server; None if the strategy does not use one.

    Args:
        job: What to train.
        node: Number of the node.
        coordinator: HOST:PORT of the coordinator, beside which the server runs.
        key: The ring's key.
        size: Number of weights.

    Raises:
        ValueError: If its address is not set.
    """
    if not job.train.servers:
        return None
    if not job.servers:
        raise ValueError(
            f"{job.train.strategy.kind} needs a parameter server, and the job names none: `starling run` starts it "
            "beside the coordinator"
        )
    addresses = [beside(address, coordinator) for address in job.servers]
    return ServerClient(addresses, key, f"node-{node}", size, job.train.membership.coordinator_patience_s)


def share_memory(job: TrainJob, node: int, files: str, size: int) -> SharedWeights | None:
    """Map the weights that all learners of this machine share, for hogwild; None for other strategies.

    Args:
        job: What to train.
        node: Number of the node.
        files: `NodeSetup.shared_files`; empty if nodes are launched one by one.
        size: Number of weights.

    Raises:
        ValueError: If nodes are launched one by one.
    """
    if not job.train.traits.shared:
        return None
    if not files:
        raise ValueError(f"{job.train.strategy.kind} shares one machine's memory: use launch.kind=local")
    return SharedWeights(Path(f"{files}-weights"), size, node, job.train.nodes)
