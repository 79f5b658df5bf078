"""A training whose time ran out hung if steps that arrived afterwards closed an epoch and began another.

The evaluator waited for replicas of the other epoch, which no node was asked for any more. It also hung when the
nodes had left before they wrote the requested replicas.

If the new epoch had a lease but no step yet, the result named that epoch, which was never evaluated.
"""

import pytest
from support import load_beside

books = load_beside(__file__, "../training/bookkeeping.py")
ask, beat, report = books.ask, books.beat, books.report
SIZE = 30


@pytest.fixture
def coordinator(tmp_path):
    made, clock = books.make_coordinator(tmp_path, nodes=1, epochs=5, max_minutes=0.1)
    books.join(made, 0)
    beat(made, 0)
    beat(made, 0, reports=[report(1, [0, 1], 0)])
    clock.now += 10.0
    while not made.ledger.values.finish:
        made.tick()
        clock.now += 10.0
        for number in [] if made.rounds.current is None else [made.rounds.current.number]:
            made.rounds.answer("n0", number, {"node": 0, "step": 1, "seq": 1})
        beat(made, 0)
    assert made.ledger.values.finish == "limit"
    return made


def epoch(coordinator):
    return ask(coordinator, op="status")["totals"]["epoch"]


def leave(coordinator):
    ask(coordinator, op="leave", incarnation="n0")


def ready(coordinator):
    return [(item["epoch"], item["nodes"]) for item in ask(coordinator, op="evaluations")["ready"]]


def status(coordinator):
    return ask(coordinator, op="status")["to_evaluate"]


def test_late_steps_do_not_start_another_epoch(coordinator):
    assert beat(coordinator, 0)["snapshot"] == 1
    beat(coordinator, 0, reports=[report(2, list(range(2, SIZE)), 0), report(3, [0], 1)])
    assert coordinator.ledger.values.closed == 1
    beat(coordinator, 0, snapshots=[1])
    leave(coordinator)
    assert ready(coordinator) == [(1, [0])]
    ask(coordinator, op="evaluated", epoch=1, result={"loss": 2.0})
    assert status(coordinator) == 0


def test_replica_is_requested_after_late_steps_close_two_epochs(coordinator):
    beat(coordinator, 0, reports=[report(2, list(range(2, SIZE)), 0), report(3, list(range(SIZE)), 1)])
    assert coordinator.ledger.values.closed == 2
    assert beat(coordinator, 0)["snapshot"] == 1
    assert status(coordinator) == 1


def test_evaluator_does_not_wait_for_nodes_that_have_left(coordinator):
    assert status(coordinator) == 1
    leave(coordinator)
    assert ready(coordinator) == []
    assert status(coordinator) == 0


def test_epoch_without_steps_is_not_the_last_epoch(tmp_path):
    made, clock = books.make_coordinator(tmp_path, nodes=1, epochs=5, max_minutes=0.1)
    books.join(made, 0)
    beat(made, 0)
    beat(made, 0, reports=[report(1, list(range(SIZE)), 0)])
    made.core.do("lease", epoch=1, incarnation="n0", live=1)
    assert epoch(made) == 2
    while not made.ledger.values.finish:
        clock.now += 10.0
        beat(made, 0)
        made.tick()
    assert made.ledger.values.finish == "limit"
    assert epoch(made) == made.ledger.values.last == 1


def test_late_steps_do_not_change_the_epoch_of_the_result(coordinator):
    beat(coordinator, 0, reports=[report(2, list(range(2, SIZE)), 0), report(3, list(range(SIZE)), 1)])
    assert epoch(coordinator) == 1
