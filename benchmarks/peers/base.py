"""Interface of a system: how its training loop makes a step, and which services it needs beside its learners.

To add a system, add a module with one class, and a line in `SYSTEMS`. Its learners are processes that run the training
loop of the system's documentation with the same emulated model (`benchmarks.peers.emulation`).
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
"""Learning rate of all systems; gradients have variance 1, so this is the change of a weight in one step."""
SYSTEMS = {
    "starling": "benchmarks.peers.starling:Starling",
    "adpsgd": "benchmarks.peers.sgp:AdPsgd",
    "pushsum": "benchmarks.peers.sgp:PushSum",
    "gloo": "benchmarks.peers.gloo:Gloo",
    "ddp": "benchmarks.peers.ddp:Ddp",
    "localsgd": "benchmarks.peers.ddp:PostLocalSgd",
    "hivemind": "benchmarks.peers.swarm:Hivemind",
    "torchft": "benchmarks.peers.quorum:TorchFt",
}
"""Class of each system by name; the others are compared with `starling`."""
_PATIENCE_S = 60.0


class MissingError(RuntimeError):
    """A system is not installed; the message says how to install it."""


@dataclass(frozen=True)
class Setup:
    """Parameters of a learner.

    Attributes:
        number: Its number, from 0.
        learners: Number of learners.
        params: Number of weights of the model.
        step_s: Seconds per gradient.
        folder: Folder for logs and for files shared by all learners of this system.
        ports: Free ports, the same for all learners.
        slow: Factor by which its gradients take longer.
        exchange: Fields of Starling's `train.exchange` and `train.strategy`.
        joining: Whether it joins a running training.
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
    """A learner of a system. This base class trains alone; subclasses add their system's communication.

    Args:
        setup: Parameters of the learner.
        model: Its model; all learners start with the same weights.

    Attributes:
        title: Its name in tables.
        elsewhere: Whether it needs the other environment (`--peers-python`).
        joins: Whether learners may join a running training.
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
        """Import the modules of the learners, once for all of them.

        Args:
            sgp: Folder of the source of the `sgp` systems, if given.

        Raises:
            MissingError: The system is not installed.
        """

    @classmethod
    def serve(cls, setup: Setup) -> None:
        """Run the system's service in a separate process until it is killed; nothing by default."""

    def step(self) -> bool:
        """Make a step (forward, backward, update); returns whether an update was made."""
        self.optimizer.zero_grad()
        self.model(None).backward()
        self.optimizer.step()
        return True

    def weights(self) -> Iterable[Tensor]:
        """The current weights."""
        return self.model.parameters()


def await_file(file: Path) -> Path:
    """Wait for a file that the service writes.

    Raises:
        TimeoutError: The file does not appear in time.
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
