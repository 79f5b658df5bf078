"""Limits the CPU time of an exchange."""

import time
from collections.abc import Callable

_LONGEST_S = 1.0


class CpuBudget:
    """A share of one core for this process; unused time accumulates for at most a second.

    Args:
        share: CPU time per elapsed time; 1 is a whole core.
        used_s: Returns the CPU time of the process, in seconds.
    """

    def __init__(self, share: float, used_s: Callable[[], float] = time.process_time) -> None:
        self._share, self._used_s = share, used_s
        self._saved_s = self._at = 0.0
        self._used = used_s()

    def covers(self, now: float) -> bool:
        """Whether some of the budget is left.

        Args:
            now: Monotonic time, in seconds.
        """
        used, most = self._used_s(), self._share * _LONGEST_S
        earned = self._share * (now - self._at) if self._at else most
        # overuse is owed, up to the same limit as savings: requests of other nodes may have caused it
        self._saved_s = max(-most, min(most, self._saved_s + earned - (used - self._used)))
        self._used, self._at = used, now
        return self._saved_s > 0
