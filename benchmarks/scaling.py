"""Scaling of training with the number of learners, slow learners and slow links: `python -m benchmarks.scaling`.

Processes, exchanges, all-reduces, leases and the coordinator are real; only forward and backward passes are replaced by
waits, so that many learners fit on few cores. Each strategy runs

- undisturbed with 1 to 16 learners, in the middle of an epoch (the speed-up is in utterances per second relative to one
  learner without exchanges);
- with its last learner 2, 10 and 100 times slower, with short steps, so that epochs end during the measurement: an
  epoch must be longer than a step of the slowest learner, as in any real training;
- with every machine behind a link of 1 Gbit/s or 100 Mbit/s (network namespaces; needs root). A machine has one
  learner, except with h-adpsgd, where it is a node of two.

    python -m benchmarks.scaling                       # a table, about 8 minutes on two cores
    python -m benchmarks.scaling --json                # the same as JSON
    python -m benchmarks.scaling --seconds 30 --closings 8 --epoch-steps 6 --epoch-s 20       # the long one, 45 minutes
    python -m benchmarks.scaling --disturbed 16 --slow-step-s 0.1                             # 16, as published
    python -m benchmarks.scaling --strategies adpsgd --learners 8 --conditions homogeneous    # one question
    python -m benchmarks.scaling --neighbours random-ring --wire bf16 --plain                 # other exchanges

`steps_per_s` is the median over learners that are not slow. `epoch_ratio` compares the epoch time with that of the same
strategy undisturbed. With a slow learner, it is the time from the start to the last closing of an epoch in the journal,
over the number of closings, so that waiting for the slow learner's last batch counts. Otherwise, and for scpsgd (whose
disturbed epochs take hours), it is computed from utterances per second, as `throughput_ratio` always is. `cpu_share` is
the load of all cores: near 1, the cores rather than the method are the limit, and the row says so.
"""

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.netns import why_not
from benchmarks.scaling_run import RunError, measure
from benchmarks.scaling_scenario import PER_NODE, Measured, Scenario

STRATEGIES = ("adpsgd", "h-adpsgd", "scpsgd")
SLOW = {"slow 2x": 2.0, "slow 10x": 10.0, "slow 100x": 100.0}
LINKS = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
CONDITIONS = ("homogeneous", *SLOW, *LINKS)
ENOUGH = 3
"""Minimum number of closed epochs for a mean."""
BUSY = 0.9
"""CPU load above which the cores may be the limit rather than the method."""

PUBLISHED = {
    "adpsgd": {"homogeneous": 10.88, "slow 2x": 10.63, "slow 10x": 10.42, "slow 100x": 10.38},
    "scpsgd": {"homogeneous": 8.70, "slow 2x": 5.71, "slow 10x": 1.52, "slow 100x": 0.16},
}
"""Speed-up of 16 P100, with one of them slowed down (arXiv:1904.04956)."""
PUBLISHED_RATIO = {
    "adpsgd": {"slow 2x": 0.89 / 0.87, "slow 10x": 0.91 / 0.87, "slow 100x": 0.92 / 0.87},
    "scpsgd": {"slow 2x": 1.67 / 1.09, "slow 10x": 6.24 / 1.09, "slow 100x": 57.73 / 1.09},
}
"""Hours per epoch relative to the undisturbed run, from the same table."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A scenario and its measurements."""

    scenario: Scenario
    measured: Measured


def plan(options: argparse.Namespace) -> Iterator[Scenario]:
    """Yield the runs that the options select, each after those that it is compared with."""
    common = Scenario(
        "single",
        1,
        params=options.params,
        step_s=options.step_s,
        seconds=options.seconds,
        limit_s=options.limit_s,
        neighbours=options.neighbours,
        wire=options.wire,
        encrypt=not options.plain,
    )
    short = replace(common, params=options.slow_params, step_s=options.slow_step_s)
    slow = {name: SLOW[name] for name in SLOW if name in options.conditions}
    links = {name: LINKS[name] for name in LINKS if name in options.conditions}
    yield common
    for learners in sorted(set(options.learners) | ({options.disturbed} if links else set())):
        if learners > 1 and ("homogeneous" in options.conditions or learners == options.disturbed):
            yield from _each(common, options.strategies, learners)
    for name, rate in links.items():
        yield from _each(replace(common, condition=name, rate=rate), options.strategies, options.disturbed)
    if slow and (short.params, short.step_s) != (common.params, common.step_s):
        yield short
    if slow and (short != common or "homogeneous" not in options.conditions):
        yield from _each(short, options.strategies, options.disturbed)
    for name, factor in slow.items():
        epoch_s = max(options.epoch_s, options.epoch_steps * factor * short.step_s)
        disturbed = replace(short, condition=name, slow=factor, epoch_s=epoch_s, closings=options.closings)
        yield from _each(disturbed, options.strategies, options.disturbed)


def _each(base: Scenario, strategies: Sequence[str], learners: int) -> Iterator[Scenario]:
    for strategy in strategies:
        if strategy != "h-adpsgd" or (learners % PER_NODE == 0 and learners > PER_NODE):
            yield replace(base, strategy=strategy, learners=learners)


def to_row(result: Result, earlier: Sequence[Result]) -> Row:
    """Make a row of the results.

    Args:
        result: The run.
        earlier: Previous runs, including those that it is compared with.
    """
    scenario, got = result.scenario, result.measured
    slowed = scenario.slow > 1
    rates = got.steps_per_s[:-1] if slowed else got.steps_per_s
    alone = _find(earlier, replace(scenario, strategy="single", learners=1))
    same = _find(earlier, scenario)
    row: Row = {
        "strategy": scenario.strategy,
        "learners": scenario.learners,
        "condition": scenario.condition,
        "params": scenario.params,
        "step_s": scenario.step_s,
        "steps_per_s": round(statistics.median(rates), 4),
        "speedup": round(got.utterances_per_s / alone.measured.utterances_per_s, 3) if alone else None,
        "epoch_ratio": round((_epoch_ratio if slowed else _throughput_ratio)(got, same.measured), 3) if same else None,
        "throughput_ratio": round(_throughput_ratio(got, same.measured), 3) if same else None,
        "cpu_share": round(got.cpu_share, 3),
        "own_cpu_share": round(got.own_share, 3),
        "exchanges_per_step": round(got.exchanges_per_step, 3),
        "exchange_s": round(got.exchange_s, 4),
        "failed": got.failed,
        "staleness": round(statistics.median(got.staleness or [0.0]), 2),
        "epoch_s": got.epoch_s,
        "epochs": got.closings,
        "utterances": got.index,
        "accounted": got.accounted if got.closings else None,
        "seconds": round(got.seconds, 1),
        "note": _note(got),
    }
    return row


def _note(got: Measured) -> str:
    if got.cpu_share < BUSY:
        return ""
    return "the cores are the limit" if got.own_share > 0.7 * got.cpu_share else "other work kept the cores busy"


def _find(results: Sequence[Result], like: Scenario) -> Result | None:
    """The undisturbed run with the same strategy, learners, model size and step time."""
    for result in results:
        scenario = result.scenario
        if scenario.condition != "homogeneous":
            continue
        if all(getattr(scenario, name) == getattr(like, name) for name in ("strategy", "learners", "params", "step_s")):
            return result
    return None


def _epoch_ratio(got: Measured, base: Measured) -> float:
    """Epoch time relative to the undisturbed run; by throughput if too few epochs were closed."""
    if got.epoch_s is not None and got.closings >= ENOUGH:
        return got.epoch_s / got.index * base.utterances_per_s
    return _throughput_ratio(got, base)


def _throughput_ratio(got: Measured, base: Measured) -> float:
    return base.utterances_per_s / max(got.utterances_per_s, 1e-9)


def check_goals(rows: Sequence[Row]) -> list[Row]:
    """The goals that apply to the rows, and whether they are met."""
    goals: list[Row] = []

    def goal(text: str, value: float | None, met: bool) -> None:
        goals.append({"goal": text, "value": value, "met": met})

    for row in rows:
        name, condition = row["strategy"], row["condition"]
        if name == "adpsgd" and condition == "homogeneous" and row["learners"] == 8 and row["params"] == 1_000_000:
            share = row["speedup"] / 8
            goal("adpsgd x 8: at least 0.95 of linear", round(share, 3), share >= 0.95)
        if name == "adpsgd" and condition == "slow 100x" and row["epoch_ratio"]:
            goal("adpsgd, one 100x slower: epoch at most 1.2x", row["epoch_ratio"], row["epoch_ratio"] <= 1.2)
        if name == "adpsgd" and condition in LINKS and row["epoch_ratio"]:
            goal(f"adpsgd, {condition}: no loss (5 %)", row["epoch_ratio"], row["epoch_ratio"] <= 1.05)
    if any(row["epochs"] for row in rows):
        goal("each closed epoch counts every utterance once", None, all(row["accounted"] is not False for row in rows))
    return goals


# --- showing

COLUMNS = (
    ("strategy", "strategy", "{}"),
    ("learners", "learners", "{}"),
    ("condition", "condition", "{}"),
    ("params", "params", "{:,}"),
    ("step_s", "step s", "{:g}"),
    ("steps_per_s", "steps/s", "{:.2f}"),
    ("speedup", "speed-up", "{:.2f}"),
    ("linear", "of linear", "{:.2f}"),
    ("published", "16 P100", "{:.2f}"),
    ("epoch_ratio", "epoch ratio", "{:.2f}"),
    ("published_ratio", "16 P100", "{:.2f}"),
    ("exchanges_per_step", "exchanges/step", "{:.2f}"),
    ("cpu_share", "CPU", "{:.2f}"),
    ("note", "", "{}"),
)


def show(document: Row) -> str:
    """The results as a Markdown table, with the published figures (arXiv:1904.04956, 16 learners) beside them."""
    lines = ["| " + " | ".join(title for _, title, _ in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in document["rows"]:
        name, condition = row["strategy"], row["condition"]
        facts = row | {
            "linear": row["speedup"] / row["learners"] if row["speedup"] else None,
            "published": PUBLISHED.get(name, {}).get(condition),
            "published_ratio": PUBLISHED_RATIO.get(name, {}).get(condition),
        }
        cells = ("" if facts[key] is None else form.format(facts[key]) for key, _, form in COLUMNS)
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\nskipped: {skip['condition']}: {skip['reason']}" for skip in document["skipped"]]
    lines += [""]
    for goal in document["goals"]:
        value = "" if goal["value"] is None else f" ({goal['value']})"
        lines.append(f"{'met   ' if goal['met'] else 'MISSED'} {goal['goal']}{value}")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.scaling", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--params", type=int, default=1_000_000, help="weights of the model")
    parser.add_argument("--step-s", type=float, default=0.3, help="seconds per gradient")
    parser.add_argument(
        "--learners", type=int, nargs="+", default=[2, 4, 8, 16], help="undisturbed numbers of learners"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--disturbed", type=int, default=8, help="learners in runs with a slow learner or slow links")
    parser.add_argument("--slow-params", type=int, default=100_000, help="weights in runs with a slow learner")
    parser.add_argument("--slow-step-s", type=float, default=0.05, help="step time in runs with a slow learner")
    parser.add_argument("--epoch-steps", type=float, default=3.0, help="minimum epoch, in steps of the slow learner")
    parser.add_argument("--epoch-s", type=float, default=5.0, help="minimum epoch with a slow learner, seconds")
    parser.add_argument("--closings", type=int, default=4, help="epochs to close in runs with a slow learner")
    parser.add_argument("--seconds", type=float, default=4.0, help="minimum duration of a run")
    parser.add_argument("--limit-s", type=float, default=300.0, help="maximum duration of a run")
    parser.add_argument("--neighbours", choices=("ring", "random-ring"), default="ring")
    parser.add_argument("--wire", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--plain", action="store_true", help="no encryption on loopback")
    options = parser.parse_args(argv)
    if min(options.learners) < 1 or options.disturbed < 2:
        parser.error("--learners must be 1 or more, --disturbed 2 or more")
    if options.params < 1 or options.slow_params < 1 or options.step_s <= 0 or options.slow_step_s <= 0:
        parser.error("--params, --slow-params, --step-s and --slow-step-s must be positive")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 1 if a run failed."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    reason = why_not() if set(options.conditions) & set(LINKS) else ""
    skipped = [{"condition": name, "reason": reason} for name in LINKS if reason and name in options.conditions]
    options.conditions = [name for name in options.conditions if not reason or name not in LINKS]
    results: list[Result] = []
    rows: list[Row] = []
    failures: list[str] = []
    for scenario in plan(options):
        try:
            results.append(Result(scenario, measure(scenario)))
        except KeyboardInterrupt:
            failures.append("interrupted")
            break
        except RunError as error:
            failures.append(str(error))
            print(f"failed: {error}", file=sys.stderr)
            continue
        rows.append(to_row(results[-1], results))
        brief = {name: rows[-1][name] for name in ("steps_per_s", "speedup", "epoch_ratio", "cpu_share")}
        print(f"{scenario.strategy} x {scenario.learners}, {scenario.condition}: {brief}", file=sys.stderr, flush=True)
    document = {"rows": rows, "goals": check_goals(rows), "skipped": skipped, "failures": failures}
    document |= {"cores": os.cpu_count(), "neighbours": options.neighbours, "wire": options.wire}
    print(json.dumps(document, indent=1) if options.json else show(document))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
