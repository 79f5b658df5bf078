"""The training process's side of a mailbox: torch tensors in and out, on a CPU or a GPU."""

import os
from abc import abstractmethod

import torch
from typing_extensions import override

from training.exchange.base import Exchange, ExchangeError, ExchangeStats
from training.exchange.device import CudaCopies
from training.exchange.mailbox import Bell, Mailbox, make_file
from training.exchange.movers import DeviceMover, HostMover, Mover


class MailboxExchange(Exchange):
    """Common part of exchanges over a mailbox; subclasses provide the other side.

    Args:
        size: Number of weights.
        shared: Whether another process maps the mailbox, too; else it needs no file.
    """

    def __init__(self, size: int, shared: bool = True) -> None:
        if size < 1:
            raise ValueError(f"an exchange of {size} weights: give a model with parameters")
        self._file, self._bell = (make_file(size), Bell.make()) if shared else (-1, Bell())
        self._size, self._mailbox = size, Mailbox(self._file, size, self._bell)
        self._mailbox.last_peer = -1
        self._staleness = 0.0
        self._final: ExchangeStats | None = None
        self._mover: Mover | None = None

    @abstractmethod
    def _wake(self) -> None:
        """Notify the other side of changes; never waits, may be called by any thread."""

    def _make_mover(self, weights: torch.Tensor) -> Mover:
        if weights.is_cuda:
            return DeviceMover(self._mailbox, self._wake, weights, CudaCopies(weights.device, self._mailbox))
        return HostMover(self._mailbox, self._wake)

    @override
    def start(self, weights: torch.Tensor, step: int) -> None:
        self._check(weights)
        if self._mover is None:
            self._mover = self._make_mover(weights)
        # a snapshot of the new generation resets the other side; if the slot is full, the next `give` sends it
        self._mover.restart()
        self._mailbox.step = self._mailbox.updating = step
        self._mover.give(weights, step)

    @override
    def give(self, weights: torch.Tensor, step: int) -> bool:
        self._check(weights)
        if self._mover is None:
            raise ExchangeError("give() before start()")
        return self._mover.give(weights, step)

    @override
    def tick(self, step: int) -> None:
        if self._final is not None:
            return
        self._mailbox.step = step
        self._mailbox.ticks += 1
        self._wake()

    @override
    def ready(self) -> bool:
        if self._mover is None:
            return False
        update = self._mailbox.step + 1
        if update != self._mailbox.updating:
            self._mover.update_begins()
            self._mailbox.updating = update
        if not self._mover.ready():
            return False
        self._staleness = float(update - self._mover.oldest)
        return True

    @override
    def take(self) -> torch.Tensor:
        if self._mover is None or not self.ready():
            raise ExchangeError("no delta is ready: ask ready() first")
        return self._mover.take()

    @override
    def release(self) -> None:
        if self._mover is not None:
            self._mover.release()

    @override
    def stats(self) -> ExchangeStats:
        if self._final is not None:
            return self._final
        mailbox = self._mailbox
        return ExchangeStats(
            initiated=mailbox.initiated,
            finished=mailbox.finished,
            answered=mailbox.answered,
            failed=mailbox.failed,
            late=mailbox.late,
            skipped_nonfinite=mailbox.skipped,
            last_s=mailbox.last_s,
            mean_s=mailbox.total_s / max(mailbox.finished, 1),
            bytes_sent=mailbox.bytes_sent,
            bytes_received=mailbox.bytes_received,
            distance=mailbox.distance,
            staleness=self._staleness,
            cpu_seconds=mailbox.cpu_seconds,
            silent_s=mailbox.silent_s(),
            last_peer=mailbox.last_peer,
        )

    def _close_mailbox(self) -> None:
        """Release the memory; called by `close` of subclasses."""
        if self._mover is not None:
            self._mover.close()
        self._mover = None
        if self._file >= 0:
            self._final = self.stats()
            os.close(self._file)
            self._file = -1
            self._bell.close()
            self._mailbox.close()

    def _check(self, weights: torch.Tensor) -> None:
        if weights.dtype != torch.float32 or weights.shape != (self._size,) or not weights.is_contiguous():
            raise ValueError(
                f"weights of shape {tuple(weights.shape)} and type {weights.dtype}: "
                f"the exchange was set up for {self._size} contiguous fp32 values in one dimension"
            )
