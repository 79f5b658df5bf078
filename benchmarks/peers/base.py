"""What the benchmark knows of a system: how its training loop makes a step, and what it needs beside its learners.

A system is a module with one class, and one line in `SYSTEMS`. Its learners are processes that run the loop which its
documentation shows, around the same emulated model (`benchmarks.peers.emulation`).
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.peers.emulation import EmulatedModel

OURS = "starling"
LR = 0.01
"""Learning rate of all; gradients have a variance of 1, so this is how far a step moves a weight."""
SYSTEMS = {
    "starling": "benchmarks.peers.starling:Starling",
    "adpsgd": "benchmarks.peers.sgp:AdPsgd",
    "pushsum": "benchmarks.peers.sgp:PushSum",
    "ddp": "benchmarks.peers.ddp:Ddp",
    "localsgd": "benchmarks.peers.ddp:PostLocalSgd",
    "hivemind": "benchmarks.peers.swarm:Hivemind",
    "torchft": "benchmarks.peers.quorum:TorchFt",
}
"""Name and class of each system. `starling` is what the others are compared with."""
_PATIENCE_S = 60.0


class MissingError(RuntimeError):
    """A system is not there; the message says how to have it."""


@dataclass(frozen=True)
class Setup:
    """What a learner is told.

    Attributes:
        number: Its number, from 0.
        learners: How many there are.
        params: Weights of the model.
        step_s: Seconds that a gradient takes.
        folder: For logs, and for what learners of this system tell each other; all have the same.
        ports: Free ports, the same for all learners.
        slow: Factor by which its gradients take longer.
        exchange: Fields of Starling's `train.exchange` and `train.strategy`.
        joining: Whether it comes to a running training.
    """

    number: int
    learners: int
    params: int
    step_s: float
    folder: Path
    ports: tuple[int, ...]
    slow: float = 1.0
    exchange: Mapping[str, str] = field(default_factory=dict)
    joining: bool = False


class System:
    """A learner of a system. As it is, it trains alone: a subclass adds what its system does.

    Args:
        setup: Who it is.
        model: Its model; all learners begin with the same weights.

    Attributes:
        title: Its name in tables.
        elsewhere: Whether it needs the other environment, which `--peers-python` names.
        joins: Whether a learner may come to a running training.
        synchronous: Whether all replicas are equal after each step.
    """

    title: ClassVar[str]
    elsewhere: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    synchronous: ClassVar[bool] = False

    def __init__(self, setup: Setup, model: EmulatedModel) -> None:
        self.setup = setup
        self.model: nn.Module = model
        self.optimizer: Optimizer = SGD(model.parameters(), lr=LR)

    @classmethod
    def prepare(cls, sgp: Path | None) -> None:
        """Import what learners need, once for all of them.

        Args:
            sgp: Folder of the `sgp` systems' source, if the user named one.

        Raises:
            MissingError: It is not there.
        """

    @classmethod
    def serve(cls, setup: Setup) -> None:
        """What runs beside the learners, in a process of its own, until it is killed; nothing by default."""

    def step(self) -> bool:
        """Forward, backward and update; whether an update was made."""
        self.optimizer.zero_grad()
        self.model(None).backward()
        self.optimizer.step()
        return True

    def weights(self) -> Iterable[Tensor]:
        """The present weights."""
        return self.model.parameters()


def await_file(file: Path) -> Path:
    """Wait for what a process beside the learners writes.

    Raises:
        TimeoutError: It does not come.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {_PATIENCE_S:.0f} s there is no {file.name}")
        time.sleep(0.02)
    return file


def find(name: str) -> type[System]:
    """The class of a system."""
    module, _, attribute = SYSTEMS[name].partition(":")
    system: type[System] = getattr(import_module(module), attribute)
    return system
