"""Training with all its real processes: killed, orphaned, cancelled, failing, with one learner and several."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from forks import Forkable
from safetensors.torch import load_file
from support import end_processes, processes_naming, slow_nodes, wait_until
from tones import LEARNS, bare, train, train_here

from storage.locks import file_lock
from storage.objects import ObjectStore
from training.coordinator.checkpoints import find_checkpoint
from training.coordinator.journal import parse_lines, read_journal
from training.launch.training_process import TrainingFailedError, run_training

ROOT = Path(__file__).resolve().parents[2]
RANDOM = {"time_masks": 1, "time_mask_frames": 3, "speed_factors": [0.9, 1.1], "noise": {"snr_db": [10, 20]}}
ENDLESS = 100_000
SLOW = slow_nodes({0: 8})
"""A tiny model's epochs would be over before a test could interrupt them."""

PARENT = """
import sys
from pathlib import Path
from tasks.engine import know_tasks
from training.job import TrainJob
from training.launch.training_process import run_training

know_tasks()
run_training(TrainJob.model_validate_json(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path):
    """Assert that a training's processes end soon after it, however it ended."""
    yield
    left = None
    try:
        wait_until(lambda: not processes_naming(str(tmp_path)))
    except TimeoutError:
        left = processes_naming(str(tmp_path))
        end_processes(left)
    assert not left


def start(job, folder, slow=SLOW):
    """A process that trains, as a flow's task does; training is slow enough to be disturbed."""
    folder.mkdir(parents=True, exist_ok=True)
    job_file = folder / "parent.json"
    job_file.write_text(job.model_dump_json())
    command = [sys.executable, "-c", Forkable(PARENT), str(job_file), str(folder)]
    environment = {**os.environ, **slow, "OMP_NUM_THREADS": "1"}
    with (folder / "parent.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def last_step(job):
    return max((entry["step"] for entry in read_journal(job.journal) if entry["kind"] == "step"), default=0)


def wait_for_step(job, step, process):
    """Wait until a step is in the journal, which is some steps later."""

    def there():
        assert process.poll() is None, "training ended by itself"
        return last_step(job) >= step

    wait_until(there, every_s=0.02)


def find_process(folder, *words):
    """The process of a training whose command line has some words."""

    def process():
        for pid in processes_naming(str(folder)):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if all(word.encode() in line for word in words):
                return pid
        return None

    return wait_until(process, every_s=0.05)


def resumes(job):
    return [entry for entry in parse_lines(job.journal.read_text().splitlines()) if entry["kind"] == "resume"]


def checkpoint_steps(job):
    """Steps in the newest complete checkpoint."""
    checkpoint = find_checkpoint(ObjectStore(job.output_url), job.run)
    return checkpoint[1]["totals"]["steps"] if checkpoint else 0


def short_job(corpus, folder, kind):
    optimizer = {"blstm": {"kind": "sgd", "lr": 0.05}, "conformer": {"kind": "adamw", "lr": 5e-3}}[kind]
    options = {"epochs": 4, "max_batch": 4, "checkpoint_steps": 5, "average": 2}
    return corpus.job(folder, kind, optimizer=optimizer, augment=RANDOM, **options)


def assert_same(run, whole):
    """Bit for bit the same training: model, evaluations, losses; and the accounts add up."""
    assert run.model_bytes == whole.model_bytes
    assert run.result["history"] == whole.result["history"]
    assert run.losses == whole.losses
    assert run.result["step"] == whole.result["step"]
    assert run.result["utterances"] == whole.result["utterances"]
    assert [entry["repeated"] for entry in run.entries("epoch")] == [0, 0, 0, 0]


@pytest.mark.slow
def test_killed_training_gives_bitwise_the_same_model(corpus, tmp_path):
    """First its learner is killed, in mid-epoch (an epoch has 12 steps), then the process that started the training."""
    whole = train_here(short_job(corpus, tmp_path / "whole", "conformer"))
    folder = tmp_path / "killed"
    job = short_job(corpus, folder, "conformer")
    parent = start(job, folder)
    try:
        wait_for_step(job, 8, parent)
        os.kill(find_process(folder, "training.node.rank"), signal.SIGKILL)
        wait_until(lambda: resumes(job))
        wait_for_step(job, 17, parent)
        seen = last_step(job)
        parent.kill()
        parent.wait()
        # without a signal, all processes of the training end in good order: nothing that was reported is lost
        wait_until(lambda: not processes_naming(str(folder)))
        assert checkpoint_steps(job) >= seen
    finally:
        parent.kill()
        parent.wait()
    assert not ObjectStore(job.output_url).exists("result.json")
    polls = []
    run = train(job, lambda: polls.append(last_step(job)))
    assert_same(run, whole)
    assert len(resumes(job)) == 2
    assert any(entry["step"] % 12 for entry in resumes(job))  # not only at the ends of epochs
    assert polls[-1] == run.result["step"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blstm", "conformer"])
def test_repeatedly_killed_training_gives_the_same_model(corpus, tmp_path, kind):
    """Before the first checkpoint, in mid-epoch, late; politely, the supervisor only, and all processes at once."""
    whole = train_here(short_job(corpus, tmp_path / "whole", kind))
    folder = tmp_path / "killed"
    job = short_job(corpus, folder, kind)
    disturbances = [
        (1, "all", signal.SIGKILL),
        (11, "supervisor", signal.SIGKILL),
        (20, "supervisor", signal.SIGTERM),
        (26, "coordinator", signal.SIGKILL),  # it restarts, and training continues
        (32, "all", signal.SIGKILL),
    ]
    parent = None
    try:
        for step, who, number in disturbances:
            # on a busy machine, the last steps must take longer than finding the processes to kill
            parent = parent or start(job, folder, slow_nodes({0: 40}))
            wait_for_step(job, step, parent)
            if who == "coordinator":
                os.kill(find_process(folder, "training.coordinator.server"), number)
                continue
            if who == "all":
                end_processes(processes_naming(str(folder)))
            else:
                os.kill(find_process(folder, "training.launch.supervisor"), number)
            parent.wait(60)
            parent = None
            wait_until(lambda: not processes_naming(str(folder)))
            assert not ObjectStore(job.output_url).exists("result.json")
    finally:
        if parent:
            parent.kill()
            parent.wait()
    assert_same(train(job), whole)


class Cancelled(BaseException):
    """What an orchestrator raises in the task's thread."""


def test_an_exception_of_the_caller_ends_the_training(corpus, tmp_path):
    job = corpus.job(tmp_path, epochs=ENDLESS)

    def cancel():
        if last_step(job) >= 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        run_training(job, tmp_path, cancel, poll_s=0.02)
    with file_lock(tmp_path / "training.lock", wait_s=0):  # its owner is gone already, and so are all other processes
        assert not processes_naming(str(tmp_path))
    assert checkpoint_steps(job) >= 2
    assert not ObjectStore(job.output_url).exists("result.json")


def test_failure_message_has_the_end_of_the_log(corpus, tmp_path):
    job = corpus.job(
        tmp_path,
        optimizer={"kind": "sgd", "lr": 1e30, "clip_norm": 0},
        schedule={"kind": "constant", "warmup_epochs": 0},
        epochs=ENDLESS,
    )
    (tmp_path / "train.log").write_text("the coordinator ended with status 1 in an older session\n")
    said = r"status 3(.|\n)*train\.log(.|\n)*lower train\.optimizer\.lr"
    with pytest.raises(TrainingFailedError, match=said) as caught:
        run_training(job, tmp_path, poll_s=0.05)
    assert "older session" not in str(caught.value)
    bad = [entry for entry in read_journal(job.journal) if entry["kind"] == "bad"]
    assert [entry["learner"] for entry in bad] == ["0.0"]


def test_another_runs_output_is_refused(corpus, tmp_path):
    train_here(corpus.job(tmp_path / "one", epochs=1), stop_at=2)
    other = corpus.job(tmp_path / "two", run="run-2", output_url=str(tmp_path / "one" / "output"))
    with pytest.raises(TrainingFailedError, match="belongs to another configuration"):
        run_training(other, tmp_path / "two", poll_s=0.05)


# --- several learners


PLAIN = {
    "epochs": 2,
    "augment": {"enabled": False},
    "optimizer": {"kind": "sgd", "lr": 0.05},
    "average": 1,
}
"""Nothing random: neither dropout nor augmentation nor dither."""


@pytest.mark.slow
def test_node_of_two_learners_trains_like_one_learner(corpus, tmp_path):
    """One code path: the two divide each batch, and add up their gradients."""
    spec = corpus.spec("blstm", model=bare("blstm"))
    alone = train_here(corpus.job(tmp_path / "one", spec=spec, **PLAIN))
    job = corpus.job(tmp_path / "two", spec=spec, strategy="scpsgd", learners_per_node=2, **PLAIN)
    two = train(job)
    ours, theirs = (load_file(run.bundle / "model.safetensors") for run in (alone, two))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    norms = [
        {entry["step"]: entry["grad_norm"] for entry in run.entries("step") if entry["learner"] == "0.0"}
        for run in (alone, two)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    for ours, theirs in zip(alone.entries("valid"), two.entries("valid"), strict=True):
        for name in ("train_loss", "valid_loss", "audio_seconds"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4)
    assert two.result["step"] == alone.result["step"]
    assert_counts_add_up(two, corpus, nodes=1, per_node=2, epochs=2)


def test_every_strategy_with_one_learner_is_single(corpus, tmp_path):
    """All of these strategies are the same with one learner."""
    names = ("single", "scpsgd", "adpsgd", "h-adpsgd")
    runs = [train_here(corpus.job(tmp_path / name, strategy=name, epochs=1)) for name in names]
    assert len({run.model_bytes for run in runs}) == 1


def assert_counts_add_up(run, corpus, nodes, per_node, epochs):
    """Every utterance once an epoch, by all learners together; evaluated as average and as replicas."""
    count = len(corpus.train)
    assert [(e["epoch"], e["utterances"], e["index"], e["repeated"], e["nodes"]) for e in run.entries("epoch")] == [
        (number, count, count, 0, nodes) for number in range(1, epochs + 1)
    ]
    assert run.result["utterances"] == epochs * count
    assert run.result["repeated"] == 0
    assert run.result["audio_seconds"] == pytest.approx(epochs * sum(s.row["duration"] for s in corpus.train))
    last = {entry["learner"]: entry for entry in run.entries("step")}
    assert last.keys() == {f"{node}.{rank}" for node in range(nodes) for rank in range(per_node)}
    assert sum(entry["utterances"] for entry in last.values()) == epochs * count
    assert run.result["step"] == sum(last[f"{node}.0"]["step"] for node in range(nodes))
    valid = run.entries("valid")
    # in the order in which replicas are complete; of an epoch of a tenth of a second, nodes may write none in time
    validated = Counter(entry["epoch"] for entry in valid)
    assert set(validated.values()) == {1}
    assert epochs in validated
    assert validated.keys() <= set(range(1, epochs + 1))
    for entry in valid:
        replicas = {str(node) for node in range(nodes)}
        assert entry["replicas"].keys() == replicas or (entry["replicas"].keys() < replicas and entry["epoch"] < epochs)
        assert all(isinstance(loss, float) for loss in [entry["valid_loss"], *entry["replicas"].values()])
    assert not [entry for entry in read_journal(run.job.journal) if entry["kind"] == "bad"]


def ring_job(corpus, folder, **layout):
    spec = corpus.spec("conformer", model=bare("conformer"))
    return corpus.job(folder, spec=spec, epochs=12, optimizer={"lr": 1e-2}, **{**LEARNS, "max_batch": 8}, **layout)


@pytest.mark.slow
def test_two_nodes_in_a_ring_learn_the_words(corpus, tmp_path):
    run = train(ring_job(corpus, tmp_path, strategy="adpsgd", nodes=2))
    assert run.result["valid"]["wer"] <= 0.1
    assert_counts_add_up(run, corpus, nodes=2, per_node=1, epochs=12)
    averaged = [entry for entry in run.entries("step") if entry["exchanges"] + entry["answered"]]
    assert {entry["learner"] for entry in averaged} == {"0.0", "1.0"}
    assert not any(entry["failed"] for entry in run.entries("step"))


@pytest.mark.slow
def test_a_ring_of_nodes_of_two_learns_the_words(corpus, tmp_path):
    run = train(ring_job(corpus, tmp_path, strategy="h-adpsgd", nodes=2, learners_per_node=2))
    assert run.result["valid"]["wer"] <= 0.1
    assert (run.result["strategy"], run.result["nodes"], run.result["learners_per_node"]) == ("h-adpsgd", 2, 2)
    assert_counts_add_up(run, corpus, nodes=2, per_node=2, epochs=12)
