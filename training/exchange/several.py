"""Several exchanges per rank, each for a part of its weights: for networks that one daemon's core cannot saturate."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from typing_extensions import override

from training.coordinator.membership import View
from training.exchange.base import Exchange, ExchangeError, ExchangeSetup, ExchangeStats


class SeveralExchanges(Exchange):
    """Splits the weights into parts of nearly equal size and averages each with a separate exchange.

    Averaging is elementwise, so parts may meet different neighbours at different times: each part's sum over the
    learners is preserved as with one exchange.

    Args:
        build: Builds the exchange of a part.
        setup: Setup of the whole exchange.
        count: Number of parts.

    Raises:
        ValueError: If there are more parts than weights.
    """

    def __init__(self, build: Callable[[ExchangeSetup], Exchange], setup: ExchangeSetup, count: int) -> None:
        if setup.size < count:
            raise ValueError(f"exchange.daemons is {count}, but there are only {setup.size} weights: use daemons=1")
        edges = [setup.size * k // count for k in range(count + 1)]
        self._slices = [slice(begin, end) for begin, end in pairwise(edges)]
        self._exchanges: list[Exchange] = []
        self._waiting: list[int] = []
        self._taken: list[int] = []
        self._delta = torch.empty(0)
        try:
            for k, part in enumerate(self._slices):
                one = replace(setup, rank=setup.rank * count + k, size=part.stop - part.start, moments=0)
                self._exchanges.append(build(one))
        except BaseException:
            self.close()
            raise
        self.parts = count
        self.endpoint = " ".join(exchange.endpoint for exchange in self._exchanges)

    def _each(self, weights: torch.Tensor) -> Iterator[tuple[Exchange, torch.Tensor]]:
        return ((one, weights[part]) for one, part in zip(self._exchanges, self._slices, strict=True))

    @override
    def start(self, weights: torch.Tensor, step: int) -> None:
        for exchange, part in self._each(weights):
            exchange.start(part, step)

    @override
    def tick(self, step: int) -> None:
        for exchange in self._exchanges:
            exchange.tick(step)

    @override
    def ready(self) -> bool:
        self._waiting = [k for k, exchange in enumerate(self._exchanges) if exchange.ready()]
        return bool(self._waiting)

    @override
    def take(self) -> torch.Tensor:
        if not self._waiting:
            raise ExchangeError("no delta is ready: ask ready() first")
        self._taken = self._waiting
        brought = {k: self._exchanges[k].take() for k in self._taken}
        if not len(self._delta):
            self._delta = torch.empty(self._slices[-1].stop, device=next(iter(brought.values())).device)
        for k, part in enumerate(self._slices):
            if k in brought:
                self._delta[part].copy_(brought[k])
            else:
                self._delta[part].zero_()
        return self._delta

    @override
    def release(self) -> None:
        for k in self._taken:
            self._exchanges[k].release()
        self._taken = self._waiting = []

    @override
    def give(self, weights: torch.Tensor, step: int) -> bool:
        given = [exchange.give(part, step) for exchange, part in self._each(weights)]
        return all(given)

    @override
    def set_view(self, view: View) -> None:
        spread = (
            replace(member, endpoints=tuple(" ".join(member.endpoints).split())) for member in view.members
        )  # each part counts as a rank
        view = View(view.number, tuple(spread))
        for exchange in self._exchanges:
            exchange.set_view(view)

    @override
    def fetch(self, timeout_s: float) -> torch.Tensor | None:
        deadline = time.monotonic() + timeout_s
        found = []
        for exchange in self._exchanges:
            part = exchange.fetch(max(0.0, deadline - time.monotonic()))
            if part is None:
                return None
            found.append(part)
        return torch.cat(found)

    @override
    def stats(self) -> ExchangeStats:
        return combined([exchange.stats() for exchange in self._exchanges])

    @override
    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.close()

    @override
    def alive(self) -> bool:
        return all(exchange.alive() for exchange in self._exchanges)


def combined(parts: list[ExchangeStats]) -> ExchangeStats:
    """Combine the figures of equal parts into those of one exchange: counts and CPU times add up.

    Args:
        parts: Figures of each part; at least one.
    """

    def total(name: str) -> int:
        return sum(int(getattr(one, name)) for one in parts)

    finished = total("finished")
    return ExchangeStats(
        initiated=total("initiated"),
        finished=finished,
        answered=total("answered"),
        failed=total("failed"),
        late=total("late"),
        skipped_nonfinite=total("skipped_nonfinite"),
        last_s=max(one.last_s for one in parts),
        mean_s=sum(one.mean_s * one.finished for one in parts) / max(finished, 1),
        bytes_sent=total("bytes_sent"),
        bytes_received=total("bytes_received"),
        distance=math.sqrt(sum(one.distance**2 for one in parts) / len(parts)),
        staleness=max(one.staleness for one in parts),
        cpu_seconds=sum(one.cpu_seconds for one in parts),
        silent_s=max(one.silent_s for one in parts),
        last_peer=parts[-1].last_peer,
    )
