"""Training in a real child process: killed, stopped, orphaned, failing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.locks import file_lock
from storage.objects import ObjectStore
from training.checkpoint import checkpoint_steps
from training.journal import parse_lines, read_journal
from training.launch import STOPPED, TrainingFailedError, run_training
from training.loop import Trainer

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
RANDOM = {"time_masks": 1, "time_mask_frames": 3, "speed_factors": [0.9, 1.1], "noise_snr_db": [10, 20]}
ENDLESS = 100_000

PARENT = """
import sys
from pathlib import Path
from training.job import TrainJob
from training.launch import run_training

run_training(TrainJob.model_validate_json(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
"""


def start(job, folder):
    folder.mkdir(parents=True, exist_ok=True)
    job_file = folder / "job.json"
    job_file.write_text(job.model_dump_json())
    command = [sys.executable, "-m", "training.launch", str(job_file), str(os.getpid())]
    with (folder / "child.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log)


def last_step(job):
    return max((entry.get("step", 0) for entry in read_journal(job.journal)), default=0)


def wait_for_step(job, step, process=None):
    deadline = time.monotonic() + 60
    while last_step(job) < step:
        assert process is None or process.poll() is None, "the child ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def disturb(job, folder, step, number):
    """Start a child and send it a signal at a step; its exit status."""
    child = start(job, folder)
    try:
        wait_for_step(job, step, child)
        child.send_signal(number)
        return child.wait(30)
    finally:
        child.kill()
        child.wait()


def model_bytes(job):
    return (Path(job.output_url) / "model" / "model.safetensors").read_bytes()


def disturbed_job(corpus, folder, kind):
    optimizer = {"blstm": {"kind": "sgd", "lr": 0.05}, "conformer": {"kind": "adamw", "lr": 5e-3}}[kind]
    options = {"epochs": 4, "max_batch": 4, "checkpoint_steps": 5, "average": 2}
    return corpus.job(folder, kind, optimizer=optimizer, augment=RANDOM, **options)


@pytest.mark.parametrize(
    ("kind", "disturbances"),
    [
        # in mid-epoch (an epoch has 12 steps), before the first checkpoint, and late
        ("blstm", [(17, signal.SIGKILL)]),
        ("conformer", [(2, signal.SIGKILL), (17, signal.SIGKILL), (28, signal.SIGTERM)]),
    ],
)
def test_a_killed_training_ends_with_the_same_bytes(corpus, tmp_path, kind, disturbances):
    whole = disturbed_job(corpus, tmp_path / "whole", kind)
    result = Trainer(whole).run()
    job = disturbed_job(corpus, tmp_path / "killed", kind)
    for step, number in disturbances:
        status = disturb(job, tmp_path / "killed", step, number)
        assert status == (-signal.SIGKILL if number == signal.SIGKILL else STOPPED)
        assert not ObjectStore(job.output_url).exists("result.json")
        if number == signal.SIGTERM:  # it stopped in good order: no step is lost
            assert checkpoint_steps(ObjectStore(job.output_url))[-1] == last_step(job)
    polls = []
    run_training(job, tmp_path / "killed", lambda: polls.append(last_step(job)), poll_s=0.05)
    assert model_bytes(job) == model_bytes(whole)
    assert ObjectStore(job.output_url).read_json("result.json")["history"] == result["history"]
    steps = [entry["loss"] for entry in read_journal(job.journal) if entry["kind"] == "step"]
    assert steps == [entry["loss"] for entry in read_journal(whole.journal) if entry["kind"] == "step"]
    resumes = [e for e in parse_lines(job.journal.read_text().splitlines()) if e["kind"] == "resume"]
    assert any(entry["cursor"] > 0 for entry in resumes)  # not only at the ends of epochs
    assert polls[-1] == result["step"]


def test_a_training_ends_with_its_killed_parent(corpus, tmp_path):
    job = corpus.job(tmp_path, epochs=ENDLESS)
    job_file = tmp_path / "parent.json"
    job_file.write_text(job.model_dump_json())
    command = [sys.executable, "-c", PARENT, str(job_file), str(tmp_path)]
    parent = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT)
    try:
        wait_for_step(job, 2, parent)
        parent.kill()
        parent.wait()
        # the child holds the lock as long as it lives; it stops in good order, with a checkpoint
        with file_lock(tmp_path / "training.lock", wait_s=30):
            assert checkpoint_steps(ObjectStore(job.output_url))[-1] == last_step(job)
            assert not ObjectStore(job.output_url).exists("result.json")
    finally:
        parent.kill()


def test_a_failure_tells_the_end_of_the_log(corpus, tmp_path):
    optimizer = {"kind": "sgd", "lr": 1e30, "clip_norm": 0}
    schedule = {"kind": "constant", "warmup_epochs": 0}
    job = corpus.job(tmp_path, optimizer=optimizer, schedule=schedule, epochs=30)
    with pytest.raises(TrainingFailedError, match=r"status 1(.|\n)*train\.log(.|\n)*lower train\.optimizer\.lr"):
        run_training(job, tmp_path, poll_s=0.05)


class Cancelled(BaseException):
    """What an orchestrator raises in the task's thread."""


def test_an_exception_of_the_caller_ends_the_training(corpus, tmp_path):
    job = corpus.job(tmp_path, epochs=ENDLESS)

    def cancel():
        if last_step(job) >= 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        run_training(job, tmp_path, cancel, poll_s=0.02)
    with file_lock(tmp_path / "training.lock", wait_s=0):  # its holder is gone already
        assert checkpoint_steps(ObjectStore(job.output_url))[-1] == last_step(job)
