"""A node that read its checkpoint for so long that training started without it restarted the training of all nodes.

The checkpoint may be deleted meanwhile, because newer ones are complete: the node then reported it as damaged.
"""

import pytest
from support import load_beside

from storage.objects import ObjectStore
from training.coordinator.coordinator import Coordinator
from training.coordinator.core import Core, Settings


@pytest.fixture(scope="module")
def bookkeeping():
    return load_beside(__file__, "../training/bookkeeping.py")


@pytest.fixture
def resumed(bookkeeping, tmp_path):
    """A coordinator that starts from a checkpoint, and its clock."""
    coordinator, clock = bookkeeping.ring(tmp_path, nodes=2, checkpoint_steps=1, epochs=3)
    for node in range(2):
        bookkeeping.beat(coordinator, node, reports=[bookkeeping.report(1, [node])])
    number = coordinator.rounds.current.number
    for node in range(2):
        bookkeeping.beat(coordinator, node, records=[(number, bookkeeping.record(node, 1))])
    bookkeeping.wait_until_published(coordinator, number)
    coordinator.rounds.publisher.close()
    settings: Settings = coordinator.settings
    core = Core(settings, bookkeeping.empty_ledger(6, 3), ObjectStore(settings.output_url), clock, clock)
    return Coordinator(core, fresh=True), clock


@pytest.mark.parametrize("finish", ["", "stop"])
def test_node_whose_checkpoint_is_gone_takes_a_neighbours_weights(bookkeeping, resumed, finish):
    coordinator, clock = resumed
    replies = [bookkeeping.join(coordinator, node) for node in range(2)]
    assert [reply["source"] for reply in replies] == ["checkpoint", "checkpoint"]
    bookkeeping.beat(coordinator, 0)
    for _ in range(70):  # start_patience_s is 60
        clock.now += 1.0
        bookkeeping.beat(coordinator, 0)
        bookkeeping.beat(coordinator, 1, ready=False)
    bookkeeping.beat(coordinator, 0, reports=[bookkeeping.report(1, [3])])
    if finish:
        coordinator.core.set(finish=finish)
    session, trained = coordinator.ledger.values.session, coordinator.ledger.trained
    back = bookkeeping.join(coordinator, 1, incarnation="late", previous="n1", damaged=replies[1]["resume"])
    assert back["source"] == "neighbour"
    assert (coordinator.ledger.values.session, coordinator.ledger.trained) == (session, trained)


def test_damaged_checkpoint_is_skipped_as_long_as_training_has_not_started(bookkeeping, resumed):
    coordinator, _ = resumed
    replies = [bookkeeping.join(coordinator, node) for node in range(2)]
    bookkeeping.beat(coordinator, 0)
    back = bookkeeping.join(coordinator, 1, incarnation="again", previous="n1", damaged=replies[1]["resume"])
    assert back["source"] == "initial"
    assert bookkeeping.beat(coordinator, 0)["dropped"]
