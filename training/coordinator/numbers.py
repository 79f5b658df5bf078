"""Assigns node numbers to nodes that do not have one."""

from collections.abc import Callable
from itertools import count

from training.coordinator.ledger import Ledger
from training.coordinator.messages import NumberReply
from training.coordinator.requests import NumberRequest

HELD_S = 60.0
"""A node that was given a number must join within this time, or another one may get it."""


class NodeNumbers:
    """Gives each node that asks the lowest free number.

    Args:
        ledger: The state.
        clock: Monotonic seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        self._held: dict[str, tuple[int, float]] = {}

    def answer(self, request: NumberRequest) -> NumberReply:
        """Answer a node; the same process gets the same number again."""
        now = self._clock()
        self._held = {token: held for token, held in self._held.items() if now - held[1] < HELD_S}
        if request.token not in self._held:
            taken = {state.member.node for state in self._ledger.states.values()}
            taken |= {node for node, _ in self._held.values()}
            self._held[request.token] = (next(node for node in count() if node not in taken), now)
        return NumberReply(node=self._held[request.token][0])
