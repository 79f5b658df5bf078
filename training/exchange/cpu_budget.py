"""How much processor time an exchange may take."""

import time
from collections.abc import Callable

_LONGEST_S = 1.0


class CpuBudget:
    """A share of one core for this process, saved up for a second at most.

    Args:
        share: Of one core.
        used_s: Processor time of the process so far.
    """

    def __init__(self, share: float, used_s: Callable[[], float] = time.process_time) -> None:
        self._share, self._used_s = share, used_s
        self._saved_s = self._at = 0.0
        self._used = used_s()

    def covers(self, now: float) -> bool:
        """Whether some of it is left.

        Args:
            now: Monotonic seconds.
        """
        used, most = self._used_s(), self._share * _LONGEST_S
        earned = self._share * (now - self._at) if self._at else most
        # what was used beyond the share is owed, for as long as saving lasts: it may have been others' asking
        self._saved_s = max(-most, min(most, self._saved_s + earned - (used - self._used)))
        self._used, self._at = used, now
        return self._saved_s > 0
