"""Requests that a program can make, and their outcomes."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Work:
    """A computed gradient of the mean loss over `weight` items (tokens, utterances).

    A weight of 0 means that the batch was empty: there is no gradient, and the learner makes no update of its own.
    """

    weight: float = 1.0


class Bucket(Protocol):
    """Gradients that travel together; the interface of `torch.distributed.GradBucket`."""

    def index(self) -> int:
        """Position among a step's buckets."""

    def is_last(self) -> bool:
        """Whether this is the last bucket of the step."""

    def buffer(self) -> Tensor:
        """All gradients [values]."""

    def parameters(self) -> list[Tensor]:
        """The parameters of these gradients."""


class BucketCodec(Protocol):
    """Encodes a bucket's gradients as a message, and decodes the messages of all learners to their mean."""

    def encode(self, grads: Tensor) -> tuple[Tensor, ...]:
        """Encode gradients as a message; the error is kept and added to the next gradients.

        Args:
            grads: [values]; must be finite.
        """

    def blank(self) -> tuple[Tensor, ...]:
        """A message of the same size that decodes to zero."""

    def mean(self, messages: Sequence[tuple[Tensor, ...]], weights: Sequence[float]) -> Tensor:
        """Weighted mean [values] of decoded messages; zero if all weights are 0."""


class Codec(Protocol):
    """Compresses the gradients of a learner, with error feedback."""

    @property
    def warm(self) -> bool:
        """Whether gradients are still uncompressed in this step."""

    def next_step(self) -> None:
        """Called when all gradients of a step have been sent."""

    def bucket(self, bucket: Bucket) -> BucketCodec:
        """The codec of a bucket."""

    def wire_bytes(self, num_bytes: float) -> float:
        """Size of the message for fp32 gradients of `num_bytes` bytes."""

    def forget(self) -> None:
        """Drop all errors: they belong to other weights, or are not finite."""


@dataclass(frozen=True)
class Compute:
    """Compute the gradient of the next batch's mean loss at the current weights into `replica.grads`.

    Outcome: `Work`; None when all work of the training is done.

    Attributes:
        reduce: Whose gradients are averaged: none but this learner's own, those of its node, or those of all learners.
            The engine averages them bucket by bucket while the rest of the gradient is still being computed.
            `replica.grads` is then for `replica.update` only, and `Work.weight` is the sum over the averaged learners.
        codec: Compresses averaged gradients; None sends them uncompressed.
        average: Average weights with a neighbouring node while the gradient is computed, and add the result to the
            node's weights before the outcome. Without it the node's averaging pauses: it starts no exchange, and what
            its neighbours' exchanges bring waits for the next gradient with it. Neighbours still get its weights of the
            last step.
    """

    reduce: Literal["own", "node", "all"] = "own"
    codec: Codec | None = None
    average: bool = False


class Op:
    """A communication with other learners or the parameter server."""


@dataclass(frozen=True)
class AllReduce(Op):
    """Weighted mean of a vector over all live learners. Outcome: `Reduced`.

    Attributes:
        vector: This learner's vector.
        weight: Its weight; with 0 the learner takes part without affecting the mean.
        num_bytes: Size of the vector on the wire.
        scope: All learners, or those of this node.
        channel: Separates concurrent collectives.
    """

    vector: Tensor
    weight: float = 1.0
    num_bytes: float = 0.0
    scope: Literal["all", "node"] = "all"
    channel: str = "main"


@dataclass(frozen=True)
class Mix(Op):
    """Synchronous averaging with neighbours: one round of a doubly stochastic mixing matrix.

    The learner and its neighbours of the round have the same weight. Outcome: the mixed vector.

    Attributes:
        vector: This learner's vector.
        graph: Defines the neighbours: both on the ring, all on the complete graph, or one at random.
        num_bytes: Size of the vector on the wire.
        last: The learner's last round; neighbours that continue use this vector in all further rounds. The outcome is
            the vector itself.
        number: Number of the round, the same at all learners; determines the random pairs.
    """

    vector: Tensor
    graph: Literal["ring", "complete", "pairs"] = "ring"
    num_bytes: float = 0.0
    last: bool = False
    number: int = 0

    def group(self, rank: int, ranks: Sequence[int]) -> list[int]:
        """A learner and its neighbours in this round, ascending.

        Args:
            rank: The learner.
            ranks: All learners, ascending.
        """
        if self.graph == "complete" or len(ranks) < 3:
            return list(ranks)
        if self.graph == "ring":
            place = bisect_left(ranks, rank)
            return sorted({rank, ranks[place - 1], ranks[(place + 1) % len(ranks)]})
        order = list(ranks)
        random.Random(f"starling pairs {self.number}").shuffle(order)
        place = order.index(rank)
        return sorted(order[place - place % 2 : place - place % 2 + 2])  # of an odd number, one stays alone


@dataclass(frozen=True)
class Push(Op):
    """Send a gradient to the parameter server, which applies it. Outcome: `Pushed`.

    Attributes:
        grads: The gradient.
        version: Version of the weights that it was computed at.
        num_bytes: Size of the gradient on the wire.
    """

    grads: Tensor
    version: int
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Pull(Op):
    """Get the server's weights. Outcome: `Pulled`."""

    num_bytes: float = 0.0


@dataclass(frozen=True)
class Elastic(Op):
    """Move the server's center towards a vector x: d = alpha (x - center); center += d. Outcome: d."""

    vector: Tensor
    alpha: float
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Reduced:
    """A weighted mean and the sum of the weights; the mean is zero if that sum is."""

    vector: Tensor
    weight: float


@dataclass(frozen=True)
class Pushed:
    """The server's version after a push, and the number of updates by others between pull and push."""

    version: int
    staleness: float


@dataclass(frozen=True)
class Pulled:
    """The server's weights and their version."""

    vector: Tensor
    version: int


@dataclass
class Ticket:
    """A communication in progress."""

    op: Op
    done: bool = False
    outcome: Any = None


@dataclass(frozen=True)
class Start:
    """Start a communication. Outcome, at once: its `Ticket`."""

    op: Op


@dataclass(frozen=True)
class Wait:
    """Wait for a communication. Outcome: the outcome of its operation."""

    ticket: Ticket


Request = Compute | Start | Wait
Program = Generator[Request, Any, None]
