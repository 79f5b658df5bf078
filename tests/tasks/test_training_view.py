"""A journal as `starling top` shows it: learners, speed, membership, time left."""

import json
import random

import pytest

from tasks.tracking.training_view import TrainingView, validation_text
from training.coordinator.journal import Journal, JournalTail


def step(learner, n, **more):
    entry = {"kind": "step", "learner": learner, "step": n, "epoch": n / 10, "epochs": 2, "loss": 10.0 / n, "lr": 0.1}
    return entry | {"elapsed": n / 2, "audio_seconds": 30.0 * n, "staleness": 1.0, "exchange_s": 0.25} | more


def view_of(*entries):
    view = TrainingView()
    for entry in entries:
        view.feed(entry)
    return view


RING = [
    {"kind": "start", "step": 0, "run": "r"},
    {"kind": "view", "number": 2, "nodes": [0, 1], "joined": [0, 1], "left": {}, "elapsed": 0.0},
    *(step(f"{node}.0", n) for n in range(1, 6) for node in (0, 1)),
]


def test_learners_speed_and_time_left_are_shown():
    view = view_of(*RING)
    shown = view.to_dict()
    assert [learner["learner"] for learner in shown["learners"]] == ["0.0", "1.0"]
    assert shown["learners"][0]["steps_per_s"] == pytest.approx(2.0)
    assert shown["steps_per_s"] == pytest.approx(4.0)
    assert shown["audio_per_s"] == pytest.approx(120.0)
    assert shown["loss"] == pytest.approx(2.0)
    assert (shown["epoch"], shown["epochs"], shown["nodes"]) == (0.5, 2.0, [0, 1])
    # 0.4 epochs took 2 s, 1.5 are left
    assert shown["eta_s"] == pytest.approx(7.5)
    assert json.loads(json.dumps(shown)) == shown


def test_speed_is_averaged_and_progress_never_decreases():
    times = [0.0, 1.0, 2.0, 3.0, 13.0]
    view = view_of(*(step("0.0", n, elapsed=time) for n, time in enumerate(times, 1)))
    assert view.steps_per_s == pytest.approx(4 / 13)
    view.feed(step("0.0", 6, elapsed=14.0, audio_seconds=1.0))
    assert view.audio_per_s is None  # counting started again
    view.feed(step("1.0", 1, elapsed=13.0, epoch=0.2))
    assert view.progress == 0.6
    assert view.eta_s is not None
    view.feed({"kind": "resume", "step": 2, "epoch": 0.3, "elapsed": 2.0})
    view.feed(step("0.0", 3, elapsed=2.5))
    assert view.eta_s is None  # the speed is that of the current session


def test_joins_losses_and_the_end_are_shown():
    view = view_of(
        *RING,
        {"kind": "view", "number": 3, "nodes": [0], "joined": [], "left": {"1": "silent"}, "elapsed": 4.0},
        {"kind": "view", "number": 4, "nodes": [0, 2], "joined": [2], "left": {}, "elapsed": 5.0},
        {"kind": "bad", "learner": "0.0", "what": "no finite loss", "step": 5},
        {"kind": "valid", "epoch": 1, "epochs": 2, "valid_loss": 1.5, "valid_wer": 0.25, "elapsed": 6.0},
        {"kind": "epoch", "epoch": 1, "utterances": 40, "repeated": 3, "elapsed": 6.0},
    )
    texts = [event["text"] for event in view.events]
    assert texts[-5:] == [
        "node 1 left: silent",
        "node 2 joined",
        "learner 0.0: no finite loss",
        "epoch 1: validation loss 1.500, WER 25.0 %",
        "epoch 1 ended: 40 utterances, 3 of them repeated after a node was lost",
    ]
    assert [learner.name for learner in view.present] == ["0.0"]
    assert view.to_dict()["valid"]["valid_wer"] == 0.25
    assert view.to_dict()["ended"] is False
    view.feed({"kind": "end", "step": 40})
    assert view.to_dict()["ended"] is True
    assert view.eta_s is None


def test_resume_starts_from_its_checkpoint():
    resume = {"kind": "resume", "step": 4, "epoch": 1, "elapsed": 1.0, "checkpoint": "checkpoints/000002"}
    view = view_of(*RING, resume, step("0.0", 3, elapsed=1.5, epoch=1.1))
    assert [learner.name for learner in view.present] == ["0.0"]
    assert (view.progress, view.elapsed) == (1.1, 1.5)
    assert view.present[0].steps_per_s is None
    assert "resumed from checkpoints/000002" in [event["text"] for event in view.events]


def test_machines_are_shown_with_names_and_metrics():
    system = {"kind": "system", "node": 1, "host": "b", "cpu": 50.0, "memory": 10.0, "elapsed": 3.0}
    shown = view_of(*RING, system).to_dict()
    assert shown["systems"] == [{"node": 1, "host": "b", "cpu": 50.0, "memory": 10.0}]
    assert [system["host"] for system in shown["learners"]] == [None, "b"]


def test_view_works_from_the_middle_of_a_journal():
    shown = view_of(*RING[5:]).to_dict()
    assert len(shown["learners"]) == 2
    assert shown["nodes"] is None


def test_damaged_lines_and_lines_of_other_versions_are_skipped():
    draw = random.Random(5)
    values = [None, "text", [], {}, -1, float("nan"), True, {"x": 1}]
    view, sound = TrainingView(), view_of(*RING).to_dict()
    for kind in ("start", "resume", "step", "view", "valid", "epoch", "system", "bad", "end", "unheard-of"):
        view.feed({"kind": kind})
        for _ in range(40):
            entry = dict(draw.choice(RING)) | {"node": 1, "what": "x", "valid_loss": 1.0, "valid_wer": 0.5}
            entry[draw.choice(sorted(entry))] = draw.choice(values)
            view.feed(entry | {"kind": kind})
            json.dumps(view.to_dict())
        # later lines are shown as if the damaged ones did not exist
        for line in RING:
            view.feed(line)
        shown = view.to_dict()
        told = shown.pop("events")[-len(sound["events"]) :]
        assert shown == {name: value for name, value in sound.items() if name != "events"}, kind
        assert told == sound["events"]


def test_line_of_unknown_kind_is_ignored():
    assert view_of(*RING, {"kind": "unheard-of", "step": 99, "elapsed": 99.0}).to_dict() == view_of(*RING).to_dict()


def test_restarted_torn_or_truncated_journal_is_followed(tmp_path):
    path = tmp_path / "journal.jsonl"
    tail = JournalTail(path)
    assert tail.new_entries() == []
    journal = Journal(path)
    journal.write("start", step=0)
    journal.write("step", step=1)
    assert len(tail.new_entries()) == 2
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "st')
    assert tail.new_entries() == []
    with path.open("ab") as file:
        file.write(b'ep": 2}\n')
    assert tail.new_entries() == [{"kind": "step", "step": 2}]
    path.unlink()  # a training that was forced to start again, with a journal as long as the old one
    again = Journal(path)
    for number in range(30):
        again.write("step", step=100 + number)
    assert [entry["step"] for entry in tail.new_entries()] == list(range(100, 130))
    path.write_bytes(path.read_bytes()[:60])
    tail.new_entries()
    assert tail.new_entries() == []


def test_long_journal_is_read_from_near_its_end(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(9000):
        journal.write("step", step=number, note="x" * 40)
    ends = [entry["step"] for entry in JournalTail(path, whole=False).new_entries()]
    assert ends == list(range(ends[0], 9000))
    assert 1000 < len(ends) < 8000


def test_validation_of_tied_states_shows_frame_accuracy_without_wer():
    entry = {"valid_loss": 1.25, "valid_wer": None, "valid_frame_accuracy": 0.5}
    assert validation_text(entry) == "validation loss 1.250, frame accuracy 50.0 %"
    assert validation_text({"valid_loss": None, "valid_wer": None}) == "no finite validation loss"
    assert validation_text({"valid_loss": 1.25, "valid_wer": 0.5}) == "validation loss 1.250, WER 50.0 %"
