"""A learner's client of the parameter server: asks all shares in parallel, each until it answers or times out."""

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from torch import Tensor

from training.parameter_server.layout import Layout
from training.parameter_server.messages import (
    LONGEST,
    SILENCE_S,
    UNREAD,
    Answer,
    Frames,
    MessageError,
    ServerRequest,
    pack,
    put_state,
    read_answer,
    split,
    state_of,
    unpack,
)
from training.processes.keys import RingKey
from training.processes.sockets import Connection, end_context

REPEAT_S = 20.0
"""An unanswered request is sent again over the same connection after this time, and then with doubled intervals. Over a
new connection it is sent at once."""
LOOK_S = 0.5
"""Longest wait for events before time-outs are checked."""


class ServerError(RuntimeError):
    """A parameter server refused a request; the message says why."""


class ServerUnreachableError(ServerError):
    """A parameter server did not answer in time."""


@dataclass
class _Line:
    """The connection to one share, and its current request."""

    number: int
    address: str
    connection: Connection
    layout: Layout | None = None
    request: int = UNREAD
    frames: Frames = field(default_factory=list)
    answer: Answer | None = None
    values: list["zmq.Frame"] = field(default_factory=list)
    _over: int = 0
    _due: float = 0.0
    _pause: float = 0.0

    @property
    def name(self) -> str:
        return f"parameter server {self.number} at {self.address}"

    def ask(self, request: int, frames: Frames) -> None:
        """Set the current request; `go_on` sends it."""
        self.request, self.frames, self.answer, self.values = request, frames, None, []
        self._over, self._due, self._pause = 0, 0.0, REPEAT_S

    def go_on(self) -> None:
        """Send the request if it was not sent over this connection yet, or is unanswered for too long."""
        self.connection.look()
        made, now = self.connection.handshakes, time.monotonic()
        if self.answer is not None or (made == self._over and now < self._due):
            return
        try:
            self.connection.socket.send_multipart(self.frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        self._over, self._due, self._pause = made, now + self._pause, 2 * self._pause

    def hear(self) -> None:
        """Receive the answer; answers to earlier requests are discarded."""
        while True:
            try:
                header, *values = self.connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                answer = read_answer(header)
            except MessageError as error:
                raise ServerError(f"{self.name}: {error}") from error
            if self.answer is None and answer.number in (self.request, UNREAD):
                self.answer, self.values = answer, values

    def take(self, count: int) -> Tensor:
        """The answer's values [count]."""
        try:
            return unpack(self.values, count)
        except MessageError as error:
            raise ServerError(f"{self.name}: {error}") from error

    def why_silent(self, patience_s: float) -> str:
        if self.connection.refused:
            return f"{self.name} refused the key: use the key file that it was started with"
        return (
            f"{self.name} has not answered for {patience_s:g} s: check that it is running, belongs to this training, "
            "and can be reached from this machine"
        )


class ServerClient:
    """Asks all shares of a parameter server. Makes one request at a time; thread-safe.

        with ServerClient(job.servers, key, "node-0", flat.weights.numel(), patience_s=600) as client:
            client.init(session, flat.weights, {})
            weights, versions = client.pull()
            versions, staleness = client.push(grads, versions, lr=0.1)

    All methods raise `ServerUnreachableError` if a share does not answer for `patience_s`, and `ServerError` if one
    refuses. A request that only some shares have carried out is not rolled back.

    Args:
        addresses: HOST:PORT of each share, in order.
        key: The ring's key; None only for servers on this machine that run without a key.
        name: Unique name of the learner.
        num_weights: Number of the model's weights, averaged buffers included.
        patience_s: Longest time to wait for an answer.

    Raises:
        ValueError: If an address is malformed, or on another machine and there is no key.
    """

    def __init__(
        self, addresses: Sequence[str], key: RingKey | None, name: str, num_weights: int, patience_s: float
    ) -> None:
        if not addresses:
            raise ValueError("no address of a parameter server: set the job's servers when starting the training")
        self.name, self.num_weights, self.patience_s = name, num_weights, patience_s
        self._token, self._number, self._session = secrets.token_hex(8), 0, ""
        self._lock = threading.RLock()
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._lines: list[_Line] = []
        try:
            for number, address in enumerate(addresses):
                connection = Connection(self._context, address, key, LONGEST, SILENCE_S)
                self._lines.append(_Line(number, address, connection))
        except ValueError:
            self.close()
            raise
        for line in self._lines:
            self._poller.register(line.connection.socket, zmq.POLLIN)
            self._poller.register(line.connection.monitor, zmq.POLLIN)

    def __enter__(self) -> "ServerClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for line in self._lines:
                line.connection.close()
            self._lines = []
            end_context(self._context)

    # --- requests

    def init(self, session: str, weights: Tensor, optimizer: dict[str, Tensor]) -> bool:
        """Initialize the servers' weights; within a session only the first learner's weights are accepted.

        Learners of one session must offer the same weights: each share accepts those of the learner that reaches it
        first.

        Args:
            session: Name of the training session; weights of an earlier one are replaced.
            weights: Weights of the whole model [num_weights].
            optimizer: Optimizer state of the whole model, in the form of `state` and
                `training.learner.optim.optimizer_tensors`; empty for a fresh optimizer.

        Returns:
            Whether all shares have accepted these weights; if not, `pull` theirs.
        """
        with self._lock:
            self._session = session
            self._meet(again=True)
            missing = [line for line in self._lines if line.answer and line.answer.session != session]
            flat = self._host(weights, "weights", self.num_weights)
            requests, values = [], []
            for line in missing:
                state = _state(line, optimizer)
                sizes = tuple((name, part.numel()) for name, part in state.items())
                requests.append({"tensors": sizes})
                values.append([self._part(line, flat), *state.values()])
            self._ask("init", requests, values, missing)
            return len(missing) == len(self._lines) and not any(line.answer and line.answer.known for line in missing)

    def push(self, grads: Tensor, versions: Sequence[int], lr: float) -> tuple[list[int], float]:
        """Have the servers make one optimizer step.

        Args:
            grads: Gradients of all parameters, in the order of the flat weights.
            versions: Versions of the weights at which they were computed, as returned by `pull`.
            lr: Learning rate.

        Returns:
            The versions after the step, and the staleness: steps of other learners since the pull, mean over the
            shares.
        """
        with self._lock:
            self._meet()
            flat = self._host(grads, "gradients", sum(_layout(line).num_grads for line in self._lines))
            requests = [{"version": version, "lr": lr} for version in versions]
            answers = self._ask("push", requests, [[self._part(line, flat)] for line in self._lines])
            return [answer.version for answer in answers], sum(answer.staleness for answer in answers) / len(answers)

    def pull(self) -> tuple[Tensor, list[int]]:
        """The servers' weights [num_weights], on the CPU, and the version of each share."""
        with self._lock:
            self._meet()
            answers = self._ask("pull")
            return self._together(), [answer.version for answer in answers]

    def elastic(self, vector: Tensor, alpha: float) -> Tensor:
        """Move the center towards a learner's weights x: d = alpha (x - center); center += d.

        Args:
            vector: x [num_weights].
            alpha: Between 0 and 1.

        Returns:
            d, which the learner subtracts from x; on the device of x.
        """
        with self._lock:
            self._meet()
            flat = self._host(vector, "weights", self.num_weights)
            self._ask("elastic", [{"alpha": alpha}] * len(self._lines), [[self._part(x, flat)] for x in self._lines])
            return self._together().to(vector.device)

    def state(self) -> dict[str, Tensor]:
        """The servers' optimizer state, with the names of `training.learner.optim.optimizer_tensors`."""
        with self._lock:
            self._meet()
            whole: dict[str, Tensor] = {}
            for line, answer in zip(self._lines, self._ask("state"), strict=True):
                values = line.take(sum(size for _, size in answer.tensors))
                put_state(whole, split(values, answer.tensors), _layout(line).pieces)
            return whole

    # --- implementation

    def _meet(self, again: bool = False) -> None:
        """Check that the addresses are those of all shares of this model, in order."""
        if not again and all(line.layout for line in self._lines):
            return
        for line, answer in zip(self._lines, self._ask("layout"), strict=True):
            layout = line.layout = answer.layout
            if layout is None or (layout.number, layout.servers) != (line.number, len(self._lines)):
                raise ServerError(f"{line.name} is not server {line.number} of {len(self._lines)}: give all in order")
            if layout.num_weights != self.num_weights:
                raise ServerError(
                    f"{line.name} serves a model of {layout.num_weights} weights, this one has {self.num_weights}: "
                    "does it belong to another training?"
                )

    def _ask(
        self,
        op: str,
        fields: Sequence[dict[str, Any]] | None = None,
        values: Sequence[list[Tensor]] | None = None,
        lines: list[_Line] | None = None,
    ) -> list[Answer]:
        """Ask shares in parallel and wait for all answers.

        Args:
            op: The operation.
            fields: Further header fields for each share.
            values: Tensors that follow each share's header.
            lines: Shares to ask; by default all.
        """
        lines = self._lines if lines is None else lines
        fields, values = fields or [{}] * len(lines), values or [[]] * len(lines)
        self._number += 1
        common = {"op": op, "name": self.name, "token": self._token, "number": self._number, "session": self._session}
        for line, own, tensors in zip(lines, fields, values, strict=True):
            line.ask(self._number, pack(ServerRequest.model_validate(common | own), tensors))
        self._wait(lines)
        answers = []
        for line in lines:
            assert line.answer is not None
            line.frames = []
            if line.answer.error:
                raise ServerError(f"{line.name}: {line.answer.error}")
            answers.append(line.answer)
        return answers

    def _wait(self, lines: list[_Line]) -> None:
        deadline = time.monotonic() + self.patience_s
        while silent := [line for line in lines if line.answer is None]:
            for line in silent:
                line.go_on()
            left = deadline - time.monotonic()
            ready = dict(self._poller.poll(max(0, int(1000 * min(left, LOOK_S)))))
            for line in self._lines:
                if line.connection.socket in ready:
                    line.hear()
            # poll once even after the deadline: if this process was suspended, the answer may already be here
            if left <= 0 and (silent := [line for line in lines if line.answer is None]):
                raise ServerUnreachableError(silent[0].why_silent(self.patience_s))

    def _together(self) -> Tensor:
        """The values of all shares' answers, concatenated into one flat tensor."""
        return torch.cat([line.take(_layout(line).size) for line in self._lines])

    @staticmethod
    def _host(tensor: Tensor, what: str, size: int) -> Tensor:
        if tensor.numel() != size:
            raise ServerError(f"{tensor.numel()} {what} where the parameter server's model has {size}: another model?")
        return tensor.detach().to("cpu", torch.float32).flatten()

    @staticmethod
    def _part(line: _Line, flat: Tensor) -> Tensor:
        layout = _layout(line)
        return flat[layout.start : layout.stop]


def _state(line: _Line, optimizer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Extract a share's part of the whole model's optimizer state."""
    try:
        return dict(pair for piece in _layout(line).pieces for pair in state_of(optimizer, piece))
    except MessageError as error:
        raise ServerError(str(error)) from error


def _layout(line: _Line) -> Layout:
    assert line.layout is not None
    return line.layout
