"""The protocol between exchanges: requests, answers and refusals; no I/O.

One side starts an exchange and sends its weights chunk by chunk. The other side averages each chunk with its own and
sends back its own chunk from before, with which the first side averages too (see `averaging`). The transport drives the
protocol: ZeroMQ between processes, virtual time in the simulator.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from training.coordinator.membership import View
from training.exchange.averaging import Averaging
from training.exchange.mailbox import Mailbox
from training.exchange.messages import (
    AVERAGE,
    CROSSED,
    MEANING,
    MISMATCH,
    NOT_READY,
    OK,
    OUTDATED,
    RELEASE,
    Buffer,
    Header,
    MemoryPool,
)

Outcome = Literal["ignored", "averaged", "crossed", "refused"]
"""Result of an answer; `crossed`: both sides asked for the same chunk, and the other side's request has priority."""


class ChunkRequest(NamedTuple):
    """A chunk to send to the neighbour that is asked."""

    header: Header
    chunk: Buffer


@dataclass(frozen=True, slots=True)
class _Sent:
    """A chunk that was sent, and the training step of its weights."""

    chunk: Buffer
    step: int


class Pending:
    """Unanswered chunks of one connection.

    They outlive their exchange: a neighbour that answers late has added its half, so the other half must be added here.

    Args:
        memory: Allocates memory for a message, given its size in bytes.

    Attributes:
        memory: Memory of messages, reused after their answers.
    """

    def __init__(self, memory: Callable[[int], Buffer] = bytearray) -> None:
        self.memory = MemoryPool(memory)
        self._sent: dict[tuple[int, int], _Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._sent

    def add(self, header: Header, chunk: Buffer, step: int) -> None:
        """Record a chunk that was sent."""
        self._sent[header.token, header.index] = _Sent(chunk, step)

    def pop(self, header: Header) -> _Sent | None:
        """Take the chunk to which an answer belongs; None if it is unknown or already answered."""
        return self._sent.pop((header.token, header.index), None)

    def clear(self) -> None:
        """Expect no more answers."""
        self._sent.clear()


@dataclass
class Asking:
    """An exchange that this side started.

    Attributes:
        node: The neighbour.
        pending: Unanswered chunks of the connection in use.
        token: Token of its messages: generation of the weights, and number of the exchange.
        first: Index of the first chunk.
        began: Start time, in seconds of the driver's clock.
        moved: Time of the last answer.
        sent: Number of chunks sent.
        settled: Number of chunks answered.
        squares: Sum of squared differences.
        compared: Number of weights that `squares` covers.
    """

    node: int
    pending: Pending
    token: int
    first: int
    began: float
    moved: float
    sent: int = 0
    settled: int = 0
    squares: float = 0.0
    compared: int = 0


# --- figures


_EVERY_S = 0.05
_REPEAT_S = 60.0


class Report:
    """Collects an exchange's figures; for their meaning see `ExchangeStats`.

    Args:
        mailbox: Where they are published.
        cpu_s: Returns the exchange's CPU time, in seconds.
    """

    def __init__(self, mailbox: Mailbox, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._cpu_s = cpu_s
        self._mailbox = mailbox
        self.initiated = self.finished = self.failed = self.late = 0
        self.bytes_sent = self.bytes_received = 0
        self._answered = 0
        self._total_s = self._last_s = self._distance = 0.0
        self._last_peer = -1
        self._reported_at: dict[tuple[int, str], float] = {}
        self._written_at = 0.0
        self._changed = True

    def answered(self, length: int, last: bool) -> None:
        """Count an answered chunk of another node's exchange."""
        self.bytes_sent += length
        self.bytes_received += length
        self._answered += last
        self._changed |= last

    def received(self, length: int, late: bool) -> None:
        """Count a received answer."""
        self.bytes_received += length
        self.late += late

    def finish(self, seconds: float, squares: float, compared: int, node: int) -> None:
        """Count a successful exchange that this side started.

        Args:
            seconds: Duration.
            squares: Sum of the squared differences.
            compared: Number of weights that `squares` covers; 0 if every chunk was left out.
            node: The neighbour.
        """
        self.finished += 1
        self._last_s, self._last_peer = seconds, node
        if compared:
            self._distance = math.sqrt(squares / compared)
        self._total_s += seconds
        self._changed = True

    def refuse(self, node: int, why: str) -> None:
        """Log a refusal, at most once a minute per node and reason."""
        now = time.monotonic()
        if now - self._reported_at.get((node, why), -_REPEAT_S) >= _REPEAT_S:
            self._reported_at[node, why] = now
            logging.warning("node %d refused an exchange: %s", node, why)

    def write(self, now: float, averager: Averaging) -> None:
        """Publish the figures if they have changed or the interval is over."""
        if self._changed or now - self._written_at >= _EVERY_S:
            self.publish(now, averager)

    def publish(self, now: float, averager: Averaging) -> None:
        """Write the figures to the mailbox."""
        mailbox = self._mailbox
        mailbox.initiated, mailbox.finished, mailbox.failed = self.initiated, self.finished, self.failed
        mailbox.answered, mailbox.late, mailbox.skipped = self._answered, self.late, averager.skipped
        mailbox.bytes_sent, mailbox.bytes_received = self.bytes_sent, self.bytes_received
        mailbox.last_s, mailbox.total_s = self._last_s, self._total_s
        mailbox.distance, mailbox.last_peer = self._distance, self._last_peer
        mailbox.cpu_seconds, mailbox.beat = self._cpu_s(), now
        if self._changed:
            mailbox.bell.ring()
        self._written_at, self._changed = now, False


# --- the protocol


class Protocol:
    """One node's side of all its exchanges; at most one of those that it started is in progress.

    Args:
        node: This node.
        mailbox: Shared with the training process.
        averager: Averages this node's weights.
        report: Receives the figures.
        per_step: Number of exchanges that this side may start per training step.
        window: Maximum number of unanswered chunks.

    Attributes:
        view: The members.
        asking: The exchange in progress that this side started, or None.
        number: Running number of the next exchange.
    """

    def __init__(
        self, node: int, mailbox: Mailbox, averager: Averaging, report: Report, per_step: int, window: int = 1
    ) -> None:
        self.view = View()
        self.asking: Asking | None = None
        self.number = 0
        self._node, self._mailbox, self._averager, self._report = node, mailbox, averager, report
        self._per_step, self._window = per_step, window
        self._ticks = self._permits = self._first = 0

    # --- asking

    def new_step(self) -> bool:
        """Check for a new training step and renew the permits; unused permits expire.

        Returns:
            Whether a step has ended since the last call.
        """
        if self._mailbox.ticks == self._ticks:
            return False
        self._ticks, self._permits = self._mailbox.ticks, self._per_step
        return True

    @property
    def may_begin(self) -> bool:
        """Whether this side may start an exchange."""
        return self.asking is None and self._permits > 0 and self._averager.loaded

    @property
    def first_of_step(self) -> bool:
        """Whether no exchange was started in this step."""
        return self._permits == self._per_step

    def begin(self, node: int, pending: Pending, now: float) -> Asking:
        """Start an exchange, at the chunk at which the last one broke off, if it did, so that no chunk is neglected.

        Args:
            node: The neighbour.
            pending: Unanswered chunks of the connection to it.
            now: Time of the driver's clock, in seconds.
        """
        token = self._averager.generation << 32 | (self.number & 0xFFFFFFFF)
        self.asking = Asking(node, pending, token, self._first, now, now)
        self._permits -= 1
        self._report.initiated += 1
        return self.asking

    def pass_over(self) -> None:
        """Use up a permit without an exchange, because there is no neighbour to ask."""
        self._permits -= 1

    def next_request(self) -> ChunkRequest | None:
        """The next chunk to send; None if all chunks are sent or the window is full.

        The chunk counts as sent only after a call of `sent`.
        """
        asking, averager = self.asking, self._averager
        if asking is None or asking.sent == averager.chunks or asking.sent - asking.settled >= self._window:
            return None
        index = (asking.first + asking.sent) % averager.chunks
        chunk = asking.pending.memory.take(averager.message_bytes(index))
        averager.ask(index, chunk)
        last = asking.sent == averager.chunks - 1
        return ChunkRequest(self.header(AVERAGE, asking.token, index=index, last=last), chunk)

    def sent(self, request: ChunkRequest) -> None:
        """Record that a request was sent."""
        assert self.asking is not None
        self.asking.pending.add(request.header, request.chunk, self._averager.step)
        self.asking.sent += 1
        self._report.bytes_sent += len(request.chunk)

    def hear(self, pending: Pending, header: Header, chunk: Buffer, now: float) -> Outcome:
        """Process an answer.

        Args:
            pending: Unanswered chunks of the answer's connection.
            header: The answer's header.
            chunk: The answer's weights.
            now: Time of the driver's clock, in seconds.
        """
        sent = pending.pop(header)
        if sent is None:
            return "ignored"
        asking = self.asking if self.asking and self.asking.token == header.token else None
        if header.status == CROSSED:
            pending.memory.give_back(sent.chunk)
            self._advance(asking, header.index, math.nan, now)
            return "crossed"
        if header.kind != AVERAGE or header.status != OK or len(chunk) != len(sent.chunk):
            if asking is None:
                return "ignored"
            self._report.refuse(asking.node, MEANING.get(header.status, "malformed"))
            pending.clear()
            self.give_up()
            return "refused"
        if header.token >> 32 != self._averager.generation:
            self._advance(asking, header.index, math.nan, now)
            return "ignored"
        squares = self._averager.settle(header.index, sent.chunk, chunk, sent.step)
        pending.memory.give_back(sent.chunk)
        self._report.received(len(sent.chunk), late=asking is None)
        self._advance(asking, header.index, squares, now)
        return "averaged"

    def _advance(self, asking: Asking | None, index: int, squares: float, now: float) -> None:
        if asking is None:
            return
        asking.settled += 1
        asking.moved = now
        if not math.isnan(squares):
            asking.squares += squares
            asking.compared += self._averager.count(index)

    @property
    def complete(self) -> bool:
        """Whether all chunks of the exchange in progress are answered."""
        return self.asking is not None and self.asking.settled == self._averager.chunks

    def finish(self, seconds: float) -> None:
        """Record the success of the exchange in progress, after `seconds`."""
        asking = self.asking
        assert asking is not None
        self._report.finish(seconds, asking.squares, asking.compared, asking.node)
        self.asking, self._first = None, 0

    def give_up(self) -> None:
        """Abort the exchange in progress."""
        asking = self.asking
        assert asking is not None
        self._report.failed += 1
        self._first, self.asking = (asking.first + asking.settled) % self._averager.chunks, None

    def note_rest(self, waits: bool) -> None:
        """Tell the training process whether an exchange of its last step may still end, or begin if `waits`."""
        if self.asking is None and not (waits and self.first_of_step):
            self._mailbox.rested = self._ticks

    # --- answering

    def poll(self) -> None:
        """Serve the training process's mailbox; called before every chunk, so that the training process never waits."""
        self._averager.poll()
        if self.asking and self.asking.token >> 32 != self._averager.generation:
            self.give_up()

    def answer(self, header: Header, chunk: Buffer) -> Header:
        """Answer a request; if an `AVERAGE` request gets status `OK`, the answer overwrites the chunk.

        Args:
            header: The request's header.
            chunk: The request's weights, in writable memory.

        Returns:
            The answer's header.
        """
        if header.kind == RELEASE:
            self._averager.release(chunk)
            return self.header(RELEASE, header.token, OK, header.index)
        status = self._status_of(header, chunk)
        if status == OK and header.kind == AVERAGE:
            self._averager.answer(header.index, chunk, chunk)
            self._report.answered(len(chunk), header.last)
        elif status == CROSSED:
            self._report.answered(0, header.last)
        return self.header(header.kind, header.token, status, header.index)

    def _status_of(self, header: Header, chunk: Buffer) -> int:
        """Determine the status of the answer to a request."""
        averager = self._averager
        if header.view < self.view.number and self.view.find(header.node) is None:
            return OUTDATED
        if not averager.loaded:
            return NOT_READY
        fits = (header.size, header.chunk) == (averager.size, averager.chunk)
        if header.kind != AVERAGE:
            return OK if fits and header.index * averager.chunk < averager.size else MISMATCH
        fits = fits and header.index < averager.chunks and header.wire == averager.wire.kind
        if not fits or len(chunk) != averager.message_bytes(header.index):
            return MISMATCH
        return CROSSED if self._crosses(header) else averager.refusal(chunk)

    def _crosses(self, header: Header) -> bool:
        """Whether this side waits for the asker's answer for the same chunk, and has priority.

        If both sides answered crossing requests, each would add the whole difference: they would swap their weights
        instead of averaging them. So only the request of the lower-numbered node is answered.
        """
        asking = self.asking
        if asking is None or header.node <= self._node or asking.node != header.node:
            return False
        return (asking.token, header.index) in asking.pending

    def header(self, kind: int, token: int, status: int = OK, index: int = 0, last: bool = False) -> Header:
        """Header of a message from this node."""
        averager = self._averager
        wire = averager.wire.kind if kind == AVERAGE else "fp32"
        return Header(
            kind, wire, status, last, self._node, averager.chunk, index, token, self.view.number, averager.size
        )
