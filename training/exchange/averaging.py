"""The half-difference rule on chunks of flat weights; no I/O.

Two sides i and j exchange a chunk: i sends its current weights, j answers with its own, and both add half the
difference of the two messages: j at once, i when the answer arrives. The two additions are exact negatives of each
other, bit for bit, so the sum over learners is preserved even if the weights of either side change in between by
gradient steps, other exchanges or newer snapshots. (AD-PSGD, arXiv:1710.06952, algorithm 1, without its lock: there,
both sides overwrite their weights with the average, which needs one.)

Additions go to a working copy of the weights, from which further exchanges read, and to a delta that the training
process adds to the live weights between two steps. The delta is handed over on demand, just before an update, so that
it contains everything averaged until then (staleness one, arXiv:1904.04956).
"""

from abc import ABC, abstractmethod

import numpy as np
from typing_extensions import override

from training.exchange.mailbox import Floats, Mailbox, fence
from training.exchange.messages import OK, Buffer, Wire, WireKind

_QUIET = np.errstate(over="ignore", invalid="ignore")  # non-finite values are detected explicitly


class Averaging(ABC):
    """The exchange's side of a mailbox: averages chunks and collects the delta.

    Attributes:
        size: Number of weights.
        generation: Generation of the current weights; 0 before the first ones.
        step: Training step of the snapshot in use.
        chunks: Number of messages of an exchange, each with one chunk.
        chunk: Weights per chunk; the last one may be shorter.
        wire: Converts chunks to messages and back.
        skipped: Number of chunks left out because they were not finite.
        refers: Whether messages refer to weights in shared memory instead of containing them.
    """

    refers = False
    size: int
    generation: int
    step: int
    chunks: int
    chunk: int
    wire: Wire
    skipped: int

    @property
    def loaded(self) -> bool:
        """Whether weights have been loaded."""
        return self.generation > 0

    @abstractmethod
    def count(self, index: int) -> int:
        """Number of weights in a chunk."""

    @abstractmethod
    def message_bytes(self, index: int) -> int:
        """Length of a chunk's message in bytes."""

    @abstractmethod
    def weights(self, index: int) -> Floats:
        """The current weights of a chunk, in main memory."""

    @abstractmethod
    def poll(self) -> bool:
        """Load a waiting snapshot; returns whether there was one. Cheap enough to call before every chunk."""

    @abstractmethod
    def use(self) -> None:
        """Mark the current snapshot as used, which requests a newer one."""

    def refusal(self, theirs: Buffer) -> int:
        """Status of the answer to a request of the right size: `OK` if its weights can be averaged."""
        return OK

    @abstractmethod
    def ask(self, index: int, out: Buffer) -> None:
        """Encode a chunk as a request; its weights are those of `self.step`."""

    @abstractmethod
    def answer(self, index: int, theirs: Buffer, out: Buffer) -> float:
        """Average a chunk with a request, and encode the answer.

        Args:
            index: Index of the chunk.
            theirs: The request.
            out: Memory for the answer; may be that of the request.

        Returns:
            Sum of the squared differences; NaN if the chunk was left out.
        """

    @abstractmethod
    def settle(self, index: int, sent: Buffer, theirs: Buffer, step: int) -> float:
        """Average a chunk with the answer to our request.

        Args:
            index: Index of the chunk.
            sent: Our request.
            theirs: The answer.
            step: Training step of the weights in our request.

        Returns:
            Sum of the squared differences; NaN if the chunk was left out.
        """

    def release(self, answered: Buffer) -> None:  # noqa: B027 - only needed if an answer refers to memory
        """Allow reuse of the memory to which an answer refers; the asker sends the answer back once it has read it."""


class Averager(Averaging):
    """Averages weights in main memory; messages contain them."""

    def __init__(self, mailbox: Mailbox, chunk: int, wire: WireKind = "fp32") -> None:
        self._mailbox = mailbox
        self.size = mailbox.size
        self.chunk = min(chunk, max(self.size, 1))
        self.chunks = -(-self.size // self.chunk)
        self.wire = Wire(wire, self.chunk)
        self.generation = 0
        self.step = 0
        self.skipped = 0
        self._weights = mailbox.weights[0]
        self._pending = mailbox.deltas[1]
        self._fresh = np.ones(self.chunks, bool)  # chunks without a pending delta; their memory is stale
        self._offered_generation = 0
        self._pending_step = 0
        mailbox.gathered = 0
        self._difference = np.empty(self.chunk, np.float32)

    @property
    def dirty(self) -> bool:
        """Whether there is a delta to hand over."""
        return not bool(self._fresh.all())

    @override
    def count(self, index: int) -> int:
        return min(self.chunk, self.size - index * self.chunk)

    @override
    def message_bytes(self, index: int) -> int:
        return self.count(index) * self.wire.itemsize

    @override
    def weights(self, index: int) -> Floats:
        return self._weights[index * self.chunk : index * self.chunk + self.count(index)]

    @override
    def poll(self) -> bool:
        """Load a waiting snapshot, if there is one, and hand over the delta if demanded."""
        # `released` must be read first: if a delta is released now, a snapshot without it is loaded before the
        # delta's memory is reused
        mailbox = self._mailbox
        empty, wanted = mailbox.released == mailbox.offered, mailbox.wanted
        loaded = self._load()
        if empty and wanted != mailbox.handed:
            if self.dirty:
                self._hand_over()
            fence()
            mailbox.handed = wanted
            mailbox.bell.ring()
        return loaded

    @override
    def ask(self, index: int, out: Buffer) -> None:
        self.use()
        self.wire.encode(self.weights(index), out)

    @_QUIET
    @override
    def answer(self, index: int, theirs: Buffer, out: Buffer) -> float:
        self.use()
        weights, difference = self.weights(index), self._difference[: self.count(index)]
        if self.wire.kind == "fp32":
            np.subtract(self.wire.decode(theirs), weights, out=difference)
            self.wire.encode(weights, out)
        else:
            received = self.wire.decode(theirs)
            self.wire.encode(weights, out)
            np.subtract(received, self.wire.decode(out, 1), out=difference)
        return self._add(index, difference, self.step)

    @_QUIET
    @override
    def settle(self, index: int, sent: Buffer, theirs: Buffer, step: int) -> float:
        difference = self._difference[: self.count(index)]
        np.subtract(self.wire.decode(theirs), self.wire.decode(sent, 1), out=difference)
        return self._add(index, difference, step)

    @override
    def use(self) -> None:
        if self._mailbox.used != self._mailbox.read:
            self._mailbox.used = self._mailbox.read
            self._mailbox.bell.ring()

    def _add(self, index: int, difference: Floats, step: int) -> float:
        # finite squares imply finite differences; otherwise check each value, so that both sides decide alike
        squares = float(difference.dot(difference))
        if not np.isfinite(squares) and not np.isfinite(difference).all():
            self.skipped += 1
            return float("nan")
        start = index * self.chunk
        pending = self._pending[start : start + len(difference)]
        if self._fresh[index]:
            np.multiply(difference, np.float32(0.5), out=pending)
            self._weights[start : start + len(difference)] += pending
            self._pending_step = min(self._pending_step, step) if self.dirty else step
            self._fresh[index] = False
        else:
            difference *= np.float32(0.5)
            pending += difference
            self._weights[start : start + len(difference)] += difference
            self._pending_step = min(self._pending_step, step)
        self._mailbox.gathered += 1
        return squares

    @_QUIET
    def _load(self) -> bool:
        """Load a waiting snapshot: its buffer becomes the working copy, and deltas that it lacks are added."""
        mailbox, number = self._mailbox, self._mailbox.written
        if number == mailbox.read:
            return False
        weights = mailbox.weights[number % 2]
        if mailbox.snapshot_generation != self.generation:
            self.generation = mailbox.snapshot_generation
            self._fresh[:] = True
            mailbox.gathered = 0
        else:
            offered = mailbox.offered
            if mailbox.snapshot_taken < offered and self._offered_generation == self.generation:
                weights += mailbox.deltas[offered % 2]
            for index in np.flatnonzero(~self._fresh).tolist():
                part = slice(index * self.chunk, index * self.chunk + self.count(index))
                weights[part] += self._pending[part]
        self._weights, self.step = weights, mailbox.snapshot_step
        mailbox.read = number
        return True

    def _hand_over(self) -> None:
        """Offer the pending delta, and collect the next one in the other buffer."""
        for index in np.flatnonzero(self._fresh).tolist():
            self._pending[index * self.chunk : index * self.chunk + self.count(index)] = 0
        self._mailbox.send_delta(self._pending_step, self.generation)
        self._offered_generation = self.generation
        self._pending = self._mailbox.deltas[(self._mailbox.offered + 1) % 2]
        self._fresh[:] = True
        self._mailbox.gathered = 0
