"""Which learner and which stepper a strategy has at a rank."""

from pathlib import Path

import torch

from training.compute import Learner
from training.exchange.keys import RingKey
from training.group import NodeGroup
from training.job import TrainJob
from training.parameter_server.client import ServerClient
from training.pipeline import PipelineLearner
from training.pipeline_stepper import PipelineStepper
from training.program_stepper import ProgramStepper
from training.ring import Ring
from training.shared_weights import SharedWeights
from training.sockets import beside
from training.stepper import Stepper


def build_learner(job: TrainJob, device: torch.device, group: NodeGroup) -> Learner:
    """The model, or the part of it that a rank has.

    Raises:
        ValueError: If a pipeline has more ranks than the model layers.
    """
    if job.train.traits.split and group.size > 1:
        return PipelineLearner(job, device, group)
    return Learner(job, device)


def build_stepper(
    job: TrainJob,
    ring: Ring,
    learner: Learner,
    server: ServerClient | None = None,
    shared: SharedWeights | None = None,
    epoch_steps: float = 0.0,
) -> Stepper:
    """The strategy at one rank.

    Args:
        job: What to train.
        ring: The node's place among others, and its ranks.
        learner: Of `build_learner`.
        server: The parameter server, for strategies that have one.
        shared: Memory for the weights, for hogwild.
        epoch_steps: Steps of a learner in an epoch, the same at all ranks.
    """
    if isinstance(learner, PipelineLearner):
        return PipelineStepper(learner)
    return ProgramStepper(job, learner, ring, server, shared, epoch_steps)


def connect(job: TrainJob, node: int, store: str, key: RingKey | None, size: int) -> ServerClient | None:
    """A node's line to the parameter server, where the strategy has one.

    Args:
        job: What to train.
        node: Number of the node.
        store: HOST:PORT of the store, beside which the server runs.
        key: The ring's key.
        size: Weights.

    Raises:
        ValueError: If nobody has said where it is.
    """
    if not job.train.servers:
        return None
    if not job.servers:
        raise ValueError(
            f"{job.train.strategy} needs a parameter server, and the job names none: `starling train` starts it beside "
            "the store"
        )
    addresses = [beside(address, store) for address in job.servers]
    return ServerClient(addresses, key, f"node-{node}", size, job.train.membership.store_patience_s)


def share_memory(job: TrainJob, node: int, meeting: str, size: int) -> SharedWeights | None:
    """Memory for the weights of all learners of this machine, for hogwild.

    Args:
        job: What to train.
        node: Number of the node.
        meeting: Files below this name are this run's; empty where nodes are started one by one.
        size: Weights.

    Raises:
        ValueError: If nodes are started one by one.
    """
    if not job.train.traits.shared:
        return None
    if not meeting:
        raise ValueError(f"{job.train.strategy} shares one machine's memory: use launch.kind=local")
    return SharedWeights(Path(f"{meeting}-weights"), size, node, job.train.nodes)
