"""The link model: every machine has one link, which carries one message at a time in either direction."""

from collections import defaultdict

from training.simulation.clock import Clock
from training.simulation.cluster import Cluster


class LinkModel:
    """The machines' links and their traffic.

    Attributes:
        sent: Bytes that each learner has sent.
        carried: Bytes that each machine has sent to others.
    """

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self.cluster, self._clock = cluster, clock
        self.sent: dict[int, float] = defaultdict(float)
        self.carried: dict[int, float] = defaultdict(float)
        self._up: dict[int, float] = defaultdict(float)
        self._down: dict[int, float] = defaultdict(float)
        self._link = cluster.link_gbit * 1e9 / 8
        self._local = cluster.local_gbit * 1e9 / 8

    def send(self, source: int, target: int, num_bytes: float) -> float:
        """Send a message from one learner to another; returns the time of its arrival."""
        here, there = self.cluster.machine(source), self.cluster.machine(target)
        self.sent[source] += num_bytes
        if here == there:
            return self._clock.now + num_bytes / self._local + self.cluster.local_ms / 1e3
        self.carried[here] += num_bytes
        return self._occupy(here, there, num_bytes) + self.cluster.link_ms / 1e3

    def to_server(self, source: int, servers: int, num_bytes: float) -> float:
        """Send a learner's message to the servers, a part to each; returns the time when the last part arrives."""
        here = self.cluster.machine(source)
        self.sent[source] += num_bytes
        self.carried[here] += num_bytes
        ends = [self._occupy(here, -1 - server, num_bytes / servers) for server in range(servers)]
        return max(ends) + self.cluster.link_ms / 1e3

    def from_server(self, target: int, servers: int, num_bytes: float) -> float:
        """Send a message from the servers to a learner, a part from each; returns the last part's time of arrival."""
        there = self.cluster.machine(target)
        ends = [self._occupy(-1 - server, there, num_bytes / servers) for server in range(servers)]
        return max(ends) + self.cluster.link_ms / 1e3

    def _occupy(self, here: int, there: int, num_bytes: float) -> float:
        end = max(self._clock.now, self._up[here], self._down[there]) + num_bytes / self._link
        self._up[here] = self._down[there] = end
        return end

    def all_reduce(self, ranks: list[int], num_bytes: float) -> float:
        """Seconds of a ring all-reduce: 2 (N - 1) messages of 1/N each, over the slowest link of the ring.

        A ring in the order of the machines crosses every machine's link once, so a link carries one learner's traffic.
        """
        return self._ring(ranks, 2 * (len(ranks) - 1), num_bytes / len(ranks))

    def all_gather(self, ranks: list[int], num_bytes: float) -> float:
        """Seconds of a ring all-gather: every learner's payload of `num_bytes` travels to all others."""
        return self._ring(ranks, len(ranks) - 1, num_bytes)

    def _ring(self, ranks: list[int], messages: int, num_bytes: float) -> float:
        machines = {self.cluster.machine(rank) for rank in ranks}
        for rank in ranks:
            self.sent[rank] += messages * num_bytes
        if len(machines) == 1:
            return messages * (num_bytes / self._local + self.cluster.local_ms / 1e3)
        for machine in machines:
            self.carried[machine] += messages * num_bytes
        slowest = min(self._link, self._local) if len(machines) < len(ranks) else self._link
        return messages * (num_bytes / slowest + self.cluster.link_ms / 1e3)
