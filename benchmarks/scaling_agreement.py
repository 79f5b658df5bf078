"""Compares the simulator with real processes: `python -m benchmarks.scaling_agreement`.

Takes the rows of `benchmarks.scaling` with four learners (real processes, exchanges, leases and links; forward and
backward passes are waits), simulates the same settings, and compares the total steps per second of all learners, and
the epoch time relative to the undisturbed run.

    python -m benchmarks.scaling_agreement                     # runs the benchmark first, about 10 minutes
    python -m benchmarks.scaling_agreement --rows scaling.json # uses an earlier `benchmarks.scaling --json`
    python -m benchmarks.scaling_agreement --conditions homogeneous "slow 10x" --json

The simulator gets the benchmark's settings (model size, step time, slow-down, link rate) and one of its results: the
overhead of a step beyond its wait, from the run of *one* learner. Everything else is predicted. A second column,
`calibrated`, also uses the undisturbed run of four learners: its excess over the prediction (four processes on these
cores) is added to the strategy's `overhead_s`, so the undisturbed row agrees by construction.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scaling import CONDITIONS, LINKS, SLOW, STRATEGIES
from benchmarks.scaling_scenario import PER_NODE
from training.simulation import Cluster, Simulation, Timing

WITHIN = 0.15
"""Allowed relative difference."""
LINK_GBIT = {"1 Gbit/s": 1.0, "100 Mbit/s": 0.1}
LOOPBACK_GBIT = 10.0
"""Bandwidth between processes of a machine, of the order of a loopback exchange on a CPU."""
LINK_MS = 0.1
STEPS = 400
"""Simulated steps per learner."""
_ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]


def cluster(row: Mapping[str, Any], overhead_s: float) -> Cluster:
    """The benchmark's machines as a configuration of the simulator."""
    learners, strategy, condition = int(row["learners"]), str(row["strategy"]), str(row["condition"])
    together = 1 if condition in LINKS else learners
    return Cluster(
        learners=learners,
        per_machine=PER_NODE if strategy == "h-adpsgd" else together,
        step_s=row["step_s"],
        overhead_s=overhead_s,
        slow={learners - 1: SLOW[condition]} if condition in SLOW else {},
        link_gbit=LINK_GBIT.get(condition, LOOPBACK_GBIT),
        link_ms=LINK_MS,
        local_gbit=LOOPBACK_GBIT,
        local_ms=LINK_MS,
    )


def rate(row: Mapping[str, Any], overhead_s: float) -> float:
    """Simulated total steps per second of all learners."""
    problem = Timing(batches=STEPS * int(row["learners"]), num_bytes=4.0 * row["params"])
    outcome = Simulation(cluster(row, overhead_s), str(row["strategy"]), problem).run()
    return problem.batches / outcome.open_epoch_s


def compare(rows: Sequence[Row]) -> list[Row]:
    """Compare rows of the real benchmark with simulated ones.

    Args:
        rows: Rows of `benchmarks.scaling`; those of one learner calibrate the simulation of the others.

    Raises:
        ValueError: The run of one learner with a row's settings is missing.
    """
    return [_compare(row, rows) for row in rows if row["learners"] > 1]


def _compare(row: Row, rows: Sequence[Row]) -> Row:
    alone = _find(rows, row, strategy="single", learners=1)
    if alone is None:
        raise ValueError(
            f"there is no run of one learner with {row['params']} weights and steps of {row['step_s']} s: "
            "run benchmarks.scaling with all rows in one call"
        )
    overhead_s = max(0.0, 1 / alone["steps_per_s"] - row["step_s"])
    base = _find(rows, row)
    real, simulated = row["speedup"] * alone["steps_per_s"], rate(row, overhead_s)
    figures: Row = {name: row[name] for name in ("strategy", "learners", "condition", "params", "step_s", "cpu_share")}
    figures |= {"overhead_s": overhead_s, "real": real, "simulated": simulated, "difference": simulated / real - 1}
    figures |= {"calibrated": None, "calibrated_difference": None, "real_ratio": None, "simulated_ratio": None}
    if base is not None:
        undisturbed = base["speedup"] * alone["steps_per_s"]
        excess = base["learners"] * (1 / undisturbed - 1 / rate(base, overhead_s))
        calibrated = rate(row, max(0.0, overhead_s + excess))
        figures |= {"calibrated": calibrated, "calibrated_difference": calibrated / real - 1}
        figures["real_ratio"] = row["epoch_ratio"]
        figures["simulated_ratio"] = rate(base, max(0.0, overhead_s + excess)) / calibrated
    figures["agrees"] = abs(figures["difference"]) <= WITHIN
    return figures


def _find(rows: Sequence[Row], like: Row, **changes: Any) -> Row | None:
    """The undisturbed run with the same settings."""
    wanted = {name: like[name] for name in ("strategy", "learners", "params", "step_s")} | changes
    for row in rows:
        if row["condition"] == "homogeneous" and all(row[name] == value for name, value in wanted.items()):
            return row
    return None


COLUMNS = (
    ("strategy", "strategy", "{}"),
    ("condition", "condition", "{}"),
    ("step_s", "step s", "{:g}"),
    ("real", "real steps/s", "{:.2f}"),
    ("simulated", "simulated", "{:.2f}"),
    ("difference", "difference", "{:+.1%}"),
    ("calibrated_difference", "calibrated", "{:+.1%}"),
    ("real_ratio", "real epoch ratio", "{:.2f}"),
    ("simulated_ratio", "simulated", "{:.2f}"),
    ("cpu_share", "CPU", "{:.2f}"),
)


def show(rows: Sequence[Row], skipped: Sequence[Mapping[str, str]] = ()) -> str:
    """A Markdown table, and the rows that differ by more than allowed."""
    lines = ["| " + " | ".join(title for _, title, _ in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = ("" if row[key] is None else form.format(row[key]) for key, _, form in COLUMNS)
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\nskipped: {skip['condition']}: {skip['reason']}" for skip in skipped]
    apart = [f"{row['strategy']}, {row['condition']} ({row['difference']:+.1%})" for row in rows if not row["agrees"]]
    lines += ["", f"within {WITHIN:.0%}: {len(rows) - len(apart)} of {len(rows)} rows"]
    lines += [f"apart: {description}" for description in apart]
    return "\n".join(lines)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the real benchmark."""
    words = ["--json", "--learners", "4", "--disturbed", "4", "--step-s", str(options.step_s)]
    words += ["--slow-step-s", str(options.slow_step_s), "--seconds", str(options.seconds)]
    words += ["--closings", str(options.closings), "--strategies", *options.strategies]
    command = [sys.executable, "-m", "benchmarks.scaling", *words, "--conditions", *options.conditions]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=_ROOT)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns 1 if a row differs by more than allowed."""
    parser = argparse.ArgumentParser(prog="benchmarks.scaling_agreement", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rows", type=Path, help="results of `benchmarks.scaling --json`; without it, it is run")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds per gradient")
    parser.add_argument("--slow-step-s", type=float, default=0.15, help="the same for runs with a slow learner")
    parser.add_argument("--seconds", type=float, default=8.0, help="minimum duration of a real run")
    parser.add_argument("--closings", type=int, default=4, help="epochs to close in runs with a slow learner")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    document = json.loads(options.rows.read_text(encoding="utf-8")) if options.rows else _measure(options)
    chosen = [row for row in document["rows"] if row["learners"] in (1, 4)]
    rows = compare(chosen)
    if options.json:
        print(json.dumps({"rows": rows, "skipped": document["skipped"], "within": WITHIN}, indent=1))
    else:
        print(show(rows, document["skipped"]))
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
