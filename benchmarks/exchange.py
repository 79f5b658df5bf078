"""Time and CPU time of one exchange of weights on one machine, compared with raw sockets.

Run `python -m benchmarks.exchange` (`--json` for one line of JSON). All alternatives run at the same time and take
turns, so that other load affects all alike. `seconds` is the time from the first chunk sent to the last one averaged;
`cpu_seconds` is the CPU time of both sides.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.common import view_of
from benchmarks.exchange_raw import RawPair
from benchmarks.peers.gloo import GlooExchange
from training.exchange import Exchange, ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.processes.keys import RingKey
from training.strategies.gossip import GossipConfig

PUBLISHED = 43_000_000
"""Parameters of the published acoustic model (arXiv:1904.04956: "over 43 M")."""

_LONGEST_S = 120.0
GLOO = "gloo"
_VARIANTS: dict[str, dict[str, object]] = {
    "zmq plain": {"encrypt": False},
    "zmq encrypted": {"encrypt": True},
    "zmq plain bf16": {"encrypt": False, "wire": "bf16"},
    GLOO: {"encrypt": False},
}


class Pair:
    """The exchanges of two nodes."""

    def __init__(self, count: int, folder: Path, variant: str) -> None:
        options = _VARIANTS[variant]
        cfg, gossip = ExchangeConfig.model_validate({"timeout_s": 60.0, **options}), GossipConfig(per_step=1)
        key = RingKey.generate() if cfg.encrypt else None
        self.both = variant == GLOO
        setups = [ExchangeSetup(node, 0, count, key, folder, gossip=gossip) for node in range(2)]
        self.ends = [
            GlooExchange(cfg, setup, str(folder / "meet"), 2) if self.both else build_exchange(cfg, setup)
            for setup in setups
        ]
        view = view_of([end.endpoint for end in self.ends])
        weights = torch.from_numpy(np.random.default_rng(0).normal(size=count).astype(np.float32))
        for node, end in enumerate(self.ends):
            end.set_view(view)
            end.start(weights + node, 0)
            wait(lambda end=end: end.give(weights, 0))
        self.once()

    def once(self) -> tuple[float, float]:
        """Run one exchange; returns its seconds and CPU seconds."""
        asker = self.ends[0]
        before, cpu = asker.stats().finished, self.cpu()
        for end in self.ends if self.both else self.ends[:1]:
            end.tick(0)
        wait(lambda: asker.stats().finished > before)
        time.sleep(0.15)  # figures are updated every 50 ms
        used = self.cpu() - cpu
        for end in self.ends:
            drain(end)
        return asker.stats().last_s, used

    def cpu(self) -> float:
        """CPU seconds of both daemons so far."""
        return sum(end.stats().cpu_seconds for end in self.ends)

    def close(self) -> None:
        """Close both exchanges."""
        for end in self.ends:
            end.close()


def wait(condition: Callable[[], object]) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: After two minutes.
    """
    deadline = time.monotonic() + _LONGEST_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("an exchange did not end")
        time.sleep(0.005)


def drain(end: Exchange) -> None:
    """Take a ready delta, as a training process does between two steps."""
    if end.ready():
        with end.taken():
            pass


def measure(count: int, rounds: int, names: list[str]) -> list[dict[str, object]]:
    """Rows of the table: medians over rounds in which all alternatives take turns.

    Args:
        count: Number of parameters.
        rounds: Number of rounds.
        names: Alternatives besides raw sockets.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rivals: dict[str, Pair | RawPair] = {"raw sockets": RawPair(count)}
        stack.callback(rivals["raw sockets"].close)
        for name in names:
            (folder / name).mkdir()
            rivals[name] = Pair(count, folder / name, name)
            stack.callback(rivals[name].close)
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
        for number in range(rounds + 1):
            for name, rival in rivals.items():
                result = rival.once()
                if number:  # the first round includes page faults
                    figures[name].append(result)
    raw = statistics.median(seconds for seconds, _ in figures["raw sockets"])
    rows: list[dict[str, object]] = []
    for name, values in figures.items():
        seconds, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        row = {"exchange": name, "params": count, "seconds": seconds, "cpu_seconds": cpu, "ratio_to_raw": raw / seconds}
        rows.append(row)
    return rows


def interference(count: int, seconds: float) -> list[dict[str, object]]:
    """Slow-down of a computing thread while two nodes on this machine exchange continuously.

    `own core` binds the thread to one core and the exchange's processes to the others; `shared cores` binds nothing.
    `slowdown` is in wall time; `cpu_slowdown` is in the thread's CPU time: the cost of shared caches and memory,
    without waiting for a core.
    """
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(count, Path(folder), "zmq plain")
        daemons = [task for end in pair.ends for task in Path(f"/proc/{end.pid}/task").iterdir()]  # type: ignore[attr-defined]
        try:
            for condition in ["own core", "shared cores"] if len(cores) > 1 else ["shared cores"]:
                apart = condition == "own core"
                for task in daemons:
                    os.sched_setaffinity(int(task.name), cores[1:] if apart else cores)
                rows.append({"condition": condition} | _slowdown(pair, {cores[0]} if apart else set(cores), seconds))
        finally:
            pair.close()
    return rows


def _slowdown(pair: Pair, cores: set[int], seconds: float) -> dict[str, object]:
    """Compare computation with and without exchanges, in turns, while another thread calls `tick`."""
    quiet, busy, exchanges = [], [], 0
    for _ in range(5):
        quiet.append(_compute(cores, seconds))
        running = threading.Event()
        running.set()
        before = pair.ends[0].stats().finished
        ticker = threading.Thread(target=_tick, args=(pair, running))
        ticker.start()
        busy.append(_compute(cores, seconds))
        running.clear()
        ticker.join()
        exchanges += pair.ends[0].stats().finished - before
    wall, cpu = (
        statistics.median(a[which] / b[which] for a, b in zip(quiet, busy, strict=True)) - 1 for which in range(2)
    )
    return {"slowdown": wall, "cpu_slowdown": cpu, "exchanges_per_s": exchanges / 5 / seconds}


def _tick(pair: Pair, running: threading.Event) -> None:
    """Permit exchanges at a far higher rate than possible, at almost no cost."""
    while running.is_set():
        pair.ends[0].tick(0)
        for end in pair.ends:
            drain(end)
        time.sleep(0.02)


def _compute(cores: set[int], seconds: float) -> tuple[float, float]:
    """Matrix products of one thread per second and per CPU second."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        a = np.random.default_rng(0).normal(size=(384, 384)).astype(np.float32)
        done, started, used = 0, time.perf_counter(), time.thread_time()
        while time.perf_counter() - started < seconds:
            for _ in range(20):
                np.matmul(a, a)
            done += 20
        return done / (time.perf_counter() - started), done / (time.thread_time() - used)
    finally:
        os.sched_setaffinity(0, mine)


def hand_over(count: int) -> dict[str, float]:
    """Seconds that `give`, and `take` with the addition, cost the training thread."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(count, Path(folder), "zmq plain")
        weights = torch.zeros(count)
        gives, takes = [], []
        try:
            for step in range(6):
                for end in pair.ends:
                    wait(lambda end=end, step=step: end.give(weights, step))  # noqa: B023
                pair.ends[0].tick(step)
                wait(pair.ends[0].ready)
                started = time.perf_counter()
                weights += pair.ends[0].take()
                pair.ends[0].release()
                takes.append(time.perf_counter() - started)
                started = time.perf_counter()
                if pair.ends[0].give(weights, step):
                    gives.append(time.perf_counter() - started)
                drain(pair.ends[1])
        finally:
            pair.close()
    return {"give_s": statistics.median(gives or [0.0]), "take_s": statistics.median(takes)}


def main(argv: list[str]) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__)
    parser.add_argument("--params", type=lambda text: int(float(text)), default=PUBLISHED, help="weights exchanged")
    parser.add_argument("--rounds", type=int, default=7, help="exchanges of each alternative")
    parser.add_argument("--only", nargs="*", choices=list(_VARIANTS), default=list(_VARIANTS), help="alternatives")
    parser.add_argument("--interference-s", type=float, default=2.0, help="seconds of each computation; 0 for none")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    args = parser.parse_args(argv)
    result: dict[str, object] = {"benchmark": "exchange", "cores": len(os.sched_getaffinity(0))}
    result["rows"] = rows = measure(args.params, args.rounds, args.only)
    result["hand_over"] = hand_over(args.params)
    result["interference"] = slow = interference(args.params, args.interference_s) if args.interference_s else []
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"one exchange of {args.params:,} fp32 weights, both ways, on {result['cores']} cores")
    for row in rows:
        figures = "{seconds:8.3f} s {cpu_seconds:8.3f} s CPU {ratio_to_raw:6.2f} of raw sockets' speed".format(**row)
        print(f"  {row['exchange']:16}{figures}")
    print("  training thread: give {give_s:.3f} s, take and add {take_s:.3f} s".format(**result["hand_over"]))  # type: ignore[arg-type]
    for row in slow:
        line = (
            "  computing thread, {condition}: {slowdown:+.1%} by the clock, {cpu_slowdown:+.1%} in processor "
            "time, at {exchanges_per_s:.1f} exchanges/s"
        )
        print(line.format(**row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
