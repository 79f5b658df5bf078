"""The published BLSTM on this machine: step time, frames per second, what the exchange costs, peak memory.

    python -m benchmarks.published_model [--json] [--learners 2] [--steps 10] [--device auto] [--precision fp32 bf16]

Model and batch are those of arXiv:1904.04956: 6 x 512 cells per direction, bottleneck 256, 32,000 outputs, 21-frame
segments of 260 dimensions, 128 of them a batch, frame cross-entropy, SGD with momentum. The data is noise: this
measures speed, not learning. Learners are processes on one device; first each trains alone, then all average along a
ring.
"""

import argparse
import json
import multiprocessing as mp
import os
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.config import ExchangeConfig, OptimizerConfig
from training.flat import FlatParameters
from training.membership import Member, View
from training.optim import build_optimizer
from training.processes import end_with_parent

SEGMENT, DIMENSION, OUTPUTS = 21, 260, 32_000


class PublishedBlstm(nn.Module):
    """The acoustic model of arXiv:1904.04956, section 4: segments [B, 21, 260] to state scores [B, 21, 32000]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIMENSION, 512, num_layers=6, bidirectional=True, batch_first=True)
        self.bottleneck = nn.Linear(1024, 256)
        self.output = nn.Linear(256, OUTPUTS)

    def forward(self, x_BTF: Tensor) -> Tensor:  # noqa: D102 - the class says it
        scores: Tensor = self.output(self.bottleneck(self.lstm(x_BTF)[0]))
        return scores


class Bench:
    """One learner: noise batches through the published model."""

    def __init__(self, number: int, device: torch.device, bf16: bool, batch: int) -> None:
        torch.manual_seed(0)
        self.model = PublishedBlstm().to(device)
        self.flat = FlatParameters(self.model)
        self.optimizer = build_optimizer(OptimizerConfig(kind="sgd", lr=0.01), self.model)
        self.device, self.bf16 = device, bf16
        generator = torch.Generator().manual_seed(number)
        self.inputs = torch.randn(batch, SEGMENT, DIMENSION, generator=generator).to(device)
        self.states = torch.randint(OUTPUTS, (batch * SEGMENT,), generator=generator).to(device)

    def step(self, exchange: Any = None, number: int = 0) -> float:
        """Seconds of one training step, averaging included if there is an exchange."""
        started = time.perf_counter()
        self.flat.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            scores = self.model(self.inputs)
        nn.functional.cross_entropy(scores.flatten(0, 1).float(), self.states).backward()
        if exchange is not None and exchange.ready():
            self.flat.weights.add_(exchange.take())
            exchange.release()
        self.optimizer.step()
        if exchange is not None:
            exchange.give(self.flat.weights, number)
            exchange.tick(number)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def peak_mb(self) -> float:
        """Most memory in use so far: the device's, or on a CPU this process's."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def learner(number: int, options: dict[str, Any], pipe: Connection, parent: int) -> None:
    """A learner's process: first alone, then in the ring."""
    from training.exchange import ExchangeSetup, build_exchange

    end_with_parent(parent)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options["learners"]))
    bench = Bench(number, torch.device(options["device"]), options["precision"] == "bf16", options["batch"])
    size = bench.flat.weights.numel()
    with tempfile.TemporaryDirectory() as folder:
        exchange = build_exchange(ExchangeConfig(encrypt=False), ExchangeSetup(number, 0, size, folder=Path(folder)))
        try:
            pipe.send(exchange.endpoint)
            exchange.set_view(View.from_dict(pipe.recv()))
            bench.step()
            alone = [bench.step() for _ in range(options["steps"])]
            pipe.send("alone")
            pipe.recv()
            exchange.start(bench.flat.weights, 0)
            together = [bench.step(exchange, step + 1) for step in range(options["steps"])]
            stats = exchange.stats()
            pipe.send(
                {
                    "params": size,
                    "step_s": statistics.median(alone),
                    "step_s_exchanging": statistics.median(together),
                    "exchanges": stats.initiated + stats.answered,
                    "exchange_s": stats.mean_s,
                    "peak_mb": bench.peak_mb(),
                }
            )
            pipe.recv()
        finally:
            exchange.close()


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Run the learners of one precision and sum up."""
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for number in range(options["learners"]):
        ours, theirs = context.Pipe()
        process = context.Process(target=learner, args=(number, options, theirs, os.getpid()), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    members = tuple(Member(number, str(number), (pipe.recv(),)) for number, pipe in enumerate(pipes))
    for pipe in pipes:
        pipe.send(View(1, members).to_dict())
    for _ in range(2):  # all have trained alone; all have trained together
        replies = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send("go on")
    for process in processes:
        process.join(30)
    median = {name: statistics.median(reply[name] for reply in replies) for name in replies[0]}
    frames = options["learners"] * options["batch"] * SEGMENT
    return {
        **{name: options[name] for name in ("device", "precision", "learners", "batch")},
        **median,
        "frames_per_s": frames / median["step_s_exchanging"],
        "exchange_share": 1 - median["step_s"] / median["step_s_exchanging"],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("learners", "steps", "batch", "device")}
    rows = [measure({**options, "precision": precision}) for precision in args.precision]
    if args.json:
        print(json.dumps({"benchmark": "published_model", "rows": rows}))
        return
    for row in rows:
        print(
            f"{row['device']} {row['precision']}: {row['learners']} learners, {row['params'] / 1e6:.1f} M parameters, "
            f"step {row['step_s']:.3f} s alone, {row['step_s_exchanging']:.3f} s exchanging "
            f"({row['exchange_share']:.1%}), {row['frames_per_s']:,.0f} frames/s, peak {row['peak_mb']:,.0f} MB"
        )


if __name__ == "__main__":
    main()
