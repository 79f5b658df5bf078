"""Compares the methods of search at the same total budget of epochs, and measures what searching itself costs.

    python -m benchmarks.search surrogate [--seeds 100]     # on a synthetic loss surface: seconds for each method
    python -m benchmarks.search proposals [--trials 10000]  # proposals per second of each method alone
    python -m benchmarks.search scale [--trials 10000]      # results per second, memory and size of the study on disk
    python -m benchmarks.search trainings [--seeds 5]       # real trainings, on the Free Spoken Digit Dataset
    python -m benchmarks.search kills                       # a search with real trainings is killed twice
    python -m benchmarks.search                             # all of them

`trainings` needs STARLING_SHARED_DATA. Methods and seeds share trainings: a training to 27 epochs also answers what the
loss is after 1, 3 and 9, as its learning rate does not depend on the number of epochs. Finished ones are in a file, so
that an interrupted benchmark continues. `--dry` says how many epochs there are to train, and trains none.

All print a table and JSON; `surrogate` and `trainings` also draw loss against budget.
"""

import argparse
import itertools
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pipelines import ROOT
from storage.batching import derive_seed
from storage.stages import digest_json
from tasks.search.config import SearchConfig, trial_config
from tasks.search.methods.base import SearchTrial, TrialJob
from tasks.search.space import Values

METHODS = ("grid", "random", "tpe", "hyperband", "asha", "bohb")
SPACE: dict[str, Any] = {
    "train.optimizer.lr": {"low": 1e-4, "high": 3e-2, "log": True, "points": 4},
    "train.max_batch": [16, 48],
    "model.dropout": {"low": 0.0, "high": 0.4, "points": 3},
}
"""What real trainings vary; a grid takes 24 points of it."""
LARGEST, TOTAL = 27, 24 * 27
"""Epochs of a whole training, and of all trials of a search: 24 whole trainings."""
CONFIG = ROOT / "configs" / "fsdd.yaml"
FIXED = ("train.average=1", f"train.schedule.epochs={LARGEST}", f"train.epochs={LARGEST}")
"""One epoch's weights are the model, and the learning rate does not depend on how many epochs follow."""
Loss = Callable[[TrialJob], float]
"""Trains, and gives the validation loss."""
Course = list[tuple[int, float]]
"""Epochs that all trials of a search have trained, and the lowest loss by then."""


def search_config(method: str, seed: int, space: Mapping[str, Any] = SPACE, trials: int = 10_000) -> SearchConfig:
    """A search that goes on until its budget is spent."""
    options = {"trials": 0} if method == "grid" else {"trials": trials}
    return SearchConfig.model_validate({"method": method, "space": space, "seed": seed, **options})


def searched(search: SearchConfig, largest: int, total: int, loss: Loss) -> Course:
    """Run a search without a database; a failed trial is one without a finite loss.

    Args:
        search: The search.
        largest: Epochs of a whole training.
        total: Epochs of all trials: none begins or goes on after them.
        loss: Trains.
    """
    method, trials, spent, course = search.build(largest), list[SearchTrial](), 0, Course()
    while spent < total and (job := method.next(trials)):
        before = max(trials[job.number].losses, default=0) if job.number < len(trials) else 0
        trial = trials[job.number] if before else SearchTrial(job.number, job.values, "running", job.budget)
        found = loss(job)
        spent += job.budget - before
        if math.isfinite(found):
            state = "finished" if job.budget >= largest else "paused"
            trial = replace(trial, state=state, budget=job.budget, losses={**trial.losses, job.budget: found})
            course.append((spent, min(found, course[-1][1] if course else math.inf)))
        else:
            trial = replace(trial, state="failed", budget=job.budget)
        trials[job.number : job.number + 1] = [trial]
    return course


def surrogate(job: TrialJob) -> float:
    """A synthetic validation loss, as of a small model: high learning rates learn fast and end high or diverge.

    The loss falls with a power of the epochs, from that of guessing to one that the values decide; each has noise that
    belongs to the values, so that all methods get the same loss for them.
    """
    lr = math.log10(job.values["train.optimizer.lr"])
    rng = np.random.Generator(np.random.PCG64(derive_seed("surrogate", digest_json(job.values))))
    noise = rng.normal(size=2)
    if lr > -1.75 + 0.1 * noise[0]:
        return math.nan
    large_batch = job.values["train.max_batch"] == 48
    floor = 0.10 + 0.25 * (lr + 2.6) ** 2 + 0.6 * (job.values["model.dropout"] - 0.15) ** 2 + 0.02 * large_batch
    speed = 0.9 + 0.5 * (lr + 4) - (0.3 if large_batch else 0.0)
    return float(floor * math.exp(0.05 * noise[1]) + 2.3 * (1 + job.budget) ** -speed)


def lowest(course: Course, epochs: float) -> float:
    """The lowest loss by some epochs."""
    return min((loss for spent, loss in course if spent <= epochs), default=math.nan)


def compared(courses: Mapping[str, Sequence[Course]], total: int) -> list[dict[str, Any]]:
    """A row for each method: the loss reached, its spread over seeds, and the budget for random's final loss."""
    rows = []
    wanted = (
        float(np.mean([lowest(course, total) for course in courses["random"]])) if "random" in courses else math.nan
    )
    at = np.linspace(total / 100, total, 100)
    for method, runs in courses.items():
        finals = np.array([lowest(course, total) for course in runs])
        means = np.array([np.mean([lowest(course, epochs) for course in runs]) for epochs in at])
        reached = at[means <= wanted]
        rows.append(
            {
                "method": method,
                "loss": round(float(finals.mean()), 4),
                "spread": round(float(finals.std(ddof=1)), 4) if len(finals) > 1 else None,
                "seeds": len(runs),
                "share_of_budget_for_randoms_loss": round(float(reached[0] / total), 2) if len(reached) else None,
            }
        )
    return rows


def show(title: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Print rows as a table and as JSON."""
    print(title)
    heads = list(rows[0])
    widths = [max(len(head), *(len(str(row[head])) for row in rows)) for head in heads]
    for line in (heads, *(row.values() for row in rows)):
        print("  " + "  ".join(f"{value!s:>{width}}" for value, width in zip(line, widths, strict=True)))
    print(json.dumps({"benchmark": title, "rows": rows, **more}), flush=True)


def draw(courses: Mapping[str, Sequence[Course]], total: int, path: Path) -> None:
    """Plot the mean of the lowest loss against the budget, with its standard error."""
    from benchmarks.experiment_plots import new_figure, save_figure

    figure, [axes] = new_figure(7.5, 4.6)
    at = np.linspace(total / 100, total, 100)
    for method, runs in courses.items():
        losses = np.array([[lowest(course, epochs) for epochs in at] for course in runs])
        mean, error = losses.mean(axis=0), losses.std(axis=0) / math.sqrt(len(runs))
        (line,) = axes.plot(at, mean, label=method)
        axes.fill_between(at, mean - error, mean + error, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(yscale="log", xlabel="epochs of all trials", ylabel="lowest validation loss, mean of the seeds")
    axes.legend(title="method")
    save_figure(figure, path)
    print(f"plot: {path}")


def run_surrogate(args: argparse.Namespace) -> None:
    """The methods on the synthetic surface."""
    began, courses = time.process_time(), {}
    for method in args.methods:
        seeds = range(1, 2 if method == "grid" else args.seeds + 1)  # a grid has no chance
        courses[method] = [searched(search_config(method, seed), LARGEST, TOTAL, surrogate) for seed in seeds]
    title = f"search on a synthetic surface, {TOTAL} epochs, of which a training takes {LARGEST}"
    show(title, compared(courses, TOTAL), cpu_s=round(time.process_time() - began, 1))
    draw(courses, TOTAL, args.plots / "search-surrogate.png")


class Trainings:
    """Trains each configuration once for all methods and seeds: validation losses after each epoch, by its values.

    Args:
        path: File of the losses, a line of JSON for each training.
        settings: Changes to the configuration.
        dry: Count epochs and give losses of the synthetic surface instead of training.
    """

    def __init__(self, path: Path, settings: Sequence[str], dry: bool) -> None:
        from tasks.config.pipeline import load_config

        self.config = load_config(CONFIG, [*FIXED, *settings])
        self.largest, self._path, self._dry = self.config.train.epochs, path, dry
        self._known: dict[str, list[float]] = {}
        self.epochs, self.asked, self.seconds = 0, 0, 0.0
        self._content = digest_json({"settings": [*FIXED, *settings]})
        for line in path.read_text().splitlines() if path.exists() and not dry else ():
            entry = json.loads(line)
            if entry["content"] == self._content:
                self._known[entry["values"]] = entry["losses"]

    def __call__(self, job: TrialJob) -> float:
        """The loss of the best of the epochs so far, whose weights are the model."""
        key = digest_json(job.values)
        known = self._known.get(key, [])
        self.asked += 1
        if len(known) < job.budget:
            self.epochs += job.budget - len(known)
            began = time.monotonic()
            known = [math.nan] * job.budget if self._dry else self._train(job.values, job.budget, len(known))
            self.seconds += time.monotonic() - began
            self._known[key] = known
            if not self._dry:
                with self._path.open("a") as file:
                    file.write(json.dumps({"content": self._content, "values": key, "losses": known}) + "\n")
        return surrogate(job) if self._dry else min(known[: job.budget], default=math.nan)

    def _train(self, values: Values, epochs: int, trained: int) -> list[float]:
        from tasks.orchestration.stage_tasks import run_plainly
        from tasks.stages.base import Run
        from tasks.stages.paused import TrialPart
        from tasks.tracking.plots import stored_journal

        config = trial_config(self.config, values, epochs)
        before = {"epochs": trained} if trained else {}
        run = Run(config, "benchmark-search", trial=TrialPart(before, keep=epochs < self.largest))
        try:
            run_plainly(run, "train")
        except RuntimeError as error:
            print(f"a training with {values} has failed: {error}", file=sys.stderr)
            return [math.nan] * epochs
        journal = stored_journal(run.result("train").output)
        losses = {round(entry["epoch"]): entry["valid_loss"] for entry in journal if entry["kind"] == "valid"}
        return [float(losses.get(epoch) or math.nan) for epoch in range(1, epochs + 1)]


def run_trainings(args: argparse.Namespace) -> None:
    """The methods with real trainings."""
    trainings = Trainings(args.losses, args.set, args.dry)
    largest, total = trainings.largest, args.total or 24 * trainings.largest
    courses: dict[str, list[Course]] = {}
    began = time.monotonic()
    for method in args.methods:
        seeds = range(1, 2 if method == "grid" else args.seeds + 1)
        courses[method] = [searched(search_config(method, seed), largest, total, trainings) for seed in seeds]
        print(f"{method}: {trainings.asked} results, {trainings.epochs} epochs trained so far", flush=True)
    cost = {"epochs_trained": trainings.epochs, "epochs_counted": total * sum(map(len, courses.values()))}
    if args.dry:
        print(json.dumps({"benchmark": "what search with real trainings would train", **cost}))
        return
    wall = time.monotonic() - began
    if trainings.seconds:
        cost |= {"seconds": round(wall), "share_outside_of_trainings": round(1 - trainings.seconds / wall, 5)}
    show(f"search on FSDD, {total} epochs, of which a training takes {largest}", compared(courses, total), **cost)
    draw(courses, total, args.plots / "search-fsdd.png")


def run_proposals(args: argparse.Namespace) -> None:
    """Many trials of each method alone, without a database: what a proposal costs, and whether later ones cost more."""
    rows = []
    for method in args.methods:
        marks = [time.process_time()]

        def loss(job: TrialJob, marks: list[float] = marks) -> float:
            if job.number == len(marks) * (args.trials // 10):
                marks.append(time.process_time())
            return surrogate(job)

        searched(_many(method, args.trials), LARGEST, args.trials * LARGEST, loss)
        marks.append(time.process_time())
        tenths = [after - before for before, after in itertools.pairwise(marks)]
        row = {"method": method, "trials": args.trials, "cpu_s": round(marks[-1] - marks[0], 2)}
        row |= {"trials_per_cpu_s": round(args.trials / (marks[-1] - marks[0]))}
        rows.append(row | {"last_to_first_tenth": round(tenths[9] / tenths[0], 2)})
        print(json.dumps(rows[-1]), flush=True)
    show(f"proposals of {args.trials:,} trials", rows)


def _many(method: str, count: int) -> SearchConfig:
    """A search of `count` trials; a grid of about `count` points."""
    space = {**SPACE, "train.optimizer.lr": {**SPACE["train.optimizer.lr"], "points": -(-count // 6)}}
    return search_config(method, 1, space, count).model_copy(update={"failures": 1_000_000})


def search_many(method: str, count: int, home: str) -> dict[str, Any]:
    """Search with the driver and a database, with results that take no time; in a process of its own."""
    os.environ["STARLING_HOME"] = home
    from tasks.search.driver import SearchDriver, spent_budget
    from tasks.search.study import Studies, TrialOutcome

    search = _many(method, count)
    built, study = search.build(LARGEST), Studies().create("many", {})
    marks: list[tuple[int, float]] = []

    def train(job: TrialJob, _: Any) -> TrialOutcome:
        if job.number == len(study.trials) - 1 and job.number % (count // 10) == 0 and not study.trials[-1].losses:
            marks.append((job.number, time.process_time()))
        return TrialOutcome(surrogate(job))

    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, wall = time.process_time(), time.monotonic()
    SearchDriver(study, built, search, LARGEST, train).run()
    cpu, wall = time.process_time() - began, time.monotonic() - wall
    parts = [after - before for (_, before), (_, after) in itertools.pairwise(marks)]
    results = sum(len(trial.losses) for trial in study.trials)
    return {
        "method": method,
        "trials": len(study.trials),
        "results": results,
        "epochs": spent_budget(study.trials, False),
        "results_per_cpu_s": round(results / cpu, 1),
        "cpu_s": round(cpu, 1),
        "wall_s": round(wall, 1),
        "last_to_first_tenth": round(parts[-1] / parts[0], 2) if len(parts) > 1 else None,
        "memory_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024, 1),
        "study_mb": round((Path(home) / "search" / "studies.db").stat().st_size / 1e6, 2),
    }


def run_scale(args: argparse.Namespace) -> None:
    """Many trials of each method."""
    rows = []
    for method in args.methods:
        with tempfile.TemporaryDirectory() as home:
            call = f"search_many({method!r}, {args.trials}, {home!r})"
            code = f"import json; from benchmarks.search import search_many; print(json.dumps({call}))"
            done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    show(f"a search of {args.trials:,} trials that take no time", rows)


STARLING = [sys.executable, "-m", "starling", "search"]
COMPARED = ("number", "values", "state", "budget", "trained", "losses")


def run_kills(args: argparse.Namespace) -> None:
    """Kill a search with real trainings twice at random moments; compare its trials with those of one that is not."""
    rng, trials, took = random.Random(args.seed), {}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "killed.yaml"
        config.write_text(json.dumps(_small()))
        sets = [word for change in args.set for word in ("--set", change)]
        for name in ("undisturbed", "killed"):
            env = {**os.environ, "STARLING_HOME": str(Path(folder) / name), "PYTHONPATH": str(ROOT)}
            began = time.monotonic()
            for after in [rng.uniform(0.1, 0.5) * took for _ in range(2 if name == "killed" else 0)]:
                _kill([*STARLING, str(config), *sets, "--no-prefect"], env, after)
            _told([str(config), *sets, "--no-prefect", "--json"], env)
            took = time.monotonic() - began
            listed = sorted(_told(["show", "--json"], env)["trials"], key=lambda trial: trial["number"])
            trials[name] = [{field: trial[field] for field in COMPARED} for trial in listed]
            whole, inside = _told(["status", "--json"], env)["seconds"], sum(trial["seconds"] for trial in listed)
            cost = {"search_s": round(whole, 1), "share_outside_of_trials": round(1 - inside / whole, 4)}
            print(json.dumps({"search": name, **cost, "losses": [trial["losses"] for trial in listed]}), flush=True)
    same = trials["undisturbed"] == trials["killed"]
    print(json.dumps({"benchmark": "a search that is killed twice", "same_trials": same}))
    if not same:
        raise SystemExit("the trials differ")


def _kill(command: list[str], env: dict[str, str], after: float) -> None:
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(after)
        print(f"the search ended before it was killed after {after:.0f} s")
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        print(f"killed after {after:.0f} s", flush=True)


def _told(words: list[str], env: dict[str, str]) -> Any:
    """What `starling search` prints as JSON."""
    done = subprocess.run([*STARLING, *words], env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _small() -> dict[str, Any]:
    """A configuration that trains in seconds, on synthetic speech."""
    synthesis = {"train": 48, "valid": 12, "test": 4, "rate": [180, 200]}
    search = {"method": {"kind": "hyperband", "eta": 2}, "trials": 4, "seed": 3}  # four trials, two go on, then one
    return {
        "name": "killed",
        "search": {**search, "space": {"train.optimizer.lr": SPACE["train.optimizer.lr"]}},
        "data": {"sample_rate": 8000, "sources": [{"kind": "synthetic", "synthesis": synthesis}]},
        "features": {"num_mels": 16},
        "model": {"kind": "conformer", "dim": 16, "layers": 1, "heads": 2, "channels": 4, "kernel": 5},
        "train": {"epochs": 4, "batch_seconds": 20, "device": "cpu", "threads": 1},
    }


def main() -> None:
    """Run the parts that are asked for."""
    parts = {
        "surrogate": run_surrogate,
        "proposals": run_proposals,
        "scale": run_scale,
        "trainings": run_trainings,
        "kills": run_kills,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], metavar="PART", help=", ".join(parts))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of each method; default 100, with trainings 5")
    parser.add_argument("--trials", type=int, default=10_000, help="of `proposals` and `scale`")
    parser.add_argument(
        "--total", type=int, default=0, help="epochs of each search of `trainings`; default 24 trainings"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="changes to the trainings, or to `kills`"
    )
    parser.add_argument("--dry", action="store_true", help="only count the epochs of `trainings`")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments of `kills`")
    parser.add_argument("--losses", type=Path, default=ROOT / "build" / "search-losses.jsonl", help="file of trainings")
    parser.add_argument("--plots", type=Path, default=ROOT / "build" / "search", help="folder of the plots")
    args = parser.parse_args()
    args.losses.parent.mkdir(parents=True, exist_ok=True)
    given = args.seeds
    for part in args.parts or parts:
        args.seeds = given or (5 if part == "trainings" else 100)
        parts[part](args)


if __name__ == "__main__":
    main()
