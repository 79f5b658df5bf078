"""Does a stage's work in a process of its own, which can be ended at any moment.

A stage works in threads of its process, and a thread that hangs in a library cannot be ended. So where a trial of a
search has a limit of time, a child does the work of the stages before its training; the training is one in any case.
The locks, the record and the messages stay with the parent.

    python -m tasks.stages.separate JOB PARENT      JOB: a file that `work_separately` writes
"""

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configurable.files import replace_file
from storage.retries import DiskError
from storage.stages import StageOutput
from tasks.config.home import own_disks_named, work_folder
from tasks.config.pipeline import PipelineConfig
from tasks.failures import passes
from tasks.stages import progress
from tasks.stages.base import Run, StageError, StageResult, get_stage
from training.processes import logs
from training.processes.children import Child, end_with_parent, exit_at_once, watched
from training.processes.exit_reason import leave_reason

_log = logging.getLogger(__name__)
_END_S = 5.0
"""How long the child may take to end; what it has not published is made again."""
_FAILED, _DISK, _PASSING = 1, 3, 4
"""Exit statuses of the child: the stage's error, that of a disk of this machine, and one that a retry may mend."""
_ERRORS: dict[int, type[Exception]] = {_DISK: DiskError, _PASSING: ConnectionError}


def work_separately(stage: str, run: Run, output: StageOutput, watch: Callable[[], None]) -> Any:
    """Do a stage's work in a child process.

    Args:
        stage: The stage.
        run: The run, with the results of earlier stages.
        output: The stage's output.
        watch: Called about once a second; its exception ends the child, and what the child has started.

    Returns:
        The stage's record.

    Raises:
        StageError: The work fails; the message says why.
        DiskError: A disk of this machine is full or cannot be written.
        ConnectionError: The work fails by what may pass, such as a server that restarts.
    """
    folder = work_folder(f"separate-{stage}", output.key)
    folder.mkdir(parents=True, exist_ok=True)
    job, record, log = folder / "job.json", _record_file(folder / "job.json"), folder / "stage.log"
    # the model that an alias named when the run began
    config = run.config.beginning_with(run.initial.name if run.initial and run.initial.named else "")
    document: dict[str, Any] = {"stage": stage, "key": output.key}
    document |= {"run_id": run.run_id, "flow_run_url": run.flow_run_url, "bundle": run.bundle and str(run.bundle)}
    document |= {"config": config.model_dump(mode="json", by_alias=True)}
    document |= {"results": [result.to_dict() for result in run.results.values()]}
    job.write_text(json.dumps(document), encoding="utf-8")
    record.unlink(missing_ok=True)
    progress.announce(stage, f"works in a process of its own, which search.trial_hours limits; its log is {log}")
    child = Child(
        [sys.executable, "-m", "tasks.stages.separate", str(job), str(os.getpid())],
        log,
        note=folder / "exit-reason.txt",
        start_new_session=True,  # only this process receives Ctrl-C, and ends the child
    )

    def poll() -> None:
        try:
            watch()
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)  # with what it has started; its id is not free before it is waited for
            raise

    watched(child, poll, _END_S)
    if child.returncode == 0:
        made = json.loads(record.read_text(encoding="utf-8"))
        shutil.rmtree(folder)
        return made
    text = child.tail() or f"its process ended with status {child.returncode}; its log, {log}, is empty"
    raise _ERRORS.get(child.returncode, StageError)(text)


def _record_file(job: Path) -> Path:
    return job.with_name("record.json")


def _work(job: Path) -> None:
    """Do the work that a file describes, and write the record beside it."""
    document = json.loads(job.read_text(encoding="utf-8"))
    results = {result["name"]: StageResult(**result) for result in document["results"]}
    config = PipelineConfig.model_validate(document["config"])
    run = Run(config, document["run_id"], flow_run_url=document["flow_run_url"], results=results)
    run.bundle = document["bundle"] and Path(document["bundle"])
    stage = get_stage(document["stage"])
    record = stage.work(run, StageOutput(run.store, stage.name, document["key"]))
    replace_file(_record_file(job), json.dumps(record).encode())


def main(job: Path) -> int:
    """Do the work; an error leaves its text as the reason, and its kind as the status.

    Args:
        job: The file.
    """
    logs.setup("stage")
    try:
        with own_disks_named(), progress.following(lambda stage, text: _log.info("%s: %s", stage, text)):
            _work(job)
    except Exception as error:
        _log.exception("the work failed")
        leave_reason(str(error) or type(error).__name__)
        return _DISK if isinstance(error, DiskError) else _PASSING if passes(error) else _FAILED
    return 0


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    exit_at_once(main(Path(sys.argv[1])))
