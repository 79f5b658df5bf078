"""Memory of messages that were answered, for reuse by the next ones."""

from collections.abc import Callable

from training.exchange.wire import Buffer


class MemoryPool:
    """Allocates memory for messages and takes it back; never holds more than was in use at once.

    Args:
        allocate: Allocates memory, given its size in bytes.
    """

    def __init__(self, allocate: Callable[[int], Buffer]) -> None:
        self._allocate = allocate
        self._spare: list[Buffer] = []

    def take(self, length: int) -> Buffer:
        """Memory of this length; spare memory of another length, such as that of a model's last chunk, is freed."""
        while self._spare:
            if len(spare := self._spare.pop()) == length:
                return spare
        return self._allocate(length)

    def give_back(self, memory: Buffer) -> None:
        """Allow reuse of a message's memory, after an answer proves that the message was sent in full."""
        self._spare.append(memory)
