"""What exchanges ask of each other and how they answer; no I/O.

One side begins an exchange and sends its weights chunk by chunk. The other averages each chunk with its own and sends
back what its own was; with that the first side averages too (see `averaging`). Whatever carries the messages drives
this: ZeroMQ between processes, Gloo between fixed pairs, virtual time in the simulator.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from training.coordinator.membership import View
from training.exchange.averaging import Averager
from training.exchange.mailbox import Mailbox
from training.exchange.messages import AVERAGE, CROSSED, MEANING, MISMATCH, NOT_READY, OK, OUTDATED, Header
from training.exchange.reporting import Report
from training.exchange.wire import Buffer

Outcome = Literal["ignored", "averaged", "crossed", "refused"]
"""What became of an answer; `crossed`: both asked for the same chunk, and theirs has the right of way."""


class ChunkRequest(NamedTuple):
    """A chunk to be sent to the neighbour that is asked."""

    header: Header
    chunk: Buffer


@dataclass(frozen=True, slots=True)
class _Sent:
    """A chunk that was sent, and the training step of its weights."""

    chunk: Buffer
    step: int


class Pending:
    """What was sent over one connection and is not answered yet.

    It outlives the exchange that it was sent for: a neighbour that answers late has added its half, so the other half
    must be added here.

    Args:
        memory: Makes memory for a message of so many bytes.
    """

    def __init__(self, memory: Callable[[int], Buffer] = bytearray) -> None:
        self._memory = memory
        self._sent: dict[tuple[int, int], _Sent] = {}
        self._spare: list[Buffer] = []

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._sent

    def buffer(self, length: int) -> Buffer:
        """Memory for a message; that of an answered one if there is some."""
        while self._spare:
            if len(spare := self._spare.pop()) == length:
                return spare
        return self._memory(length)

    def add(self, header: Header, chunk: Buffer, step: int) -> None:
        """Remember what was sent."""
        self._sent[header.token, header.index] = _Sent(chunk, step)

    def pop(self, header: Header) -> _Sent | None:
        """What an answer belongs to; None if that is not known, or was answered."""
        return self._sent.pop((header.token, header.index), None)

    def spare(self, chunk: Buffer) -> None:
        """A message was sent in full, as its answer is here: its memory may be used again."""
        self._spare.append(chunk)

    def clear(self) -> None:
        """Expect no more answers."""
        self._sent.clear()


@dataclass
class Asking:
    """An exchange that was begun here.

    Attributes:
        node: With whom.
        pending: Of the connection that it uses.
        token: Of its messages: generation of the weights, and number of the exchange.
        first: The chunk that it begins with.
        began: When, in the driver's seconds.
        moved: When an answer came last.
        sent: Chunks sent.
        settled: Chunks answered.
        squares: Sum of squared differences ...
        compared: ... over so many weights.
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


class Protocol:
    """One node's part in all exchanges, one of which at most was begun here.

    Args:
        node: This node.
        mailbox: Shared with the training process.
        averager: Works on its weights.
        report: Gets the figures.
        per_step: Exchanges that may begin here in a training step.
        window: Chunks at most that are sent ahead of the answers.

    Attributes:
        view: Who takes part.
        asking: The exchange that was begun here and is not over.
        number: Running number of the next exchange.
    """

    def __init__(
        self, node: int, mailbox: Mailbox, averager: Averager, report: Report, per_step: int, window: int = 1
    ) -> None:
        self.view = View()
        self.asking: Asking | None = None
        self.number = 0
        self._node, self._mailbox, self._averager, self._report = node, mailbox, averager, report
        self._per_step, self._window = per_step, window
        self._ticks = self._permits = self._first = 0

    # --- asking

    def new_step(self) -> bool:
        """Whether the training process has begun another step; permits that are left of the last one expire."""
        if self._mailbox.ticks == self._ticks:
            return False
        self._ticks, self._permits = self._mailbox.ticks, self._per_step
        return True

    @property
    def may_begin(self) -> bool:
        """Whether an exchange may begin here."""
        return self.asking is None and self._permits > 0 and self._averager.loaded

    @property
    def first_of_step(self) -> bool:
        """Whether none has begun in this step."""
        return self._permits == self._per_step

    def begin(self, node: int, pending: Pending, now: float) -> Asking:
        """Begin an exchange; if the last one broke off, with the chunk at which it did, so that all have their turn.

        Args:
            node: With whom.
            pending: Of the connection to it.
            now: The driver's seconds.
        """
        token = self._averager.generation << 32 | (self.number & 0xFFFFFFFF)
        self.asking = Asking(node, pending, token, self._first, now, now)
        self._permits -= 1
        self._report.initiated += 1
        return self.asking

    def pass_over(self) -> None:
        """There is nobody to ask: the permit is used up all the same."""
        self._permits -= 1

    def next_request(self) -> ChunkRequest | None:
        """The next chunk to be sent; None if the exchange has none left or has enough under way.

        The message counts only once `sent` was called.
        """
        asking, averager = self.asking, self._averager
        if asking is None or asking.sent == averager.chunks or asking.sent - asking.settled >= self._window:
            return None
        index = (asking.first + asking.sent) % averager.chunks
        chunk = asking.pending.buffer(averager.count(index) * averager.wire.itemsize)
        averager.ask(index, chunk)
        last = asking.sent == averager.chunks - 1
        return ChunkRequest(self.header(AVERAGE, asking.token, index=index, last=last), chunk)

    def sent(self, request: ChunkRequest) -> None:
        """A request is on its way."""
        assert self.asking is not None
        self.asking.pending.add(request.header, request.chunk, self._averager.step)
        self.asking.sent += 1
        self._report.bytes_sent += len(request.chunk)

    def hear(self, pending: Pending, header: Header, chunk: Buffer, now: float) -> Outcome:
        """Take an answer.

        Args:
            pending: Of the connection that it came by.
            header: The answer's header.
            chunk: The weights that it brings.
            now: The driver's seconds.
        """
        sent = pending.pop(header)
        if sent is None:
            return "ignored"
        asking = self.asking if self.asking and self.asking.token == header.token else None
        if header.status == CROSSED:
            pending.spare(sent.chunk)
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
        pending.spare(sent.chunk)
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
        """Whether all chunks of the exchange that was begun here are answered."""
        return self.asking is not None and self.asking.settled == self._averager.chunks

    def finish(self, seconds: float) -> None:
        """The exchange that was begun here has ended well after so many seconds."""
        asking = self.asking
        assert asking is not None
        self._report.finish(seconds, asking.squares, asking.compared, asking.node)
        self.asking, self._first = None, 0

    def give_up(self) -> None:
        """The exchange that was begun here ends before all chunks were answered."""
        asking = self.asking
        assert asking is not None
        self._report.failed += 1
        self._first, self.asking = (asking.first + asking.settled) % self._averager.chunks, None

    # --- answering

    def poll(self) -> None:
        """See what the training process has given and what it wants; before every chunk, so that it need not wait."""
        self._averager.poll()
        if self.asking and self.asking.token >> 32 != self._averager.generation:
            self.give_up()

    def answer(self, header: Header, chunk: Buffer) -> Header:
        """Answer a request; if the answer is `OK` to an average, it replaces the chunk.

        Args:
            header: The request's header.
            chunk: Its weights, in memory that may be written.

        Returns:
            The answer's header.
        """
        status = self._judge(header, len(chunk))
        if status == OK and header.kind == AVERAGE:
            self._averager.answer(header.index, chunk, chunk)
            self._report.answered(len(chunk), header.last)
        elif status == CROSSED:
            self._report.answered(0, header.last)
        return self.header(header.kind, header.token, status, header.index)

    def _judge(self, header: Header, length: int) -> int:
        """Status of the answer to a request."""
        averager = self._averager
        if header.view < self.view.number and self.view.find(header.node) is None:
            return OUTDATED
        if not averager.loaded:
            return NOT_READY
        fits = (header.size, header.chunk) == (averager.size, averager.chunk) and header.index < averager.chunks
        if header.kind == AVERAGE:
            fits = fits and header.wire == averager.wire.kind
            fits = fits and length == averager.count(header.index) * averager.wire.itemsize
            if fits and self._crosses(header):
                return CROSSED
        return OK if fits else MISMATCH

    def _crosses(self, header: Header) -> bool:
        """Whether this side waits for the asker's answer on the same chunk, and has the right of way.

        If two sides answered each other's requests that crossed, each would add the whole difference: they would swap
        their weights instead of averaging them. So the lower node's request is answered, the other's is not.
        """
        asking = self.asking
        if asking is None or header.node <= self._node or asking.node != header.node:
            return False
        return (asking.token, header.index) in asking.pending

    def header(self, kind: int, token: int, status: int = OK, index: int = 0, last: bool = False) -> Header:
        """The header of a message from here."""
        averager = self._averager
        wire = averager.wire.kind if kind == AVERAGE else "fp32"
        return Header(
            kind, wire, status, last, self._node, averager.chunk, index, token, self.view.number, averager.size
        )
