"""Load of a node's machine (CPU, memory, network, GPUs) as lines of the training's journal.

Values that a machine does not provide are omitted. A sample every ten seconds takes a few milliseconds.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import psutil

from devices.gpus import Gpus
from training.coordinator.messages import CoordinatorError

EVERY_S = 10.0
"""Seconds between samples."""
_SOON_S = 0.5
_TICK_S = 0.001
"""Minimum time between two samples: two at the same time would be two values at one point of a chart."""
_MEGA = 1e6
_log = logging.getLogger(__name__)


class Machine:
    """Samples this machine's load; for use by a single thread."""

    def __init__(self) -> None:
        self._gpus = Gpus()
        self._traffic: tuple[float, float, float] | None = None
        with suppress(OSError):
            psutil.cpu_percent()  # the next call measures the load since this one
        with suppress(OSError):
            self._network()

    def sample(self) -> dict[str, Any]:
        """`cpu` in percent since the last sample, `memory` in percent and MB, network in MB/s since then, `gpus`."""
        figures: dict[str, Any] = {}
        with suppress(OSError):
            figures["cpu"] = psutil.cpu_percent()
        with suppress(OSError):
            memory = psutil.virtual_memory()
            figures |= {"memory_mb": (memory.total - memory.available) / _MEGA, "memory": memory.percent}
        with suppress(OSError):
            figures |= self._network()
        if gpus := self._gpus.sample():
            figures["gpus"] = gpus
        return figures

    def _network(self) -> dict[str, float]:
        """Megabytes per second over all interfaces except loopback since the last call; empty at the first one.

        The training's clock does not count here: it stops while the training waits for nodes.
        """
        interfaces = psutil.net_io_counters(pernic=True)
        others = [counters for name, counters in interfaces.items() if name != "lo"]
        received, sent = (sum(getattr(counters, name) for counters in others) for name in ("bytes_recv", "bytes_sent"))
        before, self._traffic = self._traffic, (time.monotonic(), received, sent)
        if before is None or not interfaces:
            return {}
        seconds = self._traffic[0] - before[0]
        gained = {"received_mb_per_s": received - before[1], "sent_mb_per_s": sent - before[2]}
        # an interface that has gone takes its counters with it
        return {name: size / _MEGA / seconds for name, size in gained.items() if size >= 0 and seconds > 0}


class SystemFigures:
    """Writes samples to the journal from a thread, until it is closed.

    Args:
        node: Number of the node.
        journal: Writes a line; may raise CoordinatorError while the node has not joined.
        elapsed: Seconds of training.
        every_s: Seconds between samples.
    """

    def __init__(
        self,
        node: int,
        journal: Callable[[Mapping[str, Any]], None],
        elapsed: Callable[[], float],
        every_s: float = EVERY_S,
    ) -> None:
        self._about = {"kind": "system", "node": node, "host": socket.gethostname()}
        self._journal, self._elapsed, self._every_s = journal, elapsed, every_s
        self._latest = -_TICK_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait_s, machine = _SOON_S, Machine()
        while not self._stop.wait(wait_s):
            wait_s = self._every_s
            try:
                at = self._time()
                self._journal({**self._about, "elapsed": at, **_sample(machine)})
                self._latest = at
            except CoordinatorError:  # the node has not joined yet
                wait_s = min(_SOON_S, self._every_s)
            except (OSError, ValueError) as error:  # a failed sample must not end a training
                _log.warning("cannot sample the machine's load: %s", error)

    def _time(self) -> float:
        """Seconds of training, made strictly increasing: the training's clock stops while it waits for nodes."""
        return round(max(self._elapsed(), self._latest + _TICK_S), 3)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(5.0)


def _sample(machine: Machine) -> dict[str, Any]:
    sample = machine.sample()
    gpus = [{name: round(value, 1) for name, value in gpu.items()} for gpu in sample.pop("gpus", [])]
    return {name: round(value, 3) for name, value in sample.items()} | ({"gpus": gpus} if gpus else {})
