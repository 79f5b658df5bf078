"""Messages between nodes and coordinator: JSON objects, with rows of the index packed into short strings."""

import base64
import json
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from training.coordinator.membership import View

Message = dict[str, Any]
Rows = NDArray[np.int64]
Source = Literal["initial", "checkpoint", "neighbour", "own"]
MAX_MESSAGE = 256 * 1024 * 1024
"""Maximum size of a message in bytes; the largest is a lease of a whole epoch."""

COUNTS = ("utterances", "seconds", "loss_sum", "tokens", "unalignable", "skipped", "unreadable")
"""Counts in a report."""


class CoordinatorError(ValueError):
    """The coordinator refused a request, or a message or setting is invalid."""


class CoordinatorUnreachableError(CoordinatorError):
    """No answer in time."""


def pack_rows(rows: Rows) -> str:
    """Encode row numbers as text: deflated differences; ascending rows take well under a byte each."""
    differences = np.diff(np.asarray(rows, dtype=np.int64), prepend=0).astype("<i4")
    return base64.b64encode(zlib.compress(differences.tobytes(), 1)).decode()


def unpack_rows(text: str) -> Rows:
    """Inverse of `pack_rows`.

    Raises:
        CoordinatorError: If the text is not a valid encoding.
    """
    data = _inflate(text)
    if len(data) % 4:
        raise CoordinatorError("packed rows are damaged: do coordinator and nodes run the same version?")
    return np.cumsum(np.frombuffer(data, dtype="<i4"), dtype=np.int64)


def pack_bits(bits: NDArray[np.bool_]) -> str:
    """Encode a mask as text."""
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 6)).decode()


def unpack_bits(text: str, count: int) -> NDArray[np.bool_]:
    """Inverse of `pack_bits`: a mask [count].

    Raises:
        CoordinatorError: If the text does not encode a mask of that length.
    """
    octets = np.frombuffer(_inflate(text), dtype=np.uint8)
    if len(octets) != (count + 7) // 8:
        raise CoordinatorError(
            f"a mask of {len(octets)} bytes where {count} rows were expected: does it belong to another index?"
        )
    return np.unpackbits(octets, count=count).astype(np.bool_)


def _inflate(text: str) -> bytes:
    try:
        expand = zlib.decompressobj()
        data = expand.decompress(base64.b64decode(text, validate=True), MAX_MESSAGE)
    except (ValueError, zlib.error) as error:
        raise CoordinatorError(
            f"packed rows are damaged ({error}): do coordinator and nodes run the same version?"
        ) from error
    if expand.unconsumed_tail or not expand.eof:
        raise CoordinatorError("packed rows are damaged or too long: do coordinator and nodes run the same version?")
    return data


def encode(message: Message) -> bytes:
    """Encode a message for the wire."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """Decode a message from the wire.

    Raises:
        CoordinatorError: If it is not a JSON object.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CoordinatorError(f"a message is not valid JSON ({error})") from error
    if not isinstance(message, dict):
        raise CoordinatorError("a message is not a JSON object")
    return message


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
    """

    trained: int = 0
    size: int = 1
    total: int = 1
    closed: int = 0
    live: int = 1
    elapsed: float = 0.0

    @property
    def epochs(self) -> float:
        """Epochs trained, with fraction: the position in the schedule."""
        return min(self.trained / self.size, float(self.total))

    @classmethod
    def from_dict(cls, value: Message) -> "Progress":
        """Parse the coordinator's JSON."""
        names = ("trained", "size", "total", "closed", "live")
        return cls(**{name: int(value[name]) for name in names}, elapsed=float(value["elapsed"]))


@dataclass(frozen=True)
class JoinReply:
    """The coordinator's answer when a node joins.

    Attributes:
        incarnation: The node's name in the ring from now on.
        session: Changes when training starts from scratch or from a checkpoint; weights of another session are void.
        view: The current members of the ring.
        job: The training job, as `TrainJob.model_dump(mode="json")`.
        progress: How far training is.
        source: Where the node's weights come from: `initial` (initialized from the seed), `checkpoint` (see `resume`),
            `neighbour` (`Exchange.fetch`; if no neighbour answers, join again), or `own` (the node was dropped and came
            back, and no other node has newer ones).
        resume: For `checkpoint`: folder of the checkpoint, below the output.
        record: This node's record in that checkpoint, if the same nodes train as then; else None, and the node starts
            from the average.
        records: All nodes' records in that checkpoint.
        step: Local steps that this node has made.
        finish: Why training has already ended, or "".
    """

    incarnation: str
    session: str
    view: View
    job: Message
    progress: Progress
    source: Source
    resume: str | None = None
    record: Message | None = None
    records: tuple[Message, ...] = field(default_factory=tuple)
    step: int = 0
    finish: str = ""

    @property
    def fresh(self) -> bool:
        """Whether training has not started: weights are initialized or loaded, not taken from a neighbour."""
        return self.source in ("initial", "checkpoint")

    @property
    def epoch(self) -> int:
        """Current epoch (0 is the first)."""
        return self.progress.closed

    def facts(self) -> Message:
        """The part that all ranks of the node need, as JSON."""
        names = ("session", "source", "step", "record", "resume", "finish")
        more = {"records": list(self.records), "view": self.view.to_dict()}
        return {name: getattr(self, name) for name in names} | more

    @classmethod
    def from_dict(cls, value: Message) -> "JoinReply":
        """Parse the coordinator's JSON."""
        return cls(
            incarnation=str(value["incarnation"]),
            session=str(value["session"]),
            view=View.from_dict(value["view"]),
            job=dict(value["job"]),
            progress=Progress.from_dict(value["progress"]),
            source=value["source"],
            resume=value["resume"],
            record=value["record"],
            records=tuple(value["records"]),
            step=int(value["step"]),
            finish=str(value["finish"]),
        )
