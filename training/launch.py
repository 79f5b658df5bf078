"""Training in a process of its own, which ends with its parent and whenever the parent says so."""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from storage.locks import file_lock
from training.job import TrainJob

STOPPED = 75
"""Exit status of a training process that was asked to stop and wrote a checkpoint (EX_TEMPFAIL)."""


PREDECESSOR_S = 300.0
"""How long a training process waits for an earlier one of the same job to end."""


class TrainingFailedError(RuntimeError):
    """The training process ended without a model."""


def die_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its parent dies, kill -9 included; elsewhere do nothing.

    Args:
        parent: The parent's process number, from the parent itself: it may have died before this process could ask.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit("the parent died before training began")


def run_training(job: TrainJob, folder: Path, on_poll: Callable[[], None] | None = None, poll_s: float = 1.0) -> None:
    """Train a job in a child process and wait for it.

    Args:
        job: What to train.
        folder: Where the job file and the log go.
        on_poll: Called every `poll_s` seconds meanwhile.
        poll_s: Seconds between polls.

    Raises:
        TrainingFailedError: If the child fails; the message ends with the last lines of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job_file, log = folder / "job.json", folder / "train.log"
    job_file.write_text(job.model_dump_json(indent=2), encoding="utf-8")
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "training.launch", str(job_file), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        try:
            while child.poll() is None:
                if on_poll:
                    on_poll()
                time.sleep(poll_s)
        except BaseException:
            _end(child)
            raise
    if on_poll:
        on_poll()
    if child.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise TrainingFailedError(f"training ended with status {child.returncode}; the end of {log}:\n{tail}")


def _end(child: "subprocess.Popen[bytes]", patience_s: float = 8.0) -> None:
    child.terminate()
    try:
        child.wait(patience_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def main(argv: list[str]) -> int:
    """Train the job in a file; the entry point of the child process.

    Args:
        argv: The job file, and the number of the process to end with (by default, the present parent).
    """
    die_with_parent(int(argv[1]) if len(argv) > 1 else os.getppid())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    from training.loop import StopRequested, Trainer

    job = TrainJob.model_validate_json(Path(argv[0]).read_bytes())
    # a killed parent's successor may be quicker than the end of this process: only one may write checkpoints
    with file_lock(job.journal.parent / "training.lock", PREDECESSOR_S):
        trainer = Trainer(job)

        def ask_to_stop(*_: object) -> None:
            trainer.stop_requested = True

        signal.signal(signal.SIGTERM, ask_to_stop)
        signal.signal(signal.SIGINT, ask_to_stop)
        try:
            result = trainer.run()
        except StopRequested:
            logging.info("stopped as asked, after a checkpoint at step %d", trainer.state.step)
            return STOPPED
    logging.info("finished: %s", json.dumps({k: result[k] for k in ("step", "epoch", "valid")}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
