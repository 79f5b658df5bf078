"""The published BLSTM on this machine: step time, frames per second, cost of the exchange, peak memory.

    python -m benchmarks.published_model [--json] [--learners 2] [--seconds 10] [--device auto] [--precision fp32 bf16]
        [--exchange zmq|cuda] [--daemons 1] [--wire fp32|bf16] [--graphs] [--flat-bf16]

Model and batch are those of arXiv:1904.04956: 6 x 512 cells per direction, bottleneck 256, 32,000 outputs, batches of
128 segments of 21 frames with 260 dimensions, frame cross-entropy, SGD with momentum. The data is noise: this measures
speed, not learning. Learners are processes, each on its own GPU if there are enough. First each trains alone, then all
average along a ring; the measurement starts after each has finished an exchange. `--learners 1` measures the step
without one. A step ends when the GPU has done the step's own work, without waiting for copies of the exchange, which
run on separate streams. `--layers`, `--cells` and `--outputs` make the model smaller for quick tests.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.common import BenchmarkError, Watched
from devices.choice import claim, inventory, pick_device
from devices.precision import describe
from speech.models.networks.lstm import run_lstm
from training.config import SgdConfig
from training.coordinator.membership import Member, View
from training.exchange.base import Exchange, ExchangeStats
from training.exchange.config import ExchangeConfig
from training.learner.bf16_weights import Bf16Weights
from training.learner.flat import FlatParameters
from training.learner.graphs import GraphedForward
from training.learner.optim import build_optimizer
from training.processes.children import end_with_parent

SEGMENT, DIMENSION, OUTPUTS = 21, 260, 32_000
WARM_UP_S = 120.0
"""Time-out of a learner's first exchange in seconds."""
GRACE_S = 300.0
"""Time-out of a learner's answer, beyond its measurement, in seconds."""
MIN_STEPS = 3


@dataclass(frozen=True)
class Options:
    """Options of the measurement, for each learner."""

    learners: int = 2
    seconds: float = 10.0
    batch: int = 128
    layers: int = 6
    cells: int = 512
    outputs: int = OUTPUTS
    device: str = "auto"
    precision: str = "fp32"
    graphs: bool = False
    """Whether forward and backward pass are replayed from CUDA graphs."""
    flat_bf16: bool = False
    """Whether all weights are converted to bf16 at once, instead of one by one; without effect in fp32."""
    exchange: Literal["zmq", "cuda"] = "zmq"
    daemons: int = 1
    wire: Literal["fp32", "bf16"] = "fp32"

    def exchange_config(self) -> ExchangeConfig:
        """Configuration of the exchange; raises ValueError if the options do not fit together."""
        return ExchangeConfig(kind=self.exchange, wire=self.wire, daemons=self.daemons, encrypt=False)


class PublishedBlstm(nn.Module):
    """The acoustic model of arXiv:1904.04956, section 4: maps segments [B, 21, 260] to state scores [B, 21, 32000]."""

    def __init__(self, layers: int, cells: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIMENSION, cells, num_layers=layers, bidirectional=True, batch_first=True)
        self.bottleneck = nn.Linear(2 * cells, 256)
        self.output = nn.Linear(256, outputs)

    def forward(self, x_BTF: Tensor) -> Tensor:  # noqa: D102 - described in the class
        scores: Tensor = self.output(self.bottleneck(run_lstm(self.lstm, x_BTF, None)))
        return scores


class Bench:
    """One learner, which trains the published model on noise."""

    def __init__(self, number: int, options: Options) -> None:
        self.device, self.bf16 = pick_device(options.device, number), options.precision == "bf16"
        claim(self.device)
        torch.manual_seed(0)
        self.model = PublishedBlstm(options.layers, options.cells, options.outputs).to(self.device)
        self.flat = FlatParameters(self.model)
        self.optimizer = build_optimizer(SgdConfig(lr=0.01), self.model)
        self._weights = Bf16Weights(self.flat).in_use if options.flat_bf16 and self.bf16 else nullcontext
        # all batches have one shape
        self._forward = GraphedForward(self._scores, self.flat, size=int) if options.graphs else self._scores
        self.steps = 0
        self.staleness: list[float] = []
        generator = torch.Generator().manual_seed(number)
        self.inputs = torch.randn(options.batch, SEGMENT, DIMENSION, generator=generator).to(self.device)
        self.lengths = torch.full((options.batch,), SEGMENT, device=self.device)
        states = torch.randint(options.outputs, (options.batch * SEGMENT,), generator=generator)
        self.states = states.to(self.device)

    def _scores(self, x_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        with self._weights(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            return self.model(x_BTF), lengths

    def step(self, exchange: Exchange | None = None) -> float:
        """Make a training step, with averaging if there is an exchange; returns its seconds."""
        started = time.perf_counter()
        self.steps += 1
        self.flat.zero_grad()
        scores, _ = self._forward(self.inputs, self.lengths)
        nn.functional.cross_entropy(scores.flatten(0, 1).float(), self.states).backward()
        if exchange is not None and exchange.ready():
            with exchange.taken() as delta:
                self.flat.weights.add_(delta)
            self.staleness.append(exchange.stats().staleness)
        self.optimizer.step()
        if exchange is not None:
            exchange.offer(self.flat.weights, self.steps)
        if self.device.type == "cuda":
            # not the whole device: copies of the exchange may overlap with the next step
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter() - started

    def measure(self, seconds: float, exchange: Exchange | None = None) -> list[float]:
        """Train for some seconds and at least a few steps; returns the seconds of each step."""
        end, times = time.perf_counter() + seconds, [self.step(exchange)]
        while time.perf_counter() < end or len(times) < MIN_STEPS:
            times.append(self.step(exchange))
        return times

    def await_exchange(self, exchange: Exchange) -> None:
        """Train until an exchange has finished.

        Raises:
            BenchmarkError: No exchange has finished in time.
        """
        deadline = time.perf_counter() + WARM_UP_S
        while not exchange.stats().finished:
            if time.perf_counter() > deadline:
                raise BenchmarkError(f"no exchange has finished after {WARM_UP_S:.0f} s")
            self.step(exchange)

    def peak_mb(self) -> float:
        """Peak memory in MB: of the GPU, or on a CPU of this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def learner(number: int, options: Options, pipe: Connection, parent: int) -> None:
    """A learner's process: trains first alone, then in the ring, if there are others."""
    from training.exchange import ExchangeSetup, build_exchange

    end_with_parent(parent)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.learners))
    bench = Bench(number, options)
    if options.learners == 1:
        bench.step()
        alone = bench.measure(options.seconds)
        pipe.send(_report(bench, alone, alone))
        return
    size = bench.flat.weights.numel()
    with tempfile.TemporaryDirectory() as folder:
        exchange = build_exchange(options.exchange_config(), ExchangeSetup(number, 0, size, folder=Path(folder)))
        try:
            pipe.send(exchange.endpoint)
            exchange.set_view(View.from_dict(pipe.recv()))
            bench.step()
            alone = bench.measure(options.seconds)
            pipe.send("alone")
            pipe.recv()
            exchange.start(bench.flat.weights, bench.steps)
            bench.await_exchange(exchange)
            pipe.send("warm")
            pipe.recv()
            before = exchange.stats()
            bench.staleness.clear()
            together = bench.measure(options.seconds, exchange)
            pipe.send(_report(bench, alone, together, before, exchange.stats(), exchange.parts))
            pipe.recv()  # keep the daemon answering until all are done
        finally:
            exchange.close()


def _report(
    bench: Bench,
    alone: list[float],
    together: list[float],
    before: ExchangeStats = ExchangeStats(),  # noqa: B008 - frozen
    after: ExchangeStats = ExchangeStats(),  # noqa: B008
    parts: int = 1,
) -> dict[str, Any]:
    finished = (after.finished - before.finished) / parts
    return {
        "on": str(bench.device),
        "computed_in": describe(bench.device, bench.bf16, has_lstm=True),
        "params": bench.flat.weights.numel(),
        "steps": len(together),
        "step_s": statistics.median(alone),
        "step_s_exchanging": statistics.median(together),
        "exchanges": finished,
        "exchanges_per_step": finished / len(together),
        "staleness": statistics.fmean(bench.staleness or [0.0]),
        "failed": after.failed - before.failed,
        "exchange_s": after.mean_s,
        "peak_mb": bench.peak_mb(),
    }


def measure(options: Options) -> dict[str, Any]:
    """Run the learners with one precision and summarize.

    Raises:
        BenchmarkError: A learner has died.
    """
    learners = Watched(learner, options.learners, options, options.seconds + WARM_UP_S + GRACE_S)
    patience_s = 0.0
    try:
        if options.learners > 1:
            members = tuple(Member(number, str(number), (place,)) for number, place in enumerate(learners.hear()))
            learners.tell(View(1, members).to_dict())
            for _ in range(2):  # first all have trained alone, then all have exchanged once
                learners.hear()
                learners.tell("go on")
        replies = learners.hear()
        if options.learners > 1:
            learners.tell("end")
        patience_s = 30.0
    finally:
        learners.end(patience_s)
    places, kinds = (sorted({reply.pop(name) for reply in replies}) for name in ("on", "computed_in"))
    median = {name: statistics.median(reply[name] for reply in replies) for name in replies[0]}
    frames = options.learners * options.batch * SEGMENT
    return {
        **asdict(options),
        "device": ", ".join(places),
        "computed_in": ", ".join(kinds),
        **median,
        "frames_per_s": frames / median["step_s_exchanging"],
        "exchange_share": 1 - median["step_s"] / median["step_s_exchanging"],
    }


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    defaults = Options()
    for name in ("learners", "batch", "layers", "cells", "outputs", "daemons"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument(
        "--seconds", type=float, default=defaults.seconds, help="per measurement; each learner makes two"
    )
    parser.add_argument("--graphs", action="store_true", help="replay forward and backward pass from CUDA graphs")
    parser.add_argument(
        "--flat-bf16", action="store_true", help="convert all weights to bf16 at once (train.flat_bf16)"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--exchange", default=defaults.exchange, choices=["zmq", "cuda"])
    parser.add_argument("--wire", default=defaults.wire, choices=["fp32", "bf16"])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    args = parser.parse_args(argv)
    if args.learners < 1:
        parser.error("--learners: 1 or more")
    if trouble := inventory().trouble:
        print(f"on the CPU: {trouble}")
    try:
        pick_device(args.device, field="--device")
        values = {name: getattr(args, name) for name in vars(defaults) if name != "precision"}
        Options(**values).exchange_config()
        if args.exchange == "cuda" and pick_device(args.device).type != "cuda":
            raise ValueError("--exchange cuda needs a GPU: use zmq")
    except ValueError as error:
        parser.error(str(error))
    rows = [measure(Options(**values, precision=precision)) for precision in args.precision]
    if args.json:
        print(json.dumps({"benchmark": "published_model", "rows": rows}))
        return
    for row in rows:
        print(
            f"{row['device']}, {row['computed_in']}: {row['learners']} learners, "
            f"{row['params'] / 1e6:.1f} M parameters, "
            f"step {row['step_s']:.3f} s alone, {row['step_s_exchanging']:.3f} s exchanging "
            f"({row['exchange_share']:.1%}), {row['exchanges_per_step']:.2f} exchanges a step by {row['exchange']}, "
            f"{row['exchange_s'] * 1e3:.1f} ms each, staleness {row['staleness']:.1f}, "
            f"{row['frames_per_s']:,.0f} frames/s, peak {row['peak_mb']:,.0f} MB"
        )


if __name__ == "__main__":
    main()
