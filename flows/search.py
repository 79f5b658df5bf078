"""The flow `search`: trains trials of a configuration, each in a flow run of its own, and continues the best."""

import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from prefect import tags
from prefect.runtime import flow_run
from typing_extensions import override

from configurable.addresses import address_content
from flows.definition import flow
from flows.deploy.concurrency import in_turn
from flows.deploy.deployments import TAG
from flows.names import new_run_id, pipeline_name
from flows.pipeline import INGEST, ingest
from flows.pipeline import train as train_flow
from flows.servers.prefect_api import lasting_url
from storage.retries import DiskError
from tasks.config.home import home
from tasks.config.pipeline import PipelineConfig
from tasks.config.training import training_content
from tasks.failures import passes
from tasks.locking.lock_owner import LockOwner
from tasks.locking.slots import SlotTakenError, lock_name, machine_lock, run_log, shared_lock
from tasks.orchestration.artifacts import ProgressArtifact, publish_artifacts, quietly
from tasks.orchestration.stage_tasks import close_run, open_run, run_plainly
from tasks.search.config import plain_document, trial_config
from tasks.search.driver import SearchDriver, Watch, spent_epochs, work_left
from tasks.search.methods.base import TrialJob
from tasks.search.study import Studies, Study, StudyTrial, TrialOutcome
from tasks.stages import progress
from tasks.stages.base import Artifact, Run, StageError
from tasks.stages.paused import TrialPart, paused_output
from tasks.stages.train import TRAIN
from tasks.tracking.search_report import study_artifacts, write_report
from tasks.tracking.search_tracking import SearchRun

_NO_EFFECT = ("search", "storage", "runner", "slots", "score", "register", "report", "decode", "tune")
"""Sections on which no result of a trial depends."""
_DRAWN_S = 600.0
"""Seconds between two drawings of a running search; each takes a few seconds."""
_log = logging.getLogger(__name__)
Execute = Callable[[Run], Run]
"""Runs the stages up to the training; returns the run with their results."""


def study_name(config: PipelineConfig) -> str:
    """Name of the study of a configuration's search."""
    assert config.search is not None
    return config.search.study or config.name


def study_content(config: PipelineConfig) -> dict[str, Any]:
    """All that the results of a search depend on, as JSON."""
    search = config.search
    assert search is not None
    document = {name: part for name, part in plain_document(config).items() if name not in _NO_EFFECT}
    return {
        "configuration": document | {"train": training_content(config.train)},
        "method": address_content(search.method),
        "space": {name: address_content(parameter) for name, parameter in search.space.items()},
        "minimize": search.minimize,
        "seed": search.seed,
    }


class SearchDisplay:
    """Shows a search while it runs: nowhere."""

    def progress(self, done: float, total: float, note: str) -> None:
        """Show how many epochs are trained, and a note."""

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

    @override
    def publish(self, artifacts: Iterable[Artifact]) -> None:
        quietly(lambda: publish_artifacts(self._name, "search", artifacts))


class Trials:
    """Trains the trials of a search, and keeps their checkpoints while they may go on.

    Args:
        config: The searched configuration.
        run_id: Name of the search's run.
        study: The trials.
        execute: Runs the stages of a trial.
        display: Shows the search.
    """

    def __init__(
        self, config: PipelineConfig, run_id: str, study: Study, execute: Execute, display: SearchDisplay
    ) -> None:
        assert config.search is not None
        self._config, self._search, self._run_id, self._study = config, config.search, run_id, study
        self._execute, self._display = execute, display
        self._drawn = time.monotonic()
        self._store = Run(config, run_id).store
        self._discarded: set[str] = set()
        self._sizes: dict[str, int] = {}
        self.tracked = SearchRun(config.name, f"{study.name}@{study.created:.6f}", run_id)

    def train(self, job: TrialJob, watch: Watch) -> TrialOutcome:
        """Train a trial to a budget.

        Raises:
            StageError: The validation has no such figure.
        """
        config = trial_config(self._config, job.values, job.budget)
        continued = not self._search.method.restarts
        part = TrialPart(
            trained=self._study.trials[job.number].trained if continued else 0,
            keep=continued and job.budget < self._config.train.epochs,
            tags=self.tracked.tags,
            watch=watch,
        )
        run = self._execute(Run(config, f"{self._run_id}-trial-{job.number}", trial=part))
        valid = TRAIN.record(run)["result"]["valid"]
        if valid.get(self._search.minimize) is None:
            raise StageError(
                f"the validation has no {self._search.minimize}, only {', '.join(valid)}: set search.minimize=loss"
            )
        figures = {name: value for name, value in valid.items() if isinstance(value, int | float)}
        return TrialOutcome(float(valid[self._search.minimize]), {**figures, "training": run.result("train").key})

    def tidy(self) -> None:
        """After each result: show it, and delete checkpoints that are not needed or beyond the quota."""
        best, spent = self._study.best, spent_epochs(self._study.trials, self._search.method.restarts)
        if best is not None:
            self.tracked.log({f"best_{self._search.minimize}": best.losses[max(best.losses)]}, spent)
            if left := work_left(self._study):
                note = f"trial {best.number} is the best so far, {best.losses[max(best.losses)]:.4f}{left}"
                self._display.progress(spent, spent + left.epochs, note)
        if time.monotonic() - self._drawn > _DRAWN_S:
            self.draw()
        waiting = []
        for trial in self._study.trials:
            going_on = trial.state in ("paused", "running")
            for budget, figures in trial.figures.items():
                if going_on and budget == trial.trained:
                    waiting += [trial] if trial.state == "paused" else []
                else:
                    self._discard(figures["training"])
        self._keep_quota(waiting)

    def draw(self) -> None:
        """Draw the plots and the page, for MLflow and the display; an error only warns."""
        try:
            report = write_report(self._study, search_result(self._study))
            self.tracked.attach(report.files())
            link = self.tracked.report_text(report.path)
            self._display.publish(study_artifacts(self._study, report, link))
        except Exception as error:  # the study has everything: `starling search report` draws it again
            _log.warning("the report of the search is not written: %s: %s", type(error).__name__, error)
        self._drawn = time.monotonic()

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

    def give_back(self) -> None:
        """At the end of the search: leave the checkpoints of trials that will not go on to garbage collection."""
        for trial in self._study.trials:
            for figures in trial.figures.values():
                paused_output(self._store, figures["training"]).withdraw()


def _ends(error: Exception) -> bool:
    """Whether an error is not the fault of a trial: disks, locks and servers."""
    return isinstance(error, DiskError | SlotTakenError) or passes(error)


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
        execute: Runs the stages of a trial.
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
    method, name = search.build(config.train.epochs), study_name(config)
    holder, what = LockOwner.here(run_id, url), f"the study {name}"
    lock = machine_lock([home() / "locks" / f"search-{lock_name(name)}.lock"], what, config.slots, holder)
    with lock, shared_lock([lock_name("search", name)], what, config.slots, holder):
        about = {"method": search.method.kind, "trials": method.total, "total_epochs": search.total_epochs}
        about |= {"epochs": method.epochs, "hours": search.hours}
        about |= {"largest": config.train.epochs, "restarts": search.method.restarts, "minimize": search.minimize}
        study = Studies(search.url).create(name, study_content(config), about)
        prepare(config.model_copy(update={"search": None}))
        trials = Trials(config, run_id, study, execute, display)
        driver = SearchDriver(
            *(study, method, search, config.train.epochs, trials.train),
            ends=_ends,
            say=functools.partial(progress.announce, "search"),
            on_result=trials.tidy,
        )
        status = "FAILED"
        try:
            driver.run()
            status = "FINISHED"
            over = not study.interrupted and method.next(study.trials) is None
            if over:
                trials.give_back()
            trials.draw()
        finally:
            trials.tracked.end(search_result(study), status)
    return search_result(study) | {"run_id": run_id, "complete": over, "mlflow_run": trials.tracked.run_id}


def search_result(study: Study) -> dict[str, Any]:
    """The state of a study as JSON: number of trials by state, epochs, what is left to do, the best trial."""
    states = [trial.state for trial in study.trials]
    best, left = study.best, work_left(study)
    return {
        "study": study.name,
        **{name: study.about.get(name) for name in ("method", "minimize", "total_epochs", "largest")},
        "planned": study.about.get("trials"),
        "trials": {state: states.count(state) for state in ("finished", "paused", "running", "failed")},
        "epochs": spent_epochs(study.trials, bool(study.about.get("restarts"))),
        "seconds": study.seconds,
        "left": left and left._asdict(),
        "best": best and {name: getattr(best, name) for name in ("number", "values", "trained", "losses", "figures")},
    }


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

    def execute(run: Run) -> Run:
        opened = open_run(run.config, run.run_id)
        opened.trial = run.trial
        try:
            with tags(TAG):
                train_flow(run.config, run.run_id)
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

    def execute(run: Run) -> Run:
        run_plainly(run, TRAIN.name)
        return run

    def prepare(shared: PipelineConfig) -> None:
        run_plainly(Run(shared, f"{run_id}-data"), INGEST[-1])

    return run_search(config, run_id, "", prepare, execute, SearchDisplay())
