"""What a training process sees of the exchange, whatever moves the bytes.

The training process calls `tick` after each step, adds `take()` to its weights whenever `ready()`, and offers new
weights with `give`. None of these waits for the network or for a lock. `ready` belongs right before the update: it gets
everything that has been averaged until then, for which it gives the daemon on the same machine a few milliseconds:

    exchange.start(weights, step)
    for step in ...:
        ...  # forward, backward
        if exchange.ready():
            weights += exchange.take()
            exchange.release()
        ...  # update
        exchange.give(weights, step)
        exchange.tick(step)
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from training.coordinator.membership import View
from training.strategies.config import GossipConfig

if TYPE_CHECKING:
    import torch

    from training.processes.keys import RingKey


class ExchangeError(RuntimeError):
    """The exchange cannot begin or cannot go on; the message says why and what helps."""


class PortTakenError(ValueError):
    """The configured port belongs to another process."""


@dataclass(frozen=True)
class RingRendezvous:
    """Where the fixed ring of `gloo` meets; the elastic exchanges need none of it.

    Attributes:
        store: Host and port of a `torch.distributed.TCPStore`, or the path of a `FileStore`.
        nodes: Nodes in the ring; their numbers are 0 to nodes - 1.
        serve: Whether this exchange's daemon keeps the TCPStore itself (one of them does, or the caller has it).
    """

    store: str
    nodes: int
    serve: bool = False


@dataclass(frozen=True)
class ExchangeSetup:
    """What an exchange must know beside its configuration.

    Attributes:
        node: This node's number.
        rank: This process's rank in its node; it exchanges with the same rank of other nodes.
        size: Weights that this rank exchanges.
        key: The ring's key; None exchanges in the clear, on loopback addresses only.
        folder: Where a daemon writes its log (`exchange-<node>.<rank>.log`).
        bind_host: Address to listen at; "host" takes a free port, "host:port" that one.
        advertise_host: How others call this machine, if not by `bind_host`.
        seed: Shared by the whole ring: fixes the random neighbours.
        rendezvous: Where fixed neighbours meet; only `gloo` needs it.
        moments: Values of optimizer state for each weight that newcomers take with the weights; 0: they take none.
        optimizer: Names these; nodes that name others take weights alone from each other.
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
    rendezvous: RingRendezvous | None = None
    moments: int = 0
    optimizer: str = ""
    gossip: GossipConfig = field(default_factory=GossipConfig)


@dataclass(frozen=True)
class FetchedReplica:
    """What a newcomer has taken from a neighbour, all of one step.

    Attributes:
        rows: Weights, then the optimizer's moments [1 + moments, size], fp32, on the CPU.
        steps: Steps that the optimizer has made.
    """

    rows: "torch.Tensor"
    steps: float


@dataclass(frozen=True)
class ExchangeStats:
    """Figures since the exchange began, unless they say otherwise.

    Attributes:
        initiated: Exchanges that this side began.
        finished: Those of them that ended well.
        answered: Exchanges of others whose last chunk this side answered.
        failed: Exchanges begun here that were not answered in time, or refused.
        late: Chunks whose answers came after the time-out, and were averaged all the same.
        skipped_nonfinite: Chunks left out because one side held an infinity or NaN.
        last_s: Seconds of the last finished exchange.
        mean_s: Mean seconds of the finished ones.
        bytes_sent: Weights sent, in bytes on the wire.
        bytes_received: Weights received.
        distance: RMS difference between these weights and the last peer's.
        staleness: Own steps between the oldest weights that the delta last taken was computed from and the update at
            which it was taken; from 1, as published (arXiv:1904.04956).
        cpu_seconds: Processor time of the daemon.
        silent_s: Seconds since the daemon last showed a sign of life.
        last_peer: Node of the last finished exchange, -1 before.
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

    Weights are 1-d contiguous fp32 tensors of `ExchangeSetup.size` elements. All methods are for one thread.
    """

    endpoint: str
    """Where other nodes reach this exchange: goes into `Member.endpoints[rank]`."""
    elastic: bool = True
    """Whether nodes may come and go. A fixed ring ends with the first node that leaves it, without an error."""
    moments: int = 0
    """See `ExchangeSetup`; 0 where there is no optimizer state to be had."""
    parts: int = 1
    """Parts of the weights that are exchanged by themselves, and counted by themselves in the figures."""

    @abstractmethod
    def start(self, weights: "torch.Tensor", step: int) -> None:
        """First weights, or other ones: what is in flight or waits to be taken from before is dropped."""

    @abstractmethod
    def tick(self, step: int) -> None:
        """A step is over: allows `per_step` more exchanges to begin; unused permits do not add up."""

    @abstractmethod
    def ready(self) -> bool:
        """Get everything that has been averaged until now; whether there is anything to be taken."""

    @abstractmethod
    def take(self) -> "torch.Tensor":
        """The delta to add to the live weights, on their device; valid until `release`.

        Raises:
            ExchangeError: If none is ready.
        """

    @abstractmethod
    def release(self) -> None:
        """The delta has been added."""

    @abstractmethod
    def give(self, weights: "torch.Tensor", step: int) -> bool:
        """Offer new weights, which contain every delta taken so far; False if earlier ones still wait (no harm)."""

    @abstractmethod
    def set_view(self, view: View) -> None:
        """Who takes part from now on; nodes that are not in it are not asked any more."""

    @abstractmethod
    def fetch(self, timeout_s: float) -> "torch.Tensor | None":
        """The present weights (fp32, on the CPU) of a live neighbour, for a newcomer; None if nobody gave any.

        Waits for the network up to `timeout_s`. Call `set_view` before and `start` after it.
        """

    def fetch_replica(self, timeout_s: float) -> FetchedReplica | None:
        """As `fetch`, with the optimizer state of the same step; None, after a word in the log, if nobody gave any."""
        return None

    def replica_slot(self) -> "torch.Tensor | None":
        """Where to write a replica [1 + moments, size], if a newcomer waits for one; ask after every step."""
        return None

    def give_replica(self, steps: float) -> None:
        """Hand over what was written to the slot.

        Args:
            steps: Steps that the optimizer has made; 0: it has no state yet.
        """
        raise NotImplementedError

    @abstractmethod
    def stats(self) -> ExchangeStats:
        """Figures so far."""

    @abstractmethod
    def close(self) -> None:
        """End the exchange and everything that it started."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether exchanges are still possible: the daemon runs, and has not given up."""
