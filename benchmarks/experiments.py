"""Simulated experiments with methods of distributed training on real speech.

    python -m benchmarks.experiments [EXPERIMENT ...] [--results FILE] [--json] [--tables] [--plot FOLDER]

    headline    up to which total batch does each method converge?
    unclipped   and without clipping gradients?
    longer      do three times the epochs help at batches that are too large?
    longer-unclipped  the same without clipping, for one of each kind of method
    segments    the largest batch again, with tied states of 21-frame segments (needs STARLING_SHARED_DATA, and hours)
    seeds       how much does chance decide?
    plain       does it help at a large batch to leave out momentum?
    links       do more exchanges a step and a faster link help at a large batch?
    momenta     BMUF with momentum within its blocks, too
    strategies  what does a slow learner cost each method?
    rings       how far apart do learners drift on fixed and on random rings?
    recipes     one learner with other optimizers
    newcomers   does optimizer state help learners that come late?

Finished runs are lines of the results file, so an interrupted sweep continues; `--json`, `--tables` and `--plot` show
its contents and run nothing. See docs/experiments.md.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from benchmarks import experiment_plans as plans
from benchmarks import experiment_report as report
from benchmarks.experiment_runs import Problems, PublishedRecipe, Record, Results, Run
from training.simulation.problem import Problem
from training.strategies.gossip import Newcomer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "experiments" / "results.jsonl"
DIGITS = (
    "fsdd.yaml",
    "data.valid_share=0.2",
    "features.hop_ms=20",
    "features.frame_ms=32",
    "model.dim=64",
    "model.layers=1",
    "model.channels=8",
    "model.kernel=7",
    "model.dropout=0",
    "train.threads=1",
)
"""A Conformer of 103,139 parameters; a fifth of the training recordings is held out."""
SEGMENTS = (
    "mini_librispeech_hybrid.yaml",
    "data.speeds=[]",
    "data.pauses=null",
    "align={stage: tri, tri: {leaves: 500, gaussians: 4000}}",
    "features={kind: mfcc, num_mels: 40, num_ceps: 40, cmvn: speaker, stored: true}",
    "model={kind: blstm, layers: 1, dim: 32, bottleneck: 32, subsampling: 1, dropout: 0}",
    "train.segments={frames: 21}",
    "train.augment.enabled=false",
    "train.threads=1",
)
"""The published model made small: one bidirectional layer of 32 cells, a bottleneck of 32, the states of triphones."""


class Jobs:
    """Problems of all runs; the job of each kind of data is made when it is needed first."""

    def __init__(self) -> None:
        self._made: dict[str, PublishedRecipe] = {}

    def __call__(self, run: Run) -> Problem:
        """Return the problem of a run."""
        if run.data not in self._made:
            from flows.cli.simulate import training_job

            config, *overrides = {"digits": DIGITS, "segments": SEGMENTS}[run.data]
            self._made = {run.data: PublishedRecipe(training_job(ROOT / "configs" / config, overrides))}
        return self._made[run.data](run)


def _say(record: Record) -> None:
    run = record["run"]
    options = " ".join(run["options"])
    print(
        f"{run['strategy']} {options} {run['learners']} learners, batch {run['batch']}, lr {run['lr']:g}, slow "
        f"{run['slow']:g}: loss {record['loss']}, WER {record['wer']}, {record['cpu_s']} s",
        file=sys.stderr,
        flush=True,
    )


def _run_all(runs: Iterable[Run], results: Results, problems: Problems) -> None:
    for run in runs:
        _say(results.ensure(run, problems))


def run_sweep(name: str, results: Results, problems: Problems) -> None:
    """Run every method at increasing batch sizes, searching over learning rates, until it does not converge."""
    sweep = plans.SWEEPS[name]
    for choice in sweep.choices:
        for batch in sweep.batches:
            runs = sweep.runs(batch, choice)
            for record in plans.sweep(runs, results, problems):
                _say(record)
            if not plans.converged(plans.best(runs, results)):
                break


def run_momenta(results: Results, problems: Problems) -> None:
    """Run BMUF with momentum within blocks, too."""
    _run_all(plans.momenta(), results, problems)


def run_plain(results: Results, problems: Problems) -> None:
    """Run a large batch without momentum."""
    _run_all(plans.plain(), results, problems)


def run_links(results: Results, problems: Problems) -> None:
    """Run a large batch with more exchanges per step and with a faster link."""
    _run_all(plans.links(), results, problems)


def run_seeds(results: Results, problems: Problems) -> None:
    """Run the best learning rates of the largest batches with other seeds."""
    for sweep in plans.SWEEPS.values():
        for choice in sweep.choices:
            for batch in sweep.repeated:
                _run_all(plans.seeds(sweep, batch, choice, results), results, problems)


def run_strategies(results: Results, problems: Problems) -> None:
    """Run every method with equal learners, lowering the rate until it reaches the target; then with a slow learner."""
    for choice in plans.STRATEGIES:
        runs = plans.strategies(choice)
        for run in runs:
            record = results.ensure(run, problems)
            _say(record)
            if record["loss"] is not None and record["loss"] <= plans.TARGET:
                break
        for run in runs:
            if results.get(run) is not None and results.get(run) is plans.best(runs, results):
                _say(results.ensure(replace(run, slow=plans.SLOW), problems))


def run_rings(results: Results, problems: Problems) -> None:
    """Run all rings by number of learners; the largest with a second seed."""
    _run_all([*plans.rings(), *plans.rings(seed=2)], results, problems)


def run_recipes(results: Results, problems: Problems) -> None:
    """Run one learner with each recipe."""
    for batch in plans.RECIPE_BATCHES:
        _run_all(plans.recipes(batch), results, problems)


def run_newcomers(results: Results, problems: Problems) -> None:
    """Run with late learners, which take a neighbour's weights alone or its optimizer state as well."""
    for recipe in plans.NEWCOMER_RECIPES:
        for late, _ in plans.NEWCOMERS:
            for takes in get_args(Newcomer):
                _run_all(plans.newcomers(recipe, late, takes), results, problems)


EXPERIMENTS: dict[str, Callable[[Results, Problems], None]] = {
    **{name: partial(run_sweep, name) for name in plans.SWEEPS},
    "seeds": run_seeds,
    "plain": run_plain,
    "links": run_links,
    "momenta": run_momenta,
    "strategies": run_strategies,
    "rings": run_rings,
    "recipes": run_recipes,
    "newcomers": run_newcomers,
}


def show(args: argparse.Namespace, results: Results) -> bool:
    """Show the contents of the results file as requested; returns whether anything was requested."""
    if args.json:
        rows = {
            **{name: report.sweep_rows(results, name) for name in plans.SWEEPS},
            "largest_batch": {name: report.largest_batches(results, name) for name in plans.SWEEPS},
            "seeds": {name: report.seed_rows(results, name) for name in plans.SWEEPS},
            "plain": report.plain_rows(results),
            "links": report.link_rows(results),
            "momenta": report.momenta_rows(results),
            "strategies": report.strategy_rows(results),
            "rings": report.ring_rows(results),
            "recipes": report.recipe_rows(results),
            "newcomers": report.newcomer_rows(results),
        }
        print(json.dumps({"benchmark": "experiments", **rows}))
    if args.tables:
        print(report.tables(results))
    if args.plot is not None:
        from benchmarks.experiment_plots import draw

        for path in draw(results, args.plot):
            print(path, file=sys.stderr)
    return args.json or args.tables or args.plot is not None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}; all without")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if unknown := sorted(set(args.experiments) - set(EXPERIMENTS)):
        parser.error(f"{unknown[0]!r} is not an experiment: choose from {', '.join(EXPERIMENTS)}")
    results = Results(args.results)
    if show(args, results):
        return
    problems = Jobs()
    for name in args.experiments or EXPERIMENTS:
        EXPERIMENTS[name](results, problems)


if __name__ == "__main__":
    main()
