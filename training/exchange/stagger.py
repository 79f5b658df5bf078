"""Random delay of each step's first exchange, so that learners in lockstep do not all exchange at the same moment."""

import random

_MOST_S = 1.0


class Stagger:
    """Draws the delay of a step's first exchange: at most half a step, less the time of an exchange.

    Learners whose steps start at the same moment would otherwise take part in two exchanges at once, one started by
    either side, and end at the mean of their neighbours without themselves. On an even ring that mixing has an
    eigenvalue of -1, and with gradients from before it no learning rate is stable (docs/strategies.md).

    Args:
        seed: Shared by the ring.
        node: This node.
        now: Monotonic time, in seconds.

    Attributes:
        took_s: Duration of the last exchange, in seconds.
    """

    def __init__(self, seed: int, node: int, now: float) -> None:
        self.took_s = 0.0
        self._chance = random.Random(f"starling pause {seed} {node}")
        self._stepped_at = now

    def pause_s(self, now: float) -> float:
        """Delay of the first exchange of a step that starts at `now`, in seconds."""
        step_s, self._stepped_at = now - self._stepped_at, now
        return self._chance.uniform(0.0, min(_MOST_S, max(0.0, step_s / 2 - self.took_s)))
