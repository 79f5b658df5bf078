"""Checkpoints by the coordinator: when one is made, which nodes it waits for, and which ones are kept."""

import pytest
from bookkeeping import PER_SHARD, ask, beat, join, make_coordinator, record, report, ring, wait_until_published

from storage.objects import ObjectStore
from training.coordinator.checkpoints import PATIENCE_S, Publisher, find_checkpoint, last_number
from training.coordinator.coordinator import FINAL_S
from training.coordinator.messages import CoordinatorError

SIZE = 6 * PER_SHARD


def checkpoint_answered_by_node_0(tmp_path, **options):
    """A checkpoint for which node 0 has answered, and node 1 has not."""
    coordinator, clock = ring(tmp_path, checkpoint_steps=1, **options)
    beat(coordinator, 0, reports=[report(1, [0])])
    beat(coordinator, 1, reports=[report(1, [1])])
    assert beat(coordinator, 0, records=[[1, record(0, 1)]])["checkpoint"] is None
    assert beat(coordinator, 1)["checkpoint"] == 1
    return coordinator, clock


def test_a_checkpoint_waits_for_all_members(tmp_path):
    coordinator, clock = checkpoint_answered_by_node_0(tmp_path)
    while clock.now < 100.0 + PATIENCE_S - 5:
        clock.now += 4.0
        for node in range(2):
            beat(coordinator, node)
    assert last_number(coordinator.core.output) == 0
    beat(coordinator, 1, records=[[1, record(1, 1)]])
    wait_until_published(coordinator, 1)
    _, document = find_checkpoint(coordinator.core.output, "r")
    assert [entry["node"] for entry in document["records"]] == [0, 1]


def test_silent_member_is_left_out_of_the_checkpoint_after_a_while(tmp_path):
    coordinator, clock = checkpoint_answered_by_node_0(tmp_path)
    while clock.now <= 100.0 + PATIENCE_S:
        clock.now += 4.0
        for node in range(2):
            beat(coordinator, node)
    wait_until_published(coordinator, 1)
    _, document = find_checkpoint(coordinator.core.output, "r")
    assert [entry["node"] for entry in document["records"]] == [0]


def test_checkpoint_does_not_wait_for_a_lost_member(tmp_path):
    coordinator, _ = checkpoint_answered_by_node_0(tmp_path)
    ask(coordinator, op="leave", incarnation="n1")
    coordinator.tick()
    wait_until_published(coordinator, 1)


def test_checkpoint_without_answers_is_abandoned_and_the_next_succeeds(tmp_path):
    coordinator, clock = ring(tmp_path, nodes=1, checkpoint_steps=1)
    assert beat(coordinator, 0, reports=[report(1, [0])])["checkpoint"] == 1
    while clock.now <= 100.0 + PATIENCE_S:
        clock.now += 4.0
        beat(coordinator, 0)
    assert coordinator.rounds.current is None
    assert beat(coordinator, 0, records=[[1, record(0, 1)]])["checkpoint"] is None  # too late
    assert beat(coordinator, 0, reports=[report(2, [1])])["checkpoint"] == 2
    beat(coordinator, 0, records=[[1, record(0, 1)]])  # for checkpoint 1
    assert beat(coordinator, 0)["checkpoint"] == 2
    beat(coordinator, 0, records=[[2, record(0, 2)]])
    wait_until_published(coordinator, 2)


class InterruptedStore(ObjectStore):
    """An object store whose process is killed while it deletes a folder."""

    def delete_tree(self, *_, **__):
        raise KeyboardInterrupt


def test_partly_deleted_checkpoint_is_not_complete(tmp_path):
    store = InterruptedStore(str(tmp_path))
    publisher = Publisher(store, keep=1)
    try:
        for number in (1, 2):
            store.write_json(f"checkpoints/{number:06d}/node-000/state.json", {})
            store.write_json(f"checkpoints/{number:06d}/complete.json", {"format": 1, "run": "r", "number": number})
        with pytest.raises(KeyboardInterrupt):
            publisher._prune(2)
        assert store.exists("checkpoints/000001/node-000/state.json")
        assert not store.exists("checkpoints/000001/complete.json")
        assert find_checkpoint(store, "r")[0] == 2
        assert last_number(store) == 2
    finally:
        publisher.close()


def test_old_and_unfinished_checkpoints_are_deleted_newer_ones_kept(tmp_path):
    store = ObjectStore(str(tmp_path))
    for number in (1, 2, 3, 4, 6):
        store.write_json(f"checkpoints/{number:06d}/node-000/state.json", {})
        if number in (1, 3):
            store.write_json(f"checkpoints/{number:06d}/complete.json", {"format": 1, "run": "r"})
    publisher = Publisher(store, keep=2)
    publisher.publish(4, {"format": 1, "run": "r"})
    publisher.close()
    assert publisher.finished() == [(4, True)]
    assert sorted({name.split("/")[1] for name in store.list("checkpoints")}) == ["000003", "000004", "000006"]
    with pytest.raises(CoordinatorError, match="another configuration"):
        find_checkpoint(store, "other")


# --- the end


@pytest.mark.parametrize("why", ["stop", "limit"])
def test_early_end_makes_a_last_checkpoint_even_after_a_recent_one(tmp_path, why):
    coordinator, clock = ring(tmp_path, nodes=1, checkpoint_steps=1, max_minutes=2.0)
    beat(coordinator, 0, reports=[report(1, [0])])
    beat(coordinator, 0, records=[[1, record(0, 1)]])
    wait_until_published(coordinator, 1)
    if why == "stop":
        ask(coordinator, op="stop")
    while clock.now < 100.0 + 125.0 * (why == "limit"):
        clock.now += 4.0
        beat(coordinator, 0)
    reply = beat(coordinator, 0)
    assert (reply["finish"], reply["checkpoint"]) == ("", 2)
    assert beat(coordinator, 0, want=True)["leases"] == []  # no new work
    beat(coordinator, 0, records=[[2, record(0, 2)]], reports=[report(2, [1])])
    wait_until_published(coordinator, 2)
    assert beat(coordinator, 0)["finish"] == why
    assert beat(coordinator, 0)["checkpoint"] is None


def test_finished_training_makes_exactly_one_last_checkpoint(tmp_path):
    coordinator, _ = ring(tmp_path, nodes=1)
    reply = beat(coordinator, 0, reports=[report(1, list(range(SIZE)))])
    assert (reply["finish"], reply["checkpoint"]) == ("", 1)
    beat(coordinator, 0, records=[[1, record(0, 1)]])
    wait_until_published(coordinator, 1)
    assert beat(coordinator, 0)["finish"] == "done"
    assert coordinator.ledger.values.checkpoint == 1


def test_training_that_ends_during_a_checkpoint_makes_another_one(tmp_path):
    coordinator, _ = ring(tmp_path, nodes=1, checkpoint_steps=1)
    assert beat(coordinator, 0, reports=[report(1, [0])])["checkpoint"] == 1
    beat(coordinator, 0, reports=[report(2, list(range(SIZE)))])
    beat(coordinator, 0, records=[[1, record(0, 1)]])
    wait_until_published(coordinator, 1)
    assert beat(coordinator, 0)["checkpoint"] == 2
    beat(coordinator, 0, records=[[2, record(0, 2)]])
    wait_until_published(coordinator, 2)
    assert beat(coordinator, 0)["finish"] == "done"
    assert find_checkpoint(coordinator.core.output, "r")[1]["count"] == 1


def test_wait_for_the_last_checkpoint_is_bounded(tmp_path):
    coordinator, clock = ring(tmp_path, nodes=1)
    ask(coordinator, op="stop")
    assert beat(coordinator, 0)["checkpoint"] == 1
    while clock.now < 100.0 + FINAL_S - 5:
        clock.now += 4.0
        assert beat(coordinator, 0)["finish"] == ""
    for _ in range(3):
        clock.now += 4.0
        reply = beat(coordinator, 0)
    assert reply["finish"] == "stop"


def test_stop_before_any_node_has_weights_ends_at_once(tmp_path):
    coordinator, _ = make_coordinator(tmp_path, nodes=1)
    join(coordinator, 0)
    ask(coordinator, op="stop")
    assert beat(coordinator, 0, ready=False)["finish"] == "stop"
