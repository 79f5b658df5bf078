"""What a program may ask of others, and what it gets back."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Work:
    """A gradient has been computed: of the mean loss over `weight` items (tokens, utterances).

    A weight of 0 says that the batch was empty: there is no gradient, and no update of the learner's own.
    """

    weight: float = 1.0


class Bucket(Protocol):
    """Gradients that travel together, as `torch.distributed.GradBucket` has them."""

    def index(self) -> int:
        """Its number among a step's buckets."""

    def is_last(self) -> bool:
        """Whether no other bucket of this step follows."""

    def buffer(self) -> Tensor:
        """All gradients [values]."""

    def parameters(self) -> list[Tensor]:
        """Whose gradients these are."""


class BucketCodec(Protocol):
    """Turns a bucket's gradients into a message, and the messages of all learners into their mean."""

    def encode(self, grads: Tensor) -> tuple[Tensor, ...]:
        """The message; what it leaves out is kept, and added to the next gradients.

        Args:
            grads: [values]; must be finite.
        """

    def blank(self) -> tuple[Tensor, ...]:
        """A message of the same size that counts for nothing."""

    def mean(self, messages: Sequence[tuple[Tensor, ...]], weights: Sequence[float]) -> Tensor:
        """The weighted mean [values] of what messages stand for; zero if nothing has a weight."""


class Codec(Protocol):
    """How the gradients of a learner travel as less than they are; remembers what it leaves out."""

    @property
    def warm(self) -> bool:
        """Whether gradients still travel in full in this step."""

    def next_step(self) -> None:
        """All gradients of a step have been sent."""

    def bucket(self, bucket: Bucket) -> BucketCodec:
        """The codec of a bucket."""

    def wire_bytes(self, num_bytes: float) -> float:
        """Bytes of a message for fp32 gradients of `num_bytes` bytes."""

    def forget(self) -> None:
        """Drop what was left out: it belongs to other weights, or is not finite."""


@dataclass(frozen=True)
class Compute:
    """Gradient of the next batch's mean loss, at the weights as they are now, into `replica.grads`.

    Outcome: `Work`; None when all work of the training is done.

    Attributes:
        reduce: Whose gradients are averaged: only this learner's own, those of its node, or those of all learners. The
            engine averages them bucket by bucket while the rest of the gradient is still being computed. Then
            `replica.grads` is for `replica.update` only, and `Work.weight` is that of all whose gradients are in it.
        codec: How averaged gradients travel; in full without one.
        average: Weights are averaged with a neighbouring node while the gradient is computed, and what this has brought
            is added to the node's weights before the outcome.
    """

    reduce: Literal["own", "node", "all"] = "own"
    codec: Codec | None = None
    average: bool = False


@dataclass(frozen=True)
class AllReduce:
    """Weighted mean of a vector over all learners that are present. Outcome: `Reduced`.

    Attributes:
        vector: This learner's.
        weight: 0 takes part without a say.
        num_bytes: Of the vector on the wire.
        scope: All learners, or those of this node.
        channel: Keeps concurrent collectives apart.
    """

    vector: Tensor
    weight: float = 1.0
    num_bytes: float = 0.0
    scope: Literal["all", "node"] = "all"
    channel: str = "main"


@dataclass(frozen=True)
class Gather:
    """The payloads of all learners, put together. Outcome: that of `combine`.

    Attributes:
        payload: Tensors, not changed on the way.
        combine: Makes the outcome of the payloads in the order of the ranks. It is the same at all learners, so that
            learners of one process may share it: it must not be changed.
        num_bytes: Of the payload on the wire.
    """

    payload: tuple[Tensor, ...]
    combine: Callable[[list[tuple[Tensor, ...]]], Any]
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Mix:
    """Mean with the neighbours, who all wait for each other: one round of a doubly stochastic matrix.

    On the ring both neighbours and oneself count equally (1/3 each); on the complete graph all learners do.
    Outcome: the mixed vector.

    Attributes:
        vector: This learner's.
        graph: Who its neighbours are.
        num_bytes: Of the vector on the wire.
        last: The learner takes part no more; neighbours that go on use this vector in all further rounds. The outcome
            is the vector itself.
    """

    vector: Tensor
    graph: Literal["ring", "complete"] = "ring"
    num_bytes: float = 0.0
    last: bool = False


@dataclass(frozen=True)
class Push:
    """Have the parameter server apply a gradient. Outcome: `Pushed`.

    Attributes:
        grads: The gradient.
        version: Of the weights that it was computed at.
        num_bytes: On the wire.
    """

    grads: Tensor
    version: int
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Pull:
    """The server's weights. Outcome: `Pulled`."""

    num_bytes: float = 0.0


@dataclass(frozen=True)
class Elastic:
    """Draw the server's center towards a vector x: d = alpha (x - center); center += d. Outcome: d."""

    vector: Tensor
    alpha: float
    num_bytes: float = 0.0


Op = AllReduce | Gather | Mix | Push | Pull | Elastic


@dataclass(frozen=True)
class Reduced:
    """A weighted mean and the weights' sum; the mean of no weight at all is zero."""

    vector: Tensor
    weight: float


@dataclass(frozen=True)
class Pushed:
    """The server's version after a push; `staleness` updates of others came between pull and push."""

    version: int
    staleness: float


@dataclass(frozen=True)
class Pulled:
    """The server's weights and their version."""

    vector: Tensor
    version: int


@dataclass
class Ticket:
    """A communication that was started."""

    op: Op
    done: bool = False
    outcome: Any = None


@dataclass(frozen=True)
class Start:
    """Begin a communication. Outcome, at once: its `Ticket`."""

    op: Op


@dataclass(frozen=True)
class Wait:
    """Wait for a communication. Outcome: that of its operation."""

    ticket: Ticket


@dataclass(frozen=True)
class Idle:
    """Let a moment pass: until something of this learner has happened (a ticket is done, its exchange has news)."""


Request = Compute | Start | Wait | Idle
Program = Generator[Request, Any, None]
