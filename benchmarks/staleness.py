"""Staleness of averages: `python -m benchmarks.staleness [--learners 4] [--step-ms 60] [--weights 100000]`.

Learners run the real exchange and its daemons, but their steps sleep instead of computing, so several learners fit on
two cores and only the exchange is measured. Staleness is defined as published (arXiv:1904.04956): own steps between the
averaged weights and the update that applies the average; the minimum is 1.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.common import view_of
from training.exchange import Exchange, ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.strategies.gossip import GossipConfig

_WARM_UP = 10


class Learner(threading.Thread):
    """A learner with simulated steps.

    Args:
        exchange: Its exchange.
        weights: Number of weights.
        steps: Number of measured steps.
        step_s: Duration of a step in seconds.
        late_s: Delay of the start in seconds, so that learners are not in lockstep.
    """

    def __init__(self, exchange: Exchange, weights: int, steps: int, step_s: float, late_s: float) -> None:
        super().__init__(daemon=True)
        self.exchange, self.steps, self.step_s, self.late_s = exchange, steps, step_s, late_s
        self.weights = torch.randn(weights)
        self.staleness: list[float] = []
        self.waited: list[float] = []
        self.per_step = 0.0

    def run(self) -> None:
        """Run the steps."""
        exchange = self.exchange
        exchange.start(self.weights, 0)
        time.sleep(self.late_s)
        before = 0
        for step in range(1, _WARM_UP + self.steps + 1):
            time.sleep(self.step_s)
            asked = time.perf_counter()
            ready = exchange.ready()
            waited = time.perf_counter() - asked
            if ready:
                with exchange.taken() as delta:
                    self.weights += delta
            exchange.offer(self.weights, step)
            if step == _WARM_UP:
                before = exchange.stats().finished
            if step > _WARM_UP:
                self.waited.append(waited)
                self.staleness += [exchange.stats().staleness] if ready else []
        self.per_step = (exchange.stats().finished - before) / self.steps


def measure(options: argparse.Namespace, per_step: int) -> dict[str, Any]:
    """Run with at most `per_step` exchanges per step; returns means over learners and steps."""
    cfg, gossip = ExchangeConfig(encrypt=options.encrypt), GossipConfig(per_step=per_step)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        exchanges = [
            build_exchange(cfg, ExchangeSetup(node, 0, options.weights, None, folder, gossip=gossip))
            for node in range(options.learners)
        ]
        for exchange in exchanges:
            stack.callback(exchange.close)
        view = view_of([exchange.endpoint for exchange in exchanges])
        for exchange in exchanges:
            exchange.set_view(view)
        step_s = options.step_ms / 1000
        learners = [
            Learner(exchange, options.weights, options.steps, step_s, 0.5 + node * step_s / options.learners)
            for node, exchange in enumerate(exchanges)
        ]
        for learner in learners:
            learner.start()
        for learner in learners:
            learner.join()
    ages = [age for learner in learners for age in learner.staleness]
    waited = [second for learner in learners for second in learner.waited]
    return {
        "per_step": per_step,
        "learners": options.learners,
        "weights": options.weights,
        "staleness": statistics.fmean(ages) if ages else None,
        "exchanges_per_step": statistics.fmean(learner.per_step for learner in learners),
        "updates_with_average": len(ages) / len(waited),
        "wait_ms": 1000 * statistics.fmean(waited),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--weights", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--step-ms", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--per-step", type=int, nargs="+", default=[1, 4], help="train.strategy.per_step")
    parser.add_argument("--encrypt", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in options.weights:
        for per_step in options.per_step:
            rows.append(measure(argparse.Namespace(**{**vars(options), "weights": size}), per_step))
            print(
                "{weights:>9,} weights, per_step {per_step}: staleness {staleness:.2f}, {exchanges_per_step:.2f} "
                "exchanges a step, averages in {updates_with_average:.0%} of updates, {wait_ms:.2f} ms waited".format(
                    **rows[-1]
                ),
                file=sys.stderr,
                flush=True,
            )
    if options.json:
        print(json.dumps({"benchmark": "staleness", "rows": rows}))


if __name__ == "__main__":
    main()
