"""Runs training in a child process, which ends with its parent or at the parent's request."""

import os
from collections.abc import Callable
from pathlib import Path

from storage.retries import check_disk
from training.job import TrainJob
from training.processes.children import Child, engine_command, watched

END_S = 9.0
"""How long training may take to end after a request: time for a last checkpoint."""


class TrainingFailedError(RuntimeError):
    """The training process ended without a model."""


def run_training(job: TrainJob, folder: Path, on_poll: Callable[[], None] | None = None, poll_s: float = 1.0) -> None:
    """Train a job in a child process and wait for it.

    Args:
        job: The training job.
        folder: Folder for the job file and the log.
        on_poll: Called every `poll_s` seconds while training runs.
        poll_s: Seconds between polls.

    Raises:
        TrainingFailedError: If the child fails; the message ends with its exit reason, or the last lines of its log.
        DiskError: If it fails without a message because the folder's disk is full.
    """
    assert job.train.epochs, "there is nothing to train"
    folder.mkdir(parents=True, exist_ok=True)
    job_file, log = folder / "job.json", folder / "train.log"
    job_file.write_text(job.model_dump_json(indent=2), encoding="utf-8")
    child = Child(
        engine_command("training.launch.supervisor", str(job_file), str(os.getpid())),
        log,
        note=folder / "exit-reason.txt",
        start_new_session=True,  # only this process receives Ctrl-C; it then asks the child for a last checkpoint
    )
    watched(child, on_poll or (lambda: None), END_S, poll_s)
    if on_poll:
        on_poll()
    if child.returncode:
        if reason := child.reason():
            raise TrainingFailedError(f"training ended with status {child.returncode} (its log: {log}): {reason}")
        tail = child.tail()
        if not tail.strip():
            check_disk(folder)  # an empty log may mean that its disk is full
        raise TrainingFailedError(f"training ended with status {child.returncode}; the end of {log}:\n{tail}")
