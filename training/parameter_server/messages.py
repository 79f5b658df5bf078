"""Messages between learners and parameter servers: a JSON header, then fp32 values in frames of bounded size.

An answer has its request's number. `push` and `elastic` change the weights and are applied once, however often they are
sent: a server remembers its last answer to each learner.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import zmq
from pydantic import Field, ValidationError
from torch import Tensor

from training.parameter_server.layout import SCALARS, Layout, ParameterSlice
from training.processes.message import Message, first_problem

CHUNK = 4 * 1024 * 1024
"""Maximum bytes of values per frame; ZeroMQ heartbeats can pass between the frames of a long message."""
LONGEST = CHUNK + 4096
"""Maximum size of a frame in bytes."""
SILENCE_S = 60.0
"""A connection over which no frame has arrived for this time is closed."""
UNREAD = -1
"""Number of an answer to a header that could not be read."""

Frames = list[bytes | memoryview]
Sizes = tuple[tuple[str, int], ...]


class MessageError(ValueError):
    """A message is malformed, or does not match the model."""


class ServerRequest(Message):
    """Header of a request.

    Attributes:
        op: The operation. `layout`: return the server's share; `init`: initialize weights and optimizer tensors;
            `push`: apply a gradient; `pull`: return the weights; `elastic`: move the center towards a vector; `state`:
            return the optimizer's tensors.
        name: Name of the learner.
        token: Changes whenever the learner restarts.
        number: Increases with every request.
        session: The learner's training session; "" before it has one.
        version: Version of the weights at which a pushed gradient was computed.
        lr: Learning rate of a push.
        alpha: Coefficient of `elastic`.
        tensors: Names and sizes of the optimizer tensors that follow the weights of `init`.
    """

    op: Literal["layout", "init", "push", "pull", "elastic", "state"]
    name: str = Field(min_length=1, max_length=100)
    token: str = Field(max_length=100)
    number: int = Field(ge=0)
    session: str = Field(default="", max_length=200)
    version: int = 0
    lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    alpha: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    tensors: Sizes = ()


class Answer(Message):
    """Header of an answer.

    Attributes:
        number: Number of the request.
        error: Why the request failed; "" if it succeeded.
        session: Session of the server's weights; "" if it has none.
        version: Number of pushes applied since `init`.
        staleness: Pushes of other learners between this push and the pull before it.
        known: Whether the server already had weights of the session, and has kept them.
        layout: The server's share.
        tensors: Names and sizes of the optimizer tensors that follow.
    """

    number: int
    error: str = ""
    session: str = ""
    version: int = 0
    staleness: int = 0
    known: bool = False
    layout: Layout | None = None
    tensors: Sizes = ()


def read_request(frame: "zmq.Frame") -> ServerRequest:
    """Parse a request's header from untrusted bytes.

    Raises:
        MessageError: If it is invalid.
    """
    try:
        return ServerRequest.model_validate_json(frame.bytes)
    except ValidationError as error:
        raise MessageError(
            f"not a request to a parameter server ({first_problem(error)}): do both run the same version?"
        ) from None


def read_answer(frame: "zmq.Frame") -> Answer:
    """Parse an answer's header.

    Raises:
        MessageError: If it is invalid.
    """
    try:
        return Answer.model_validate_json(frame.bytes)
    except ValidationError as error:
        raise MessageError(f"not an answer of a parameter server ({first_problem(error)})") from None


def pack(header: ServerRequest | Answer, values: Sequence[Tensor] = ()) -> Frames:
    """Encode a message as frames.

    Args:
        header: The header.
        values: Flat fp32 tensors on the CPU; not copied, so they must not change until the message is sent.
    """
    frames: Frames = [header.model_dump_json(exclude_defaults=True).encode()]
    for tensor in values:
        if tensor.numel():
            octets = tensor.contiguous().numpy().data.cast("B")
            frames += [octets[start : start + CHUNK] for start in range(0, len(octets), CHUNK)]
    return frames


def unpack(frames: Sequence["zmq.Frame"], count: int) -> Tensor:
    """Decode the frames after a header into one flat tensor [count].

    Args:
        frames: All frames except the header.
        count: Expected number of values.

    Raises:
        MessageError: If the number of values is different.
    """
    size = sum(len(frame) for frame in frames)
    if size != 4 * count:
        raise MessageError(f"{size} bytes of values where {count} fp32 values were expected: is it from another model?")
    values = torch.empty(count)
    if count:
        octets, position = values.numpy().data.cast("B"), 0
        for frame in frames:
            octets[position : position + len(frame)] = frame.buffer
            position += len(frame)
    return values


def split(values: Tensor, sizes: Sizes) -> dict[str, Tensor]:
    """Split a flat tensor into consecutive named parts."""
    parts, start = {}, 0
    for name, size in sizes:
        parts[name] = values[start : start + size]
        start += size
    return parts


def state_of(tensors: dict[str, Tensor], piece: ParameterSlice) -> Iterator[tuple[str, Tensor]]:
    """Extract a piece's part of the whole model's optimizer tensors.

    Args:
        tensors: Optimizer state in the form of `training.learner.optim.optimizer_tensors`.
        piece: The piece of a parameter.

    Raises:
        MessageError: If the tensors belong to another model.
    """
    prefix = f"{piece.number}."
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            continue
        whole = 1 if name.removeprefix(prefix) in SCALARS else piece.numel
        if tensor.numel() != whole:
            raise MessageError(f"optimizer tensor {name} has {tensor.numel()} values, not {whole}: of another model?")
        values = tensor.detach().to("cpu", torch.float32).flatten()
        yield name, values if whole == 1 else values[piece.first : piece.stop]


def put_state(whole: dict[str, Tensor], parts: dict[str, Tensor], pieces: Sequence[ParameterSlice]) -> None:
    """Insert a share's optimizer tensors into those of the whole model.

    Args:
        whole: Optimizer tensors of the whole model, by name; changed in place.
        parts: Optimizer tensors of the share, by name.
        pieces: The share's pieces.
    """
    by_number: dict[Any, ParameterSlice] = {str(piece.number): piece for piece in pieces}
    for name, values in parts.items():
        number, kind = name.split(".", 1)
        if kind in SCALARS:
            whole[name] = values.reshape(())
            continue
        piece = by_number[number]
        target = whole.setdefault(name, torch.zeros(piece.shape))
        target.view(-1)[piece.first : piece.stop] = values
