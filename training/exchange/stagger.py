"""When the first exchange of a step begins: at random, so that learners in lockstep do not all meet at one moment."""

import random

_MOST_S = 1.0


class Stagger:
    """Draws how long the first exchange of a step waits: up to half of the time that a step leaves beside it.

    Learners whose steps begin at the same moment would otherwise be in two exchanges at once, one begun on either side,
    and end at the mean of their neighbours without themselves. On an even ring that mixing has an eigenvalue of -1, and
    with gradients from before it no learning rate is stable (docs/strategies.md).

    Args:
        seed: Shared by the ring.
        node: This node.
        now: Monotonic seconds.

    Attributes:
        took_s: Seconds of the last exchange.
    """

    def __init__(self, seed: int, node: int, now: float) -> None:
        self.took_s = 0.0
        self._chance = random.Random(f"starling pause {seed} {node}")
        self._stepped_at = now

    def pause_s(self, now: float) -> float:
        """A step begins now: how long its first exchange waits."""
        step_s, self._stepped_at = now - self._stepped_at, now
        return self._chance.uniform(0.0, min(_MOST_S, max(0.0, step_s / 2 - self.took_s)))
