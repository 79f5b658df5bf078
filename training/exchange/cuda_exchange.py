"""The exchange of learners on GPUs of one machine: ZeroMQ carries messages, and the weights stay in GPU memory."""

import logging
import socket
import sys
import threading
import time
from typing import Any

import torch
from typing_extensions import override

from training.exchange.base import ExchangeError
from training.exchange.client import DaemonExchange
from training.exchange.control import Control
from training.exchange.daemon import serve_zmq
from training.exchange.device import Copies, CudaCopies, CudaPeerMemory, PeerMemory
from training.exchange.movers import Mover
from training.exchange.peer_averaging import PeerAverager, PeerMover

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
