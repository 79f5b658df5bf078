"""The coordinator's ledger without processes: leases, accounts, replay, checkpoints, and decisions by a test clock."""

import json
import time

import numpy as np
import pytest
from bookkeeping import PER_SHARD, Player, ask, beat, empty_ledger, join, make_coordinator, report
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.objects import ObjectStore
from training.coordinator.checkpoints import make_document, restored_state
from training.coordinator.epochs import MAX_NAMED, Epoch, Repeats, ShardMap
from training.coordinator.event_log import EventLog
from training.coordinator.journal import read_journal
from training.coordinator.leasing import Throughput, fair_transfer
from training.coordinator.messages import CoordinatorError, Lease
from training.coordinator.node_client import JournalSpool
from training.coordinator.packing import PackingError, pack_bits, pack_rows, unpack_bits, unpack_rows
from training.coordinator.worklist import Worklist, plan_lease


def test_rows_and_masks_survive_packing():
    for rows in ([], [3], [0, 1, 2], [9, 2, 5], [0, 2**31 - 1]):
        assert unpack_rows(pack_rows(np.array(rows, dtype=np.int64))).tolist() == rows
    mask = np.random.default_rng(1).random(77) < 0.5
    assert (unpack_bits(pack_bits(mask), 77) == mask).all()
    assert len(pack_rows(np.arange(1_000_000))) < 50_000


@pytest.mark.parametrize("text", ["", "?", "AAAA", pack_bits(np.ones(8, dtype=bool))])
def test_damaged_rows_are_refused(text):
    with pytest.raises(PackingError):
        unpack_rows(text)


def test_checkpoint_has_the_rows_in_its_weights_after_epoch_end():
    player = Player()
    first, second = player.join(0), player.join(1)
    size = player.ledger.size
    player.report(first, 0, list(range(10)))
    player.ledger.accepted = []
    player.report(second, 0, list(range(10, 20)))
    player.report(first, 0, list(range(20, size)))
    player.report(second, 1, [0, 1])
    assert player.ledger.values.closed == 1
    records = {first: {"node": 0, "step": 1, "seq": 1}, second: {"node": 1, "step": 1, "seq": 1}}
    document = make_document(player.ledger, "run", 2, records)
    again = empty_ledger()
    again.load(json.loads(json.dumps(restored_state(again, "run", "s", 4, document))))
    assert again.values.closed == 0
    assert np.flatnonzero(~again.epochs[0].trained).tolist() == list(range(20, size))
    assert 1 not in again.epochs or not again.epochs[1].count
    assert again.totals.utterances == 20
    assert again.books.steps == {"0": 1, "1": 1}
    with pytest.raises(CoordinatorError, match="index"):
        restored_state(empty_ledger(shards=7), "run", "s", 4, document)


def test_limited_number_of_repeated_rows_is_named_but_all_are_counted():
    repeats = Repeats()
    for start in range(0, MAX_NAMED + 40, 20):
        repeats.add(np.arange(start, start + 20))
    assert repeats.count == MAX_NAMED + 40
    assert repeats.rows == list(range(MAX_NAMED))


def test_journal_lines_of_a_killed_coordinator_are_written_once(tmp_path):
    journal = tmp_path / "journal"
    log = EventLog(tmp_path / "db", journal)
    log.commit([{"event": "a"}], [{"kind": "step", "step": 1}])
    log.journal.append = lambda lines: None  # killed after the commit, before the journal
    log.commit([{"event": "b"}], [{"kind": "step", "step": 2}, {"kind": "step", "step": 3}])
    with journal.open("a") as file:
        file.write('{"kind": "step", "step": 2}\n{"kind": "st')  # or in the middle of it
    for _ in range(2):
        log = EventLog(tmp_path / "db", journal)
        assert [entry["step"] for entry in read_journal(journal)] == [1, 2, 3]
        assert log.load() == (None, [{"event": "a"}, {"event": "b"}])
        log.close()


def test_log_is_truncated_when_a_state_is_saved(tmp_path):
    log = EventLog(tmp_path / "db", tmp_path / "journal")
    log.commit([{"event": "a"}], [], {"x": 1})
    log.commit([{"event": "b"}], [])
    assert log.load() == ({"x": 1}, [{"event": "b"}])
    log.commit([{"event": "c"}], [], {"x": 2})
    assert log.load() == ({"x": 2}, [])
    log.commit([{"event": "d"}], [])
    assert log.load() == ({"x": 2}, [{"event": "d"}])


def test_spool_sends_each_line_once_including_those_of_its_predecessor(tmp_path):
    old = JournalSpool(tmp_path, "s1", "a")
    old.write({"kind": "step", "step": 1})
    old.close()
    JournalSpool(tmp_path, "s0", "z").close()
    assert not list(tmp_path.glob("lines-s1-*"))  # another session's are void
    old = JournalSpool(tmp_path, "s2", "a")
    old.write({"kind": "step", "step": 1})
    new = JournalSpool(tmp_path, "s2", "b")
    new.write({"kind": "step", "step": 2})
    steps = []
    while portions := new.portions():
        steps += [line["step"] for line in portions[0].lines]
        new.arrived({portions[0].name: portions[0].end})
    assert sorted(steps) == [1, 2]


def test_transferred_rows_let_both_nodes_finish_together():
    assert fair_transfer(100, 1.0, 1.0) == 50
    assert fair_transfer(110, 1.0, 10.0) == 100
    assert fair_transfer(0, 1.0, 1.0) == 0
    pace = Throughput(0.0)
    pace.report(1.0, 10)
    assert pace.rate(1.0, 0.0, 0.0001) == pytest.approx(10, rel=0.01)
    assert pace.rate(10.0, 0.0, 0.0001) == pytest.approx(1, rel=0.01)


def batches_of_four(epoch, rows, plan):
    return [rows[start : start + 4] for start in range(0, len(rows), 4)]


def test_resumed_epoch_keeps_its_plan_unless_batches_were_cut():
    lease = Lease(id="1", epoch=0, whole=True, rows=pack_rows(np.arange(8, 30)))
    assert [a.rows[0] for a in plan_lease(batches_of_four, lease, 30)] == [8, 12, 16, 20, 24, 28]
    cut = lease.model_copy(update={"rows": pack_rows(np.arange(9, 30))})
    assert [a.rows[0] for a in plan_lease(batches_of_four, cut, 30)] == [9, 13, 17, 21, 25, 29]
    with pytest.raises(CoordinatorError, match="rows"):
        plan_lease(lambda *_: [np.arange(3)], lease, 30)


def test_worklist_trains_older_epochs_first_and_returns_rows_from_the_end():
    work = Worklist(ShardMap(np.repeat(np.arange(6), PER_SHARD)), 7, 2, {})
    for number, (epoch, start) in enumerate([(1, 0), (0, 0), (0, 8)]):
        rows = pack_rows(np.arange(start, start + 8))
        work.add(plan_lease(batches_of_four, Lease(id=str(number), epoch=epoch, rows=rows), 30))
    assert [(a.epoch, int(a.rows[0])) for a in work.peek(9)] == [(0, 0), (0, 4), (0, 8), (0, 12), (1, 0), (1, 4)]
    assert [int(a.rows[0]) for a in work.give_back(0, 7)] == [12, 8]
    assert work.give_back(0, 1) == []
    assert [(a.epoch, int(a.rows[0])) for a in work.peek(9)] == [(0, 0), (0, 4), (1, 0), (1, 4)]


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_own_shares_without_a_coordinator_are_disjoint_and_cover_open_rows(nodes):
    shards = ShardMap(np.repeat(np.arange(6), PER_SHARD))
    shares = [Worklist(shards, 7, 1, {}).own_share(0, {0: 2}, place, nodes) for place in range(nodes)]
    rows = np.concatenate([share[1] for share in shares if share])
    assert len(rows) == len(set(rows.tolist())) == 4 * PER_SHARD


def test_lost_replies_are_repeated(tmp_path):
    coordinator, _ = make_coordinator(tmp_path, nodes=1)
    assert join(coordinator, 0) == join(coordinator, 0)
    beat(coordinator, 0)
    first = beat(coordinator, 0, want=True)["leases"]
    assert first == beat(coordinator, 0, want=True)["leases"]
    assert beat(coordinator, 0, want=True, have=[first[0]["id"]])["leases"] == []
    for _ in range(2):
        reply = beat(coordinator, 0, have=[first[0]["id"]], reports=[report(1, [0, 1])])
        assert (reply["seq"], reply["progress"]["trained"]) == (1, 2)


def test_slow_node_returns_rows_so_that_both_finish_together(tmp_path):
    coordinator, clock = make_coordinator(tmp_path, shards=4)
    for node in range(2):
        join(coordinator, node)
        beat(coordinator, node)
    beat(coordinator, 0)
    leases = {0: [], 1: []}
    for _ in range(4):  # node 0 takes what it can
        leases[0] += beat(coordinator, 0, want=True, have=[lease["id"] for lease in leases[0]])["leases"]
    assert len(leases[0]) == 4
    clock.now += 1.0
    assert beat(coordinator, 1, want=True)["leases"] == []
    wish = beat(coordinator, 0, have=[lease["id"] for lease in leases[0]])["revoke"]
    assert 1 <= wish["utterances"] < 4 * PER_SHARD
    back = {"epoch": 0, "lease": leases[0][3]["id"], "rows": leases[0][3]["rows"]}
    beat(coordinator, 0, have=[lease["id"] for lease in leases[0]], returned=[back], answered=wish["number"])
    got = beat(coordinator, 1, want=True)["leases"]
    assert [lease["rows"] for lease in got] == [leases[0][3]["rows"]]


def test_silent_node_is_dropped_unless_the_coordinator_was_suspended(tmp_path):
    coordinator, clock = make_coordinator(tmp_path)
    for node in range(2):
        join(coordinator, node)
        beat(coordinator, node)
    clock.now += 60.0
    coordinator.tick()
    assert len(coordinator.ledger.states) == 2
    for _ in range(12):
        clock.now += 1.0
        coordinator.tick()
        beat(coordinator, 0)
    assert [state.member.node for state in coordinator.ledger.states.values()] == [0]
    assert beat(coordinator, 1)["dropped"]


def test_malformed_heartbeat_changes_nothing(tmp_path):
    coordinator, _ = make_coordinator(tmp_path, nodes=1)
    join(coordinator, 0)
    beat(coordinator, 0)
    before = coordinator.ledger.to_dict()
    nan = report(1, [0])
    nan["counts"]["loss_sum"] = float("nan")
    bad = [
        ({"reports": [report(1, [0]), report(2, [10**6])]}, "rows beyond the index"),
        ({"reports": [nan]}, r"reports\.0\.counts\.loss_sum"),
        ({"started": [{"epoch": 5, "own": False, "rows": pack_rows(np.array([0]))}]}, "epoch 5 is not one of"),
        ({"records": [[1, {"node": 0}]]}, r"records\.0\.1\.step"),
        ({"reports": [{}]}, r"reports\.0\.seq"),
    ]
    for reported, why in bad:
        with pytest.raises(CoordinatorError, match=why):
            beat(coordinator, 0, **reported)
    assert coordinator.ledger.to_dict() == before


def test_a_stop_waits_for_one_checkpoint_even_if_nothing_is_reported_yet(tmp_path):
    coordinator, _ = make_coordinator(tmp_path, nodes=1)
    join(coordinator, 0)
    beat(coordinator, 0)
    ask(coordinator, op="stop")
    reply = beat(coordinator, 0)
    assert (reply["finish"], reply["checkpoint"]) == ("", 1)
    record = {"node": 0, "step": 1, "seq": 1}
    reply = beat(coordinator, 0, reports=[report(1, [0, 1])], records=[[1, record]])
    deadline = time.monotonic() + 240
    for seq in range(2, 10**6):  # it trains on meanwhile
        if reply["finish"] or time.monotonic() > deadline:
            break
        reply = beat(coordinator, 0, reports=[report(seq, [seq % 30])])
        assert reply["checkpoint"] is None
        time.sleep(0.01)
    assert reply["finish"] == "stop"
    document = ObjectStore(str(tmp_path / "output_url")).read_json("checkpoints/000001/complete.json")
    assert (document["totals"]["steps"], document["totals"]["utterances"]) == (1, 2)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 6), min_size=12, max_size=40), st.data())
def test_shard_map_finds_rows_in_any_order_of_the_index(shard_of_row, data):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(shard_of_row), max_size=len(shard_of_row))))
    for order in (shard_of_row, sorted(shard_of_row)):
        shards = ShardMap(np.array(order))
        wanted = [[row for row, shard in enumerate(order) if shard == number] for number in range(max(order) + 1)]
        assert [shards.rows(number).tolist() for number in range(shards.count)] == wanted
        parts = [[row for row in rows if mask[row]] for rows in wanted]
        assert [part.tolist() for part in shards.split(np.flatnonzero(mask))] == [part for part in parts if part]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["grant", "adopt", "train", "return", "lose"]), st.integers(0, 29)), max_size=25)
)
def test_free_pieces_are_counted_as_a_look_at_all_rows_would(moves):
    """Also of rows that a node took itself, from shards that are not leased."""
    epoch, rng = Epoch(0, ShardMap(np.repeat(np.arange(15), 2)), 1), np.random.default_rng(0)
    for number, (move, row) in enumerate(moves, 1):
        rows = np.unique(rng.integers(row // 2, 30, 9))
        if move == "grant":
            epoch.grant(number, f"n{row % 3}", 3)
        elif move == "adopt":
            epoch.adopt(number, f"n{row % 3}", rows)
        elif move == "train":
            epoch.train(rows)
        elif move == "lose":
            epoch.lose(f"n{row % 3}")
        else:
            for lease in list(epoch.leases.values())[:1]:
                epoch.give_back(lease.number, epoch.open_rows(lease)[:2])
        free = ~epoch.trained & (epoch.owner == 0)
        ahead = [epoch.shards.rows(int(shard)) for shard in epoch.order[epoch.position :]]
        assert epoch.pool() == sum(1 for piece in [*epoch.returned, *ahead] if free[piece].any())
