"""The exchange of learners on GPUs of one machine: ZeroMQ carries messages, and the weights stay in GPU memory.

The asker sends a reference to a snapshot in its own GPU memory. The answerer reads the snapshot there, writes the
difference to its own weights into a buffer of its own, subtracts half of it from its delta, and answers with a
reference to the buffer. The asker adds half of the same buffer to its delta, and then tells the answerer that the
buffer may be used again. So both sides take the same numbers, bit for bit, and the sum over the learners is preserved,
whatever happens to the snapshots meanwhile.

Everything runs in the training process: messages in a thread with a stream of its own (`PeerAverager`), snapshots and
updates in the training thread (`PeerMover`). Events order the work within a process. A reference is sent only after the
GPU has finished writing what it refers to, because these events do not order the work of different processes.
"""

import json
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from training.exchange.averaging import Averaging
from training.exchange.base import ExchangeError
from training.exchange.client import DaemonExchange
from training.exchange.control import Control
from training.exchange.daemon import serve_zmq
from training.exchange.device import (
    Copies,
    CopyEvent,
    CudaCopies,
    CudaPeerMemory,
    Handle,
    PeerMemory,
    PeerMemoryError,
    Points,
)
from training.exchange.mailbox import Floats, Mailbox
from training.exchange.messages import MISMATCH, NOT_READY, OK, UNREADABLE, Buffer, Wire
from training.exchange.movers import DeltaSum, Mover

log = logging.getLogger(__name__)
_END_S = 10.0
_SWITCH_S = 0.0005
"""How long the training thread may keep the interpreter while the exchange's thread waits for it (usually 5 ms): an
exchange passes the interpreter a dozen times."""


class CudaExchange(DaemonExchange):
    """An exchange whose daemon is a thread of the training process: only that process may use its GPU memory."""

    @override
    def _launch(self, setup: dict[str, Any], theirs: socket.socket) -> None:
        self._averager = PeerAverager(self._mailbox, int(setup["chunk"]))
        self._thread = threading.Thread(target=self._run, args=(setup, Control(theirs)), name="exchange", daemon=True)
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        self._thread.start()

    def _run(self, setup: dict[str, Any], control: Control) -> None:
        try:
            serve_zmq(setup, self._mailbox, control, self._averager, time.thread_time)
        except Exception:
            log.exception("the exchange has ended by an error")
        finally:
            control.close()

    @override
    def _make_mover(self, weights: torch.Tensor) -> Mover:
        try:
            memory, copies = self._device(weights)
            self._averager.attach(weights, memory, copies)
        except RuntimeError as error:
            raise ExchangeError(
                f"GPU memory cannot be shared with other processes ({error}): use exchange.kind=zmq"
            ) from error
        return PeerMover(self._mailbox, self._wake, self._averager, copies)

    def _device(self, weights: torch.Tensor) -> tuple[PeerMemory, Copies]:
        """Memory that other processes can read, and work on the device of the weights.

        Raises:
            ValueError: If the weights are not on a GPU.
        """
        if not weights.is_cuda:
            raise ValueError(
                f"exchange.kind is cuda, and the weights are on {weights.device}: use exchange.kind=zmq, or a GPU"
            )
        return CudaPeerMemory(weights.device), CudaCopies(weights.device)

    @override
    def alive(self) -> bool:
        return self._thread.is_alive() and super().alive()

    @override
    def close(self) -> None:
        self._control.close()
        self._end()
        if self._thread.is_alive():  # it may still use the memory
            log.error("the exchange's thread has not ended after %.0f s: its GPU does not answer", _END_S)
            return
        super().close()

    @override
    def _end(self) -> None:
        self._thread.join(_END_S)

    @override
    def _tail(self) -> str:
        return ""


# --- averaging by the half-difference rule


_MESSAGE_BYTES = 1024
_SNAPSHOTS = 4  # the newest, the one given meanwhile, the one with the latest averages, the one that a neighbour reads
_ANSWERS, _MOST_ANSWERS = 3, 8  # differences that askers have not read yet
_READ_S = 30.0  # an answer must be read within this time, and may be overwritten after twice this time
_MOST_OPEN = 512  # buffers of neighbours; each neighbour has up to twelve
_UNUSED_S = 60.0  # a neighbour's memory is closed if it was not read for this time
_WAIT_S = 0.05  # maximum time that an update waits for an exchange, while the GPU computes the gradient
_LOOK_S = 0.0002
_REPEAT_S = 60.0


@dataclass(eq=False)
class _Room:
    """Weights or differences on the device, which other processes can read.

    Attributes:
        values: The memory [parts, part]; what exceeds the weights is zero.
        handle: Its handle.
        written: Point at which its content is complete.
        uses: Points after which it may be overwritten.
    """

    values: torch.Tensor
    handle: Handle
    written: CopyEvent | None = None
    uses: Points = ()


@dataclass(eq=False)
class _Snapshot:
    """Weights of one training step.

    Attributes:
        room: Their memory.
        step: The training step.
        generation: Increases whenever the weights are replaced.
        takes: Number of deltas that they contain.
    """

    room: _Room
    step: int
    generation: int
    takes: int


@dataclass(eq=False)
class _Answer:
    """A difference that an asker reads.

    Attributes:
        room: Its memory.
        number: Names it to the asker; 0 once the asker has read it.
        sent_at: Monotonic time, in seconds.
    """

    room: _Room
    number: int = 0
    sent_at: float = -math.inf

    def is_free(self, now: float) -> bool:
        return not self.number or now - self.sent_at > 2 * _READ_S


class PeerAverager(Averaging):
    """The exchange's side: averages with other processes on the same GPU, or on GPUs that can read each other's memory.

    Args:
        mailbox: Holds the figures and counters; its buffers for weights are not used.
        part: Number of weights of a part: parts that are not finite are left out.

    Attributes:
        chunk: Weights per message to a newcomer, and of a part; an exchange has a single message for all.
        skipped: Number of parts left out because they were not finite.
    """

    refers = True

    def __init__(self, mailbox: Mailbox, part: int) -> None:
        self.size, self.chunk, self.chunks = mailbox.size, min(part, mailbox.size), 1
        self.wire = Wire("fp32", 1)
        self.generation = self.step = self.skipped = 0
        self.lock = threading.Lock()  # held while work is issued or recorded, never while waiting for it
        self._number = 0
        self._mailbox = mailbox
        self._opened: dict[str, tuple[torch.Tensor, float]] = {}
        self._warned_at = -math.inf

    def attach(self, weights: torch.Tensor, memory: PeerMemory, copies: Copies) -> None:
        """Allocate the memory (training thread); before, there are no weights to average.

        Args:
            weights: Weights on the device; only their shape and device are used.
            memory: Memory that other processes can read.
            copies: Work on the device.
        """
        self._memory, self._copies = memory, copies
        self._parts = -(-self.size // self.chunk)
        self.gathering, self.taken = (DeltaSum(torch.empty_like(weights)) for _ in range(2))
        # these wait for the device: then the training stream no longer uses what any of this memory was before
        self.rooms = [self._new_room() for _ in range(_SNAPSHOTS)]
        self._answers = [_Answer(self._new_room()) for _ in range(_ANSWERS)]
        self._norms = copies.host(self._parts)
        self.takes = self.current_generation = 0
        self.given: _Snapshot | None = None
        self._base: _Snapshot | None = None
        self._mixed: _Room | None = None
        self._mixed_from: tuple[int, int] = (0, 0)
        self._asked: _Room | None = None

    def _new_room(self) -> _Room:
        values, handle = self._memory.allocate(self._parts * self.chunk)
        return _Room(values.view(self._parts, self.chunk), handle)

    def flat(self, room: _Room) -> torch.Tensor:
        """The weights in a room [size]."""
        return room.values.view(-1)[: self.size]

    def free_room(self) -> _Room:
        """A room that no exchange uses and that holds no snapshot; call with the lock."""
        busy = {id(room) for room in (self._mixed, self._asked)}
        busy |= {id(snapshot.room) for snapshot in (self._base, self.given) if snapshot is not None}
        return next(room for room in self.rooms if id(room) not in busy)

    # --- what the protocol and the daemon need

    @override
    def count(self, index: int) -> int:
        return self.size

    @override
    def message_bytes(self, index: int) -> int:
        return _MESSAGE_BYTES

    @override
    def use(self) -> None:
        self._mailbox.used = self._mailbox.read

    @override
    def poll(self) -> bool:
        """Use the newest snapshot, and close memory of neighbours that was not read for long."""
        now = time.monotonic()
        for key in [key for key, (_, used_at) in self._opened.items() if now - used_at > _UNUSED_S]:
            self._copies.run("across", lambda key=key: self._opened.pop(key)).wait()  # type: ignore[misc]
        mailbox = self._mailbox
        if mailbox.read == mailbox.written:
            return False
        with self.lock:
            assert self.given is not None
            self._base, self._mixed = self.given, None
            self.step, self.generation = self._base.step, self._base.generation
            mailbox.read = mailbox.written
        return True

    @override
    def refusal(self, theirs: Buffer) -> int:
        asked = _read(theirs)
        if asked is None:
            return MISMATCH
        try:
            self._open(asked["memory"])
        except PeerMemoryError as error:
            self._warn("cannot read a neighbour's weights on its GPU (%s): use exchange.kind=zmq", error)
            return UNREADABLE
        return OK if self._free_answer() else NOT_READY

    @override
    def ask(self, index: int, out: Buffer) -> None:
        self.use()
        with self.lock:
            self._asked = room = self._current()
        _finish(room.written)
        _write(out, {"memory": room.handle, "at": time.monotonic()})

    @override
    def answer(self, index: int, theirs: Buffer, out: Buffer) -> float:
        self.use()
        asked, answer = _read(theirs), self._free_answer()
        assert asked is not None
        assert answer is not None
        snapshot = self._open(asked["memory"])
        room, values = answer.room, answer.room.values
        with self.lock:
            generation, step, mine = self.generation, self.step, self._current()
            difference = self._subtract(room, mine, snapshot)
        difference.wait()
        norms = self._norms.double()
        lost = [k for k, norm in enumerate(norms.tolist()) if not math.isfinite(norm)]
        if lost:
            self.skipped += len(lost)
            self._copies.run("across", lambda: [values[k].zero_() for k in lost]).wait()
        compared = len(lost) < self._parts
        if compared:
            self._add(room, step, generation, -0.5)
        squares = float(norms.nan_to_num(0.0, 0.0).square().sum()) if compared else math.nan
        self._number += 1
        answer.number, answer.sent_at = self._number, time.monotonic()
        _write(out, {"memory": room.handle, "number": self._number, "squares": squares, "skipped": len(lost)})
        return squares

    @override
    def settle(self, index: int, sent: Buffer, theirs: Buffer, step: int) -> float:
        answered, asked = _read(theirs), _read(sent)
        if answered is None or asked is None:
            return math.nan
        squares, skipped = answered.get("squares"), answered.get("skipped")
        self.skipped += skipped if isinstance(skipped, int) else 0
        if not isinstance(squares, float) or math.isnan(squares):
            return math.nan
        if time.monotonic() - asked["at"] > _READ_S:
            self._warn("an answer came too late to be averaged with: %s", "its memory may have been overwritten")
            return math.nan
        try:
            difference = self._open(answered["memory"])
        except PeerMemoryError as error:
            self._warn("cannot read a neighbour's answer on its GPU, averaged by one side only (%s)", error)
            return math.nan
        added = self._add(_Room(difference, {}), step, self.generation, 0.5)
        _finish(added)
        return squares

    @override
    def release(self, answered: Buffer) -> None:
        message = _read(answered)
        if not self.loaded or message is None:
            return
        for answer in self._answers:
            if answer.number == message.get("number"):
                answer.number = 0

    @override
    def weights(self, index: int) -> Floats:
        part = slice(index * self.chunk, min(self.size, (index + 1) * self.chunk))
        host = torch.empty(part.stop - part.start)
        with self.lock:
            room = self._current()
            copied = self._copies.copy("across", host, self.flat(room)[part], (room.written,))
            room.uses += (copied,)
        copied.wait()
        values: Floats = host.numpy()
        return values

    # --- work on the device; call with the lock

    def _current(self) -> _Room:
        """The newest snapshot, with all deltas that it lacks."""
        base, gathering = self._base, self.gathering
        assert base is not None
        lacking = [gathering.values] if gathering.steps else []
        if base.takes < self.takes:
            lacking.append(self.taken.values)
        if not lacking:
            return base.room
        origin = (self.takes, len(gathering.steps))
        if self._mixed is not None and self._mixed_from == origin:
            return self._mixed
        self._mixed = None
        room = self.free_room()
        first, *rest = lacking

        def mix() -> None:
            out = self.flat(room)
            torch.add(self.flat(base.room), first, out=out)
            for delta in rest:
                out.add_(delta)

        room.written = self._copies.run("across", mix, (base.room.written, *room.uses))
        room.uses = (room.written,)
        base.room.uses += (room.written,)
        self._mixed, self._mixed_from = room, origin
        return room

    def _subtract(self, target: _Room, mine: _Room, theirs: torch.Tensor) -> CopyEvent:
        """Write the difference into a room, and the norm of each part of it to main memory."""

        def work() -> None:
            torch.sub(self.flat(mine), theirs.view(-1)[: self.size], out=self.flat(target))
            norms = torch.linalg.vector_norm(target.values, dim=1)
            self._norms.copy_(norms, non_blocking=True)

        point = self._copies.run("across", work, (mine.written,))
        mine.uses += (point,)
        return point

    def _add(self, room: _Room, step: int, generation: int, scale: float) -> CopyEvent | None:
        """Add a scaled difference to the delta, unless the weights were replaced."""
        with self.lock:
            if generation != self.current_generation:
                return None
            return self.gathering.add("across", self.flat(room), step, self._copies, scale)

    # --- memory of other processes

    def _open(self, handle: Handle) -> torch.Tensor:
        """Memory of another process; it stays open while it is used.

        Raises:
            PeerMemoryError: If it cannot be opened.
        """
        key = json.dumps(handle, sort_keys=True)
        known = self._opened.get(key)
        if known is None and len(self._opened) == _MOST_OPEN:
            raise PeerMemoryError(f"{_MOST_OPEN} buffers of neighbours are open already")
        memory = self._memory.open(handle, self._parts * self.chunk) if known is None else known[0]
        self._opened[key] = memory, time.monotonic()
        return memory

    def _free_answer(self) -> _Answer | None:
        """Memory for an answer; None if too many wait for their askers."""
        now = time.monotonic()
        for answer in self._answers:
            if answer.is_free(now):
                return answer
        if len(self._answers) == _MOST_ANSWERS:
            return None
        self._answers.append(_Answer(self._new_room()))
        return self._answers[-1]

    def _warn(self, text: str, why: object) -> None:
        """Log a warning, at most once a minute."""
        if (now := time.monotonic()) - self._warned_at > _REPEAT_S:
            self._warned_at = now
            log.warning(text, why)

    def close(self) -> None:
        """Wait for all work, and give up the memory; the exchange's thread has ended."""
        self._copies.close()
        self._opened.clear()
        self._memory.close()
        self.rooms.clear()
        self._answers.clear()


class PeerMover(Mover):
    """The training process's side of a `PeerAverager`: snapshots and updates on the training stream.

    Args:
        mailbox: Holds the figures and counters.
        wake: Notifies the exchange of changes.
        averager: The exchange's side, attached.
        copies: Work on the device.
    """

    def __init__(self, mailbox: Mailbox, wake: Callable[[], None], averager: PeerAverager, copies: Copies) -> None:
        super().__init__(mailbox, wake)
        self._averager, self._copies = averager, copies

    @override
    def restart(self) -> None:
        averager = self._averager
        with averager.lock:
            super().restart()
            averager.current_generation = self.generation
            averager.gathering.steps.clear()
            averager.taken.steps.clear()

    @override
    def give(self, weights: torch.Tensor, step: int) -> bool:
        """Copy the weights on the device, after the work that changes them; False if nobody saw the last ones."""
        averager, mailbox = self._averager, self._mailbox
        with averager.lock:
            unseen = mailbox.read != mailbox.written
            room = averager.given.room if unseen and averager.given else averager.free_room()
            for point in room.uses:
                if point is not None:
                    self._copies.follow(point)
            averager.flat(room).copy_(weights.detach(), non_blocking=True)
            room.written = self._copies.mark()
            room.uses = (room.written,)
            averager.given = _Snapshot(room, step, self.generation, averager.takes)
            mailbox.newest = step
            mailbox.send_snapshot(step, averager.takes, self.generation)
        self._wake()
        return not unseen

    @override
    def update_begins(self) -> None:
        """Wait for this step's exchange, but no longer than the GPU computes anyway."""
        mailbox, until = self._mailbox, time.monotonic() + _WAIT_S
        if mailbox.rested == mailbox.ticks:
            return
        computed = self._copies.mark()
        while mailbox.rested != mailbox.ticks and not computed.done() and time.monotonic() < until:
            time.sleep(_LOOK_S)

    @override
    def ready(self) -> bool:
        """Whether there is a delta; never waits."""
        averager = self._averager
        with averager.lock:
            steps = averager.gathering.steps or averager.taken.steps
            self.oldest = min(steps, default=0)
            return bool(steps)

    @override
    def take(self) -> torch.Tensor:
        """The sum of the deltas; the training stream waits for the last addition before it reads the sum."""
        averager = self._averager
        with averager.lock:
            if not averager.taken.steps:
                averager.gathering, averager.taken = averager.taken, averager.gathering
                averager.takes += 1
                assert averager.taken.added is not None
                self._copies.follow(averager.taken.added)
            return averager.taken.values

    @override
    def release(self) -> None:
        averager = self._averager
        with averager.lock:
            averager.taken.steps.clear()
            averager.taken.readers += (self._copies.mark(),)

    @override
    def close(self) -> None:
        self._averager.close()


def _finish(point: CopyEvent | None) -> None:
    if point is not None:
        point.wait()


def _write(out: Buffer, message: dict[str, object]) -> None:
    """Write a message of fixed length: JSON, filled up with spaces."""
    text = json.dumps(message).encode()
    assert len(text) <= _MESSAGE_BYTES
    memoryview(out)[:] = text.ljust(_MESSAGE_BYTES)


def _read(message: Buffer) -> dict[str, Any] | None:
    """Read a message of another process; None if it is malformed."""
    try:
        text = json.loads(bytes(message))
    except ValueError:
        return None
    return text if isinstance(text, dict) and isinstance(text.get("memory"), dict) else None
