"""A ring of real exchanges and the live weights beside them, for tests."""

import time

import torch
from support import wait_until

from training.coordinator.membership import Member, View

SIZE = 10_000
CONFIG = {"chunk_kb": 16, "timeout_s": 60.0, "per_step": 1}
"""Three chunks; no exchange fails although a busy machine may stop a process for seconds."""


class Ring:
    """Exchanges and the live weights beside them."""

    def __init__(self, exchanges):
        self.exchanges = list(exchanges)
        self.live = [torch.full((SIZE,), float(i)) + torch.arange(SIZE) % 7 for i in range(len(self.exchanges))]
        self.step = 0
        self.view = View()

    def join(self, nodes=None, number=1):
        """Make these the members of the ring for all exchanges."""
        nodes = range(len(self.exchanges)) if nodes is None else nodes
        self.view = View(number, tuple(Member(n, f"once-{n}", (self.exchanges[n].endpoint,)) for n in nodes))
        for n in nodes:
            self.exchanges[n].set_view(self.view)

    def start(self, nodes=None):
        for n in range(len(self.exchanges)) if nodes is None else nodes:
            self.exchanges[n].start(self.live[n], 0)

    def loaded(self, nodes=None):
        """Wait until all have their weights: the second offer finds the first one read."""
        for n in 2 * list(range(len(self.exchanges)) if nodes is None else nodes):
            wait_until(lambda: self.exchanges[n].give(self.live[n], 0), every_s=0.01)  # noqa: B023

    def work(self, nodes=None, tick=True):
        """What a training process does around a step."""
        self.step += 1
        for n in range(len(self.exchanges)) if nodes is None else nodes:
            self.take(n)
            self.exchanges[n].give(self.live[n], self.step)
            if tick:
                self.exchanges[n].tick(self.step)

    def take(self, n):
        if self.exchanges[n].ready():
            self.live[n] += self.exchanges[n].take()
            self.exchanges[n].release()

    def total(self):
        return torch.stack(self.live).double().sum(0)

    def spread(self, nodes=None):
        """RMS distance to the average."""
        live = torch.stack([self.live[n] for n in nodes] if nodes else self.live).double()
        return float((live - live.mean(0)).square().mean().sqrt())

    def rest(self):
        """Wait until every permitted exchange has started and ended: commands and figures have been passed on twice."""
        for exchange in 2 * self.exchanges:
            exchange.fetch(60.0)
        for _ in range(2):
            time.sleep(0.2)
            wait_until(lambda: all(s.initiated == s.finished + s.failed for s in self.stats()), every_s=0.05)

    def stats(self):
        return [exchange.stats() for exchange in self.exchanges]

    def settled(self, total):
        """Take pending averages; whether the sum is right, so that no message is in flight."""
        self.work(tick=False)
        return torch.allclose(self.total(), total, rtol=0, atol=1e-2)
