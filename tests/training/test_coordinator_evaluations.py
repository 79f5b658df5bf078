"""Which epochs may be evaluated, and which replicas nodes are asked for, when epochs end."""

import pytest
from bookkeeping import ask, beat, join, make_coordinator, report

from training.coordinator.evaluations import LATE_S

SIZE = 30


@pytest.fixture
def ring(tmp_path):
    coordinator, clock = make_coordinator(tmp_path, nodes=2, epochs=3, max_minutes=1.0)
    for node in range(2):
        join(coordinator, node)
        beat(coordinator, node)
    return coordinator, clock


def finish_epoch(coordinator, epoch):
    """Both nodes train an epoch to its end."""
    for node in range(2):
        seq = coordinator.ledger.states[f"n{node}"].seq + 1
        beat(coordinator, node, reports=[report(seq, list(range(node, SIZE, 2)), epoch)])


def ready(coordinator):
    return [(item["epoch"], item["nodes"]) for item in ask(coordinator, op="evaluations")["ready"]]


def report_evaluation(coordinator, epoch, **result):
    return ask(coordinator, op="evaluated", epoch=epoch, result={"loss": 2.0, **result})["history"]


def test_epoch_is_evaluated_when_all_replicas_are_written(ring):
    coordinator, _ = ring
    assert beat(coordinator, 0)["snapshot"] is None
    finish_epoch(coordinator, 0)
    assert [beat(coordinator, node)["snapshot"] for node in range(2)] == [1, 1]
    assert ready(coordinator) == []
    assert beat(coordinator, 0, snapshots=[1])["snapshot"] is None
    assert beat(coordinator, 1)["snapshot"] == 1
    assert ready(coordinator) == []
    beat(coordinator, 1, snapshots=[1, 1])
    assert ready(coordinator) == [(1, [0, 1])]
    assert len(report_evaluation(coordinator, 1)) == 1
    assert len(report_evaluation(coordinator, 1, loss=9.0)) == 1
    assert coordinator.ledger.books.history[0]["loss"] == 2.0
    assert ready(coordinator) == []
    assert coordinator.evaluations.pending() == []


def test_late_replicas_are_waited_for_and_then_left_out(ring):
    coordinator, clock = ring
    finish_epoch(coordinator, 0)
    beat(coordinator, 1, snapshots=[1])
    for waited in (0.0, LATE_S - 1.0):
        assert ready(coordinator) == [], waited
        clock.now += LATE_S - 1.0
    assert ready(coordinator) == [(1, [1])]


def test_evaluation_does_not_wait_for_a_lost_node(ring):
    coordinator, _ = ring
    finish_epoch(coordinator, 0)
    beat(coordinator, 1, snapshots=[1])
    ask(coordinator, op="leave", incarnation="n0")
    assert ready(coordinator) == [(1, [1])]


def test_newcomer_is_not_asked_for_replicas_of_older_epochs(ring):
    coordinator, _ = ring
    finish_epoch(coordinator, 0)
    join(coordinator, 2)
    assert beat(coordinator, 2)["snapshot"] is None
    beat(coordinator, 0, snapshots=[1])
    finish_epoch(coordinator, 1)
    assert beat(coordinator, 1)["snapshot"] == 2  # its replica of the first epoch is gone
    assert beat(coordinator, 2)["snapshot"] == 2


def end_by_time_limit(coordinator):
    coordinator.core.set(finish="limit", last=coordinator.evaluations.last())


def test_open_epoch_is_evaluated_at_the_time_limit(ring):
    coordinator, _ = ring
    finish_epoch(coordinator, 0)
    for node in range(2):
        beat(coordinator, node, snapshots=[1])
    report_evaluation(coordinator, 1)
    beat(coordinator, 0, reports=[report(2, [0], 1)])
    assert beat(coordinator, 0)["snapshot"] is None
    end_by_time_limit(coordinator)
    assert coordinator.evaluations.pending() == [2]
    assert beat(coordinator, 0)["snapshot"] == 2
    coordinator.core.set(finish="stop")
    assert beat(coordinator, 0)["snapshot"] is None


def test_finished_training_without_replicas_falls_back_to_the_checkpoint(ring):
    coordinator, _ = ring
    for epoch in range(3):
        finish_epoch(coordinator, epoch)
    assert coordinator.evaluations.lost()
    beat(coordinator, 0, snapshots=[3])
    assert not coordinator.evaluations.lost()


def test_journal_entry_has_totals_up_to_its_epoch(ring):
    coordinator, clock = ring
    for epoch in range(2):
        clock.now += 1.5
        finish_epoch(coordinator, epoch)
        for node in range(2):
            beat(coordinator, node, snapshots=[epoch + 1])
    coordinator.core.drain()
    report_evaluation(coordinator, 1, wer=0.5, unreadable=2, replicas={"0": 1.0})
    report_evaluation(coordinator, 2)
    first, second = (line for line in coordinator.core.drain()[1] if line["kind"] == "valid")
    assert (first["epoch"], first["epochs"], first["step"], first["train_loss"]) == (1, 3, 2, 1.0)
    assert (first["valid_loss"], first["valid_wer"], first["valid_unreadable"]) == (2.0, 0.5, 2)
    assert (first["audio_seconds"], second["audio_seconds"], second["step"]) == (2.0, 4.0, 4)
    assert (first["elapsed"], second["elapsed"]) == (1.5, 3.0)
    assert "valid_unreadable" not in second
    assert "valid_frame_accuracy" not in second


def test_figures_of_the_objective_are_in_the_journal(ring):
    coordinator, _ = ring
    finish_epoch(coordinator, 0)
    for node in range(2):
        beat(coordinator, node, snapshots=[1])
    coordinator.core.drain()
    report_evaluation(coordinator, 1, wer=None, frame_accuracy=0.625)
    (line,) = (line for line in coordinator.core.drain()[1] if line["kind"] == "valid")
    assert (line["valid_frame_accuracy"], line["valid_wer"]) == (0.625, None)
