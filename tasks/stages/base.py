"""The base of all stages: content-addressed outputs that are made once and published by their record.

The address of a stage's output is a hash of its configuration and the digests of its inputs. If the output has a
record, the stage is cached. If not, one process does the work and publishes the record; others wait for its lock.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, cast

from configurable.wording import counted
from devices.worker_processes import refuse_import_by_workers
from storage.cache import set_cache_limit
from storage.objects import ObjectStore
from storage.stages import StageOutput, stage_key
from tasks import CONDITIONS, STAGES
from tasks.config.credentials import export_credentials
from tasks.config.home import home, objects_url, own_disks_named
from tasks.config.pipeline import PipelineConfig, RunnerConfig
from tasks.locking.lock_owner import LockOwner
from tasks.locking.slots import Say, machine_lock, output_lock_name, run_log, shared_lock, waits_counted
from tasks.stages import progress
from training.processes.logs import fields

if TYPE_CHECKING:
    from recognition.pretrained import PretrainedModel
    from tasks.locking.leases import LockLease
    from tasks.stages.initial import InitialModel
    from tasks.stages.paused import TrialPart

LOCK_WAIT_S = 12 * 3600.0
_WORTH_SAYING_S = 1.0
"""Shorter waiting for other runs is not mentioned: a lock that is free takes milliseconds."""
_RARE = ("unalignable", "repeated")
"""Counts that are left out of a line if they are 0, as nearly always."""


class StageError(RuntimeError):
    """A stage cannot do its work."""


def position(stage: str) -> int:
    """A stage's place in the order.

    Raises:
        StageError: If there is no such stage.
    """
    if stage not in STAGES:
        raise StageError(f"{stage!r} is not a stage; stages are: {', '.join(STAGES)}")
    return STAGES.index(stage)


def get_stage(name: str) -> "Stage[Any]":
    """The stage of this name, as its file declares it; imports the file, which takes seconds the first time.

    Raises:
        StageError: If there is no such stage.
    """
    position(name)
    stage: Stage[Any] = getattr(import_module(f"tasks.stages.{name}"), name.upper())
    return stage


def stages_of(config: PipelineConfig) -> tuple[str, ...]:
    """The stages that a configuration has, in order."""
    return tuple(name for name, has in CONDITIONS.items() if has(config))


@dataclass(frozen=True)
class StageResult:
    """Result of a stage, made now or taken from the object store."""

    name: str
    """The stage."""
    key: str
    """Address of its output."""
    url: str
    """Where the output is."""
    seconds: float
    """Duration of this execution in seconds, without what it waited for others."""
    cached: bool
    """Whether the output existed before."""
    counts: dict[str, int]
    """Counts of what the stage processed."""
    record: dict[str, Any]
    """The stage's record, as published."""
    waited_s: float = 0.0
    """Seconds that it waited for other runs: for one that makes the same output, or for a place in a pool of GPUs."""

    @property
    def store(self) -> ObjectStore:
        """The output's store."""
        return ObjectStore(self.url)

    @property
    def output(self) -> StageOutput:
        """The output; checks what is read against the record."""
        return StageOutput.at(self.url)

    @property
    def line(self) -> str:
        """Counts and duration in one line."""
        took = "cached" if self.cached else f"{self.seconds:.1f} s"
        waited = f", after waiting {self.waited_s:.0f} s" if self.waited_s >= _WORTH_SAYING_S else ""
        return f"{counts_text(self.counts)} ({took}{waited})"

    @property
    def markdown(self) -> str:
        """Name, counts and place as Markdown."""
        return f"**{self.name}**: {counts_text(self.counts)}\n\n`{self.url}`" + (" (cached)" if self.cached else "")

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def repeated_text(count: int) -> str:
    """What it means that a training has repeated utterances: their node was lost, or too slow to be heard of."""
    return f"{counted(count, 'utterance')} repeated after a node was lost"


def counts_text(counts: dict[str, Any]) -> str:
    """Format counts in one line, such as `1 error, 32 words`."""
    if counts.keys() == {"promoted", "version"}:  # of the stage register: neither is a number of things
        outcome = "became champion" if counts["promoted"] else "stays challenger"
        return f"version {counts['version']} {outcome}"
    if counts.keys() == {"frames", "dimensions"} and not counts["frames"]:  # of the stage features
        return f"{counts['dimensions']} dimensions, computed when they are needed"
    return ", ".join(_count_text(name, value) for name, value in counts.items() if value or name not in _RARE)


def _count_text(name: str, value: Any) -> str:
    if name == "repeated":  # by the stage train
        return repeated_text(value)
    if value == 1 and name.endswith("s"):
        name = f"{name[:-3]}y" if name.endswith("ies") else name[:-1]
    return f"{value:,} {name}"


def said_as(stage: str) -> Say:
    """Says for whom a run waits as a line of a stage; in the run's log where nothing follows such lines.

    Args:
        stage: The stage.
    """

    def say(text: str) -> None:
        if progress.followed():
            progress.announce(stage, text)
        else:
            run_log().info("%s", text)

    return say


def lock_path(stage: str, key: str) -> Path:
    """The lock file that a process of this machine holds while it makes an output."""
    return home() / "locks" / f"{stage}-{key}.lock"


@dataclass
class Run:
    """One run of a pipeline: its configuration and the results so far."""

    config: PipelineConfig
    run_id: str
    force_from: str = ""
    """Stages from this one on run again."""
    flow_run_url: str = ""
    """URL of the run in the Prefect UI; empty without one."""
    results: dict[str, StageResult] = field(default_factory=dict)
    bundle: Path | None = None
    """Folder of an existing model that the run evaluates instead of training one."""
    initial: "InitialModel | None" = None
    """The model that training begins with, once it has been looked up."""
    pretrained: "PretrainedModel | None" = None
    """The pretrained model that `model.source` names, once it is read."""
    trial: "TrialPart | None" = None
    """If the run is of a trial of a search: what of its training it does."""

    def __post_init__(self) -> None:
        refuse_import_by_workers()

    def result(self, name: str) -> StageResult:
        """The result of an earlier stage."""
        return self.results[name]

    @property
    def holder(self) -> LockOwner:
        """This run as lock owner, for the messages of runs that wait for it."""
        return LockOwner.here(self.run_id, self.flow_run_url)

    @property
    def store(self) -> ObjectStore:
        """The object store of all stage outputs."""
        export_credentials(self.config.storage)
        return ObjectStore(objects_url(self.config.storage.url))

    @property
    def cache_folder(self) -> Path:
        """Local folder for copies of remote shards, bounded as configured for all processes of this machine."""
        folder = home() / "cache"
        set_cache_limit(folder, int(self.config.storage.cache_gb * 1e9))
        return folder

    @property
    def runner(self) -> RunnerConfig:
        """Configuration of the work on shards; `storage.workers` is the default of `runner.workers`."""
        runner = self.config.runner
        _ = self.cache_folder  # writes the limit that the workers read
        if not runner.local and self.store.protocol == "memory":
            raise StageError(
                f"runner.kind {runner.kind} uses other processes, which cannot see {self.store.url}: use runner.kind "
                "threads, or set storage.url to a folder or s3://"
            )
        return runner if runner.workers else runner.model_copy(update={"workers": self.config.storage.workers})

    def forced(self, stage: str) -> bool:
        """Whether a stage must run again even if its output exists."""
        return bool(self.force_from) and position(stage) >= position(self.force_from)


def note_use(run: Run, output: StageOutput) -> None:
    """Note the outputs that an output depends on, so that garbage collection keeps them (`storage.garbage`)."""
    uses = {name: result.key for name, result in run.results.items() if name != output.stage}
    output.note_use(uses, datetime.now(UTC).date().isoformat())


Inputs = tuple[dict[str, Any], dict[str, str]]


@dataclass(frozen=True)
class Artifact:
    """What the Prefect UI shows of a finished stage."""

    content: str | list[dict[str, Any]] | bytes
    """Markdown, the rows of a table, or a PNG image."""
    description: str | None = None
    """Markdown above it."""
    name: str = ""
    """End of its key; by default the stage's name."""


def _result_artifact(run: Run, result: StageResult) -> Iterable[Artifact]:
    return [Artifact(result.markdown, counts_text(result.counts))]


class StageRecord(TypedDict):
    """What the record of every stage has."""

    counts: dict[str, int]
    """Numbers of things that the stage has processed."""


RecordT = TypeVar("RecordT", bound=StageRecord)


def _no_figures(record: Any) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Stage(Generic[RecordT]):
    """A stage of the pipeline; `RecordT` is what its record has, which later stages read by `record`.

    Args:
        name: One of STAGES; the module `tasks.stages.<name>` has it under this name in capitals.
        version: Must be raised whenever the same configuration and inputs give a different output.
        inputs: Returns the configuration that affects the output, and the digests of its inputs.
        work: Does the work in the output's store and returns the record.
        still_valid: Whether a published record may be used; for records that refer to data outside the object store.
        artifacts: What the Prefect UI shows of its result; by default name, counts and place.
        figures: Metrics of its record, which the stage register logs with the model.
        watches: Whether its work itself calls what watches a trial (`TrialPart.watch`), which may end it.
        evaluates: Whether it is also a stage of `starling evaluate`, which scores an existing model.
        reads: What it reads, for the documentation.
        writes: What its output holds, likewise.
        only: When it runs, likewise, such as `with a section ...`; empty if always.
    """

    name: str
    version: int
    inputs: Callable[[Run], Inputs]
    work: Callable[[Run, StageOutput], RecordT]
    still_valid: Callable[[Run, dict[str, Any]], bool] | None = None
    pieces: str | None = None
    """Folder of the output with what an interrupted attempt has finished and the next one keeps; "" is the whole
    output. None if the work starts again, or tells itself where it resumes."""
    artifacts: Callable[[Run, StageResult], Iterable[Artifact]] = _result_artifact
    figures: Callable[[RecordT], dict[str, float]] = _no_figures
    evaluates: bool = False
    watches: bool = False
    reads: str = ""
    writes: str = ""
    only: str = ""

    def record(self, run: Run) -> RecordT:
        """The record of this stage in a run that has executed it."""
        return cast("RecordT", run.result(self.name).record)

    def output(self, run: Run) -> StageOutput:
        """The output of this stage for a run, whether it exists or not."""
        config, inputs = self.inputs(run)
        return StageOutput(run.store, self.name, stage_key(self.name, self.version, config, inputs))

    def execute(self, run: Run) -> StageResult:
        """Do the work unless it is done, and add the result to `run.results`.

        Raises:
            SlotTakenError: If another run does the same work, and this one may not wait or has waited for too long.
            DiskError: If a disk of this machine is full or cannot be written.
        """
        local = run.store.local_path(self.name)
        try:
            with own_disks_named(*([local] if local else [])):
                return self._execute(run)
        except BaseException:
            progress.end(self.name)
            raise

    def _execute(self, run: Run) -> StageResult:
        started = time.monotonic()
        output, slots = self.output(run), run.config.slots
        what = f"the output {self.name}/{output.key}"
        # one process at a time makes an output; the others wait and then use it
        say = partial(progress.announce, self.name)
        lock = machine_lock([lock_path(self.name, output.key)], what, slots, run.holder, say)
        with waits_counted() as waits, fields(run=run.run_id, stage=self.name), lock:
            record = self._made(run, output)
            cached = record is not None
            if not cached:
                with shared_lock([output_lock_name(output.store.url)], what, slots, run.holder, say) as lease:
                    record = self._made(run, output)  # another machine may have published it
                    cached = record is not None
                    if not cached:
                        record = self._make(run, output, lease)
            if cached:
                note_use(run, output)
        assert record is not None
        result = StageResult(
            name=self.name,
            key=output.key,
            url=output.store.url,
            seconds=time.monotonic() - started - waits.seconds,
            cached=cached,
            counts=record.get("counts", {}),
            record=record,
            waited_s=waits.seconds,
        )
        run.results[self.name] = result
        progress.end(self.name)  # first, so that what follows is none of the many lines of a running stage
        progress.announce(self.name, result.line)
        if result.counts.get("quarantined") or "passed_over" in record:
            from tasks.stages.quarantined import left_out_lines, quarantine_lines  # imports pyarrow

            for line in (*left_out_lines(record), *quarantine_lines(result.output, record)):
                progress.announce(self.name, line)
        return result

    def _made(self, run: Run, output: StageOutput) -> dict[str, Any] | None:
        """The record of the output if it exists and may be used, else None.

        Raises:
            DamagedObjectError: If the record is damaged.
        """
        record = None if run.forced(self.name) else output.record()
        valid = record is not None and (self.still_valid is None or self.still_valid(run, record))
        return record if valid and not output.lacking() else None

    def _kept(self, output: StageOutput) -> int:
        """Number of objects that an interrupted attempt has left, and that are not made again."""
        if self.pieces is None:
            return 0
        return sum(not name.startswith("uses/") for name in output.store.list(self.pieces))

    def _worked(self, run: Run, output: StageOutput) -> RecordT:
        """Do the work, in a process that can be ended if it is for a trial with a limit of time."""
        trial = run.trial
        # a cluster needs this process's flow run, and its pieces have a limit of their own (runner.wait_hours)
        if trial is None or not trial.limited or self.watches or run.config.runner.cluster:
            return self.work(run, output)
        from tasks.stages.separate import work_separately

        return cast("RecordT", work_separately(self.name, run, output, trial.watch))

    def _make(self, run: Run, output: StageOutput, lease: "LockLease | None") -> dict[str, Any] | None:
        if run.forced(self.name):
            output.clear()
        elif output.record() and (lacking := output.lacking()):
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            name = output.store.join(lacking[0])
            progress.announce(self.name, f"{name}{more} missing or truncated: runs again and keeps the intact objects")
            output.withdraw()
        elif kept := self._kept(output):
            progress.announce(self.name, f"resumes: keeps {counted(kept, 'object')} of an interrupted attempt")
        note_use(run, output)
        made = self._worked(run, output)
        lost = lease is not None and lease.lost_to is not None
        if not (lost and output.record()):  # the lock's new holder may have published first; its record stays
            output.publish(made)
        return output.record()
