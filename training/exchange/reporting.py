"""An exchange's figures, written to the shared memory, where the training process can read them at any time."""

import logging
import math
import time
from collections.abc import Callable

from training.exchange.averaging import Averaging
from training.exchange.mailbox import Mailbox

_EVERY_S = 0.05
_REPEAT_S = 60.0


class Report:
    """Collects an exchange's figures; for their meaning see `ExchangeStats`.

    Args:
        mailbox: Where they are published.
        cpu_s: Returns the exchange's CPU time, in seconds.
    """

    def __init__(self, mailbox: Mailbox, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._cpu_s = cpu_s
        self._mailbox = mailbox
        self.initiated = self.finished = self.failed = self.late = 0
        self.bytes_sent = self.bytes_received = 0
        self._answered = 0
        self._total_s = self._last_s = self._distance = 0.0
        self._last_peer = -1
        self._reported_at: dict[tuple[int, str], float] = {}
        self._written_at = 0.0
        self._changed = True

    def answered(self, length: int, last: bool) -> None:
        """Count an answered chunk of another node's exchange."""
        self.bytes_sent += length
        self.bytes_received += length
        self._answered += last
        self._changed |= last

    def received(self, length: int, late: bool) -> None:
        """Count a received answer."""
        self.bytes_received += length
        self.late += late

    def finish(self, seconds: float, squares: float, compared: int, node: int) -> None:
        """Count a successful exchange that this side started.

        Args:
            seconds: Duration.
            squares: Sum of the squared differences.
            compared: Number of weights that `squares` covers; 0 if every chunk was left out.
            node: The neighbour.
        """
        self.finished += 1
        self._last_s, self._last_peer = seconds, node
        if compared:
            self._distance = math.sqrt(squares / compared)
        self._total_s += seconds
        self._changed = True

    def refuse(self, node: int, why: str) -> None:
        """Log a refusal, at most once a minute per node and reason."""
        now = time.monotonic()
        if now - self._reported_at.get((node, why), -_REPEAT_S) >= _REPEAT_S:
            self._reported_at[node, why] = now
            logging.warning("node %d refused an exchange: %s", node, why)

    def write(self, now: float, averager: Averaging) -> None:
        """Publish the figures if they have changed or the interval is over."""
        if self._changed or now - self._written_at >= _EVERY_S:
            self.publish(now, averager)

    def publish(self, now: float, averager: Averaging) -> None:
        """Write the figures to the mailbox."""
        mailbox = self._mailbox
        mailbox.initiated, mailbox.finished, mailbox.failed = self.initiated, self.finished, self.failed
        mailbox.answered, mailbox.late, mailbox.skipped = self._answered, self.late, averager.skipped
        mailbox.bytes_sent, mailbox.bytes_received = self.bytes_sent, self.bytes_received
        mailbox.last_s, mailbox.total_s = self._last_s, self._total_s
        mailbox.distance, mailbox.last_peer = self._distance, self._last_peer
        mailbox.cpu_seconds, mailbox.beat = self._cpu_s(), now
        if self._changed:
            mailbox.bell.ring()
        self._written_at, self._changed = now, False
