"""What the benchmarks share: median times of rivals that take turns, and a table with ratios."""

import json
import statistics
import time
from collections.abc import Callable


def compare(rivals: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Median seconds of each rival; they take turns, so that a busy moment of the machine meets them all."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for work in rivals.values():
        work()  # caches, lazy imports
    for _ in range(rounds):
        for name, work in rivals.items():
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def show(title: str, seconds: dict[str, float], ours: str, unit: str, amount: float) -> None:
    """Print a table, ours first and the others as ratios to it, and the same as one JSON line."""
    print(title)
    for name, value in seconds.items():
        ratio = seconds[ours] / value
        print(f"  {name:38} {amount / value:12,.1f} {unit:24} x {ratio:5.2f} of {ours}")
    rows = [{"name": name, "median_s": value, unit: amount / value} for name, value in seconds.items()]
    print(json.dumps({"benchmark": title, "rows": rows}))
