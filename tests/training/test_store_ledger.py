"""The store's books without processes: leases, accounts, replay, checkpoints, and decisions by a clock of our own."""

import json
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.objects import ObjectStore
from training.journal import read_journal
from training.store.checkpoints import make_document, restored_state
from training.store.coordinator import Coordinator
from training.store.core import Core
from training.store.epochs import ShardMap
from training.store.ledger import Ledger
from training.store.log import StoreLog
from training.store.messages import StoreError, pack_bits, pack_rows, unpack_bits, unpack_rows
from training.store.pace import Pace, fair_transfer
from training.store.settings import Settings
from training.store.spool import Spool
from training.store.worklist import Worklist, plan_lease

PER_SHARD = 5


def empty_ledger(shards=6, epochs=2):
    shard_of_row = np.repeat(np.arange(shards), PER_SHARD)
    return Ledger(ShardMap(shard_of_row), lambda _, rows: [f"u{row}" for row in rows], 7, epochs)


def test_rows_and_masks_survive_the_wire():
    for rows in ([], [3], [0, 1, 2], [9, 2, 5], [0, 2**31 - 1]):
        assert unpack_rows(pack_rows(np.array(rows, dtype=np.int64))).tolist() == rows
    mask = np.random.default_rng(1).random(77) < 0.5
    assert (unpack_bits(pack_bits(mask), 77) == mask).all()
    assert len(pack_rows(np.arange(1_000_000))) < 50_000


@pytest.mark.parametrize("text", ["", "?", "AAAA", pack_bits(np.ones(8, dtype=bool))])
def test_damaged_rows_are_refused(text):
    with pytest.raises(StoreError):
        unpack_rows(text)


class Player:
    """Random nodes over one ledger, with a record of what they truly did."""

    def __init__(self):
        self.ledger, self.events, self.lines = empty_ledger(), [], []
        self.done, self.work, self.names, self.seqs = Counter(), {}, [], Counter()
        self.do("running")

    def do(self, event, **values):
        body = json.loads(json.dumps({"event": event, **values}))
        self.events.append(body)
        result = self.ledger.apply(body)
        self.lines += self.ledger.lines
        self.ledger.lines = []
        return result

    def join(self, node):
        name = f"i{len(self.names)}"
        self.names.append(name)
        self.do("join", node=node, incarnation=name, endpoints=[])
        self.do("ready", incarnation=name)
        self.work[name] = []

    def act(self, node, action, amount):
        seat = self.ledger.seat_of(node)
        if seat is None:
            return self.join(node)
        name = seat.member.incarnation
        if action == "ask":
            self.ask(name)
        elif action == "train":
            self.train(name, amount)
        elif action == "give":
            self.give(name, amount)
        elif action == "own":
            self.own(name, amount)
        elif action == "lose":
            self.do("drop", incarnation=name, why="lost")
        elif action == "rejoin":
            self.join(node)
        return None

    def ask(self, name):
        for number in range(self.ledger.values.closed, min(self.ledger.values.closed + 2, self.ledger.total)):
            lease = self.do("lease", epoch=number, incarnation=name, live=len(self.ledger.seats))
            if lease is not None:
                rows = self.ledger.epochs[number].open_rows(lease).tolist()
                self.work[name].append((number, lease.number, rows))
                return

    def train(self, name, amount):
        """Begin some rows, and report them now or never."""
        if not self.work[name]:
            return
        number, lease, rows = self.work[name].pop(0)
        mine, rest = rows[:amount], rows[amount:]
        if rest:
            self.work[name].insert(0, (number, lease, rest))
        self.report(name, number, mine)

    def report(self, name, number, rows, told=True):
        packed = pack_rows(np.array(rows, dtype=np.int64))
        self.do("begin", incarnation=name, epoch=number, rows=packed)
        self.done.update((number, row) for row in rows)
        if told:
            self.seqs[name] += 1
            counts = {"utterances": len(rows)}
            self.do("report", incarnation=name, seq=self.seqs[name], epoch=number, rows=packed, counts=counts)

    def give(self, name, amount):
        if self.work[name]:
            number, lease, rows = self.work[name].pop()
            self.do("back", epoch=number, lease=lease, rows=pack_rows(np.array(rows[-amount:], dtype=np.int64)))
            if rows[:-amount]:
                self.work[name].append((number, lease, rows[:-amount]))

    def own(self, name, amount):
        """Train without a lease, as without a store; known before it is reported."""
        number = self.ledger.values.closed
        if number < self.ledger.total:
            rows = list(range(amount, amount + 3))
            self.do("adopt", incarnation=name, epoch=number, rows=pack_rows(np.array(rows)))
            self.report(name, number, rows)

    def finish(self):
        """One node trains what is left."""
        self.join(0)
        name = self.names[-1]
        for seat in list(self.ledger.seats.values()):
            if seat.member.incarnation != name:
                self.do("drop", incarnation=seat.member.incarnation, why="lost")
        while not self.ledger.complete:
            self.ask(name)
            while self.work[name]:
                self.train(name, 4)


ACTIONS = st.sampled_from(["ask", "ask", "train", "train", "train", "give", "own", "lose", "rejoin"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), ACTIONS, st.integers(1, 7)), max_size=60))
def test_whatever_happens_every_row_is_trained_and_what_is_repeated_is_named(moves):
    player = Player()
    for node, action, amount in moves:
        player.act(node, action, amount)
    player.finish()
    ledger = player.ledger
    last = {line["epoch"]: line for line in player.lines if line["kind"] == "epoch"}
    assert sorted(last) == [1, 2]
    for epoch in range(2):
        times = {row: count for (number, row), count in player.done.items() if number == epoch}
        assert sorted(times) == list(range(ledger.size))
        again = {f"u{row}" for row, count in times.items() if count > 1}
        assert again == set(last[epoch + 1]["repeated_ids"])
        assert sum(times.values()) - ledger.size == last[epoch + 1]["repeated"]
    assert ledger.trained == 2 * ledger.size


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), ACTIONS, st.integers(1, 7)), max_size=50), st.integers(0, 200))
def test_a_log_replayed_from_anywhere_gives_the_same_state(moves, cut):
    player = Player()
    for node, action, amount in moves:
        player.act(node, action, amount)
    replayed = empty_ledger()
    for number, event in enumerate(player.events):
        if number == cut:
            fresh = empty_ledger()
            fresh.load(json.loads(json.dumps(replayed.to_dict())))
            replayed = fresh
        replayed.apply(event)
    assert replayed.to_dict() == player.ledger.to_dict()


def test_a_checkpoint_holds_what_its_weights_contain_even_if_an_epoch_has_closed_since():
    player = Player()
    player.join(0)
    player.join(1)
    size = player.ledger.size
    first, second = player.names
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
    with pytest.raises(StoreError, match="index"):
        restored_state(empty_ledger(shards=7), "run", "s", 4, document)


def test_journal_lines_of_a_killed_store_are_written_once(tmp_path):
    journal = tmp_path / "journal"
    log = StoreLog(tmp_path / "db", journal)
    log.commit([{"event": "a"}], [{"kind": "step", "step": 1}])
    log.journal.append = lambda lines: None  # killed after the commit, before the journal
    log.commit([{"event": "b"}], [{"kind": "step", "step": 2}, {"kind": "step", "step": 3}])
    with journal.open("a") as file:
        file.write('{"kind": "step", "step": 2}\n{"kind": "st')  # or in the middle of it
    for _ in range(2):
        log = StoreLog(tmp_path / "db", journal)
        assert [entry["step"] for entry in read_journal(journal)] == [1, 2, 3]
        assert log.load() == (None, [{"event": "a"}, {"event": "b"}])
        log.close()


def test_the_log_is_cut_at_a_state(tmp_path):
    log = StoreLog(tmp_path / "db", tmp_path / "journal")
    log.commit([{"event": "a"}], [], {"x": 1})
    log.commit([{"event": "b"}], [])
    assert log.load() == ({"x": 1}, [{"event": "b"}])
    log.commit([{"event": "c"}], [], {"x": 2})
    assert log.load() == ({"x": 2}, [])
    log.commit([{"event": "d"}], [])
    assert log.load() == ({"x": 2}, [{"event": "d"}])


def test_a_spool_ships_each_line_once_and_a_predecessor_s_too(tmp_path):
    old = Spool(tmp_path, "s1", "a")
    old.write({"kind": "step", "step": 1})
    old.close()
    Spool(tmp_path, "s0", "z").close()
    assert not list(tmp_path.glob("lines-s1-*"))  # another session's are void
    old = Spool(tmp_path, "s2", "a")
    old.write({"kind": "step", "step": 1})
    new = Spool(tmp_path, "s2", "b")
    new.write({"kind": "step", "step": 2})
    steps = []
    while portions := new.portions():
        steps += [line["step"] for line in portions[0]["lines"]]
        new.arrived({portions[0]["name"]: portions[0]["end"]})
    assert sorted(steps) == [1, 2]


def test_a_transfer_lets_both_end_together():
    assert fair_transfer(100, 1.0, 1.0) == 50
    assert fair_transfer(110, 1.0, 10.0) == 100
    assert fair_transfer(0, 1.0, 1.0) == 0
    pace = Pace(0.0)
    pace.report(1.0, 10)
    assert pace.rate(1.0, 0.0, 0.0001) == pytest.approx(10, rel=0.01)
    assert pace.rate(10.0, 0.0, 0.0001) == pytest.approx(1, rel=0.01)


def by_fours(epoch, rows, plan):
    return [rows[start : start + 4] for start in range(0, len(rows), 4)]


def test_a_whole_epoch_keeps_its_plan_after_a_resume_unless_batches_were_cut():
    lease = {"id": "1", "epoch": 0, "whole": True, "rows": pack_rows(np.arange(8, 30))}
    assert [a.rows[0] for a in plan_lease(by_fours, lease, 30)] == [8, 12, 16, 20, 24, 28]
    cut = lease | {"rows": pack_rows(np.arange(9, 30))}
    assert [a.rows[0] for a in plan_lease(by_fours, cut, 30)] == [9, 13, 17, 21, 25, 29]
    with pytest.raises(StoreError, match="rows"):
        plan_lease(lambda *_: [np.arange(3)], lease, 30)


def test_a_worklist_trains_older_epochs_first_and_gives_back_from_the_end():
    work = Worklist(ShardMap(np.repeat(np.arange(6), PER_SHARD)), 7, 2, {})
    for number, (epoch, start) in enumerate([(1, 0), (0, 0), (0, 8)]):
        rows = pack_rows(np.arange(start, start + 8))
        work.add(plan_lease(by_fours, {"id": str(number), "epoch": epoch, "whole": False, "rows": rows}, 30))
    assert [(a.epoch, int(a.rows[0])) for a in work.peek(9)] == [(0, 0), (0, 4), (0, 8), (0, 12), (1, 0), (1, 4)]
    assert [int(a.rows[0]) for a in work.give_back(0, 7)] == [12, 8]
    assert work.give_back(0, 1) == []
    assert [(a.epoch, int(a.rows[0])) for a in work.peek(9)] == [(0, 0), (0, 4), (1, 0), (1, 4)]


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_own_shares_without_a_store_cover_what_nobody_had_and_do_not_overlap(nodes):
    shards = ShardMap(np.repeat(np.arange(6), PER_SHARD))
    shares = [Worklist(shards, 7, 1, {}).own_share(0, {0: 2}, place, nodes) for place in range(nodes)]
    rows = np.concatenate([share[1] for share in shares if share])
    assert len(rows) == len(set(rows.tolist())) == 4 * PER_SHARD


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_coordinator(tmp_path, nodes=2, shards=6, **train):
    member = {"beat_s": 0.5, "dead_after_s": 10.0, "start_patience_s": 60.0}
    train = {"nodes": nodes, "learners_per_node": 1, "epochs": 1, "max_minutes": 0.0, "membership": member} | train
    train = {"checkpoint_steps": 10000, "checkpoint_keep": 2} | train
    urls = {name: str(tmp_path / name) for name in ("train_url", "output_url", "journal")}
    job = {"run": "r", "seed": 7, **urls, "train": train}
    clock = Clock()
    core = Core(Settings.from_job(job), empty_ledger(shards, 1), ObjectStore(urls["output_url"]), clock, clock)
    return Coordinator(core, fresh=True), clock


def join(coordinator, node):
    message = {"op": "join", "node": node, "incarnation": f"n{node}", "previous": "", "kept": "", "endpoints": []}
    return coordinator.handle({**message, "damaged": ""})


def beat(coordinator, node, **news):
    message = {"op": "beat", "incarnation": f"n{node}", "ready": True, "view": 0, "want": False, "have": []}
    message |= {"empty": False, "spools": [], "reports": [], "begun": [], "back": [], "answered": 0}
    return coordinator.handle({**message, "snapshots": [], "records": [], **news})


def report(seq, rows):
    counts = {
        "utterances": len(rows),
        "seconds": 1.0,
        "loss_sum": 1.0,
        "tokens": 1,
        "unalignable": 0,
        "skipped": 0,
        "unreadable": 0,
    }
    return {"seq": seq, "epoch": 0, "rows": pack_rows(np.array(rows)), "counts": counts}


def test_answers_that_are_lost_are_given_again(tmp_path):
    coordinator, _ = make_coordinator(tmp_path, nodes=1)
    assert join(coordinator, 0) == join(coordinator, 0)
    beat(coordinator, 0)
    first = beat(coordinator, 0, want=True)["leases"]
    assert first == beat(coordinator, 0, want=True)["leases"]
    assert beat(coordinator, 0, want=True, have=[first[0]["id"]])["leases"] == []
    for _ in range(2):
        reply = beat(coordinator, 0, have=[first[0]["id"]], reports=[report(1, [0, 1])])
        assert (reply["seq"], reply["progress"]["trained"]) == (1, 2)


def test_the_slowest_node_gives_back_so_that_both_end_together(tmp_path):
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
    beat(coordinator, 0, have=[lease["id"] for lease in leases[0]], back=[back], answered=wish["number"])
    got = beat(coordinator, 1, want=True)["leases"]
    assert [lease["rows"] for lease in got] == [leases[0][3]["rows"]]


def test_silence_drops_a_node_but_a_store_that_slept_drops_nobody(tmp_path):
    coordinator, clock = make_coordinator(tmp_path)
    for node in range(2):
        join(coordinator, node)
        beat(coordinator, node)
    clock.now += 60.0
    coordinator.tick()
    assert len(coordinator.ledger.seats) == 2
    for _ in range(12):
        clock.now += 1.0
        coordinator.tick()
        beat(coordinator, 0)
    assert [seat.member.node for seat in coordinator.ledger.seats.values()] == [0]
    assert beat(coordinator, 1)["dropped"]


def test_a_malformed_beat_changes_nothing(tmp_path):
    coordinator, _ = make_coordinator(tmp_path, nodes=1)
    join(coordinator, 0)
    beat(coordinator, 0)
    before = coordinator.ledger.to_dict()
    nan = report(1, [0])
    nan["counts"]["loss_sum"] = float("nan")
    bad = [
        {"reports": [report(1, [0]), report(2, [10**6])]},
        {"reports": [nan]},
        {"begun": [{"epoch": 5, "own": False, "rows": pack_rows(np.array([0]))}]},
        {"records": [[1, {"node": 0}]]},
        {"reports": [{}]},
    ]
    for news in bad:
        with pytest.raises(StoreError):
            beat(coordinator, 0, **news)
    assert coordinator.ledger.to_dict() == before


def test_a_stop_waits_for_one_checkpoint_even_if_nothing_is_reported_yet(tmp_path):
    coordinator, _ = make_coordinator(tmp_path, nodes=1)
    join(coordinator, 0)
    beat(coordinator, 0)
    coordinator.handle({"op": "stop"})
    reply = beat(coordinator, 0)
    assert (reply["finish"], reply["checkpoint"]) == ("", 1)
    record = {"node": 0, "step": 1, "seq": 1}
    reply = beat(coordinator, 0, reports=[report(1, [0, 1])], records=[[1, record]])
    deadline = time.monotonic() + 20
    for seq in range(2, 10**6):  # it trains on meanwhile
        if reply["finish"] or time.monotonic() > deadline:
            break
        reply = beat(coordinator, 0, reports=[report(seq, [seq % 30])])
        assert reply["checkpoint"] is None
        time.sleep(0.01)
    assert reply["finish"] == "stop"
    document = ObjectStore(str(tmp_path / "output_url")).read_json("checkpoints/000001/complete.json")
    assert (document["totals"]["steps"], document["totals"]["utterances"]) == (1, 2)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_a_shard_has_its_rows_in_whatever_order_the_index_is(shard_of_row, data):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(shard_of_row), max_size=len(shard_of_row))))
    for order in (shard_of_row, sorted(shard_of_row)):
        shards = ShardMap(np.array(order))
        wanted = [[row for row, shard in enumerate(order) if shard == number] for number in range(max(order) + 1)]
        assert [shards.rows(number).tolist() for number in range(shards.count)] == wanted
        assert shards.some(mask).tolist() == [any(mask[row] for row in rows) for rows in wanted]
