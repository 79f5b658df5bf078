"""The flow `search`: trains trials of a configuration, each in a flow run of its own, and continues the best.

If only fields of `decode` are searched, it trains once, and its trials decode with that model.
"""

import functools
import logging
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import tags
from prefect.runtime import flow_run
from typing_extensions import override

from configurable.addresses import address_content
from flows.definition import flow
from flows.deploy.concurrency import in_turn
from flows.names import TAG, new_run_id, pipeline_name
from flows.pipeline import INGEST, ingest, pipeline
from flows.pipeline import train as train_flow
from flows.servers.prefect_api import lasting_url
from flows.summary import summarize
from storage.retries import DiskError
from tasks import STAGES
from tasks.config.home import home
from tasks.config.pipeline import PipelineConfig
from tasks.config.training import training_content
from tasks.failures import passes
from tasks.locking.lock_owner import LockOwner
from tasks.locking.slots import SlotTakenError, lock_name, machine_lock, run_log, shared_lock
from tasks.orchestration.artifacts import ProgressArtifact, publish_artifacts, quietly
from tasks.orchestration.stage_tasks import close_run, open_run, run_plainly
from tasks.search.config import budget_fields, decoding_values, plain_document, trial_config
from tasks.search.driver import SearchDriver, SearchFailedError, Train, Watch, work_left
from tasks.search.methods.base import SearchMethod, TrialJob
from tasks.search.seeds import SEED, SeedTrainings, seed_spread
from tasks.search.space import Values
from tasks.search.study import Studies, Study, StudyTrial, TrialOutcome
from tasks.stages import progress
from tasks.stages.base import Artifact, Run, StageError, said_as
from tasks.stages.bundles import own_bundle
from tasks.stages.initial import initial_model
from tasks.stages.paused import TrialPart, paused_output
from tasks.stages.train import TRAIN
from tasks.stages.tuning import validation_trials
from tasks.tracking.runs import status_after
from tasks.tracking.search_report import search_result, study_artifacts, write_report
from tasks.tracking.search_tracking import SearchRun

_NO_EFFECT = ("search", "storage", "runner", "slots", "score", "register", "report", "tune")
"""Sections on which no result of a trial depends; if it is trained, it does not depend on `decode` either."""
_EVALUATION = ("sets", "model_uri", "decision", "report", "run_id")
"""What the study keeps of the summary of the run that evaluates the best."""
_BEFORE_DECODING, _LAST = STAGES[STAGES.index("decode") - 1], STAGES[-1]
_DRAWN_S = 600.0
"""Seconds between two drawings of a running search; each takes a few seconds."""
_log = logging.getLogger(__name__)
Execute = Callable[[Run, str], Run]
"""Runs the stages up to one; returns the run with their results."""


def study_name(config: PipelineConfig) -> str:
    """Name of the study of a configuration's search."""
    assert config.search is not None
    return config.search.study or config.name


def study_content(config: PipelineConfig) -> dict[str, Any]:
    """All that the results of a search depend on, as JSON."""
    search = config.search
    assert search is not None
    without = _NO_EFFECT if search.decodes else (*_NO_EFFECT, "decode")
    document = {name: part for name, part in plain_document(config).items() if name not in without}
    # addresses have digests of these instead, which only a run knows
    read = {"init": config.train.init, "alignments": config.train.objective.alignments_folder}
    train = training_content(config.train) | {name: place for name, place in read.items() if place}
    return {
        "configuration": document | {"train": train},
        "method": address_content(search.method),
        "space": {name: address_content(parameter) for name, parameter in search.space.items()},
        "minimize": search.minimize,
        **({"budget": search.budget, "max_budget": search.max_budget} if search.max_budget else {}),
        "seed": search.seed,
        **({"utterances": search.utterances} if search.decodes else {}),
    }


class SearchDisplay:
    """Shows a search while it runs: nowhere."""

    def progress(self, done: float, total: float, note: str) -> None:
        """Show how much is trained, or how many trials have ended, and a note."""

    def publish(self, artifacts: Iterable[Artifact]) -> None:
        """Show plots and tables in place of former ones."""


class PrefectDisplay(SearchDisplay):
    """Shows a search as artifacts of its flow run.

    Args:
        run: The search's run.
    """

    def __init__(self, run: Run) -> None:
        self._name = run.config.name
        self._bar = ProgressArtifact(run, "search")

    @override
    def progress(self, done: float, total: float, note: str) -> None:
        self._bar("search", done, total, note)
        if done >= total:
            self._bar.finish()

    @override
    def publish(self, artifacts: Iterable[Artifact]) -> None:
        quietly(lambda: publish_artifacts(self._name, "search", artifacts))


@dataclass
class Trials(ABC):
    """Works on the trials of a search, and shows them.

    Args:
        config: The searched configuration.
        run_id: Name of the search's run.
        study: The trials.
        execute: Runs stages.
        display: Shows the search.
    """

    config: PipelineConfig
    run_id: str
    study: Study
    execute: Execute
    display: SearchDisplay

    def __post_init__(self) -> None:
        assert self.config.search is not None
        self._search = self.config.search
        self._drawn = time.monotonic()
        self.tracked = SearchRun(self.config.name, f"{self.study.name}@{self.study.created:.6f}", self.run_id)

    @abstractmethod
    def train(self, job: TrialJob, watch: Watch) -> TrialOutcome:
        """Work on a trial.

        Raises:
            StageError: The validation has no such figure as is minimized.
        """

    @abstractmethod
    def open(self, count: int) -> None:
        """Make what all trials need.

        Args:
            count: Number of trials to expect.
        """

    @abstractmethod
    def close(self, over: bool) -> None:
        """Give back what was kept for further trials.

        Args:
            over: Whether the search has nothing left to do.
        """

    def tidy(self) -> None:
        """After each result: log the best so far, and show how far the search is."""
        if (best := self.study.best) is not None:
            self._track({f"best_{self.study.minimized}": best.losses[max(best.losses)]})
            self.show(self.study, f"trial {best.number} is the best so far")

    def _track(self, figures: Mapping[str, float]) -> None:
        work = work_left(self.study)
        assert work is not None  # `run_search` has said how much there is to do
        self.tracked.log(figures, work.done)

    def show(self, study: Study, what: str) -> None:
        """Show how far a study is, and from time to time draw the search.

        Args:
            study: Of the search, or of trainings with other seeds.
            what: What its best result is, for the note.
        """
        work, best = work_left(study), study.best
        if work and best:
            note = f"{what}: {best.losses[max(best.losses)]:.4f}{work}"
            self.display.progress(work.done, work.done + work.left, note)
        if time.monotonic() - self._drawn > _DRAWN_S:
            self.draw()

    def draw(self) -> None:
        """Draw the plots and the page, for MLflow and the display; an error only warns."""
        try:
            report = write_report(self.study)
            self.tracked.attach(report.files())
            link = self.tracked.report_text(report.path)
            self.display.publish(study_artifacts(self.study, report, link))
        except Exception as error:  # the study has everything: `starling search report` draws it again
            _log.warning("the report of the search is not written: %s: %s", type(error).__name__, error)
        self._drawn = time.monotonic()


class TrainedTrials(Trials):
    """Trains the trials of a search, and keeps their checkpoints while they may go on."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._store = Run(self.config, self.run_id).store
        self._largest = self._search.largest(self.config.train)
        self._discarded: set[str] = set()
        self._sizes: dict[str, int] = {}

    @override
    def open(self, count: int) -> None:
        """Nothing: each trial makes what it needs."""

    @override
    def train(self, job: TrialJob, watch: Watch) -> TrialOutcome:
        continued = not self._search.method.restarts
        trained = self.study.trials[job.number].trained
        part = TrialPart(
            before=budget_fields(self.config, trained) if continued and trained else {},
            keep=continued and job.budget < self._largest,
            tags=self.tracked.tags,
            watch=watch,
            limited=watch.limit_s > 0,
        )
        return self._train(job.values, job.budget, f"trial-{job.number}", part)

    def with_seeds(self, best: StudyTrial) -> Train:
        """Trains a trial's configuration with the seeds that are the values of jobs; may raise as `train`."""

        def train(job: TrialJob, watch: Watch) -> TrialOutcome:
            part = TrialPart(tags=self.tracked.tags, watch=watch, limited=watch.limit_s > 0)
            name = f"trial-{best.number}-seed-{job.values[SEED]}"
            return self._train({**best.values, **job.values}, job.budget, name, part)

        return train

    def _train(self, values: Values, budget: int, name: str, part: TrialPart) -> TrialOutcome:
        config = trial_config(self.config, values, budget)
        run = self.execute(Run(config, f"{self.run_id}-{name}", trial=part), TRAIN.name)
        valid = TRAIN.record(run)["result"]["valid"]
        if valid.get(self._search.minimize) is None:
            raise StageError(
                f"the validation has no {self._search.minimize}, only {', '.join(valid)}: set search.minimize=loss"
            )
        figures = {name: value for name, value in valid.items() if isinstance(value, int | float)}
        return TrialOutcome(float(valid[self._search.minimize]), {**figures, "training": run.result("train").key})

    def evaluate(self, best: StudyTrial, seed: int) -> dict[str, Any]:
        """Decode, score and register what a trial's configuration has given with a seed."""
        config = trial_config(self.config, {**best.values, SEED: seed}, self._largest)
        summary = summarize(self.execute(Run(config, f"{self.run_id}-best"), _LAST))
        return {name: summary[name] for name in _EVALUATION}

    def log_seeds(self) -> None:
        """Log mean and standard deviation over seeds."""
        spread, minimized = seed_spread(self.study), self.study.minimized
        figures = {"mean": spread.mean, "std": spread.std} if spread else {}
        self._track({f"seeds_{minimized}_{name}": value for name, value in figures.items() if value is not None})

    @override
    def tidy(self) -> None:
        """After each result: delete checkpoints that are not needed or beyond the quota, too."""
        super().tidy()
        waiting = []
        for trial in self.study.trials:
            going_on = trial.state in ("paused", "running")
            for budget, figures in trial.figures.items():
                if going_on and budget == trial.trained:
                    waiting += [trial] if trial.state == "paused" else []
                else:
                    self._discard(figures["training"])
        self._keep_quota(waiting)

    def _keep_quota(self, waiting: list[StudyTrial]) -> None:
        keys = {trial.number: trial.figures[trial.trained]["training"] for trial in waiting}
        for key in keys.values():
            if key not in self._sizes and key not in self._discarded:
                self._sizes[key] = sum(entry.size for entry in paused_output(self._store, key).store.entries())
        total, most = sum(self._sizes.get(key, 0) for key in keys.values()), self._search.keep_gb * 1e9
        for trial in sorted(waiting, key=lambda t: (-t.losses[t.trained], -t.number)) if total > most else ():
            if total <= most:
                return
            total -= self._sizes.get(keys[trial.number], 0)
            self._discard(keys[trial.number])

    def _discard(self, key: str) -> None:
        if key not in self._discarded:
            paused_output(self._store, key).clear()
            self._discarded.add(key)
            self._sizes.pop(key, None)

    @override
    def close(self, over: bool) -> None:
        """If the search is over, leave the checkpoints of trials that will not go on to garbage collection."""
        for trial in self.study.trials if over else ():
            for figures in trial.figures.values():
                paused_output(self._store, figures["training"]).withdraw()


class Decodings(Trials):
    """Decodes for the trials of a search over `decode`: utterances that are encoded once, with each trial's values."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._opened = ExitStack()

    @override
    def open(self, count: int) -> None:
        """Train the model, or find it trained, and encode the utterances."""
        config = self.config.model_copy(update={"search": None, "tune": None})
        run = self.execute(Run(config, f"{self.run_id}-model"), _BEFORE_DECODING)
        folder = self._opened.enter_context(tempfile.TemporaryDirectory(prefix="starling-model-"))
        bundle = own_bundle(run, Path(folder))
        self._decoder = self._opened.enter_context(validation_trials(run, bundle, self._search.utterances, count))

    @override
    def train(self, job: TrialJob, watch: Watch) -> TrialOutcome:
        """Decode with the trial's values; nothing is trained."""
        counts = self._decoder.errors(decoding_values(self.config, job.values), watch)
        if counts.wer is None:
            raise StageError("the validation utterances have no words, so that there is no error rate to minimize")
        figures = {"wer": counts.wer, "cer": counts.cer, "errors": counts.errors, "words": counts.ref_words}
        return TrialOutcome(counts.wer, figures)

    @override
    def close(self, over: bool) -> None:
        """End the processes that decode."""
        self._opened.close()


def _ends(error: Exception) -> bool:
    """Whether an error is not the fault of a trial: disks, locks and servers."""
    return isinstance(error, DiskError | SlotTakenError) or passes(error)


def _repeat_best(config: PipelineConfig, study: Study, trials: TrainedTrials, say: Callable[[str], None]) -> bool:
    """Train the best trial's configuration with other seeds, and evaluate the best of these trainings.

    Neither `search.total_budget` nor `search.hours` limits this.

    Returns:
        Whether it is done, or there is nothing to do; False if somebody has asked to stop.

    Raises:
        SearchFailedError: No training has a result.
    """
    search, best = config.search, study.best
    assert search is not None
    if not search.seeds or best is None:
        return True
    largest = search.largest(config.train)
    method = SeedTrainings(config.training_seed + 1, search.seeds, largest)
    seeds = study.make_seeds(best.number, method, largest)
    again = f"trial {best.number} with other seeds"
    SearchDriver(
        seeds,
        method,
        search.model_copy(update={"total_budget": 0, "hours": 0.0}),
        largest,
        trials.with_seeds(best),
        ends=_ends,
        say=lambda text: say(f"{again}: {text}"),
        on_result=lambda: trials.show(seeds, again),
    ).run()
    trials.log_seeds()
    if seeds.stopping:
        return False
    lucky = seeds.best
    if lucky is None:
        raise SearchFailedError(
            f"all {search.seeds} trainings of trial {best.number} with other seeds failed, the last one with: "
            f"{seeds.trials[-1].error}. The trials keep their results; to try further seeds, raise search.seeds"
        )
    if search.evaluate_best and "evaluation" not in lucky.figures[lucky.trained]:
        say(f"decodes, scores and registers the best of them, seed {lucky.values[SEED]}")
        seeds.note_figures(lucky.number, evaluation=trials.evaluate(best, lucky.values[SEED]))
    return True


def run_search(
    config: PipelineConfig,
    run_id: str,
    url: str,
    prepare: Callable[[PipelineConfig], object],
    execute: Execute,
    display: SearchDisplay,
) -> dict[str, Any]:
    """Search until there is nothing to do, a limit is reached, or somebody has asked to stop.

    Args:
        config: The configuration, with its section `search`.
        run_id: Name of the search's run.
        url: Of its flow run, for runs that wait for it.
        prepare: Makes the data that all trials share.
        execute: Runs stages.
        display: Shows the search.

    Returns:
        What `starling search CONFIG --json` prints.
    """
    search = config.search
    if search is None:
        raise ValueError(
            f"{config.name} has no section search: name there the fields to search (search.space), each with a range "
            "or a list of choices"
        )
    largest, name = search.largest(config.train), study_name(config)
    method = search.build(largest)
    config = _with_one_initial(config, run_id)
    holder, what = LockOwner.here(run_id, url), f"the study {name}"
    wait = said_as("search")
    lock = machine_lock([home() / "locks" / f"search-{lock_name(name)}.lock"], what, config.slots, holder, wait)
    with lock, shared_lock([lock_name("search", name)], what, config.slots, holder, wait):
        about = {"method": search.method.kind, "trials": method.total, "total_budget": search.total_budget}
        about |= {"work": method.work, "budget": search.budget, "hours": search.hours}
        about |= {"largest": largest, "restarts": search.method.restarts, "minimize": search.minimize}
        study = Studies(search.url).create(name, study_content(config), about)
        prepare(config.model_copy(update={"search": None}))
        trials = (Decodings if search.decodes else TrainedTrials)(config, run_id, study, execute, display)
        say = functools.partial(progress.announce, "search")
        over, ended = _is_over(study, method), status_after(None)
        try:
            if not over:
                trials.open(method.total - len(study.trials))
            driver = SearchDriver(study, method, search, largest, trials.train, _ends, say, trials.tidy)
            driver.run()
            over = _is_over(study, method)
            if not study.stopping and isinstance(trials, TrainedTrials):
                over = _repeat_best(config, study, trials, say) and over
            trials.draw()
        except BaseException as error:
            ended = status_after(type(error))
            raise
        finally:
            trials.close(over)
            trials.tracked.end(search_result(study), *ended)
    return search_result(study) | {"run_id": run_id, "complete": over, "mlflow_run": trials.tracked.run_id}


def _with_one_initial(config: PipelineConfig, run_id: str) -> PipelineConfig:
    """The configuration with the version that `train.init` names now: an alias may move while a search goes on.

    Args:
        config: The configuration.
        run_id: Name of the search's run.

    Raises:
        StageError: If there is no such model, or the registry does not answer.
    """
    initial = initial_model(Run(config, run_id)) if config.train.init else None
    return config.beginning_with(initial.name) if initial and initial.named else config


def _is_over(study: Study, method: SearchMethod) -> bool:
    """Whether there is nothing left to do, whatever the limits."""
    return not study.interrupted and method.next(study.trials) is None


@flow(name="search", flow_run_name=pipeline_name("search"), persist_result=False)
@in_turn
def search(config: PipelineConfig, run_id: str = "") -> dict[str, Any]:
    """Search for better values of the fields in the configuration's section `search`.

    Args:
        config: The pipeline's configuration.
        run_id: Name of the run; generated if empty.

    Returns:
        What `starling search CONFIG --json` prints.
    """
    logger = run_log()

    def execute(run: Run, until: str) -> Run:
        opened = open_run(run.config, run.run_id)
        opened.trial = run.trial
        try:
            with tags(TAG):
                if until == TRAIN.name:
                    train_flow(run.config, run.run_id)
                else:
                    pipeline(run.config, run.run_id, until=until)
        finally:
            close_run(run.run_id)
        return opened

    def say(stage: str, text: str) -> None:
        if stage == "search":
            logger.info("%s", text)

    def prepare(shared: PipelineConfig) -> None:
        with tags(TAG):
            ingest(shared)

    with progress.following(say):
        run_id = run_id or new_run_id(config)
        display = PrefectDisplay(Run(config, run_id))
        return run_search(config, run_id, lasting_url(flow_run.ui_url), prepare, execute, display)


def search_plainly(config: PipelineConfig) -> dict[str, Any]:
    """Search for better values of a configuration, without Prefect."""
    run_id = new_run_id(config)

    def execute(run: Run, until: str) -> Run:
        run_plainly(run, until)
        return run

    def prepare(shared: PipelineConfig) -> None:
        run_plainly(Run(shared, f"{run_id}-data"), INGEST[-1])

    return run_search(config, run_id, "", prepare, execute, SearchDisplay())
