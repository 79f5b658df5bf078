"""`starling top` on real trainings: from the folder, from the data folder, over the coordinator; it ends with them."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from support import ROOT, environment, load_beside, slow_nodes, wait_until

from flows.cli.live_table import number, picture, render
from tasks.figures import clock
from tasks.stages.base import StageError
from tasks.tracking.training_lookup import LocalTraining, RemoteTraining, WatchError, find_training, is_running
from tasks.tracking.training_view import training_line
from training.coordinator.coordinator import journal_portion
from training.coordinator.journal import Journal
from training.coordinator.messages import JournalReply
from training.processes.keys import RingKey

tones = load_beside(__file__, "../training/tones.py")
emulated_nodes = load_beside(__file__, "../training/emulated_nodes.py")
make_coordinator_process, make_node = emulated_nodes.make_coordinator_process, emulated_nodes.make_node


def text_of(watched):
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(render(picture(watched)))
    return capture.get()


def work_folder(home, name="train-abc", kind="tiny"):
    folder = home / "work" / name
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"task": {"spec": {"provenance": {"name": kind}}}}))
    journal = Journal(folder / "journal.jsonl")
    journal.write("start", step=0)
    for n in (1, 2, 3):
        common = {"epoch": n / 10, "epochs": 2, "elapsed": float(n), "audio_seconds": 9.0 * n, "lr": 0.1}
        journal.write("step", learner="0.0", step=n, loss=1.0, **common)
    return folder


def test_finished_training_is_shown_without_waiting(home):
    watched = LocalTraining(work_folder(home))
    assert watched.poll() is False
    shown = text_of(watched)
    assert "tiny (train-abc)" in shown
    assert "epoch 0.30 of 2" in shown
    assert "1.00 steps/s" in shown


@pytest.mark.parametrize("target", ["tiny", "abc", "train-ab"])
def test_training_is_found_by_name_and_key(home, target):
    folder = work_folder(home)
    training = find_training(target)
    assert (training.folder, training.name) == (folder, "tiny (train-abc)")


def test_folder_of_recordings_does_not_hide_the_training_of_that_name(home, tmp_path, monkeypatch):
    folder = work_folder(home)
    (tmp_path / "here" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert find_training("tiny").folder == folder
    with pytest.raises(WatchError, match=r"no training is running in .*tiny: give"):
        find_training("../here/tiny")


def test_missing_or_ambiguous_training_is_reported(home, tmp_path):
    with pytest.raises(WatchError, match="no training is running in"):
        find_training("")
    first, second = work_folder(home), work_folder(home, "train-xyz", "other")
    with pytest.raises(WatchError, match=r"(?s)no training is running.*other \(train-xyz\).*"):
        find_training("")
    with pytest.raises(WatchError, match="'nobody' is neither a folder of a training, nor HOST:PORT, nor a training"):
        find_training("nobody")
    with pytest.raises(WatchError, match="--key-file is for a remote coordinator"):
        find_training("tiny", tmp_path / "key")
    locks = [open(folder / "training.lock", "w") for folder in (first, second)]  # noqa: SIM115
    import fcntl

    fcntl.flock(locks[0], fcntl.LOCK_EX)
    assert is_running(first)
    assert find_training("").folder == first
    fcntl.flock(locks[1], fcntl.LOCK_EX)
    with pytest.raises(WatchError, match="2 trainings are running"):
        find_training("")
    for lock in locks:
        lock.close()


def test_coordinator_can_be_watched_only_with_its_key(make_coordinator_process, make_node, tmp_path, monkeypatch):
    coordinator = make_coordinator_process(nodes=2, epochs=2, shards=12, key=True).start("--fresh")
    nodes = [make_node(coordinator, number, step_s=0.01) for number in range(2)]
    watched = find_training(coordinator.address, coordinator.key_file)
    assert isinstance(watched, RemoteTraining)
    assert watched.poll()
    assert watched.coordinator["wanted"] == 2
    watching = threading.Event()
    for node in nodes:
        node.hold = lambda: watching.wait(240)
        node.start()
    wait_until(lambda: watched.poll() and sum(m["leased"] for m in watched.coordinator["members"]))
    assert picture(watched)["coordinator"]["pool"] < coordinator.size
    assert "unleased" in text_of(watched)
    watching.set()
    assert emulated_nodes.finish(*nodes) == {"done"}
    wait_until(lambda: not watched.poll() or len(watched.view.events) > 3)
    assert any("node 1 joined" in event["text"] for event in watched.view.events)
    watched.close()
    stranger = tmp_path / "stranger.key"
    RingKey.generate().save(stranger)
    monkeypatch.setattr("tasks.tracking.training_lookup._ANSWER_S", 0.1)
    other = RemoteTraining(coordinator.address, stranger, gone_s=0.0)
    wait_until(lambda: other.poll() is False and "refused the key" in other.trouble)
    other.close()
    stranger.chmod(0o644)
    with pytest.raises(StageError, match="chmod 600"):
        find_training(coordinator.address, stranger)


def test_coordinator_sends_its_journal_in_bounded_pieces(tmp_path):
    path = tmp_path / "job.journal"
    assert journal_portion(path, 0) == JournalReply(offset=0, end=0, text="")
    journal = Journal(path)
    for step in range(9000):
        journal.write("step", step=step, note="x" * 60)
    portion = journal_portion(path, 0)
    assert portion.offset == 0
    assert len(portion.text) < 300_000
    assert portion.end == len(portion.text)
    tail = journal_portion(path, -1)
    assert tail.end == path.stat().st_size
    assert journal_portion(path, tail.end).text == ""
    assert journal_portion(path, 10**15).offset == 0


def test_missing_numbers_are_shown_as_dashes():
    assert (clock(None), clock(3725.9), number(None), number(0.5, ".1%")) == ("–", "1:02:05", "–", "50.0%")


def test_table_of_a_ring_has_every_value_in_its_column():
    learner = {"learner": "0.1", "step": 70, "steps_per_s": 1.5, "loss": 2.25, "staleness": 3.0, "exchange_s": 0.5}
    learner |= {"exchanges_per_step": 1.25, "distance": 0.004, "failed": 5, "leases": 6, "leased": 8}
    gpu = {"gpu": 0.0, "load": 90.0, "memory_mb": 8000.0}
    shown = {"training": "tiny", "epoch": 0.5, "epochs": 4.0, "loss": 2.5, "steps_per_s": 3.0, "audio_per_s": 90.0}
    shown |= {
        "learners": [learner, learner | {"learner": "1.0", "leases": None, "loss": None}],
        "nodes": [0],
        "elapsed": 61.0,
    }
    shown |= {"ended": False, "eta_s": 3600.0, "valid": {"valid_loss": 1.5, "valid_wer": 0.25}, "trouble": "no answer"}
    shown |= {"systems": [{"node": 3, "host": "lab", "cpu": 41.0, "memory": 7.0, "gpus": [gpu]}]}
    shown |= {"events": [{"elapsed": float(n), "text": f"event {n}"} for n in range(12)]}
    shown |= {"coordinator": {"wanted": 2, "pool": 33}}
    console = Console(width=300, no_color=True)
    with console.capture() as capture:
        console.print(render(shown))
    lines = [line.split() for line in capture.get().splitlines()]
    told = "epoch 0.50 of 4, loss 2.500, validation loss 1.500, WER 25.0 %, 90 × real time, 1:00:00 left"
    more = "3.00 steps/s, 2 learners on 1 of 2 nodes, elapsed 0:01:01, 33 utterances unleased"
    assert lines[:3] == [["tiny"], told.split(), more.split()]
    assert told == training_line(shown)  # what a run prints after each epoch
    assert ["0.1", "70", "1.50", "2.250", "3.0", "0.50", "s", "1.2", "4e-03", "5", "6", "8"] in lines
    assert ["1.0", "70", "1.50", "–", "3.0", "0.50", "s", "1.2", "4e-03", "5", "–", "8"] in lines
    assert ["3", "lab", "41", "%", "7", "%", "0:", "90", "%,", "8000", "MB"] in lines
    assert [line[2] for line in lines if line[1:2] == ["event"]] == [str(n) for n in range(4, 12)]
    assert lines[-1] == ["no", "answer"]
    with console.capture() as capture:
        console.print(render(shown | {"ended": True, "nodes": None, "systems": []}))
    assert "90 × real time, ended\n3.00 steps/s, 2 learners, elapsed 0:01:01\n" in capture.get()
    assert "unleased" not in capture.get()
    with console.capture() as capture:
        console.print(render(shown | {"learners": [learner], "coordinator": {"wanted": 1}}))
    assert ", 1 learner on 1 node, " in capture.get()


def starling(*words, home):
    command = [sys.executable, "-m", "flows.cli.app", *map(str, words)]
    env = {**os.environ, "STARLING_HOME": str(home)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_ring_is_watched_from_start_to_end(tmp_path):
    """Two nodes, one of them slowed: both views show learners, leases, machines and the end."""
    corpus = tones.make_corpus(tmp_path / "tones")
    work = tmp_path / "home" / "work" / "train-ring"
    job = corpus.job(work, strategy="adpsgd", nodes=2, epochs=6)
    with environment(**slow_nodes({1: 3})):
        trainer = threading.Thread(target=tones.train, args=(job,))
        trainer.start()
    wait_until(lambda: is_running(work) and (work / "coordinator.json").exists())
    address = json.loads((work / "coordinator.json").read_text())["address"]
    here = starling("top", "--json", "--every", "0.3", home=tmp_path / "home")
    there = starling("top", address, "--key-file", work / "ring.key", "--json", "--every", "0.3", home=tmp_path)
    trainer.join(240)
    for process in (here, there):
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        looks = [json.loads(line) for line in output.splitlines()]
        last = looks[-1]
        assert last["running"] is False
        assert any(event["text"] == "node 1 joined" for look in looks for event in look["events"])
        busy = [look for look in looks if len(look["learners"]) == 2]
        assert busy
        assert any(
            learner["leased"] for look in busy for learner in look["learners"] if learner.get("leased") is not None
        )
        assert any(learner["steps_per_s"] for look in busy for learner in look["learners"])
        assert {system["node"] for look in looks for system in look["systems"]} == {0, 1}
        assert any(learner["host"] for look in busy for learner in look["learners"])
    assert Path(job.output_url, "result.json").exists()
