"""Rendezvous of the machines that make up one node; also tells them when their process group must restart.

A node's learners on several machines are one process group: when one machine's processes die, all restart together.
Each machine asks with a token that is unique to this start of its processes. When all machines of a node have asked,
their tokens identify the group. The group is over as soon as one of its machines asks with another token or stops
reporting. The state is not stored: machines tell a restarted coordinator which group they are in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from training.coordinator.core import Settings
from training.coordinator.messages import CoordinatorError, RendezvousReply, RendezvousRequest

SILENT = 3
"""Multiple of `dead_after_s` that a machine may be silent: the node's other machines notice most losses at once."""
WAITS_S = 5.0
"""A waiting machine asks repeatedly; without a request for this time it counts as gone."""


@dataclass
class _Waiting:
    """A machine that waits for the other machines of its node."""

    token: str
    address: str
    seen: float


@dataclass
class _Node:
    """Rendezvous state of one node.

    Attributes:
        waiting: Machines that wait for the others.
        group: Tokens of the current group, by machine; empty without one.
        address: Address of the group's first machine.
        seen: Time of the last report of each machine of the group.
        leaving: Whether one of them was asked to leave.
    """

    waiting: dict[int, _Waiting] = field(default_factory=dict)
    group: tuple[str, ...] = ()
    address: str = ""
    seen: dict[int, float] = field(default_factory=dict)
    leaving: bool = False


class RendezvousService:
    """Rendezvous of all nodes.

    Args:
        settings: The job.
        clock: Monotonic seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._num_nodes, self._machines, self._clock = settings.nodes, settings.machines_per_node, clock
        self._silent_s = SILENT * settings.dead_after_s
        self._nodes: dict[int, _Node] = {}
        self._last = clock()

    def answer(self, request: RendezvousRequest) -> RendezvousReply:
        """Answer a machine's request.

        Raises:
            CoordinatorError: If the job has no such machine, or the group has another number of machines.
        """
        if not 0 <= request.node < self._num_nodes or not 0 <= request.machine < self._machines:
            raise CoordinatorError(
                f"there is no machine {request.machine} of node {request.node}: train.nodes is {self._num_nodes}, "
                f"train.machines_per_node {self._machines}"
            )
        if request.group and len(request.group) != self._machines:
            raise CoordinatorError(
                f"a group needs the tokens of all {self._machines} machines: do coordinator and node run the same "
                "version?"
            )
        self._extend_deadlines()
        node = self._nodes.setdefault(request.node, _Node())
        return self._keep_alive(node, request) if request.group else self._wait(node, request)

    def _extend_deadlines(self) -> None:
        """Extend all deadlines if no machine asked for long: then it was the coordinator that was suspended."""
        gap, self._last = self._clock() - self._last, self._clock()
        if gap > self._silent_s / 2:
            for node in self._nodes.values():
                node.seen = {machine: at + gap for machine, at in node.seen.items()}

    def _wait(self, node: _Node, request: RendezvousRequest) -> RendezvousReply:
        now, machine, token, address = self._clock(), request.machine, request.token, request.address
        if not (node.group and node.group[machine] == token):
            before = node.waiting.get(machine)
            # any of a machine's learners may ask; only the one that listens knows the address
            if before is not None and before.token == token:
                address = address or before.address
            node.waiting[machine] = _Waiting(token, address, now)
            node.waiting = {m: waiting for m, waiting in node.waiting.items() if now - waiting.seen <= WAITS_S}
            self._complete(node, now)
        if node.group and node.group[machine] == token:
            return RendezvousReply(group=node.group, address=node.address)
        return RendezvousReply(missing=tuple(number for number in range(self._machines) if number not in node.waiting))

    def _complete(self, node: _Node, now: float) -> None:
        """Form the group once all machines wait and the first machine's address is known."""
        if len(node.waiting) < self._machines or not node.waiting[0].address:
            return
        node.group = tuple(node.waiting[number].token for number in range(self._machines))
        node.address, node.leaving = node.waiting[0].address, False
        node.seen, node.waiting = dict.fromkeys(range(self._machines), now), {}

    def _keep_alive(self, node: _Node, request: RendezvousRequest) -> RendezvousReply:
        now, group = self._clock(), request.group
        if not node.group:  # the group was formed before this coordinator started
            node.group, node.seen = group, dict.fromkeys(range(self._machines), now)
        if node.group != group or group[request.machine] != request.token:
            return RendezvousReply(over="the other machines have formed a new group")
        node.seen[request.machine], node.leaving = now, node.leaving or request.leaving
        return RendezvousReply(over=self._why_over(node, now), leave=node.leaving)

    def _why_over(self, node: _Node, now: float) -> str:
        for number, at in node.seen.items():
            if number in node.waiting:
                return f"machine {number} has restarted"
            if now - at > self._silent_s:
                return f"machine {number} has not reported for {self._silent_s:g} s"
        return ""
