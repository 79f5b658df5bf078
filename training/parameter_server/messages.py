"""What learners and parameter servers tell each other: a JSON header, then fp32 values in frames of bounded size.

An answer carries its request's number. `push` and `elastic` change the weights and are applied once, however often they
are sent: a server remembers the last answer to each learner.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import zmq
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from training.parameter_server.layout import SCALARS, Layout, Piece

CHUNK = 4 * 1024 * 1024
"""Bytes of values in a frame at most: between two frames a long message lets signs of life through."""
LONGEST = CHUNK + 4096
"""Bytes of a frame at most."""
SILENCE_S = 60.0
"""A connection over which no frame has come for so long is closed."""
UNREAD = -1
"""Number of an answer to a header that could not be read."""

Frames = list[bytes | memoryview]
Sizes = tuple[tuple[str, int], ...]


class MessageError(ValueError):
    """A message is not what was expected."""


class Request(BaseModel):
    """Header of a request.

    Attributes:
        op: What is wanted. `layout`: which share this is; `init`: hold these weights and optimizer tensors from now on;
            `push`: apply a gradient; `pull`: the weights; `elastic`: draw the center towards a vector; `state`: the
            optimizer's tensors.
        name: The learner's.
        token: Another one whenever the learner starts anew.
        number: Grows from request to request.
        session: The learner's session of training; "" if it has not begun one.
        version: Of the weights that a pushed gradient was computed at.
        lr: Learning rate of a push.
        alpha: Of `elastic`.
        tensors: Names and numbers of values of the optimizer tensors behind the weights of `init`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    op: Literal["layout", "init", "push", "pull", "elastic", "state"]
    name: str = Field(min_length=1, max_length=100)
    token: str = Field(max_length=100)
    number: int = Field(ge=0)
    session: str = Field(default="", max_length=200)
    version: int = 0
    lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    alpha: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    tensors: Sizes = ()


class Answer(BaseModel):
    """Header of an answer.

    Attributes:
        number: The request's.
        error: Why nothing was done; "" if it was.
        session: Of the weights that the server holds; "" without any.
        version: Pushes applied since `init`.
        staleness: Pushes of others between this one and the pull before it.
        known: The server had weights of the session already and has kept them.
        layout: The server's share.
        tensors: Names and numbers of values of the optimizer tensors that follow.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    error: str = ""
    session: str = ""
    version: int = 0
    staleness: int = 0
    known: bool = False
    layout: Layout | None = None
    tensors: Sizes = ()


def read_request(frame: "zmq.Frame") -> Request:
    """A request's header from bytes that anyone may have sent.

    Raises:
        MessageError: If it is none.
    """
    try:
        return Request.model_validate_json(frame.bytes)
    except ValidationError as error:
        raise MessageError(f"not a request to a parameter server ({_first(error)}): are both of one version?") from None


def read_answer(frame: "zmq.Frame") -> Answer:
    """An answer's header.

    Raises:
        MessageError: If it is none.
    """
    try:
        return Answer.model_validate_json(frame.bytes)
    except ValidationError as error:
        raise MessageError(f"not an answer of a parameter server ({_first(error)})") from None


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'header'}: {problem['msg']}"


def pack(header: Request | Answer, values: Sequence[Tensor] = ()) -> Frames:
    """A message's frames.

    Args:
        header: The header.
        values: Flat fp32 tensors on the CPU; not copied, so they must stay as they are until the message is sent.
    """
    frames: Frames = [header.model_dump_json(exclude_defaults=True).encode()]
    for tensor in values:
        if tensor.numel():
            octets = tensor.contiguous().numpy().data.cast("B")
            frames += [octets[start : start + CHUNK] for start in range(0, len(octets), CHUNK)]
    return frames


def unpack(frames: Sequence["zmq.Frame"], count: int) -> Tensor:
    """Values of the frames behind a header, as one flat tensor.

    Args:
        frames: All frames but the header.
        count: How many values there must be.

    Raises:
        MessageError: If there are more or fewer.
    """
    size = sum(len(frame) for frame in frames)
    if size != 4 * count:
        raise MessageError(f"{size} bytes of values where {count} fp32 values were expected: of another model?")
    values = torch.empty(count)
    if count:
        octets, position = values.numpy().data.cast("B"), 0
        for frame in frames:
            octets[position : position + len(frame)] = frame.buffer
            position += len(frame)
    return values


def split(values: Tensor, sizes: Sizes) -> dict[str, Tensor]:
    """Named parts of a flat tensor, which follow each other."""
    parts, start = {}, 0
    for name, size in sizes:
        parts[name] = values[start : start + size]
        start += size
    return parts


def state_of(tensors: dict[str, Tensor], piece: Piece) -> Iterator[tuple[str, Tensor]]:
    """A piece's part of a whole model's optimizer tensors.

    Args:
        tensors: As `training.learner.optim.optimizer_tensors` gives them.
        piece: Of a parameter.

    Raises:
        MessageError: If they are of another model.
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


def put_state(whole: dict[str, Tensor], parts: dict[str, Tensor], pieces: Sequence[Piece]) -> None:
    """Put a share's optimizer tensors into those of the whole model.

    Args:
        whole: Is added to.
        parts: The share's, by name.
        pieces: The share's.
    """
    by_number: dict[Any, Piece] = {str(piece.number): piece for piece in pieces}
    for name, values in parts.items():
        number, kind = name.split(".", 1)
        if kind in SCALARS:
            whole[name] = values.reshape(())
            continue
        piece = by_number[number]
        target = whole.setdefault(name, torch.zeros(piece.shape))
        target.view(-1)[piece.first : piece.stop] = values
