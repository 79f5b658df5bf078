"""What the coordinator answers: one pydantic model for each kind of reply; `requests` has the requests."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from training.coordinator.membership import View
from training.processes.message import Message

JsonObject = dict[str, Any]
Source = Literal["initial", "checkpoint", "neighbour", "own"]


class CoordinatorError(ValueError):
    """The coordinator refused a request, or a message or setting is invalid."""


class CoordinatorUnreachableError(ConnectionError):
    """The coordinator did not answer in time: an outage, which may pass."""


class CoordinatorFailedError(RuntimeError):
    """A fault of the coordinator, not of the request; its log has the traceback."""


def checkpoint_folder(number: int) -> str:
    """Folder of a checkpoint's files, below the training's output."""
    return f"checkpoints/{number:06d}"


def replica_name(epoch: int, node: int) -> str:
    """File of a node's weights at the end of an epoch (1 is the first), below the training's output."""
    return f"replicas/epoch-{epoch:04d}/node-{node:03d}.safetensors"


@dataclass(frozen=True)
class Progress:
    """How far training is over all nodes, as far as this node knows.

    Attributes:
        trained: Utterances trained in all epochs, each counted once per epoch; includes this node's own that are not
            yet reported.
        size: Utterances per epoch.
        total: Epochs to train.
        closed: Epochs whose utterances are all trained.
        live: Nodes in the ring.
        elapsed: Seconds of training, over all sessions.
        newcomers: Nodes in the ring that have no weights yet.
    """

    trained: int = 0
    size: int = 1
    total: int = 1
    closed: int = 0
    live: int = 1
    elapsed: float = 0.0
    newcomers: int = 0

    @property
    def epochs(self) -> float:
        """Epochs trained, with fraction: the position in the schedule."""
        return min(self.trained / self.size, float(self.total))


class Done(Message):
    """Reply to a request that only reports something."""


class JoinReply(Message):
    """Reply to a node that joins.

    Attributes:
        incarnation: The node's name in the ring from now on.
        session: Changes when training starts from scratch or from a checkpoint; weights of another session are void.
        view: The current members of the ring.
        job: The training job, as `TrainJob.model_dump(mode="json")`.
        progress: How far training is.
        source: Where the node's weights come from: `initial` (its own initial ones), `checkpoint` (see `resume`),
            `neighbour` (`Exchange.fetch`; if no neighbour answers, join again), or `own` (the node was dropped and came
            back, and no other node has newer ones).
        resume: For `checkpoint`: folder of the checkpoint, below the output.
        record: This node's record in that checkpoint, if the same nodes train as then; else None, and the node starts
            from the average.
        records: All nodes' records in that checkpoint.
        step: Local steps that this node has made.
        finish: Why training has already ended, or "".
        trained: Packed masks of the rows that are trained, by epoch in progress.
    """

    incarnation: str
    session: str
    view: View
    job: JsonObject
    progress: Progress
    source: Source
    resume: str | None = None
    record: JsonObject | None = None
    records: tuple[JsonObject, ...] = ()
    step: int = 0
    finish: str = ""
    trained: dict[int, str] = Field(default_factory=dict)

    @property
    def fresh(self) -> bool:
        """Whether training has not started: weights are initialized or loaded, not taken from a neighbour."""
        return self.source in ("initial", "checkpoint")

    @property
    def epoch(self) -> int:
        """Current epoch (0 is the first)."""
        return self.progress.closed

    def facts(self) -> JsonObject:
        """The part that all ranks of the node need, as JSON."""
        names = ("session", "source", "step", "record", "resume", "finish")
        more = {"records": list(self.records), "view": self.view.to_dict()}
        return {name: getattr(self, name) for name in names} | more


class NamedData(Message):
    """A data set without an index.

    Attributes:
        counts: Rows of each shard.
        epochs: Passes over it.
    """

    counts: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    epochs: int = Field(ge=1)


class AveragedModel(Message):
    """What nodes must have in common to average their weights, if no job says it.

    Attributes:
        weights: Number of averaged values.
        shapes: Digest of the parameters' shapes.
        learners: Learners of the node, each of which exchanges its share.
        wire: Encoding of the weights on the wire.
        chunk_kb: Maximum size of a message in KiB.
    """

    weights: int
    shapes: str = Field(max_length=64)
    learners: int
    wire: str = Field(max_length=16)
    chunk_kb: int

    def difference(self, other: "AveragedModel") -> str:
        """How another learner's model differs from this one, which the ring has; "" if they can be averaged."""
        same = "give all learners the same"
        if other.weights != self.weights:
            return (
                f"this learner's model has {other.weights:,} weights, the ring's model {self.weights:,}: {same} model"
            )
        if other.shapes != self.shapes:
            return f"this learner's model has {self.weights:,} weights as the ring's, in other shapes: {same} model"
        if other.learners != self.learners:
            return (
                f"this learner's node has {other.learners} learners, the ring's nodes have {self.learners}: start all "
                "nodes with the same number of processes (torchrun --nproc-per-node)"
            )
        for name in ("wire", "chunk_kb"):
            if (theirs := getattr(other, name)) != (ours := getattr(self, name)):
                return f"exchange.{name} is {theirs} at this learner and {ours} in the ring: {same} RingConfig"
        return ""


class NumberReply(Message):
    """A node number that no other node has."""

    node: int


class Lease(Message):
    """Packed rows that a node may train; `whole` if they are everything that is left of the epoch."""

    id: str
    epoch: int
    whole: bool = False
    rows: str


class Revocation(Message):
    """Demand to return about `utterances` rows of an epoch that are not started; `number` identifies the demand."""

    number: int
    epoch: int
    utterances: int


class HeartbeatReply(Message):
    """Reply to a heartbeat.

    Attributes:
        dropped: Whether the node is not a member any more; then only `finish` is set.
        seq: Number of the node's last report that has arrived.
        view: The current view of the ring if the node has an older one.
        progress: How far training is.
        running: Whether leases are granted.
        pools: By epoch, how many shards of its order were leased.
        leases: Leases that the node does not know.
        revoke: Rows that the node must return.
        checkpoint: Number of the checkpoint of which the node must write its part.
        snapshot: The finished epoch (1 is the first) whose replica the node must write.
        spools: Received bytes of the spool files that the heartbeat named.
        finish: Why training has ended, or "".
    """

    dropped: bool = False
    seq: int = 0
    view: View | None = None
    progress: Progress = Progress()
    running: bool = False
    pools: dict[int, int] = Field(default_factory=dict)
    leases: tuple[Lease, ...] = ()
    revoke: Revocation | None = None
    checkpoint: int | None = None
    snapshot: int | None = None
    spools: dict[str, int] = Field(default_factory=dict)
    finish: str = ""


class RendezvousReply(Message):
    """Reply to a machine of a node.

    Attributes:
        group: For a waiting machine: the tokens of the node's machines once all have arrived.
        address: Address of the node's first learner.
        missing: Machines that have not arrived.
        over: For a machine in a group: why the group is over, or "".
        leave: Whether one of the group's machines was asked to leave.
    """

    group: tuple[str, ...] = ()
    address: str = ""
    missing: tuple[int, ...] = ()
    over: str = ""
    leave: bool = False


class JobReply(Message):
    """The training job, as `TrainJob.model_dump(mode="json")`."""

    job: JsonObject


class JournalReply(Message):
    """Lines of the journal: `text` from byte `offset` to `end`, which is the offset for the next request."""

    offset: int
    end: int
    text: str


class ReadyEpoch(Message):
    """An epoch (1 is the first) to evaluate, and the nodes whose replicas are written."""

    epoch: int
    nodes: tuple[int, ...]


class EvaluationsReply(Message):
    """Epochs to evaluate, oldest first."""

    ready: tuple[ReadyEpoch, ...] = ()
    finish: str = ""


class EvaluatedReply(Message):
    """Results of all evaluations so far."""

    history: tuple[JsonObject, ...]


class StatusReply(Message):
    """State of the training, for display, the evaluator and the supervisor.

    Attributes:
        members: `node`, `ready`, `step`, `incarnation`, `leases` and `leased` of each member, by node.
        wanted: Number of nodes of the job.
        pool: Utterances of the current epoch that are neither trained nor leased.
        totals: Counters of the whole training.
        to_evaluate: Number of epochs that are over and not evaluated.
        checkpoint: Number of the checkpoint in the making.

    Other fields are those of `ledger.Counters` and `ledger.Books`.
    """

    session: str
    running: bool
    stopping: bool
    finish: str
    failure: str
    view: int
    members: tuple[JsonObject, ...]
    wanted: int
    pool: int
    progress: Progress
    totals: JsonObject
    to_evaluate: int
    restored: int
    checkpoint: int | None
    history: tuple[JsonObject, ...]
    result: JsonObject | None
