"""A replica for newcomers, weights and optimizer state of one step, in memory that a training process shares with its
daemon.

Nothing is written before somebody asks: a newcomer's request raises `wanted`, the training process writes the replica
after its next step and raises `given` to it, and the daemon serves it chunk by chunk while training goes on. It is read
to the end before another one is written, and its memory is given back when nobody reads it any more.

The replica is one array: the weights, as many values of each moment of the optimizer, and the optimizer's steps.
"""

import mmap
from dataclasses import replace

import numpy as np

from training.exchange.mailbox import Floats, discard, fence, whole_pages
from training.exchange.messages import MISMATCH, NOT_READY, OK, REPLICA, WAITING, Header

_PAGE = 4096
_FRESH_S = 2.0  # a replica may be older by so much when somebody begins to read it
_KEEP_S = 30.0  # it stays in memory for so long after the last reading


def replica_length(size: int, moments: int) -> int:
    """Values of a replica of so many weights."""
    return (1 + moments) * size + 1


def replica_bytes(length: int) -> int:
    """Bytes of the memory for a replica to give and one that was fetched."""
    return _PAGE + 2 * whole_pages(4 * length)


class ReplicaMemory:
    """The mapped memory.

    Args:
        file: Its descriptor, which remains the caller's.
        length: Values of a replica.

    Attributes:
        given: What this node gives newcomers.
        fetched: What it has taken from a neighbour.
    """

    def __init__(self, file: int, length: int) -> None:
        self._map = mmap.mmap(file, replica_bytes(length))
        self._words = np.frombuffer(self._map, np.int64, 2)
        self._room = whole_pages(4 * length)
        self.given: Floats = np.frombuffer(self._map, np.float32, length, _PAGE)
        self.fetched: Floats = np.frombuffer(self._map, np.float32, length, _PAGE + self._room)

    @property
    def wanted(self) -> bool:
        """Whether the training process is to write a replica, and nobody reads one."""
        wanted = bool(self._words[0] != self._words[1])
        fence()
        return wanted

    def want(self) -> None:
        """The daemon asks for a replica."""
        self._words[0] += 1

    def give(self) -> None:
        """The training process has written it."""
        fence()
        self._words[1] = self._words[0]

    def forget_given(self) -> None:
        """Give the memory of `given` back to the system until it is used again."""
        discard(self._map, _PAGE, self._room)

    def forget_fetched(self) -> None:
        """The same of `fetched`."""
        discard(self._map, _PAGE + self._room, self._room)

    def close(self) -> None:
        """Let go of the memory, which goes with its last user."""
        del self._words, self.given, self.fetched


class ReplicaGiver:
    """The daemon's side: what it answers to newcomers, and how it asks others; no I/O.

    Args:
        memory: Shared with the training process.
        optimizer: Its name, which a newcomer's must be, too.
        chunk: Values in a message.
        timeout_s: A reader that is silent for so long is gone.
    """

    def __init__(self, memory: ReplicaMemory, optimizer: str, chunk: int, timeout_s: float) -> None:
        self.memory, self.optimizer = memory, optimizer.encode()
        self._chunk, self._timeout_s = chunk, timeout_s
        self._present = False
        self._wanted_at = self._read_at = 0.0
        self._readers: set[bytes] = set()

    def request(self, header: Header) -> Header:
        """The header of a request for another node's replica, from that of one for its weights."""
        return replace(header, kind=REPLICA, size=len(self.memory.fetched))

    def answer(self, header: Header, reader: bytes, optimizer: bytes, now: float) -> tuple[int, bytes]:
        """Status of a newcomer's request, and the chunk.

        Args:
            header: Of the request.
            reader: Names the newcomer's connection.
            optimizer: The newcomer's.
            now: Monotonic seconds.
        """
        values, start = self.memory.given, header.index * self._chunk
        asked = (header.size, header.chunk, optimizer)
        if asked != (len(values), self._chunk, self.optimizer) or start >= len(values):
            return MISMATCH, b""
        if header.index == 0 and reader not in self._readers:
            self._want(now)
            self._readers.add(reader)
        if reader not in self._readers:
            return NOT_READY, b""  # what it has begun to read has been replaced
        if self.memory.wanted:
            self._read_at = now
            return WAITING, b""
        if not values[-1] >= 1:
            return NOT_READY, b""  # an optimizer that has made no step has no state
        self._read_at = now
        return OK, values[start : start + self._chunk].tobytes()

    def _want(self, now: float) -> None:
        """Have the training process write a replica, unless there is a fresh one, or somebody still reads the last."""
        read = bool(self._readers) and now - self._read_at < self._timeout_s
        if self.memory.wanted or (self._present and (now - self._wanted_at < _FRESH_S or read)):
            return
        self._readers.clear()
        self._present, self._wanted_at = True, now
        self.memory.want()

    def tidy(self, now: float) -> None:
        """Give the memory back when nobody has read for a while."""
        if self._present and not self.memory.wanted and now - max(self._wanted_at, self._read_at) > _KEEP_S:
            self._present = False
            self._readers.clear()
            self.memory.forget_given()
