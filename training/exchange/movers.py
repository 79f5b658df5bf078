"""How tensors get into shared memory and out of it: at once on a CPU, beside the computation on a GPU."""

import contextlib

import torch

from training.exchange.mailbox import Floats, Mailbox

Note = tuple[int, int, int]


class HostMover:
    """Copies within main memory."""

    busy = False

    def __init__(self, mailbox: Mailbox) -> None:
        self._deltas = [torch.from_numpy(part) for part in mailbox.deltas]
        self._note: Note | None = None
        self._number = 0

    def send(self, weights: torch.Tensor, slot: Floats, note: Note) -> None:
        """Copy weights to the slot; `sent` tells when they are there."""
        torch.from_numpy(slot).copy_(weights.detach())
        self._note = note

    def sent(self) -> Note | None:
        """The note of a copy that has ended, once."""
        note, self._note = self._note, None
        return note

    def bring(self, number: int) -> bool:
        """Begin to bring a delta; whether it is there."""
        self._number = number
        return True

    def delta(self) -> torch.Tensor:
        """The delta that was brought."""
        return self._deltas[self._number % 2]

    def forget(self) -> None:
        """The delta in use is given back."""
        self._number = 0

    def close(self) -> None:
        """End all copies and unlock the memory."""
        self._deltas.clear()


class CudaMover:
    """Copies between a GPU and page-locked shared memory on a stream of its own; nothing waits for it on the CPU.

    A snapshot is cloned on the GPU first (a fraction of a millisecond for 43 M weights), so that the training stream
    may change the weights while the slower copy to main memory runs.
    """

    def __init__(self, mailbox: Mailbox, weights: torch.Tensor) -> None:
        self._device = weights.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._clone = torch.empty_like(weights)
        self._delta = torch.empty_like(weights)
        self._host_deltas = [torch.from_numpy(part) for part in mailbox.deltas]
        self._locked = [part for part in (*mailbox.weights, *mailbox.deltas) if _lock_pages(part)]
        self._note: Note | None = None
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._number = 0
        self._brought = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def busy(self) -> bool:
        """Whether a copy to the slot is under way."""
        return self._note is not None

    def send(self, weights: torch.Tensor, slot: Floats, note: Note) -> None:
        """Copy weights to the slot; `sent` tells when they are there."""
        training = torch.cuda.current_stream(self._device)
        training.wait_stream(self._stream)  # the clone's last reader; it has ended, or `busy` would be true
        self._clone.copy_(weights.detach(), non_blocking=True)
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            torch.from_numpy(slot).copy_(self._clone, non_blocking=True)
            self._copied.record(self._stream)
        self._note = note

    def sent(self) -> Note | None:
        """The note of a copy that has ended, once."""
        if self._note is None or not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        note, self._note = self._note, None
        return note

    def bring(self, number: int) -> bool:
        """Begin to bring a delta; whether it is there."""
        if self._number != number:
            self._number = number
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the last delta's reader
            with torch.cuda.stream(self._stream):
                self._delta.copy_(self._host_deltas[number % 2], non_blocking=True)
                self._brought.record(self._stream)
        return bool(self._brought.query())  # type: ignore[no-untyped-call]

    def delta(self) -> torch.Tensor:
        """The delta that was brought."""
        torch.cuda.current_stream(self._device).wait_event(self._brought)
        return self._delta

    def forget(self) -> None:
        """The delta in use is given back."""
        if self._number:
            self._brought.synchronize()  # at most a copy already under way: the slot is about to be given back
        self._number = 0

    def close(self) -> None:
        """End all copies and unlock the memory."""
        torch.cuda.synchronize(self._device)
        for part in self._locked:
            with contextlib.suppress(RuntimeError):
                torch.cuda.cudart().cudaHostUnregister(part.ctypes.data)  # type: ignore[no-untyped-call]


def _lock_pages(part: Floats) -> bool:
    """Page-lock memory, so that copies to and from it run beside everything else; without it they still work."""
    try:
        return int(torch.cuda.cudart().cudaHostRegister(part.ctypes.data, part.nbytes, 0)) == 0  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
