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


def close(coordinator, epoch):
    """Both nodes train an epoch to its end."""
    for node in range(2):
        seq = coordinator.ledger.states[f"n{node}"].seq + 1
        beat(coordinator, node, reports=[report(seq, list(range(node, SIZE, 2)), epoch)])


def ready(coordinator):
    return [(item["epoch"], item["nodes"]) for item in ask(coordinator, op="evaluations")["ready"]]


def evaluated(coordinator, epoch, **result):
    return ask(coordinator, op="evaluated", epoch=epoch, result={"loss": 2.0, **result})["history"]


def test_an_epoch_is_evaluated_when_all_have_left_their_replica(ring):
    coordinator, _ = ring
    assert beat(coordinator, 0)["snapshot"] is None
    close(coordinator, 0)
    assert [beat(coordinator, node)["snapshot"] for node in range(2)] == [1, 1]
    assert ready(coordinator) == []
    assert beat(coordinator, 0, snapshots=[1])["snapshot"] is None
    assert beat(coordinator, 1)["snapshot"] == 1
    assert ready(coordinator) == []
    beat(coordinator, 1, snapshots=[1, 1])
    assert ready(coordinator) == [(1, [0, 1])]
    assert len(evaluated(coordinator, 1)) == 1
    assert len(evaluated(coordinator, 1, loss=9.0)) == 1
    assert coordinator.ledger.books.history[0]["loss"] == 2.0
    assert ready(coordinator) == []
    assert coordinator.evaluations.pending() == []


def test_late_replicas_are_waited_for_and_then_left_out(ring):
    coordinator, clock = ring
    close(coordinator, 0)
    beat(coordinator, 1, snapshots=[1])
    for waited in (0.0, LATE_S - 1.0):
        assert ready(coordinator) == [], waited
        clock.now += LATE_S - 1.0
    assert ready(coordinator) == [(1, [1])]


def test_a_node_that_is_lost_is_not_waited_for(ring):
    coordinator, _ = ring
    close(coordinator, 0)
    beat(coordinator, 1, snapshots=[1])
    ask(coordinator, op="leave", incarnation="n0")
    assert ready(coordinator) == [(1, [1])]


def test_a_node_that_came_later_is_not_asked_for_an_older_epoch(ring):
    coordinator, _ = ring
    close(coordinator, 0)
    join(coordinator, 2)
    assert beat(coordinator, 2)["snapshot"] is None
    beat(coordinator, 0, snapshots=[1])
    close(coordinator, 1)
    assert beat(coordinator, 1)["snapshot"] == 2  # of the first one its replica is gone
    assert beat(coordinator, 2)["snapshot"] == 2


def time_is_up(coordinator):
    coordinator.core.set(finish="time", last=coordinator.evaluations.last())


def test_the_open_epoch_is_evaluated_when_the_time_is_up(ring):
    coordinator, _ = ring
    close(coordinator, 0)
    for node in range(2):
        beat(coordinator, node, snapshots=[1])
    evaluated(coordinator, 1)
    beat(coordinator, 0, reports=[report(2, [0], 1)])
    assert beat(coordinator, 0)["snapshot"] is None
    time_is_up(coordinator)
    assert coordinator.evaluations.pending() == [2]
    assert beat(coordinator, 0)["snapshot"] == 2
    coordinator.core.set(finish="stop")
    assert beat(coordinator, 0)["snapshot"] is None


def test_a_finished_training_of_which_no_replica_is_left_goes_back_to_its_checkpoint(ring):
    coordinator, _ = ring
    for epoch in range(3):
        close(coordinator, epoch)
    assert coordinator.evaluations.lost()
    beat(coordinator, 0, snapshots=[3])
    assert not coordinator.evaluations.lost()


def test_the_journals_line_sums_up_to_the_epoch(ring):
    coordinator, clock = ring
    for epoch in range(2):
        clock.now += 1.5
        close(coordinator, epoch)
        for node in range(2):
            beat(coordinator, node, snapshots=[epoch + 1])
    coordinator.core.drain()
    evaluated(coordinator, 1, wer=0.5, unreadable=2, replicas={"0": 1.0})
    evaluated(coordinator, 2)
    first, second = (line for line in coordinator.core.drain()[1] if line["kind"] == "valid")
    assert (first["epoch"], first["epochs"], first["step"], first["train_loss"]) == (1, 3, 2, 1.0)
    assert (first["valid_loss"], first["valid_wer"], first["valid_unreadable"]) == (2.0, 0.5, 2)
    assert (first["audio_seconds"], second["audio_seconds"], second["step"]) == (2.0, 4.0, 4)
    assert (first["elapsed"], second["elapsed"]) == (1.5, 3.0)
    assert "valid_unreadable" not in second
    assert "valid_frame_accuracy" not in second


def test_figures_of_the_objective_are_in_the_journal(ring):
    coordinator, _ = ring
    close(coordinator, 0)
    for node in range(2):
        beat(coordinator, node, snapshots=[1])
    coordinator.core.drain()
    evaluated(coordinator, 1, wer=None, frame_accuracy=0.625)
    (line,) = (line for line in coordinator.core.drain()[1] if line["kind"] == "valid")
    assert (line["valid_frame_accuracy"], line["valid_wer"]) == (0.625, None)
