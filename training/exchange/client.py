"""The training process's side of a mailbox: torch tensors in and out, on a CPU or a GPU."""

import os
from abc import abstractmethod

import torch

from training.exchange.base import Exchange, ExchangeError, ExchangeStats
from training.exchange.mailbox import Mailbox, make_file
from training.exchange.movers import CudaMover, HostMover


class MailboxExchange(Exchange):
    """What all exchanges over a mailbox share; the other side of it is the implementation's."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"an exchange of {size} weights: give a model with parameters")
        self._size = size
        self._file = make_file(size)
        self._mailbox = Mailbox(self._file, size)
        self._mailbox.last_peer = -1
        self._generation = 0
        self._taken = 0
        self._staleness = 0.0
        self._final: ExchangeStats | None = None
        self._mover: HostMover | CudaMover | None = None

    @abstractmethod
    def _wake(self) -> None:
        """Tell the other side that there is news; never waits."""

    def start(self, weights: torch.Tensor, step: int) -> None:
        """See `Exchange.start`."""
        self._check(weights)
        if self._mover is None:
            self._mover = CudaMover(self._mailbox, weights) if weights.is_cuda else HostMover(self._mailbox)
        # a snapshot of the new generation resets the other side; if the slot is full, the next `give` brings it
        self._generation += 1
        self._mailbox.step = step
        self._offer(weights, step)

    def give(self, weights: torch.Tensor, step: int) -> bool:
        """See `Exchange.give`."""
        self._check(weights)
        return self._offer(weights, step)

    def tick(self, step: int) -> None:
        """See `Exchange.tick`."""
        if self._final is not None:
            return
        self._settle()
        self._mailbox.step = step
        self._mailbox.ticks += 1
        self._wake()

    def ready(self) -> bool:
        """See `Exchange.ready`."""
        self._settle()
        mailbox = self._mailbox
        if self._mover is None or not mailbox.delta_waits():
            return False
        if mailbox.delta_generation != self._generation:
            self._taken = mailbox.offered
            self._mover.forget()
            mailbox.released = mailbox.offered  # of weights from before `start`
            self._wake()
            return False
        return self._mover.bring(mailbox.offered)

    def take(self) -> torch.Tensor:
        """See `Exchange.take`."""
        if self._mover is None or not self.ready():
            raise ExchangeError("no delta is ready: ask ready() first")
        self._taken = self._mailbox.offered
        self._staleness = float(self._mailbox.step - self._mailbox.delta_step)
        return self._mover.delta()

    def release(self) -> None:
        """See `Exchange.release`."""
        if self._mover is None or self._taken != self._mailbox.offered or not self._mailbox.delta_waits():
            return
        self._mover.forget()
        self._mailbox.released = self._taken
        self._wake()

    def stats(self) -> ExchangeStats:
        """See `Exchange.stats`."""
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
        """Give the memory back; for implementations' `close`."""
        if self._mover is not None:
            self._mover.close()
        self._mover = None
        if self._file >= 0:
            self._final = self.stats()
            os.close(self._file)
            self._file = -1
            self._mailbox.close()

    def _offer(self, weights: torch.Tensor, step: int) -> bool:
        if self._mover is None:
            raise ExchangeError("give() before start()")
        self._settle()
        slot = self._mailbox.snapshot_slot()
        if slot is None or self._mover.busy:
            return False
        self._mover.send(weights, slot, (step, self._taken, self._generation))
        self._settle()
        return True

    def _settle(self) -> None:
        """Hand over a snapshot whose copy has ended since."""
        if self._mover is not None and (note := self._mover.sent()) is not None:
            self._mailbox.send_snapshot(*note)
            self._wake()

    def _check(self, weights: torch.Tensor) -> None:
        if weights.dtype != torch.float32 or weights.shape != (self._size,) or not weights.is_contiguous():
            raise ValueError(
                f"weights of shape {tuple(weights.shape)} and type {weights.dtype}: "
                f"the exchange was set up for {self._size} contiguous fp32 values in one dimension"
            )
