"""Compares Starling with other systems, pair by pair, both running concurrently: `python -m benchmarks.peers`.

Each pair is Starling and one other system with the same number of learners, on this machine. Learners are processes;
their gradients are waits (`benchmarks.peers.emulation`), their exchanges are real, over loopback. Both are exposed to
the same load, so their ratio is reliable even on a busy machine. Systems:

- gloo: AD-PSGD with fixed pairs over Gloo, with Starling's averaging (`benchmarks.peers.gloo`);
- ddp, localsgd: torch's DistributedDataParallel and post-local SGD, over Gloo;
- adpsgd, pushsum: github.com/facebookresearch/stochastic_gradient_push; name its folder with --sgp;
- hivemind, torchft: `python -m venv VENV; VENV/bin/pip install hivemind torchft-nightly`, and pass VENV/bin/python as
  --peers-python. VENV needs numpy and torch, too; to share those of this environment, write its package folder
  (`python -c "import site; print(site.getsitepackages()[0])"`) to a .pth file in VENV's before running pip.

Systems that are not installed are skipped and listed in the output.

    python -m benchmarks.peers --sgp SGP --peers-python VENV/bin/python     # all, about 12 minutes on two cores
    python -m benchmarks.peers --systems ddp --conditions 8                 # one question
    python -m benchmarks.peers --repeat 3                                   # medians over three runs of each pair
    python -m benchmarks.peers --exchange per_step=1 encrypt=true           # another exchange of Starling's

`steps/s` is the median over learners that are not slow. `CPU ms/step` includes all processes of a system. `MB/step`
counts the traffic on the system's own loopback interface, which needs root. `distance` is the root mean square distance
of replicas from their mean, in units of the change of a weight in one step. A cell contains Starling's figure, the
other's, and in brackets the ratio by which Starling is better.

In `kill`, a learner of each system is killed with all its processes (kill -9); the survivors' pace (relative to before)
and longest pause are measured afterwards. Then a learner joins each system, if the other system supports that.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.common import BenchmarkError
from benchmarks.peers.base import OURS, SYSTEMS, MissingError, find
from benchmarks.peers.pair import Measured, Times, measure
from benchmarks.peers.report import Row, behind, table, to_row
from benchmarks.peers.side import Scenario, Side, interpreter
from benchmarks.peers.starling import exchange_config

OTHERS = tuple(name for name in SYSTEMS if name != OURS)
CONDITIONS = ("4", "8", "slow 10x", "slow 100x", "large", "kill")


def scenarios(options: argparse.Namespace) -> list[Scenario]:
    """The scenarios that the options select."""
    params, step_s, few = options.params, options.step_s, options.learners
    slow = (options.slow_params, options.slow_step_s)
    known = {
        "4": Scenario(f"{few} learners", few, params, step_s),
        "8": Scenario(f"{2 * few} learners", 2 * few, params, step_s),
        "slow 10x": Scenario(f"{few}, one 10x slower", few, *slow, slow=10.0),
        "slow 100x": Scenario(f"{few}, one 100x slower", few, *slow, slow=100.0),
        "large": Scenario(f"{few}, {options.large_params / 1e6:g} M", few, options.large_params, options.large_step_s),
        "kill": Scenario(f"{few}, one killed", few, params, step_s, kills=True),
    }
    return [known[name] for name in CONDITIONS if name in options.conditions]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--sgp", type=Path, help="folder with the source of stochastic_gradient_push")
    parser.add_argument("--peers-python", default="", help="interpreter of an environment with hivemind and torchft")
    parser.add_argument("--learners", type=int, default=4, help="learners per system; twice as many in `8`")
    parser.add_argument("--params", type=int, default=1_000_000, help="weights of the model")
    parser.add_argument("--step-s", type=float, default=0.3, help="seconds per gradient")
    parser.add_argument("--slow-params", type=int, default=100_000, help="weights where one learner is slow")
    parser.add_argument("--slow-step-s", type=float, default=0.05, help="step time where one learner is slow")
    parser.add_argument("--large-params", type=int, default=43_000_000)
    parser.add_argument("--large-step-s", type=float, default=1.0)
    parser.add_argument("--warm-s", type=float, default=Times.warm_s, help="seconds of training before measuring")
    parser.add_argument("--window-s", type=float, default=Times.window_s, help="seconds of a window")
    parser.add_argument("--windows", type=int, default=Times.windows, help="figures are medians over these")
    parser.add_argument("--kill-s", type=float, default=Times.kill_s, help="seconds of watching survivors")
    parser.add_argument("--join-s", type=float, default=Times.join_s, help="most seconds for a newcomer's first step")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each pair")
    parser.add_argument(
        "--exchange",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of Starling's train.exchange or train.strategy",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args(argv)
    if options.learners < 2 or options.repeat < 1 or options.windows < 1:
        parser.error("--learners must be 2 or more, --repeat and --windows 1 or more")
    if min(options.params, options.slow_params, options.large_params) < 1:
        parser.error("--params, --slow-params and --large-params must be positive")
    if min(options.step_s, options.slow_step_s, options.large_step_s, options.window_s) <= 0:
        parser.error("--step-s, --slow-step-s, --large-step-s and --window-s must be positive")
    options.exchange = dict(
        assignment.split("=", 1) if "=" in assignment else (assignment, "") for assignment in options.exchange
    )
    try:
        exchange_config(options.exchange)
    except ValueError as error:
        parser.error(f"--exchange: {error}")
    options.sgp = options.sgp.resolve() if options.sgp else None
    return options


def _open(name: str, options: argparse.Namespace, folder: Path) -> Side:
    return Side(name, interpreter(name, options.peers_python), options.sgp, folder / name)


def run(options: argparse.Namespace) -> Row:
    """Run all pairs and return the results as a document."""
    times = Times(options.warm_s, options.window_s, options.windows, options.kill_s, options.join_s)
    rows: list[Row] = []
    skipped, failures = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        ours = _open(OURS, options, folder)
        stack.callback(ours.close)
        number = 0
        for name in options.systems:
            try:
                theirs = _open(name, options, folder)
            except (MissingError, BenchmarkError) as error:
                skipped.append({"peer": name, "reason": str(error)})
                print(f"skipped: {name}: {error}", file=sys.stderr, flush=True)
                continue
            try:
                for scenario in scenarios(options):
                    results: list[Measured] = []
                    for _ in range(options.repeat):
                        number += 1
                        try:
                            results.append(measure((ours, theirs), scenario, times, number, options.exchange))
                        except BenchmarkError as error:
                            failures.append({"peer": name, "condition": scenario.name, "reason": str(error)})
                            print(f"failed: {name}, {scenario.name}: {error}", file=sys.stderr, flush=True)
                    if results:
                        rows.append(to_row(scenario, name, results))
                        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
            finally:
                theirs.close()
    document: Row = {"benchmark": "peers", "rows": rows, "skipped": skipped, "failures": failures}
    return document | {"cores": os.cpu_count(), "load": list(os.getloadavg()), "own_network": ours.own_network}


def show(document: Row) -> str:
    """The tables, and what they lack."""
    lines = [table(document["rows"]), ""]
    lines += [f"skipped: {find(entry['peer']).title}: {entry['reason']}" for entry in document["skipped"]]
    lines += [
        f"failed: {find(entry['peer']).title}, {entry['condition']}: {entry['reason'].splitlines()[0]}"
        for entry in document["failures"]
    ]
    if not document["own_network"]:
        lines.append("bytes are not counted: that takes root, on Linux with iproute2")
    lines += [f"behind: {figure}" for figure in behind(document["rows"])]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 1 if a pair failed."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    document = run(options)
    if not options.json:
        print(show(document))
    print(json.dumps(document))
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
