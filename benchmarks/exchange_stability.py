"""Stability of averaging with neighbours, with the real exchange: `python -m benchmarks.exchange_stability`.

Learners minimize h/2 · |w|² from different random weights. The gradient g = h w is taken at the weights before
averaging, while the real exchange (ZeroMQ, separate processes) averages; then w += delta, w -= lr · v, where v is g, or
m · v + g with momentum m. All learners start their steps at the same time ("lockstep"), the worst case, or
independently (--free). With --rate, every learner is behind a link of that rate (network namespaces; needs root), so
that an exchange takes as long as a step, or longer.

    python -m benchmarks.exchange_stability                                       # short exchanges, 2 minutes
    python -m benchmarks.exchange_stability --momentum 0.9 --curvature 0.9 1.2 1.5 1.8 2.1
    python -m benchmarks.exchange_stability --rate 100mbit --params 250000 --step-s 0.1
    python -m benchmarks.exchange_stability --learners 8 --free --json

`factor` is the growth of the distance between the learners per step, over the second half of a run: below 1 it decays,
above 1 training diverges, even if the mean of the weights is stable. `bears` computes the theoretical limit of lr · h:
2/3 for the mean with both neighbours (smallest eigenvalue -1/3), 1 for sequential pairs (0), and 1.9 times as much with
momentum 0.9; for synchronous SGD, it is 2 and 3.8.
"""

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import netns
from benchmarks.common import view_of
from training.exchange import Exchange, ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.exchange.neighbours import Kind, neighbour
from training.processes.keys import RingKey
from training.strategies.gossip import GossipConfig

_FORK = multiprocessing.get_context("fork")
_SEEN = 64
"""Number of weights that are compared."""
_START_S = 2.0
_TINY = 1e-30

Row = dict[str, Any]


def factor(spreads: Sequence[float]) -> float:
    """Growth of the distance per step, over the second half of the steps."""
    half = len(spreads) // 2
    first, last = max(spreads[half], _TINY), max(spreads[-1], _TINY)
    return float((last / first) ** (1 / (len(spreads) - 1 - half)))


def bears(eigenvalue: float, momentum: float) -> float:
    """The stability limit of learning rate times curvature.

    The component x of the weights along an eigenvector of the mixing matrix with eigenvalue μ follows x' = μ x - lr ·
    v' with v' = m v + h x (the gradient before averaging): z² - (μ + m - lr · h) z + μ m = 0. Both roots are inside the
    unit circle for lr · h < (1 + μ)(1 + m) if |μ m| < 1.

    Args:
        eigenvalue: μ, the smallest eigenvalue of the mixing matrix; 1 for synchronous learners.
        momentum: Momentum m.
    """
    return (1 + eigenvalue) * (1 + momentum)


def computed(learners: int, neighbours: Kind, rate: float, momentum: float, per_step: int, steps: int = 400) -> float:
    """Compute the factor without processes: pairs average sequentially, in random order."""
    chance = torch.Generator().manual_seed(0)
    weights = torch.randn(learners, _SEEN, dtype=torch.float64, generator=chance)
    velocity, view, spreads, scale = torch.zeros_like(weights), view_of(["-"] * learners), [], 0.0
    for step in range(steps):
        velocity = momentum * velocity + rate * weights
        for number in range(step * per_step, (step + 1) * per_step):
            for learner in torch.randperm(learners, generator=chance).tolist():
                other = neighbour(neighbours, view, learner, number, 0)
                weights[[learner, other]] = weights[[learner, other]].mean(dim=0)
        weights = weights - velocity
        spreads.append(scale + math.log((weights - weights.mean(dim=0)).square().mean().sqrt().item()))
        largest = max(weights.abs().max().item(), velocity.abs().max().item())
        weights, velocity, scale = weights / largest, velocity / largest, scale + math.log(largest)
    return math.exp((spreads[-1] - spreads[steps // 2]) / (steps - 1 - steps // 2))


def measure(options: argparse.Namespace, learners: int, neighbours: str, curvature: float) -> Row:
    """One run, in a separate process, so that its network ends with it."""
    reader, writer = _FORK.Pipe(duplex=False)
    stage = _FORK.Process(target=_stage, args=(options, learners, neighbours, curvature, writer))
    stage.start()
    writer.close()
    try:
        row: Row = json.loads(reader.recv_bytes())
    finally:
        stage.join(20)
    return row


def _stage(options: argparse.Namespace, learners: int, neighbours: str, curvature: float, writer: Connection) -> None:
    switch = netns.Switch(learners, options.rate) if options.rate else None
    config = ExchangeConfig(encrypt=switch is not None, cpu_share=1.0)
    gossip = GossipConfig.model_validate({"neighbours": neighbours, "per_step": options.per_step})
    key = RingKey.generate()
    with tempfile.TemporaryDirectory(prefix="stability-") as folder:
        pipes: list[Connection] = []
        for number in range(learners):
            ours, theirs = _FORK.Pipe()
            setup = ExchangeSetup(
                node=number,
                rank=0,
                size=options.params,
                key=key if switch else None,
                folder=Path(folder),
                bind_host=netns.address(number) if switch else "127.0.0.1",
                gossip=gossip,
            )
            namespace = switch.machines[number] if switch else None
            words = (config, setup, theirs, namespace, curvature, options)
            _FORK.Process(target=_learn, args=words, daemon=True).start()
            pipes.append(ours)
        endpoints = [pipe.recv() for pipe in pipes]
        begin = time.time() + _START_S
        for pipe in pipes:
            pipe.send((endpoints, begin))
        answers = [pipe.recv() for pipe in pipes]
    paths = torch.tensor([weights for weights, _ in answers], dtype=torch.float64)  # [learners, steps, seen]
    spreads = (paths - paths.mean(dim=0)).square().mean(dim=(0, 2)).sqrt().tolist()
    took = sum(seconds for _, seconds in answers) / learners
    row = {"learners": learners, "neighbours": neighbours, "lr_h": curvature, "lockstep": not options.free}
    row |= {"momentum": options.momentum, "per_step": options.per_step}
    row |= {"step_s": options.step_s, "exchange_s": took, "factor": factor(spreads)}
    row |= {"most": max(spreads) / spreads[0]}
    row |= {"computed": computed(learners, gossip.neighbours, curvature, options.momentum, options.per_step)}
    writer.send_bytes(json.dumps(row).encode())


def _learn(
    config: ExchangeConfig,
    setup: ExchangeSetup,
    pipe: Connection,
    namespace: int | None,
    curvature: float,
    options: argparse.Namespace,
) -> None:
    torch.set_num_threads(1)
    if namespace is not None:
        netns.enter(namespace)
    weights = torch.randn(setup.size, generator=torch.Generator().manual_seed(setup.node))
    exchange = build_exchange(config, setup)
    pipe.send(exchange.endpoint)
    endpoints, begin = pipe.recv()
    exchange.set_view(view_of(endpoints))
    exchange.start(weights, 0)
    seen, velocity = [], torch.zeros_like(weights)
    for step in range(options.steps):
        velocity.mul_(options.momentum).add_(weights, alpha=curvature)
        moment = time.time() + options.step_s if options.free else begin + (step + 1) * options.step_s
        time.sleep(max(0.0, moment - time.time()))
        _average(exchange, weights)
        weights.sub_(velocity)
        exchange.offer(weights, step + 1)
        seen.append(weights[:_SEEN].tolist())
    pipe.send((seen, exchange.stats().mean_s))
    exchange.close()
    os._exit(0)


def _average(exchange: Exchange, weights: torch.Tensor) -> None:
    if exchange.ready():
        with exchange.taken() as delta:
            weights.add_(delta)


def show(rows: Sequence[Row]) -> str:
    """Format the rows as a Markdown table."""
    titles = ("learners", "neighbours", "exchanges a step", "momentum", "exchange / step", "lr · h", "factor a step")
    lines = ["| " + " | ".join((*titles, "computed", "at most")) + " |", "|---" * (len(titles) + 2) + "|"]
    for row in rows:
        share, factors = row["exchange_s"] / row["step_s"], (f"{row['factor']:.3f}", f"{row['computed']:.3f}")
        cells = (row["learners"], row["neighbours"], row["per_step"], row["momentum"], f"{share:.2f}", row["lr_h"])
        lines.append("| " + " | ".join(map(str, (*cells, *factors, f"{row['most']:.3g}"))) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.exchange_stability", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--learners", type=int, nargs="+", default=[4, 8])
    graphs = ("ring", "random-ring", "exponential")
    parser.add_argument("--neighbours", nargs="+", choices=graphs, default=["ring", "random-ring"])
    parser.add_argument("--per-step", type=int, default=1, help="most exchanges that a learner starts per step")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--curvature", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="learning rate times h")
    parser.add_argument("--params", type=int, default=2000, help="weights of a learner")
    parser.add_argument("--step-s", type=float, default=0.04, help="seconds per step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", default="", help="rate of each learner's link in the format of `tc`; empty: loopback")
    parser.add_argument("--free", action="store_true", help="learners step independently")
    options = parser.parse_args(argv)
    if options.rate and (reason := netns.why_not()):
        parser.error(f"--rate: {reason}")
    if options.params < _SEEN or options.steps < 10 or options.step_s <= 0:
        parser.error(f"--params must be {_SEEN} or more, --steps 10 or more, --step-s positive")
    rows = [
        measure(options, learners, neighbours, curvature)
        for learners in options.learners
        for neighbours in options.neighbours
        for curvature in options.curvature
    ]
    print(json.dumps({"rows": rows}, indent=1) if options.json else show(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
