"""The training process's interface to an exchange, independent of the transport.

The training process calls `tick` after each step, adds `take()` to its weights whenever `ready()`, and offers new
weights with `give`. None of these waits for the network or for a lock. `ready` belongs right before the update: it
collects everything averaged until then, and waits at most a few milliseconds for the local daemon to hand it over:

    exchange.start(weights, step)
    for step in ...:
        ...  # forward, backward
        if exchange.ready():
            with exchange.taken() as delta:
                weights += delta
        ...  # update
        exchange.offer(weights, step)
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from training.coordinator.membership import View

if TYPE_CHECKING:
    import torch

    from training.processes.keys import RingKey
    from training.strategies.gossip import GossipConfig


class ExchangeError(RuntimeError):
    """The exchange cannot start or continue; the message says why and names a remedy."""


class PortTakenError(ValueError):
    """The configured port is in use by another process."""


def _default_gossip() -> "GossipConfig":
    from training.strategies.gossip import GossipConfig  # imports pydantic, which the daemon does not need

    return GossipConfig()


@dataclass(frozen=True)
class ExchangeSetup:
    """What an exchange needs to know besides its configuration.

    Attributes:
        node: This node's number.
        rank: This process's rank within its node; it exchanges with the same rank of other nodes.
        size: Number of weights that this rank exchanges.
        key: The ring's key; None means unencrypted, on loopback addresses only.
        folder: Folder of the daemon's log (`exchange-<node>.<rank>.log`).
        bind_host: Address to listen on; "host" uses a free port, "host:port" that port.
        advertise_host: Address under which other machines reach this one, if it differs from `bind_host`.
        seed: Shared by the whole ring; determines the random neighbours.
        moments: Values of optimizer state per weight that newcomers fetch with the weights; 0 for weights alone.
        optimizer: Name of the optimizer state; nodes with different names fetch only weights from each other.
        gossip: With whom to average, and how often.
    """

    node: int
    rank: int
    size: int
    key: "RingKey | None" = None
    folder: Path = field(default_factory=Path)
    bind_host: str = "127.0.0.1"
    advertise_host: str = ""
    seed: int = 0
    moments: int = 0
    optimizer: str = ""
    gossip: "GossipConfig" = field(default_factory=_default_gossip)


@dataclass(frozen=True)
class FetchedReplica:
    """Weights and optimizer state that a newcomer has fetched from a neighbour, all of one step.

    Attributes:
        rows: Weights, then the optimizer's moments [1 + moments, size], fp32, on the CPU.
        steps: Number of steps that the optimizer has made.
    """

    rows: "torch.Tensor"
    steps: float


@dataclass(frozen=True)
class ExchangeStats:
    """Figures since the exchange started, unless noted otherwise.

    Attributes:
        initiated: Exchanges that this side started.
        finished: Exchanges that this side started and completed.
        answered: Exchanges of other nodes whose last chunk this side answered.
        failed: Exchanges started here that timed out or were refused.
        late: Chunks whose answers arrived after the time-out; they are averaged nevertheless.
        skipped_nonfinite: Chunks left out because one side contained an infinity or NaN.
        last_s: Duration of the last finished exchange, in seconds.
        mean_s: Mean duration of finished exchanges, in seconds.
        bytes_sent: Weights sent, in bytes on the wire.
        bytes_received: Weights received, in bytes on the wire.
        distance: RMS difference between these weights and those of the last peer.
        staleness: Own steps between the oldest weights from which the last taken delta was computed and the update that
            used it; the minimum is 1, as published (arXiv:1904.04956).
        cpu_seconds: CPU time of the daemon.
        silent_s: Seconds since the daemon's last sign of life.
        last_peer: Node of the last finished exchange; -1 before the first.
    """

    initiated: int = 0
    finished: int = 0
    answered: int = 0
    failed: int = 0
    late: int = 0
    skipped_nonfinite: int = 0
    last_s: float = 0.0
    mean_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    distance: float = 0.0
    staleness: float = 0.0
    cpu_seconds: float = 0.0
    silent_s: float = 0.0
    last_peer: int = -1


class Exchange(ABC):
    """Averages flat weights with neighbours by the half-difference rule (AD-PSGD, arXiv:1710.06952, algorithm 1).

    Weights are contiguous fp32 tensors [size] with `ExchangeSetup.size` elements. Not thread-safe.
    """

    endpoint: str
    """Endpoint under which other nodes reach this exchange; goes into `Member.endpoints[rank]`."""
    moments: int = 0
    """As in `ExchangeSetup`; 0 if the exchange cannot transfer optimizer state."""
    parts: int = 1
    """Number of parts into which the weights are split; each is exchanged and counted separately."""

    @abstractmethod
    def start(self, weights: "torch.Tensor", step: int) -> None:
        """Set the first weights, or replace them: pending deltas and exchanges of earlier weights are dropped."""

    @abstractmethod
    def tick(self, step: int) -> None:
        """Signal the end of a step: allows `per_step` exchanges to start; unused permits do not accumulate."""

    @abstractmethod
    def ready(self) -> bool:
        """Collect everything averaged until now; returns whether there is a delta to take."""

    @abstractmethod
    def take(self) -> "torch.Tensor":
        """The delta to add to the live weights, on their device; valid until `release`.

        Raises:
            ExchangeError: If none is ready.
        """

    @abstractmethod
    def release(self) -> None:
        """Signal that the delta was added to the live weights."""

    @abstractmethod
    def give(self, weights: "torch.Tensor", step: int) -> bool:
        """Offer new weights that contain every delta taken so far; False (harmless) if earlier ones still wait."""

    @contextmanager
    def taken(self) -> "Iterator[torch.Tensor]":
        """The delta of `take`, for a block that adds it to the live weights."""
        yield self.take()
        self.release()

    def offer(self, weights: "torch.Tensor", step: int, *, average: bool = True) -> None:
        """End a step: offer its weights, and unless averaging pauses, allow further exchanges.

        Args:
            weights: The weights after the step.
            step: Number of the step.
            average: Whether exchanges may start while the next gradient is computed (`Compute.average`).
        """
        self.give(weights, step)
        if average:
            self.tick(step)

    @abstractmethod
    def set_view(self, view: View) -> None:
        """Set the membership; nodes that are not in the view are no longer asked."""

    @abstractmethod
    def fetch(self, timeout_s: float) -> "torch.Tensor | None":
        """Fetch a live neighbour's current weights (fp32, on the CPU), for a newcomer; None if no neighbour sent any.

        Waits for the network for up to `timeout_s`. Call `set_view` before and `start` after it.
        """

    def fetch_replica(self, timeout_s: float) -> FetchedReplica | None:
        """Fetch weights and the optimizer state of the same step; None, with a warning, if no neighbour sent any."""
        return None

    def replica_slot(self) -> "torch.Tensor | None":
        """Memory for a replica [1 + moments, size] if a newcomer waits for one, else None; call after every step."""
        return None

    def give_replica(self, steps: float) -> None:
        """Hand over the replica that was written to the slot.

        Args:
            steps: Number of steps that the optimizer has made; 0 if it has no state yet.
        """
        raise NotImplementedError

    @abstractmethod
    def stats(self) -> ExchangeStats:
        """Figures so far."""

    @abstractmethod
    def close(self) -> None:
        """Stop the exchange and the processes that it started."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether exchanges are still possible, that is, the daemon is running."""
