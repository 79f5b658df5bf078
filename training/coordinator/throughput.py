"""Throughput of nodes, and how many rows a fast node should take over from a slow one so that both end together."""

from collections import deque

_REMEMBERED = 64


class Throughput:
    """Rows per second of one node, from its latest reports.

    Args:
        now: Current time of a monotonic clock, in seconds.
    """

    def __init__(self, now: float) -> None:
        self._start = now
        self._reports: deque[tuple[float, int]] = deque()

    def report(self, now: float, rows: int) -> None:
        """Record reported rows."""
        self._reports.append((now, rows))
        if len(self._reports) > _REMEMBERED:
            self._start = self._reports.popleft()[0]

    def rate(self, now: float, prior: float, weight_s: float) -> float:
        """Rows per second; includes the time since the last report, so that the rate of a stalled node falls.

        Args:
            now: Current time, in seconds.
            prior: Assumed rate of a node that has reported nothing, in rows per second.
            weight_s: Weight of the prior, in seconds.
        """
        rows = sum(count for _, count in self._reports)
        return (rows + prior * weight_s) / (max(0.0, now - self._start) + weight_s)


def fair_transfer(held: int, holder_rate: float, asker_rate: float) -> int:
    """Number of rows to move from a holder to an idle asker so that both end at the same time.

    Solves x / asker_rate = (held - x) / holder_rate.
    """
    total = holder_rate + asker_rate
    return int(held * asker_rate / total) if total > 0 else held // 2
