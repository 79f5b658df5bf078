"""Fault injection: kills random processes of real pipeline runs, reruns until they finish, and checks the results.

    python -m benchmarks.faults --faults 100 --seed 1            # the battery
    python -m benchmarks.faults --faults 5 --only "learner:KILL" "command:STOP"
    python -m benchmarks.faults --faults 20 --variants plain --folder /tmp/faults --calm /tmp/faults/calm.json

A run is `starling run` of a small digit recognizer in a separate data folder, with a private Prefect server and the
embedded MLflow, or with `--no-prefect`; the variants (adpsgd, h-adpsgd, asgd) take turns. Its processes get KILL, STOP
(and CONT some seconds later), TERM or INT, individually, as a group, or all at once. If the command ends, it is run
again.
Checks at the end: the run is finished, every epoch is complete, weights are finite, the error rate is within the noise
of undisturbed runs, no process and no lock is left, `storage verify` is clean, one model is registered, and a rerun has
nothing to do.

Undisturbed runs come first; `--calm` stores their results for reuse. Folders of runs with findings are kept. The exit
status is 1 if there are findings, 2 if fewer faults than requested could be injected.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults_checks import Band
from benchmarks.faults_plan import Pair, Sample, draw
from benchmarks.faults_recipe import EPOCHS, VARIANTS, Variant, make_corpus
from benchmarks.faults_trial import Given, Outcome, Trial
from storage.stages import digest_json

_TEST_WORDS = 270


class Battery:
    """Undisturbed runs, disturbed runs, and their results.

    Args:
        args: The parsed command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = Path(args.folder or tempfile.mkdtemp(prefix="starling-faults-")).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.corpus = make_corpus(self.folder / "corpus")
        self.calm_file = args.calm or self.folder / "calm.json"
        self.variants = [VARIANTS[name] for name in args.variants]
        self.outcomes: list[Outcome] = []
        self.calm: dict[str, list[dict[str, Any]]] = {}

    @staticmethod
    def say(text: str) -> None:
        """Report progress on standard error; standard output is for the table."""
        print(text, file=sys.stderr, flush=True)

    # --- undisturbed

    def observe(self) -> None:
        """Run each variant undisturbed, unless the file already contains such runs."""
        kept = json.loads(self.calm_file.read_text(encoding="utf-8")) if self.calm_file.exists() else {}
        for variant in self.variants:
            key = f"{variant.name} {self._digest(variant)}"
            runs = kept.setdefault(key, [])
            while len(runs) < self.args.calm_runs:
                runs.append(self._observe_one(variant, len(runs) + 1))
                self.calm_file.write_text(json.dumps(kept), encoding="utf-8")
            self.calm[variant.name] = runs

    def _digest(self, variant: Variant) -> str:
        return digest_json(variant.document(Path(), 0, self.args.epochs))[:8]

    def _observe_one(self, variant: Variant, seed: int) -> dict[str, Any]:
        folder = self.folder / f"calm-{variant.name}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        trial = Trial(variant, seed, folder, self.corpus, (), self.args.epochs, self.args.limit, self.say)
        outcome = trial.run(None)
        if outcome.findings or outcome.rate is None:
            raise SystemExit(f"an undisturbed run of {variant.name} has findings: see {folder}")
        self.say(f"{variant.name}, undisturbed, seed {seed}: {outcome.rate:.1%} in {outcome.seconds:.0f} s")
        shutil.rmtree(folder)
        samples = [sample.to_dict() for sample in outcome.samples]
        return {"seed": seed, "rate": outcome.rate, "seconds": outcome.seconds, "samples": samples}

    # --- disturbed

    def disturb(self) -> None:
        """Inject the requested number of faults, several in each run."""
        rng, drawn = random.Random(self.args.seed), Counter[Pair]()
        bands = Band.of({name: [run["rate"] for run in runs] for name, runs in self.calm.items()}, _TEST_WORDS)
        most = 3 * -(-self.args.faults // self.args.per_run) + len(self.variants)
        for number in range(most):
            left = self.args.faults - self.num_given
            if not left:
                return
            if number % len(self.variants) == 0:
                rng.shuffle(self.variants)
            variant = self.variants[number % len(self.variants)]
            samples = [Sample.read(sample) for run in self.calm[variant.name] for sample in run["samples"]]
            faults = draw(rng, samples, drawn, min(self.args.per_run, left), self.args.only)
            drawn.update(fault.pair for fault in faults)
            if not faults:
                continue
            seed = 1 + number % self.args.calm_runs
            self._disturb_one(
                number,
                Trial(
                    variant,
                    seed,
                    self.folder / f"run-{self.args.seed}-{number:03d}",
                    self.corpus,
                    faults,
                    self.args.epochs,
                    self.args.limit,
                    self.say,
                ),
                bands[variant.name],
            )

    def _disturb_one(self, number: int, trial: Trial, band: Band) -> None:
        self.say(f"run {number}, {trial.variant.name}, seed {trial.outcome.seed}: {trial.outcome.folder}")
        for fault in trial.waiting:
            self.say(f"  plan: {fault}")
        self.outcomes.append(trial.outcome)
        outcome = trial.run(band)
        if outcome.finished:
            rate = f"{outcome.rate:.1%} (at most {band.limit:.1%})"
            self.say(f"  finished after {outcome.seconds:.0f} s, {outcome.attempts} commands, word error rate {rate}")
        for fault in trial.waiting:
            self.say(f"  not given: {fault}")
        with (self.folder / "faults.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"battery": self.args.seed, "run": number, **outcome.to_dict()}) + "\n")
        if not outcome.findings:
            shutil.rmtree(outcome.folder)

    @property
    def num_given(self) -> int:
        """Number of faults injected so far."""
        return sum(len(outcome.given) for outcome in self.outcomes)

    def close(self) -> None:
        """Remove the folder if it is temporary and there are no findings."""
        if not self.args.folder and not any(outcome.findings for outcome in self.outcomes):
            shutil.rmtree(self.folder, ignore_errors=True)


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row for each pair of role and signal."""
    pairs: dict[Pair, list[tuple[Given, Outcome]]] = defaultdict(list)
    for outcome in outcomes:
        for given in outcome.given:
            pairs[given.fault.pair].append((given, outcome))
    return [_row(pair, pairs[pair]) for pair in sorted(pairs)]


def _row(pair: Pair, faults: Sequence[tuple[Given, Outcome]]) -> dict[str, Any]:
    ended = [given for given, _ in faults if given.ended]
    said = Counter(f"{given.status}: {given.said}" for given in ended)
    finished = [given.finished_s for given, _ in faults if given.finished_s is not None]
    touched = {id(outcome): outcome for _, outcome in faults if outcome.findings}
    return {
        "role": pair[0],
        "signal": pair[1],
        "faults": len(faults),
        "ended": len(ended),
        "end_s": statistics.median(given.end_s or 0.0 for given in ended) if ended else None,
        "finished": len(finished),
        "finished_s": statistics.median(finished) if finished else None,
        "findings": sum(len(outcome.findings) for outcome in touched.values()),
        "said": said.most_common(1)[0][0] if said else "",
    }


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| process | signal | faults | command ended | after s | finished | after s | findings in these runs | said |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["role"], row["signal"], row["faults"], row["ended"], _seconds(row["end_s"])]
        cells += [row["finished"], _seconds(row["finished_s"]), row["findings"], row["said"][:90].replace("|", "/")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def report(battery: Battery, as_json: bool) -> None:
    """Print the results of the faults so far."""
    rows = rows_of(battery.outcomes)
    findings = [(outcome, finding) for outcome in battery.outcomes for finding in outcome.findings]
    print(table_of(rows))
    for outcome, finding in findings:
        print(f"{Path(outcome.folder).name} ({outcome.variant}): {finding}")
    seconds = sum(outcome.seconds for outcome in battery.outcomes)
    finished = sum(outcome.finished for outcome in battery.outcomes)
    print(
        f"{battery.num_given} faults in {len(battery.outcomes)} runs, {finished} of them finished, in {seconds:.0f} s; "
        f"{len(findings)} findings" + (f" (folders in {battery.folder})" if findings else "")
    )
    if as_json:
        whole = {"benchmark": "faults", "seed": battery.args.seed, "faults": battery.num_given, "rows": rows}
        print(json.dumps(whole | {"findings": [finding.to_dict() for _, finding in findings]}))


def _pair(text: str) -> Pair:
    role, _, name = text.rpartition(":")
    if name not in ("KILL", "STOP", "TERM", "INT") or not role:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ROLE:SIGNAL, such as learner:KILL")
    return role, name


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="seed of faults, times and order of variants")
    parser.add_argument("--per-run", type=int, default=5, help="faults per run")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--only", nargs="+", type=_pair, default=[], metavar="ROLE:SIGNAL")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--calm-runs", type=int, default=2, help="undisturbed runs of each variant")
    parser.add_argument("--calm", type=Path, help="file of undisturbed runs; by default in the folder")
    parser.add_argument("--folder", help="folder for all files; by default a new one, kept if there are findings")
    parser.add_argument("--limit", type=float, default=900.0, help="longest time of one command in seconds")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Command line."""
    args = _arguments(words)
    # on SIGTERM, clean up as on Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    battery = Battery(args)
    began = time.monotonic()
    try:
        battery.observe()
        battery.disturb()
    except KeyboardInterrupt:
        battery.say("interrupted")
    report(battery, args.json)
    battery.say(f"{time.monotonic() - began:.0f} s in all")
    battery.close()
    if any(outcome.findings for outcome in battery.outcomes):
        return 1
    return 0 if battery.num_given >= args.faults else 2


if __name__ == "__main__":
    raise SystemExit(main())
