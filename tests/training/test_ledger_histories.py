"""The ledger under long random histories: it always knows which rows were trained, and how often."""

import json
from collections import Counter

import numpy as np
from bookkeeping import Player, empty_ledger
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from training.coordinator.checkpoints import make_document, restored_state
from training.coordinator.packing import pack_rows

NODES, AMOUNTS = st.integers(0, 3), st.integers(1, 7)


class LedgerMachine(RuleBasedStateMachine):
    """Four nodes that come, train, report late, and are lost; checkpoints; a coordinator that is killed."""

    def __init__(self):
        super().__init__()
        self.player = Player()
        self.contained = None
        """Of a checkpoint in the making: the last report in the weights of each node that has answered."""
        self.asked = set()
        self.saved = None
        self.moves = 0

    @rule(node=NODES, again=st.booleans())
    def join(self, node, again):
        self.player.join(node) if again else self.player.name_of(node)

    @rule(node=NODES)
    def ask(self, node):
        self.player.ask(self.player.name_of(node))

    @rule(node=NODES, amount=AMOUNTS, told=st.booleans())
    def train(self, node, amount, told):
        name = self.player.name_of(node)
        if not self.player.work[name]:
            self.player.ask(name)
        self.player.train(name, amount, told)

    @rule(node=NODES)
    def report_all(self, node):
        self.player.report_all(self.player.name_of(node))

    @rule(node=NODES, amount=AMOUNTS)
    def return_rows(self, node, amount):
        self.player.return_rows(self.player.name_of(node), amount)

    @rule(node=NODES, start=st.integers(0, 29), amount=AMOUNTS)
    def train_own_share(self, node, start, amount):
        self.player.train_own_share(self.player.name_of(node), start, amount)

    @rule(node=NODES)
    def drop_node(self, node):
        self.player.drop_node(self.player.name_of(node))

    @rule()
    def reload(self):
        self.player.reload()

    @precondition(lambda self: self.contained is None)
    @rule(late=st.sets(NODES, max_size=2))
    def begin_checkpoint(self, late):
        self.contained, self.player.ledger.accepted = {}, []
        self.asked = {name for name, state in self.player.ledger.states.items() if state.ready}
        for node in set(range(4)) - late:
            self.answer_checkpoint(node)

    @precondition(lambda self: self.contained is not None)
    @rule(node=NODES)
    def answer_checkpoint(self, node):
        state = self.player.ledger.state_of(node)
        if state is not None and (name := state.member.incarnation) in self.asked:
            self.asked.discard(name)
            self.contained[name] = self.player.seqs[name]

    @precondition(lambda self: self.contained)
    @rule()
    def publish(self):
        player = self.player
        records = {
            name: {"node": player.names.index(name), "step": seq, "seq": seq} for name, seq in self.contained.items()
        }
        document = make_document(player.ledger, "run", 4, records)
        player.ledger.accepted = None
        self.check_checkpoint_document(json.loads(json.dumps(document)), dict(self.contained))
        self.contained = None

    def check_checkpoint_document(self, document, seqs):
        """It holds the rows that reports in the weights brought first, and counts those reports."""
        restored = empty_ledger()
        restored.load(restored_state(restored, "run", "s", 1, document))
        inside = [report for report in self.player.reports if report[1] <= seqs.get(report[0], report[1])]
        first = {}
        for report in self.player.reports:
            for row in report[3]:
                first.setdefault((report[2], row), report)
        wanted = {place for place, report in first.items() if report in inside}
        assert trained_rows(restored) == wanted
        assert restored.trained == len(wanted)
        assert restored.totals.utterances == sum(len(rows) for _, _, _, rows in inside)
        assert restored.totals.steps == len(inside)
        self.saved = restored, Counter((number, row) for _, _, number, rows in inside for row in rows)

    @invariant()
    def counts_match_the_rows(self):
        ledger = self.player.ledger
        assert ledger.trained == len(trained_rows(ledger))
        for epoch in ledger.epochs.values():
            for lease in epoch.leases.values():
                assert lease.left == len(epoch.open_rows(lease)) > 0
            assert set(np.unique(epoch.owner[~epoch.trained]).tolist()) <= {0, *epoch.leases}
            held = sum(epoch.held(name) for name in ledger.states)
            assert held + int((epoch.started & ~epoch.trained & (epoch.owner > 0)).sum()) == sum(
                lease.left for lease in epoch.leases.values()
            )
        assert {lease.incarnation for epoch in ledger.epochs.values() for lease in epoch.leases.values()} <= set(
            ledger.states
        )
        self.moves += 1

    def teardown(self):
        event(f"{self.moves // 20 * 20} moves or more")
        player = self.player
        assert player.mirror.to_dict() == player.ledger.to_dict()
        player.finish()
        check_account(player, exact=True)
        assert player.mirror.to_dict() == player.ledger.to_dict()
        if self.saved is not None:
            resumed = Player(*self.saved)
            resumed.finish()
            check_account(resumed, exact=False)


def test_rows_can_be_started_only_by_the_node_that_leases_them():
    player = Player()
    first, second = player.join(0), player.join(1)
    player.ask(first)
    (_, _, rows), epoch = player.work[first][0], player.ledger.epochs[0]
    player.do("begin", incarnation=second, epoch=0, rows=pack_rows(np.array(rows)))
    assert epoch.held(first) == len(rows)
    player.do("begin", incarnation=first, epoch=0, rows=pack_rows(np.array(rows[:2])))
    assert epoch.held(first) == len(rows) - 2
    player.drop_node(first)
    assert np.flatnonzero(epoch.risky).tolist() == rows[:2]


def trained_rows(ledger):
    """(epoch, row) of all rows that are trained."""
    closed = {(number, row) for number in range(ledger.values.closed) for row in range(ledger.size)}
    opened = {(epoch.number, row) for epoch in ledger.epochs.values() for row in np.flatnonzero(epoch.trained).tolist()}
    return closed | opened


def check_account(player, exact):
    """Every row was trained in every epoch; those that were trained again are named and counted."""
    ledger = player.ledger
    last = {line["epoch"]: line for line in player.lines if line["kind"] == "epoch"}
    for number in range(2):
        times_trained, repeats = player.times_trained(number), ledger.closed[number].repeats
        assert sorted(times_trained) == list(range(ledger.size))
        again, named = {row for row, count in times_trained.items() if count > 1}, set(repeats.rows)
        more = sum(times_trained.values()) - ledger.size
        if exact:  # a resumed training remembers repetitions that it has undone
            assert (again, more) == (named, repeats.count)
            assert last[number + 1]["repeated"] == more
            assert set(last[number + 1]["repeated_ids"]) == {f"u{row}" for row in again}
        assert again <= named
        assert more <= repeats.count
    assert ledger.trained == 2 * ledger.size
    assert ledger.repeated == sum(part.repeats.count for part in ledger.closed.values())


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=25, stateful_step_count=60)
