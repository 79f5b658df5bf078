"""A learner of a ring that was suspended could not come back once a newcomer had joined: it had got the same number.

It ended with `node 0 was taken over by another process: give every node its own number`, though nobody chooses numbers.
"""

import pytest
from support import load_beside

from training.coordinator.admission import MAX_NODES, NodeNumbers
from training.coordinator.messages import NumberRequest


@pytest.fixture(scope="module")
def bookkeeping():
    return load_beside(__file__, "../training/bookkeeping.py")


def number(numbers, token):
    return numbers.answer(NumberRequest(token=token)).node


@pytest.mark.parametrize("trains", [True, False], ids=["with-steps", "before-its-first-step"])
def test_dropped_learner_comes_back_though_another_has_joined(bookkeeping, tmp_path, trains):
    coordinator, clock = bookkeeping.ring(tmp_path, nodes=2)
    if trains:
        bookkeeping.beat(coordinator, 0, reports=[bookkeeping.report(1, [0, 1])])
    for _ in range(12):
        clock.now += 1.0
        bookkeeping.beat(coordinator, 1)
    assert [*coordinator.ledger.states] == ["n1"]
    newcomer = number(NodeNumbers(coordinator.ledger, clock), "newcomer")
    bookkeeping.join(coordinator, newcomer, incarnation="newcomer")
    back = bookkeeping.join(coordinator, 0, incarnation="back", previous="n0", kept="n0")
    assert back["source"] == "neighbour"
    assert coordinator.ledger.view().nodes == (0, 1, newcomer)


def test_numbers_of_former_members_are_given_again_when_there_are_no_others(bookkeeping, tmp_path):
    coordinator, clock = bookkeeping.ring(tmp_path, nodes=2)
    coordinator.ledger.books.steps |= {str(node): 1 for node in range(MAX_NODES)}
    numbers = NodeNumbers(coordinator.ledger, clock)
    assert [number(numbers, token) for token in ("a", "b")] == [2, 3]
