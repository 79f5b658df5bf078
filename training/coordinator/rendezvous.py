"""Rendezvous of the machines that make up one node; also tells them when their process group must restart.

A node's learners on several machines are one process group: when one machine's processes die, all restart together.
Each machine asks with a token that is unique to this start of its processes. When all machines of a node have asked,
their tokens make up a meeting. The meeting is over as soon as one of its machines asks with another token or stops
reporting. The state is not stored: machines tell a restarted coordinator which meeting they are in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from training.coordinator.messages import CoordinatorError, Message
from training.coordinator.settings import Settings

LONGEST = 256
"""Maximum length of a token or an address, in characters."""
SILENT = 3
"""Multiple of `dead_after_s` that a machine may be silent: the node's other machines notice most losses at once."""
WAITS_S = 5.0
"""A waiting machine asks repeatedly; without a request for this time it counts as gone."""


@dataclass
class _Guest:
    """A machine that waits for the other machines of its node."""

    token: str
    address: str
    seen: float


@dataclass
class _Table:
    """Rendezvous state of one node."""

    waiting: dict[int, _Guest] = field(default_factory=dict)
    met: list[str] = field(default_factory=list)
    address: str = ""
    seen: dict[int, float] = field(default_factory=dict)
    leaving: bool = False


class Meetings:
    """Rendezvous of all nodes.

    Args:
        settings: The job.
        clock: Monotonic seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._nodes, self._machines, self._clock = settings.nodes, settings.machines_per_node, clock
        self._silent_s = SILENT * settings.dead_after_s
        self._tables: dict[int, _Table] = {}
        self._last = clock()

    def meet(self, message: Message) -> Message:
        """Answer a machine's request.

        Args:
            message: `node`, `machine`, `token`; `address`, where the node's first machine can be reached; `met`, the
                tokens of the machine's meeting, empty while it waits for the others; `leaving`, whether it was asked to
                leave.

        Returns:
            For a waiting machine: `met`, `address` and `missing`; while machines are missing, `met` is empty. For a
            machine in a meeting: `over`, why the meeting is over (or empty), and `leave`, whether one of its machines
            was asked to leave.
        """
        node, machine, token = int(message["node"]), int(message["machine"]), str(message["token"])
        address, met = str(message.get("address", "")), [str(one) for one in message.get("met", [])]
        if not 0 <= node < self._nodes or not 0 <= machine < self._machines:
            raise CoordinatorError(
                f"there is no machine {machine} of node {node}: train.nodes is {self._nodes}, "
                f"train.machines_per_node {self._machines}"
            )
        if not token or max(map(len, (token, address))) > LONGEST or (met and len(met) != self._machines):
            raise CoordinatorError(
                "a machine needs a token, and in a meeting the tokens of all machines: do coordinator and node run the "
                "same version?"
            )
        self._forgive()
        table = self._tables.setdefault(node, _Table())
        if met:
            return self._go_on(table, machine, token, met, bool(message.get("leaving")))
        return self._look(table, machine, token, address)

    def _forgive(self) -> None:
        """Extend all deadlines if no machine asked for long: then it was the coordinator that was suspended."""
        gap, self._last = self._clock() - self._last, self._clock()
        if gap > self._silent_s / 2:
            for table in self._tables.values():
                table.seen = {machine: at + gap for machine, at in table.seen.items()}

    def _look(self, table: _Table, machine: int, token: str, address: str) -> Message:
        now = self._clock()
        if not (table.met and table.met[machine] == token):
            before = table.waiting.get(machine)
            # any of a machine's learners may ask; only the one that listens knows the address
            if before is not None and before.token == token:
                address = address or before.address
            table.waiting[machine] = _Guest(token, address, now)
            table.waiting = {m: guest for m, guest in table.waiting.items() if now - guest.seen <= WAITS_S}
            self._sit_down(table, now)
        if table.met and table.met[machine] == token:
            return {"met": table.met, "address": table.address, "missing": []}
        missing = [number for number in range(self._machines) if number not in table.waiting]
        return {"met": [], "address": "", "missing": missing}

    def _sit_down(self, table: _Table, now: float) -> None:
        """Start the meeting once all machines wait and the first machine's address is known."""
        if len(table.waiting) < self._machines or not table.waiting[0].address:
            return
        table.met = [table.waiting[number].token for number in range(self._machines)]
        table.address, table.leaving = table.waiting[0].address, False
        table.seen, table.waiting = dict.fromkeys(range(self._machines), now), {}

    def _go_on(self, table: _Table, machine: int, token: str, met: list[str], leaving: bool) -> Message:
        now = self._clock()
        if not table.met:  # the meeting was formed before this coordinator started
            table.met, table.seen = met, dict.fromkeys(range(self._machines), now)
        if table.met != met or met[machine] != token:
            return {"over": "the other machines have formed a new group", "leave": False}
        table.seen[machine], table.leaving = now, table.leaving or leaving
        return {"over": self._why_over(table, now), "leave": table.leaving}

    def _why_over(self, table: _Table, now: float) -> str:
        for number, at in table.seen.items():
            if number in table.waiting:
                return f"machine {number} has restarted"
            if now - at > self._silent_s:
                return f"machine {number} has not reported for {self._silent_s:g} s"
        return ""
