"""How fast nodes are, and how much of a slow one's work another should take over, so that both end together."""

from collections import deque

_REMEMBERED = 64


class Throughput:
    """Rows per second of one node, from what it reported lately.

    Args:
        now: Seconds, of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._start = now
        self._reports: deque[tuple[float, int]] = deque()

    def report(self, now: float, rows: int) -> None:
        """Note that rows were reported."""
        self._reports.append((now, rows))
        if len(self._reports) > _REMEMBERED:
            self._start = self._reports.popleft()[0]

    def rate(self, now: float, prior: float, weight_s: float) -> float:
        """Rows per second; time since the last report counts, so that a stalled node becomes slow.

        Args:
            now: Seconds.
            prior: What to assume of a node that has reported nothing.
            weight_s: Seconds that the assumption counts for.
        """
        rows = sum(count for _, count in self._reports)
        return (rows + prior * weight_s) / (max(0.0, now - self._start) + weight_s)


def fair_transfer(held: int, holder_rate: float, asker_rate: float) -> int:
    """Rows to move from a holder to an asker without work, so that both end at the same time.

    x / asker = (held - x) / holder.
    """
    total = holder_rate + asker_rate
    return int(held * asker_rate / total) if total > 0 else held // 2
