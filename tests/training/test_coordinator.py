"""The coordinator's decisions one by one: reports, journal lines, admission, checkpoints, leases, the end."""

import numpy as np
import pytest
from bookkeeping import PER_SHARD, ask, beat, join, make_coordinator, report, ring

from training.coordinator.leasing import ANSWER_BEATS
from training.coordinator.messages import CoordinatorError
from training.coordinator.packing import pack_rows, unpack_rows

SIZE = 6 * PER_SHARD


# --- heartbeats


def test_repeated_report_is_counted_once(tmp_path):
    coordinator, _ = ring(tmp_path)
    reports = [report(1, [0, 1]), report(2, [2])]
    for told in (reports[:1], reports, reports[1:], [*reports, report(3, [3])]):
        beat(coordinator, 0, reports=told)
    totals = ask(coordinator, op="status")["totals"]
    assert (totals["step"], totals["utterances"], totals["audio_seconds"], totals["repeated"]) == (3, 4, 3.0, 0)
    assert coordinator.ledger.states["n0"].step == 3


def test_journal_lines_are_accepted_once_and_without_gaps(tmp_path):
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


def test_heartbeat_reply_has_only_what_the_node_lacks(tmp_path):
    coordinator, clock = ring(tmp_path, epochs=3)
    number = coordinator.ledger.values.view
    assert beat(coordinator, 0, view=number)["view"] is None
    assert [member["node"] for member in beat(coordinator, 0, view=number - 1)["view"]["members"]] == [0, 1]
    (lease,) = beat(coordinator, 0, want=True)["leases"]
    clock.now += 0.25  # not noted yet
    reply = beat(coordinator, 0, have=[lease["id"]])
    assert (reply["leases"], reply["pools"], reply["running"]) == ([], {"0": 1}, True)
    progress = {"trained": 0, "size": SIZE, "total": 3, "closed": 0, "live": 2, "elapsed": 0.25, "newcomers": 0}
    assert reply["progress"] == progress
    ask(coordinator, op="leave", incarnation="n1")
    assert [member["node"] for member in beat(coordinator, 0, view=number)["view"]["members"]] == [0]
    assert beat(coordinator, 1)["dropped"]


# --- admission


def rejoin(coordinator, node, name, kept):
    return join(coordinator, node, incarnation=name, previous=f"n{node}", kept=kept)["source"]


def drop_all_nodes(coordinator, clock):
    """All nodes are silent until they are dropped."""
    for _ in range(12):
        clock.now += 1.0
        coordinator.tick()
    assert not coordinator.ledger.states


def test_last_node_rejoins_with_its_own_weights(tmp_path):
    coordinator, clock = ring(tmp_path, nodes=1)
    session = coordinator.ledger.values.session
    drop_all_nodes(coordinator, clock)
    assert rejoin(coordinator, 0, "n0b", kept="n0") == "own"
    assert coordinator.ledger.values.session == session


@pytest.mark.parametrize("kept", ["", "somebody", "n1"])
def test_weights_that_the_ring_never_had_are_refused(tmp_path, kept):
    """Node 1 joined during training, and was lost before it had weights."""
    coordinator, clock = ring(tmp_path, nodes=1)
    beat(coordinator, 0, reports=[report(1, [0])])
    assert join(coordinator, 1)["source"] == "neighbour"
    session = coordinator.ledger.values.session
    drop_all_nodes(coordinator, clock)
    assert rejoin(coordinator, 1, "n1b", kept=kept) == "initial"
    assert coordinator.ledger.values.session != session
    assert coordinator.ledger.trained == 0


def test_rejoining_node_takes_weights_of_its_neighbours(tmp_path):
    coordinator, clock = ring(tmp_path)
    for _ in range(12):
        clock.now += 1.0
        beat(coordinator, 0)
    assert rejoin(coordinator, 1, "n1b", kept="n1") == "neighbour"


def test_rejoining_member_that_never_had_weights_starts_initially(tmp_path):
    coordinator, clock = make_coordinator(tmp_path, nodes=1)
    join(coordinator, 0)
    beat(coordinator, 0)
    join(coordinator, 1)
    for _ in range(12):
        clock.now += 1.0
        beat(coordinator, 1, ready=False)
    assert [*coordinator.ledger.states] == ["n1"]
    assert rejoin(coordinator, 1, "n1b", kept="n1") == "initial"


def test_replacement_of_the_only_member_needs_its_weights(tmp_path):
    for kept, source in (("n0", "own"), ("another", "initial"), ("", "initial")):
        coordinator, _ = ring(tmp_path / kept, nodes=1)
        assert rejoin(coordinator, 0, "n0b", kept=kept) == source


def test_a_second_process_with_the_same_number_is_refused(tmp_path):
    coordinator, _ = ring(tmp_path, nodes=1)
    join(coordinator, 0, incarnation="other", previous="")  # it was restarted
    with pytest.raises(CoordinatorError, match="taken over"):
        join(coordinator, 0, incarnation="third", previous="n0")
    for number in (-1, 4096):
        with pytest.raises(CoordinatorError, match="between 0 and 4095"):
            join(coordinator, number)


# --- leases


def node_with_all_leases_and_idle_node(tmp_path, **options):
    """Node 0 has all leases, node 1 none."""
    coordinator, clock = ring(tmp_path, **options)
    leases = []
    while new := beat(coordinator, 0, want=True, have=[lease["id"] for lease in leases])["leases"]:
        leases += new
        if coordinator.ledger.epochs[leases[-1]["epoch"]].pool() == 0:
            break
    return coordinator, clock, leases


def test_node_without_rows_to_return_is_asked_once(tmp_path):
    coordinator, clock, leases = node_with_all_leases_and_idle_node(tmp_path, epochs=3)
    have = [lease["id"] for lease in leases]
    assert {lease["epoch"] for lease in leases} == {0}
    clock.now += 1.0
    assert beat(coordinator, 1, want=True)["leases"] == []  # it waits for an answer
    wish = beat(coordinator, 0, have=have)["revoke"]
    assert beat(coordinator, 1, want=True)["leases"] == []
    assert beat(coordinator, 0, have=have)["revoke"] == wish
    assert beat(coordinator, 0, have=have, answered=wish["number"] + 1)["revoke"] == wish  # answers another request
    assert beat(coordinator, 0, have=have, answered=wish["number"])["revoke"] is None
    (lease,) = beat(coordinator, 1, want=True)["leases"]
    assert lease["epoch"] == 1
    assert beat(coordinator, 0, have=have)["revoke"] is None
    # its leases have changed: it may have rows to return
    beat(coordinator, 0, have=have, reports=[report(1, unpack_rows(leases[0]["rows"]).tolist())])
    beat(coordinator, 1, want=True, have=[lease["id"]])
    assert beat(coordinator, 0, have=have)["revoke"]["number"] > wish["number"]


def test_node_that_ignores_a_request_to_return_rows_is_asked_again(tmp_path):
    coordinator, clock, leases = node_with_all_leases_and_idle_node(tmp_path)
    have = [lease["id"] for lease in leases]
    beat(coordinator, 1, want=True)
    first = beat(coordinator, 0, have=have)["revoke"]
    clock.now += ANSWER_BEATS * 0.5 - 0.1
    beat(coordinator, 1, want=True)
    assert beat(coordinator, 0, have=have)["revoke"] == first
    clock.now += 0.2
    beat(coordinator, 1, want=True)
    assert beat(coordinator, 0, have=have)["revoke"]["number"] == first["number"] + 1


def test_leases_are_given_at_most_one_epoch_ahead(tmp_path):
    coordinator, _, leases = node_with_all_leases_and_idle_node(tmp_path, epochs=4)
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


def test_unreported_lease_of_an_idle_node_returns_to_the_pool(tmp_path):
    coordinator, _ = ring(tmp_path)
    (lease,) = beat(coordinator, 0, want=True)["leases"]
    before = coordinator.ledger.epochs[0].pool()
    beat(coordinator, 0, empty=True)  # it does not know of the lease yet
    assert coordinator.ledger.epochs[0].pool() == before
    beat(coordinator, 0, empty=True, have=[lease["id"]])
    assert coordinator.ledger.epochs[0].pool() == before + 1
    assert not coordinator.ledger.epochs[0].leases


def test_no_leases_before_training_starts_or_without_weights(tmp_path):
    coordinator, _ = make_coordinator(tmp_path)
    join(coordinator, 0)
    assert beat(coordinator, 0, want=True)["leases"] == []
    join(coordinator, 1)
    beat(coordinator, 1)
    join(coordinator, 2)
    assert beat(coordinator, 2, want=True, ready=False)["leases"] == []
    assert beat(coordinator, 0, want=True)["leases"]


def test_node_can_return_only_rows_of_its_own_lease(tmp_path):
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
