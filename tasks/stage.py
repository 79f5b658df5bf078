"""What a stage is: work addressed by what it is made from, done once, recorded last.

A stage gives its configuration and the digests of its inputs; their hash is the address of its output. If the output
has a record, the stage is cached. If not, one process does the work (others wait for its lock) and publishes.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.cache import set_cache_limit
from storage.objects import ObjectStore
from storage.stages import StageOutput, stage_key
from tasks import STAGES
from tasks.config import PipelineConfig, RunnerConfig
from tasks.credentials import export_credentials
from tasks.holder import Holder
from tasks.home import home, objects_url, own_disks_named
from tasks.slots import machine_lock, output_lock_name, run_log, shared_lock
from training.logs import fields

if TYPE_CHECKING:
    from tasks.leases import Lease

LOCK_WAIT_S = 12 * 3600.0


class StageError(RuntimeError):
    """A stage cannot do its work."""


def position(stage: str) -> int:
    """A stage's place in the order.

    Raises:
        StageError: If there is no such stage.
    """
    if stage not in STAGES:
        raise StageError(f"{stage!r} is no stage; stages are: {', '.join(STAGES)}")
    return STAGES.index(stage)


@dataclass(frozen=True)
class StageResult:
    """What a stage did, or had done before."""

    name: str
    """The stage."""
    key: str
    """Address of its output."""
    url: str
    """Where the output is."""
    seconds: float
    """Seconds that it took just now."""
    cached: bool
    """True if the output was there before."""
    counts: dict[str, int]
    """What it handled."""
    record: dict[str, Any]
    """The stage's record, as published."""

    @property
    def store(self) -> ObjectStore:
        """The output's store."""
        return ObjectStore(self.url)

    @property
    def output(self) -> StageOutput:
        """The output, which compares what is read with the record."""
        return StageOutput.at(self.url)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def lock_path(stage: str, key: str) -> Path:
    """The file whose lock a process of this machine holds while it makes an output."""
    return home() / "locks" / f"{stage}-{key}.lock"


@dataclass
class Run:
    """One run of a pipeline: its configuration and the results so far."""

    config: PipelineConfig
    run_id: str
    force_from: str = ""
    """Stages from this one on run again."""
    flow_run_url: str = ""
    """Where the run is seen in the Prefect UI, if there is one."""
    results: dict[str, StageResult] = field(default_factory=dict)

    def result(self, name: str) -> StageResult:
        """The result of an earlier stage."""
        return self.results[name]

    @property
    def holder(self) -> Holder:
        """This run, for others who want what it has a lock on."""
        return Holder.here(self.run_id, self.flow_run_url)

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
        """Where work on shards is done; `storage.workers` counts where `runner.workers` says nothing."""
        runner = self.config.runner
        _ = self.cache_folder  # whose limit the workers find beside it
        if not runner.local and self.store.protocol == "memory":
            raise StageError(f"runner.kind {runner.kind} works in other processes, which cannot see {self.store.url}")
        return runner if runner.workers else runner.model_copy(update={"workers": self.config.storage.workers})

    def forced(self, stage: str) -> bool:
        """Whether a stage has to run again."""
        return bool(self.force_from) and position(stage) >= position(self.force_from)


def note_use(run: Run, output: StageOutput) -> None:
    """Note what a run's output stands on, so that it is not deleted meanwhile; see `storage.garbage`."""
    uses = {name: result.key for name, result in run.results.items() if name != output.stage}
    output.note_use(uses, datetime.now(UTC).date().isoformat())


Inputs = tuple[dict[str, Any], dict[str, str]]


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline.

    Args:
        name: One of STAGES.
        version: Raised whenever the same configuration and inputs give another output.
        inputs: Gives the configuration that shapes the output, and the digests of what it is made from.
        work: Does the work below the output's store and returns the record: `counts`, and what later stages need.
        still_valid: Whether a published record may be used; some refer to things outside the object store.
    """

    name: str
    version: int
    inputs: Callable[[Run], Inputs]
    work: Callable[[Run, StageOutput], dict[str, Any]]
    still_valid: Callable[[Run, dict[str, Any]], bool] | None = None

    def output(self, run: Run) -> StageOutput:
        """Where the output of this run's stage belongs."""
        config, inputs = self.inputs(run)
        return StageOutput(run.store, self.name, stage_key(self.name, self.version, config, inputs))

    def execute(self, run: Run) -> StageResult:
        """Do the work unless it is done; the result also enters `run.results`.

        Raises:
            SlotTakenError: If another run is at it, and this one is not to wait, or has waited for too long.
            DiskError: If a disk of this machine is full or cannot be written.
        """
        local = run.store.local_path(self.name)
        with own_disks_named(*([local] if local else [])):
            return self._execute(run)

    def _execute(self, run: Run) -> StageResult:
        started = time.monotonic()
        output, slots = self.output(run), run.config.slots
        what = f"the output {self.name}/{output.key}"
        # one process at a time makes an output; the others wait and then find it made
        lock = machine_lock([lock_path(self.name, output.key)], what, slots, run.holder)
        with fields(run=run.run_id, stage=self.name), lock:
            record = self._made(run, output)
            cached = record is not None
            if not cached:
                with shared_lock([output_lock_name(output.store.url)], what, slots, run.holder) as lease:
                    record = self._made(run, output)  # by another machine, meanwhile
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
            seconds=time.monotonic() - started,
            cached=cached,
            counts=record.get("counts", {}),
            record=record,
        )
        run.results[self.name] = result
        return result

    def _made(self, run: Run, output: StageOutput) -> dict[str, Any] | None:
        """The record of an output that is there and may be used.

        Raises:
            DamagedObjectError: If it is not as it was written.
        """
        record = None if run.forced(self.name) else output.record()
        valid = record is not None and (self.still_valid is None or self.still_valid(run, record))
        return record if valid and not output.lacking() else None

    def _make(self, run: Run, output: StageOutput, lease: "Lease | None") -> dict[str, Any] | None:
        if run.forced(self.name):
            output.clear()
        elif output.record() and (lacking := output.lacking()):
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            name = output.store.join(lacking[0])
            run_log().warning("%s%s missing or cut: %s runs again, and keeps what is whole", name, more, self.name)
            output.withdraw()
        note_use(run, output)
        made = self.work(run, output)
        lost = lease is not None and lease.lost_to is not None
        if not (lost and output.record()):  # the new holder of the lock may have published first: that one stands
            output.publish(made)
        return output.record()
