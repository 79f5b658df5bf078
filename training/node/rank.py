"""The process of one rank, started by `training.node.agent`: joins its node, ring and coordinator, and trains."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from training.processes import logs
from training.processes.children import end_with_parent, exit_at_once
from training.processes.exit_reason import leave_reason, run_with_reason

if TYPE_CHECKING:
    from training.job import TrainJob

log = logging.getLogger(__name__)
STOPPED, DIVERGED = 75, 3
START = "STARLING_START"
"""Environment variable: token that the learners of a machine share, unique to this start of the node."""
GAVE_UP = "gave-up.txt"
"""File in a node's folder that says why a restart would not help: torchrun hides the ranks' exit statuses."""


class NodeSetup(BaseModel):
    """What the ranks of a node need to know besides the job; the node's agent writes it as a JSON file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: int
    coordinator: str
    """HOST:PORT of the coordinator."""
    key_file: Path | None
    folder: Path
    bind_host: str = "127.0.0.1"
    advertise_host: str = ""
    machine: int = 0
    """Number of this machine within the node."""
    machines: int = 1
    """Machines of the node."""
    first_gpu: int = 0
    """Number of the GPU of this machine's first learner, where several nodes share a machine."""
    learners_here: int = 0
    """Learners on this machine, which share its cores; 0 means those of this node only."""
    rendezvous: str = ""
    """Name prefix of the rendezvous files of the fixed ring (`exchange.kind: gloo`); local nodes only."""


def main(argv: list[str]) -> int:
    """Run one rank.

    Args:
        argv: File of the setup, and PID of the process to exit with.

    Returns:
        0 when training is over, 75 if it was stopped, 3 if a restart would not help: training diverged, too many shards
        are damaged, the GPU is too small, or the model cannot be split as configured.
    """
    setup_file, parent = Path(argv[0]), int(argv[1])
    # torchrun counts the ranks of this machine only
    number, here = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # torchrun's agent is between a rank and its node: when that agent is gone, nothing else ends the rank
    end_with_parent(parent if here == 1 else os.getppid(), signal.SIGKILL)
    setup = NodeSetup.model_validate_json(setup_file.read_bytes())
    rank = setup.machine * here + number
    logs.setup(f"[rank {rank}]", rank=str(rank))
    from training.job import TrainJob

    job = TrainJob.model_validate_json((setup.folder / "job.json").read_bytes())
    return _run(job, setup, rank, here)


def _run(job: "TrainJob", setup: NodeSetup, rank: int, here: int) -> int:
    from storage.quarantine import TooManyShardsError
    from training.coordinator.node_client import NodeClient
    from training.exchange import ExchangeSetup, RingRendezvous, build_exchange
    from training.learner.compute import use_threads
    from training.learner.devices import claim, inventory, rank_device
    from training.learner.microbatches import TooLargeError
    from training.node.process_group import NodeGroup
    from training.node.rendezvous import RankPlacement, Rendezvous, RendezvousError
    from training.node.strategy_setup import build_learner, connect, share_memory
    from training.node.system_figures import SystemFigures
    from training.node.worker import DivergedError, NoWeightsError, Worker
    from training.processes.keys import RingKey

    size, start = here * setup.machines, os.environ[START]
    use_threads(job.train.threads, setup.learners_here or here)
    wanted = "cpu" if job.train.traits.shared else job.train.device
    found = inventory()
    if found.trouble and wanted != "cpu":
        log.warning("training on the CPU: %s", found.trouble)
    key = RingKey.load(setup.key_file) if setup.key_file else None
    rendezvous = None
    try:
        device = rank_device(wanted, setup.first_gpu + rank % here, here, found)
        claim(device)
        if setup.machines > 1:
            patience = job.train.membership.coordinator_patience_s
            rendezvous = Rendezvous(setup, RankPlacement(rank, size, start), key, patience)
        group = NodeGroup(rank, size, rendezvous.store if rendezvous else setup.folder / f"meet-{start}", device)
        learner = build_learner(job, device, group)
    except (ValueError, RendezvousError, TooLargeError) as error:
        log.error("%s", error)
        leave_reason(str(error), setup.folder / GAVE_UP)
        return DIVERGED
    begin, end = group.share(learner.flat.weights.numel())
    exchange, moments = None, learner.moments
    if job.train.nodes > 1 and job.train.traits.exchange:
        exchange = build_exchange(
            job.train.exchange,
            ExchangeSetup(
                node=setup.node,
                rank=rank,
                size=end - begin,
                key=key if job.train.exchange.encrypt else None,
                folder=setup.folder,
                bind_host=setup.bind_host,
                advertise_host=setup.advertise_host,
                seed=job.seed,
                rendezvous=RingRendezvous(setup.rendezvous, job.train.nodes) if setup.rendezvous else None,
                moments=len(moments.names) if job.train.gossip.newcomer == "weights+optimizer" else 0,
                optimizer=moments.optimizer,
                gossip=job.train.gossip,
            ),
        )
    client, figures, server = None, None, None
    worker: Worker | None = None
    try:
        if rank == 0:
            client = coordinator = NodeClient(setup.coordinator, key, setup.node, folder=setup.folder)
            figures = SystemFigures(setup.node, coordinator.journal, lambda: coordinator.progress().elapsed)
        server = connect(job, setup.node, setup.coordinator, key, learner.flat.weights.numel())
        shared = share_memory(job, setup.node, setup.rendezvous, learner.flat.weights.numel())
        worker = Worker(job, setup.node, learner, group, exchange, client, server, shared)
        wish = worker.stop_requested
        if rendezvous:  # the signal may reach a machine without rank 0, which decides
            rendezvous.told_to_leave, wish = wish, rendezvous.wants_to_leave
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: wish.set())
        why = worker.run()
        log.info("node %d rank %d: training is over (%s) after %d steps", setup.node, rank, why, worker.step)
        return 0 if why in ("done", "time") else STOPPED
    except (DivergedError, NoWeightsError, TooLargeError, TooManyShardsError) as error:
        log.error("%s", error)
        if isinstance(error, NoWeightsError):
            return 1  # a restart may find weights
        leave_reason(str(error), setup.folder / GAVE_UP)
        if client:
            client.fail(str(error))
        return DIVERGED
    finally:
        if figures:
            figures.close()
        if client:
            client.close()
        if exchange:
            exchange.close()
        if server:
            server.close()
        if rendezvous:
            rendezvous.close()
        group.close()


if __name__ == "__main__":
    exit_at_once(run_with_reason(lambda: main(sys.argv[1:]), DIVERGED))
