"""A replica for newcomers (weights and optimizer state of one step) in memory shared between a training process and its
daemon.

The replica is written on demand: a newcomer's request increments the count of requests, the training process writes the
replica after its next step and sets its own count to it, and the daemon serves the replica chunk by chunk while
training continues. It is read to the end before another one is written, and its memory is released when it has no more
readers.

The replica is one array: the weights, as many values of each moment of the optimizer, and the optimizer's step count.
"""

import mmap
from dataclasses import replace

import numpy as np

from training.exchange.mailbox import Floats, discard, fence, whole_pages
from training.exchange.messages import MISMATCH, NOT_READY, OK, REPLICA, WAITING, Header

_PAGE = 4096
_FRESH_S = 2.0  # maximum age of a replica when a newcomer starts to read it
_KEEP_S = 30.0  # a replica stays in memory for this time after the last read


def replica_length(size: int, moments: int) -> int:
    """Number of values in a replica of `size` weights."""
    return (1 + moments) * size + 1


def replica_bytes(length: int) -> int:
    """Size in bytes of the memory for one replica to give and one fetched replica."""
    return _PAGE + 2 * whole_pages(4 * length)


class ReplicaMemory:
    """The mapped memory of two replicas.

    Args:
        file: Descriptor of the file; still owned by the caller.
        length: Number of values in a replica.

    Attributes:
        given: The replica for newcomers.
        fetched: The replica fetched from a neighbour.
    """

    def __init__(self, file: int, length: int) -> None:
        self._map = mmap.mmap(file, replica_bytes(length))
        self._words = np.frombuffer(self._map, np.int64, 2)
        self._room = whole_pages(4 * length)
        self.given: Floats = np.frombuffer(self._map, np.float32, length, _PAGE)
        self.fetched: Floats = np.frombuffer(self._map, np.float32, length, _PAGE + self._room)

    @property
    def wanted(self) -> bool:
        """Whether the training process must write a replica; then no newcomer reads one."""
        wanted = bool(self._words[0] != self._words[1])
        fence()
        return wanted

    def want(self) -> None:
        """Request a replica (daemon)."""
        self._words[0] += 1

    def give(self) -> None:
        """Signal that the replica is written (training process)."""
        fence()
        self._words[1] = self._words[0]

    def forget_given(self) -> None:
        """Return the memory of `given` to the system until it is used again."""
        discard(self._map, _PAGE, self._room)

    def forget_fetched(self) -> None:
        """Return the memory of `fetched` to the system until it is used again."""
        discard(self._map, _PAGE + self._room, self._room)

    def close(self) -> None:
        """Drop the references to the memory, which is unmapped with the last one."""
        del self._words, self.given, self.fetched


class ReplicaGiver:
    """The daemon's side: answers newcomers' requests, and makes requests to other nodes; no I/O.

    Args:
        memory: Shared with the training process.
        optimizer: Name of the optimizer state, which must match the newcomer's.
        chunk: Number of values per message.
        timeout_s: A reader that is silent for this time counts as gone.
    """

    def __init__(self, memory: ReplicaMemory, optimizer: str, chunk: int, timeout_s: float) -> None:
        self.memory, self.optimizer = memory, optimizer.encode()
        self._chunk, self._timeout_s = chunk, timeout_s
        self._present = False
        self._wanted_at = self._read_at = 0.0
        self._readers: set[bytes] = set()

    def request(self, header: Header) -> Header:
        """Header of a request for another node's replica, derived from that of a request for its weights."""
        return replace(header, kind=REPLICA, size=len(self.memory.fetched))

    def answer(self, header: Header, reader: bytes, optimizer: bytes, now: float) -> tuple[int, bytes]:
        """Status of the answer to a newcomer's request, and the chunk.

        Args:
            header: The request's header.
            reader: Id of the newcomer's connection.
            optimizer: Name of the newcomer's optimizer state.
            now: Monotonic time, in seconds.
        """
        values, start = self.memory.given, header.index * self._chunk
        asked = (header.size, header.chunk, optimizer)
        if asked != (len(values), self._chunk, self.optimizer) or start >= len(values):
            return MISMATCH, b""
        if header.index == 0 and reader not in self._readers:
            self._want(now)
            self._readers.add(reader)
        if reader not in self._readers:
            return NOT_READY, b""  # the replica that it started to read was replaced
        if self.memory.wanted:
            self._read_at = now
            return WAITING, b""
        if not values[-1] >= 1:
            return NOT_READY, b""  # an optimizer without a step has no state
        self._read_at = now
        return OK, values[start : start + self._chunk].tobytes()

    def _want(self, now: float) -> None:
        """Request a replica from the training process, unless there is a fresh one or the last one is still read."""
        read = bool(self._readers) and now - self._read_at < self._timeout_s
        if self.memory.wanted or (self._present and (now - self._wanted_at < _FRESH_S or read)):
            return
        self._readers.clear()
        self._present, self._wanted_at = True, now
        self.memory.want()

    def tidy(self, now: float) -> None:
        """Release the memory if the replica was not read for a while."""
        if self._present and not self.memory.wanted and now - max(self._wanted_at, self._read_at) > _KEEP_S:
            self._present = False
            self._readers.clear()
            self.memory.forget_given()
