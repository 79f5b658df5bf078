"""The coordinator's decisions one by one: reports, journal lines, admission, checkpoints, leases, the end."""

import numpy as np
import pytest
from bookkeeping import PER_SHARD, ask, beat, join, make_coordinator, report, ring

from training.coordinator.leasing import ANSWER_BEATS
from training.coordinator.messages import CoordinatorError
from training.coordinator.packing import pack_rows, unpack_rows

SIZE = 6 * PER_SHARD


# --- what beats bring


def test_a_report_that_comes_again_is_counted_once(tmp_path):
    coordinator, _ = ring(tmp_path)
    reports = [report(1, [0, 1]), report(2, [2])]
    for told in (reports[:1], reports, reports[1:], [*reports, report(3, [3])]):
        beat(coordinator, 0, reports=told)
    totals = ask(coordinator, op="status")["totals"]
    assert (totals["step"], totals["utterances"], totals["audio_seconds"], totals["repeated"]) == (3, 4, 3.0, 0)
    assert coordinator.ledger.states["n0"].step == 3


def test_journal_lines_are_taken_once_and_none_is_left_out(tmp_path):
    coordinator, _ = ring(tmp_path, nodes=1)
    coordinator.core.drain()

    def portion(offset, end, *steps):
        return {"name": "a", "offset": offset, "end": end, "lines": [{"kind": "step", "step": step} for step in steps]}

    for spool in (portion(0, 20, 1, 2), portion(0, 20, 1, 2), portion(30, 40, 4), portion(20, 30, 3)):
        told = beat(coordinator, 0, spools=[spool])["spools"]
    assert told == {"a": 30}
    assert [line["step"] for line in coordinator.core.drain()[1]] == [1, 2, 3]
    bad = portion(30, 40) | {"lines": [3, {"step": 4}, {"kind": 5}, {"kind": "step", "step": 4}]}
    assert beat(coordinator, 0, spools=[bad])["spools"] == {"a": 40}
    assert [line["step"] for line in coordinator.core.drain()[1]] == [4]


def test_a_beats_answer_tells_what_the_node_does_not_know(tmp_path):
    coordinator, clock = ring(tmp_path, epochs=3)
    number = coordinator.ledger.values.view
    assert beat(coordinator, 0, view=number)["view"] is None
    assert [member["node"] for member in beat(coordinator, 0, view=number - 1)["view"]["members"]] == [0, 1]
    (lease,) = beat(coordinator, 0, want=True)["leases"]
    clock.now += 0.25  # not noted yet
    reply = beat(coordinator, 0, have=[lease["id"]])
    assert (reply["leases"], reply["pools"], reply["running"]) == ([], {"0": 1}, True)
    assert reply["progress"] == {"trained": 0, "size": SIZE, "total": 3, "closed": 0, "live": 2, "elapsed": 0.25}
    ask(coordinator, op="leave", incarnation="n1")
    assert [member["node"] for member in beat(coordinator, 0, view=number)["view"]["members"]] == [0]
    assert beat(coordinator, 1)["dropped"]


# --- who may come in


def join_again(coordinator, node, name, kept):
    return join(coordinator, node, incarnation=name, kept=kept)["source"]


def lost(coordinator, clock):
    """All nodes are silent until they are dropped."""
    for _ in range(12):
        clock.now += 1.0
        coordinator.tick()
    assert not coordinator.ledger.states


def test_the_last_node_goes_on_with_its_own_weights(tmp_path):
    coordinator, clock = ring(tmp_path, nodes=1)
    session = coordinator.ledger.values.session
    lost(coordinator, clock)
    assert join_again(coordinator, 0, "n0b", kept="n0") == "own"
    assert coordinator.ledger.values.session == session


@pytest.mark.parametrize("kept", ["", "somebody", "n1"])
def test_weights_that_were_never_the_rings_are_not_taken(tmp_path, kept):
    """Node 1 came when training was under way, and was lost before it had weights."""
    coordinator, clock = ring(tmp_path, nodes=1)
    beat(coordinator, 0, reports=[report(1, [0])])
    assert join(coordinator, 1)["source"] == "neighbour"
    session = coordinator.ledger.values.session
    lost(coordinator, clock)
    assert join_again(coordinator, 1, "n1b", kept=kept) == "initial"
    assert coordinator.ledger.values.session != session
    assert coordinator.ledger.trained == 0


def test_a_node_that_has_newer_neighbours_takes_theirs(tmp_path):
    coordinator, clock = ring(tmp_path)
    for _ in range(12):
        clock.now += 1.0
        beat(coordinator, 0)
    assert join_again(coordinator, 1, "n1b", kept="n1") == "neighbour"


def test_a_member_without_weights_that_comes_again_has_none_of_its_own(tmp_path):
    coordinator, clock = make_coordinator(tmp_path, nodes=1)
    join(coordinator, 0)
    beat(coordinator, 0)
    join(coordinator, 1)
    for _ in range(12):
        clock.now += 1.0
        beat(coordinator, 1, ready=False)
    assert [*coordinator.ledger.states] == ["n1"]
    assert join_again(coordinator, 1, "n1b", kept="n1") == "initial"


def test_a_process_that_replaces_the_only_member_is_believed_if_it_has_that_members_weights(tmp_path):
    for kept, source in (("n0", "own"), ("another", "initial"), ("", "initial")):
        coordinator, _ = ring(tmp_path / kept, nodes=1)
        assert join_again(coordinator, 0, "n0b", kept=kept) == source


def test_a_second_process_with_the_same_number_is_refused(tmp_path):
    coordinator, _ = ring(tmp_path, nodes=1)
    join(coordinator, 0, incarnation="other", previous="")  # it was restarted
    with pytest.raises(CoordinatorError, match="taken over"):
        join(coordinator, 0, incarnation="third", previous="n0")
    for number in (-1, 4096):
        with pytest.raises(CoordinatorError, match="between 0 and 4095"):
            join(coordinator, number)


# --- leases


def holder_and_asker(tmp_path, **options):
    """Node 0 has everything, node 1 nothing."""
    coordinator, clock = ring(tmp_path, **options)
    leases = []
    while new := beat(coordinator, 0, want=True, have=[lease["id"] for lease in leases])["leases"]:
        leases += new
        if coordinator.ledger.epochs[leases[-1]["epoch"]].pool() == 0:
            break
    return coordinator, clock, leases


def test_a_holder_that_can_give_nothing_is_asked_once_and_the_asker_goes_on(tmp_path):
    coordinator, clock, leases = holder_and_asker(tmp_path, epochs=3)
    have = [lease["id"] for lease in leases]
    assert {lease["epoch"] for lease in leases} == {0}
    clock.now += 1.0
    assert beat(coordinator, 1, want=True)["leases"] == []  # an answer is worth waiting for
    wish = beat(coordinator, 0, have=have)["revoke"]
    assert beat(coordinator, 1, want=True)["leases"] == []
    assert beat(coordinator, 0, have=have)["revoke"] == wish
    assert beat(coordinator, 0, have=have, answered=wish["number"] + 1)["revoke"] == wish  # of another wish
    assert beat(coordinator, 0, have=have, answered=wish["number"])["revoke"] is None
    (lease,) = beat(coordinator, 1, want=True)["leases"]
    assert lease["epoch"] == 1
    assert beat(coordinator, 0, have=have)["revoke"] is None
    # what it holds has changed: it may have something to give
    beat(coordinator, 0, have=have, reports=[report(1, unpack_rows(leases[0]["rows"]).tolist())])
    beat(coordinator, 1, want=True, have=[lease["id"]])
    assert beat(coordinator, 0, have=have)["revoke"]["number"] > wish["number"]


def test_a_holder_that_does_not_answer_is_asked_again_after_some_beats(tmp_path):
    coordinator, clock, leases = holder_and_asker(tmp_path)
    have = [lease["id"] for lease in leases]
    beat(coordinator, 1, want=True)
    first = beat(coordinator, 0, have=have)["revoke"]
    clock.now += ANSWER_BEATS * 0.5 - 0.1
    beat(coordinator, 1, want=True)
    assert beat(coordinator, 0, have=have)["revoke"] == first
    clock.now += 0.2
    beat(coordinator, 1, want=True)
    assert beat(coordinator, 0, have=have)["revoke"]["number"] == first["number"] + 1


def test_work_of_the_next_epoch_is_given_and_of_none_after_it(tmp_path):
    coordinator, _, leases = holder_and_asker(tmp_path, epochs=4)
    begun = [{"epoch": 0, "own": False, "rows": lease["rows"]} for lease in leases]
    beat(coordinator, 0, started=begun)  # nothing can be taken back
    have, epochs = [], []
    for _ in range(20):
        for lease in beat(coordinator, 1, want=True, have=have)["leases"]:
            have.append(lease["id"])
            epochs.append(lease["epoch"])
            rows = unpack_rows(lease["rows"]).tolist()
            beat(coordinator, 1, have=have, reports=[report(len(have), rows, lease["epoch"])])
    assert set(epochs) == {1}
    assert coordinator.ledger.epochs[1].count == SIZE


def test_what_an_idle_node_has_not_reported_goes_back(tmp_path):
    coordinator, _ = ring(tmp_path)
    (lease,) = beat(coordinator, 0, want=True)["leases"]
    before = coordinator.ledger.epochs[0].pool()
    beat(coordinator, 0, empty=True)  # it does not know of the lease yet
    assert coordinator.ledger.epochs[0].pool() == before
    beat(coordinator, 0, empty=True, have=[lease["id"]])
    assert coordinator.ledger.epochs[0].pool() == before + 1
    assert not coordinator.ledger.epochs[0].leases


def test_nobody_gets_work_before_training_runs_or_without_weights(tmp_path):
    coordinator, _ = make_coordinator(tmp_path)
    join(coordinator, 0)
    assert beat(coordinator, 0, want=True)["leases"] == []
    join(coordinator, 1)
    beat(coordinator, 1)
    join(coordinator, 2)
    assert beat(coordinator, 2, want=True, ready=False)["leases"] == []
    assert beat(coordinator, 0, want=True)["leases"]


def test_rows_that_a_holder_gives_back_are_those_of_its_lease(tmp_path):
    coordinator, _ = ring(tmp_path)
    (mine,) = beat(coordinator, 0, want=True)["leases"]
    (other,) = beat(coordinator, 1, want=True)["leases"]
    mine_rows, other_rows = unpack_rows(mine["rows"]), unpack_rows(other["rows"])
    beat(coordinator, 0, reports=[report(1, mine_rows[:2].tolist())])
    epoch = coordinator.ledger.epochs[0]
    rows = pack_rows(np.concatenate([mine_rows, other_rows]))
    beat(coordinator, 0, returned=[{"epoch": 0, "lease": mine["id"], "rows": rows}])
    assert [part.tolist() for part in epoch.returned] == [mine_rows[2:].tolist()]
    assert (epoch.owner[other_rows] == int(other["id"])).all()
    assert [*epoch.leases] == [int(other["id"])]
