"""Builds the learner, the stepper and the connections that a strategy needs at a rank."""

from pathlib import Path

import torch

from training.job import TrainJob
from training.learner.compute import Learner
from training.node.learner_replica import SharedWeights
from training.node.node_exchange import NodeExchange
from training.node.pipeline import PipelineLearner, PipelineStepper
from training.node.process_group import NodeGroup
from training.node.program_stepper import ProgramStepper
from training.node.stepper import Stepper
from training.parameter_server.client import ServerClient
from training.processes.keys import RingKey
from training.processes.sockets import beside


def build_learner(job: TrainJob, device: torch.device, group: NodeGroup) -> Learner:
    """Build the learner of a rank, with the whole model or a pipeline's stage of it.

    Raises:
        ValueError: If a pipeline has more ranks than the model has layers, or ranks that share a GPU.
    """
    if job.train.traits.split and group.size > 1:
        return PipelineLearner(job, device, group)
    return Learner(job, device)


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


def share_memory(job: TrainJob, node: int, meeting: str, size: int) -> SharedWeights | None:
    """Map the weights that all learners of this machine share, for hogwild; None for other strategies.

    Args:
        job: What to train.
        node: Number of the node.
        meeting: Name prefix of this run's files; empty if nodes are launched one by one.
        size: Number of weights.

    Raises:
        ValueError: If nodes are launched one by one.
    """
    if not job.train.traits.shared:
        return None
    if not meeting:
        raise ValueError(f"{job.train.strategy.kind} shares one machine's memory: use launch.kind=local")
    return SharedWeights(Path(f"{meeting}-weights"), size, node, job.train.nodes)
