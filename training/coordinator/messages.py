"""Messages between the coordinator and its clients: one pydantic model for each kind of request and of reply.

They are sent as JSON, requests with their kind in `op`. Fields that have their default value are not sent.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from training.coordinator.membership import View
from training.coordinator.packing import PackedRows
from training.processes.message import Message, first_problem

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


# --- replies


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


# --- requests


Name = Annotated[str, Field(min_length=1, max_length=100)]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Reply = TypeVar("Reply", bound=Message)
_SAME_VERSION = "do coordinator and node run the same version?"


class Request(Message, Generic[Reply]):
    """A request; it must be idempotent, because an unanswered one is repeated."""

    op: str
    reply: ClassVar[type[Message]] = Done


class JoinRequest(Request[JoinReply]):
    """Asks to become a member.

    Attributes:
        node: Number of the node.
        incarnation: Its new name.
        previous: Its name until now, if it joins again.
        kept: The incarnation whose weights it has, or "".
        endpoints: Endpoints of the exchanges of its ranks.
        damaged: Folder of a checkpoint whose files turned out to be damaged.
        data: Data set to train on, if the job names none; the same for all nodes.
        model: What it averages, if the job does not say it; the same for all nodes.
    """

    op: Literal["join"] = "join"
    node: int
    incarnation: Name
    previous: str = ""
    kept: str = ""
    endpoints: tuple[str, ...]
    damaged: str = ""
    data: NamedData | None = None
    model: AveragedModel | None = None
    reply = JoinReply


class NumberRequest(Request[NumberReply]):
    """Asks for a node number that no other node has; `token` is unique to the asking process."""

    op: Literal["number"] = "number"
    token: Name
    reply = NumberReply


class Counts(Message):
    """Counts of a report.

    Attributes:
        utterances: Utterances in the batch.
        seconds: Seconds of audio.
        loss_sum: Sum of its losses; 0 if it is not finite.
        tokens: Tokens that `loss_sum` covers.
        unalignable: Utterances with too few frames for their tokens.
        skipped: Utterances that changed no weights because of a non-finite loss or gradient.
        unreadable: Utterances of the batch that are missing because their shards are damaged.
    """

    utterances: int = 0
    seconds: Finite = 0.0
    loss_sum: Finite = 0.0
    tokens: Finite = 0.0
    unalignable: int = 0
    skipped: int = 0
    unreadable: int = 0


class TrainedBatch(Message):
    """A trained batch; `seq` counts the reports of an incarnation."""

    seq: int = Field(ge=1)
    epoch: Count
    rows: PackedRows
    counts: Counts


class StartedBatch(Message):
    """A batch that was started or soon will be; `own` if the node took it itself during an outage."""

    epoch: Count
    own: bool = False
    rows: PackedRows


class ReturnedBatch(Message):
    """A batch of a lease that the node returns to the pool."""

    epoch: Count
    lease: int
    rows: PackedRows


class CheckpointRecord(Message):
    """A node's record of a checkpoint: `node`, `step`, last report `seq`, and further values that a resume needs."""

    model_config = ConfigDict(extra="allow")

    node: Count
    step: Count
    seq: Count


class SpoolPortion(Message):
    """Journal lines of a spool file, from byte `offset` to `end`; lines without a `kind` are skipped."""

    name: Name
    offset: Count
    end: Count
    lines: tuple[Any, ...]


class Heartbeat(Request[HeartbeatReply]):
    """What a node reports every `beat_s`.

    Attributes:
        incarnation: The node's name in the ring.
        ready: Whether it has weights that a newcomer may take.
        view: Number of the view that it has.
        want: Whether it wants a lease.
        have: Names of the latest leases that it knows.
        empty: Whether it has no batches left.
        spools: Journal lines.
        reports: Trained batches.
        started: Batches that were started or soon will be.
        returned: Batches returned to the pool.
        answered: Number of the revocation that `returned` answers; 0 for none.
        snapshots: Epochs whose replica is written.
        records: Checkpoint numbers, each with the node's record.
    """

    op: Literal["beat"] = "beat"
    incarnation: Name
    ready: bool = False
    view: int = 0
    want: bool = False
    have: tuple[str, ...] = ()
    empty: bool = False
    spools: tuple[SpoolPortion, ...] = ()
    reports: tuple[TrainedBatch, ...] = ()
    started: tuple[StartedBatch, ...] = ()
    returned: tuple[ReturnedBatch, ...] = ()
    answered: int = 0
    snapshots: tuple[int, ...] = ()
    records: tuple[tuple[int, CheckpointRecord], ...] = ()
    reply = HeartbeatReply


class LeaveRequest(Request[Done]):
    """Leaves the ring; `fail` reports a permanent failure and its reason."""

    op: Literal["leave", "fail"] = "leave"
    incarnation: str
    reason: str = ""


class RendezvousRequest(Request[RendezvousReply]):
    """Sent repeatedly by each machine of a node.

    Attributes:
        node: Number of the node.
        machine: Number of the machine within the node.
        token: Unique to this start of the machine's processes.
        address: Where the node's first machine can be reached; known to its first learner only.
        group: Tokens of the machine's group; empty while it waits for the others.
        leaving: Whether the machine was asked to leave.
    """

    op: Literal["rendezvous"] = "rendezvous"
    node: int
    machine: int
    token: str = Field(min_length=1, max_length=256)
    address: str = Field(default="", max_length=256)
    group: tuple[str, ...] = ()
    leaving: bool = False
    reply = RendezvousReply


class JobRequest(Request[JobReply]):
    """Asks for the training job."""

    op: Literal["job"] = "job"
    reply = JobReply


class StatusRequest(Request[StatusReply]):
    """Asks for the state of the training."""

    op: Literal["status"] = "status"
    reply = StatusReply


class JournalRequest(Request[JournalReply]):
    """Asks for lines of the journal from byte `offset`; negative means near the end."""

    op: Literal["journal"] = "journal"
    offset: int
    reply = JournalReply


class StopRequest(Request[Done]):
    """Asks to end training with a last checkpoint."""

    op: Literal["stop"] = "stop"


class EvaluationsRequest(Request[EvaluationsReply]):
    """Asks which epochs to evaluate."""

    op: Literal["evaluations"] = "evaluations"
    reply = EvaluationsReply


class EvaluatedRequest(Request[EvaluatedReply]):
    """Reports the result of evaluating an epoch (1 is the first)."""

    op: Literal["evaluated"] = "evaluated"
    epoch: int
    result: JsonObject
    reply = EvaluatedReply


class FinalResult(Message):
    """Result of a training: the step and the scores of its final model."""

    step: int | None = None
    valid: JsonObject = Field(default_factory=dict)


class FinishedRequest(Request[Done]):
    """Reports the final result."""

    op: Literal["finished"] = "finished"
    result: FinalResult


AnyRequest = Annotated[
    JoinRequest
    | NumberRequest
    | Heartbeat
    | LeaveRequest
    | RendezvousRequest
    | JobRequest
    | StatusRequest
    | JournalRequest
    | StopRequest
    | EvaluationsRequest
    | EvaluatedRequest
    | FinishedRequest,
    Field(discriminator="op"),
]
_REQUESTS: TypeAdapter[AnyRequest] = TypeAdapter(AnyRequest)


# --- as bytes


class _Answer(Message):
    """Envelope of a reply; without one, the reason: a refusal (`error`) or a fault of the coordinator (`failure`)."""

    ok: JsonObject | None = None
    error: str = ""
    failure: str = ""


def _encode(value: JsonObject) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _decode(data: bytes) -> Any:
    try:
        # not pydantic's parser, which refuses lone surrogates: a journal line may contain a file's name
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CoordinatorError(f"a message is not valid JSON ({error})") from error


def encode_request(request: Request[Any]) -> bytes:
    """Encode a request for the wire."""
    return _encode({"op": request.op} | request.model_dump(exclude_defaults=True))


def read_request(data: bytes) -> AnyRequest:
    """Parse a request from untrusted bytes.

    Raises:
        CoordinatorError: If it is malformed; names the field.
    """
    try:
        return _REQUESTS.validate_python(_decode(data))
    except ValidationError as error:
        raise CoordinatorError(f"malformed request: {first_problem(error)} ({_SAME_VERSION})") from None


def encode_reply(reply: Message) -> bytes:
    """Encode a reply for the wire."""
    return _encode({"ok": reply.model_dump(exclude_defaults=True)})


def encode_error(error: str = "", failure: str = "") -> bytes:
    """Encode a refusal, or a fault of the coordinator, for the wire."""
    return _encode({"error": error, "failure": failure})


def read_reply(request: Request[Reply], data: bytes) -> Reply:
    """Parse the reply to a request.

    Raises:
        CoordinatorError: If the coordinator refused the request, or the reply is malformed.
        CoordinatorFailedError: If the coordinator has a fault.
    """
    try:
        answer = _Answer.model_validate(_decode(data))
        if answer.failure:
            raise CoordinatorFailedError(answer.failure)
        if answer.error:
            raise CoordinatorError(answer.error)
        return cast(Reply, request.reply.model_validate(answer.ok))
    except ValidationError as error:
        raise CoordinatorError(f"malformed reply: {first_problem(error)} ({_SAME_VERSION})") from None
