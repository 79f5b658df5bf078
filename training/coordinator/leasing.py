"""Leases rows by guided self-scheduling, and takes work back from the slowest node when nothing is left."""

from collections import deque
from dataclasses import dataclass

from training.coordinator.core import Core
from training.coordinator.epochs import Epoch, RowLease
from training.coordinator.membership import MemberState
from training.coordinator.messages import Lease, Revocation
from training.coordinator.packing import pack_rows

ANSWER_BEATS = 4
"""Heartbeats to wait for a node that is asked to return rows."""


# --- throughput


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


# --- leases


@dataclass(frozen=True)
class _Asked:
    """A revocation that a node has not answered.

    Attributes:
        revocation: The demand.
        held: Rows that the node had and had not started.
        until: Monotonic time until which its answer is awaited.
    """

    revocation: Revocation
    held: int
    until: float


class Leasing:
    """Grants, revokes and reclaims leases.

    Args:
        core: What the coordinator's parts share.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        now = core.clock()
        self._throughputs = {name: Throughput(now) for name in core.ledger.states}
        self._asked: dict[str, _Asked] = {}
        self._fruitless: dict[str, int] = {}
        """Rows that a holder had when it had no whole batch to return."""
        self._number = int(core.wall() * 1000)

    def report(self, name: str, rows: int) -> None:
        """Record that a node has trained rows."""
        self._throughputs.setdefault(name, Throughput(self.core.clock())).report(self.core.clock(), rows)

    def answered(self, name: str, number: int, rows: int) -> None:
        """Record a node's answer to a revocation; `rows` is the number of batches that it returned."""
        asked = self._asked.get(name)
        if asked is not None and asked.revocation.number == number:
            del self._asked[name]
            if not rows:
                self._fruitless[name] = asked.held

    def asked(self, name: str) -> Revocation | None:
        """The revocation that a node must answer, or None."""
        asked = self._asked.get(name)
        return asked.revocation if asked else None

    def open_leases(self, name: str, have: set[str]) -> list[Lease]:
        """Leases that a node does not know of, because they are new or an answer was lost."""
        return [
            self._describe(epoch, lease)
            for epoch in self.core.ledger.epochs.values()
            for lease in epoch.leases.values()
            if lease.incarnation == name and not lease.adopted and str(lease.number) not in have
        ]

    def _describe(self, epoch: Epoch, lease: RowLease) -> Lease:
        rows = pack_rows(epoch.open_rows(lease))
        return Lease(id=str(lease.number), epoch=epoch.number, whole=lease.whole, rows=rows)

    def reclaim(self, name: str, have: set[str]) -> None:
        """Return a node's unreported rows to the pool: it knows its leases and has no batches left."""
        for epoch in list(self.core.ledger.epochs.values()):
            for lease in list(epoch.leases.values()):
                if lease.incarnation == name and (lease.adopted or str(lease.number) in have):
                    rows = pack_rows(epoch.open_rows(lease))
                    self.core.do("back", epoch=epoch.number, lease=lease.number, rows=rows)

    def give_work(self, state: MemberState, have: set[str]) -> None:
        """Lease rows of the oldest open epoch; if none are free, take some back from the slowest node."""
        ledger, name = self.core.ledger, state.member.incarnation
        if not ledger.size or not ledger.values.running or not state.ready or self.open_leases(name, have):
            return
        first = ledger.values.closed
        for number in range(first, min(first + 2, ledger.total)):
            epoch = ledger.epochs.get(number)
            if epoch is None or epoch.pool():
                self.core.do("lease", epoch=number, incarnation=name, live=len(ledger.states))
                return
            if self._take_back(epoch, name):
                return  # returned rows come before those of the next epoch

    def _take_back(self, epoch: Epoch, asker: str) -> bool:
        """Ask the node that would end last for some of its rows; returns whether to wait for its answer."""
        now = self.core.clock()
        self._asked = {name: asked for name, asked in self._asked.items() if asked.until > now}
        if any(asked.revocation.epoch == epoch.number for asked in self._asked.values()):
            return True
        prior = self._rate(asker, 1.0)
        states = self.core.ledger.states
        held = {name: epoch.held(name) for name in states if name != asker}
        held = {name: rows for name, rows in held.items() if rows and self._fruitless.get(name) != rows}
        if not held:
            return False
        slowest = max(held, key=lambda name: held[name] / self._rate(name, prior))
        rows = fair_transfer(held[slowest], self._rate(slowest, prior), prior)
        if rows < 1:
            return False
        self._number += 1
        until = now + ANSWER_BEATS * self.core.settings.beat_s
        revocation = Revocation(number=self._number, epoch=epoch.number, utterances=rows)
        self._asked[slowest] = _Asked(revocation, held[slowest], until)
        return True

    def _rate(self, name: str, prior: float) -> float:
        throughput = self._throughputs.setdefault(name, Throughput(self.core.clock()))
        return max(throughput.rate(self.core.clock(), prior, self.core.settings.beat_s), 1e-9)
