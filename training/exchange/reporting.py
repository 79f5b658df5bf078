"""An exchange's figures, written to the shared memory where the training process reads them without asking."""

import logging
import math
import time

from training.exchange.averaging import Averager
from training.exchange.mailbox import Mailbox

_EVERY_S = 0.05
_REPEAT_S = 60.0


class Report:
    """Counts; meanings as in `ExchangeStats`."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.initiated = self.finished = self.failed = self.late = 0
        self.bytes_sent = self.bytes_received = 0
        self._answered = 0
        self._total_s = self._last_s = self._distance = 0.0
        self._last_peer = -1
        self._told: dict[tuple[int, str], float] = {}
        self._written_at = 0.0
        self._changed = True

    def answered(self, length: int, last: bool) -> None:
        """A chunk of somebody else's exchange."""
        self.bytes_sent += length
        self.bytes_received += length
        self._answered += last
        self._changed |= last

    def received(self, length: int, late: bool) -> None:
        """An answer."""
        self.bytes_received += length
        self.late += late

    def finish(self, seconds: float, squares: float, compared: int, node: int) -> None:
        """An exchange that was begun here has ended well.

        Args:
            seconds: How long it took.
            squares: Sum of the squared differences ...
            compared: ... over so many weights; 0 if every chunk was left out.
            node: With whom.
        """
        self.finished += 1
        self._last_s, self._last_peer = seconds, node
        if compared:
            self._distance = math.sqrt(squares / compared)
        self._total_s += seconds
        self._changed = True

    def refuse(self, node: int, why: str) -> None:
        """A peer refused; the log says so once in a while."""
        now = time.monotonic()
        if now - self._told.get((node, why), -_REPEAT_S) >= _REPEAT_S:
            self._told[node, why] = now
            logging.warning("node %d refused an exchange: %s", node, why)

    def write(self, now: float, averager: Averager) -> None:
        """Write, if something has happened or it is time to."""
        if self._changed or now - self._written_at >= _EVERY_S:
            self.publish(now, averager)

    def publish(self, now: float, averager: Averager) -> None:
        """Write."""
        mailbox = self._mailbox
        mailbox.initiated, mailbox.finished, mailbox.failed = self.initiated, self.finished, self.failed
        mailbox.answered, mailbox.late, mailbox.skipped = self._answered, self.late, averager.skipped
        mailbox.bytes_sent, mailbox.bytes_received = self.bytes_sent, self.bytes_received
        mailbox.last_s, mailbox.total_s = self._last_s, self._total_s
        mailbox.distance, mailbox.last_peer = self._distance, self._last_peer
        mailbox.cpu_seconds, mailbox.beat = time.process_time(), now
        if self._changed:
            mailbox.bell.ring()
        self._written_at, self._changed = now, False
