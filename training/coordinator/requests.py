"""Requests to the coordinator: one pydantic model for each kind, sent as JSON, with the kind in `op`.

Fields that have their default value are not sent.
"""

import json
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from training.coordinator.messages import (
    AveragedModel,
    CoordinatorError,
    CoordinatorFailedError,
    Done,
    EvaluatedReply,
    EvaluationsReply,
    HeartbeatReply,
    JobReply,
    JoinReply,
    JournalReply,
    JsonObject,
    NamedData,
    NumberReply,
    RendezvousReply,
    StatusReply,
)
from training.coordinator.packing import PackedRows
from training.processes.message import Message, first_problem

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
