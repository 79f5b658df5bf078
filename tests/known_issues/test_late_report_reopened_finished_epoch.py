"""A late report that brought no new row reopened a finished epoch in the checkpoint: a resumed training never ended."""

import json

from support import load_beside

from training.coordinator.checkpoints import make_document, restored_state

bookkeeping = load_beside(__file__, "../training/bookkeeping.py")


def restore_after(seq, rows):
    """Node 0 answers after its first report; `rows` is what it reports later, before or after the epoch's end."""
    player = bookkeeping.Player(bookkeeping.empty_ledger(epochs=1))
    first, second = player.join(0), player.join(1)
    player.report(first, 0, list(range(29)))
    player.ledger.accepted = []
    for number in range(2):
        player.report(*((first, 0, rows) if number == seq else (second, 0, [29])))
    assert player.ledger.complete
    records = {name: {"node": node, "step": 1, "seq": 1} for node, name in enumerate((first, second))}
    document = json.loads(json.dumps(make_document(player.ledger, "run", 2, records)))
    again = bookkeeping.empty_ledger(epochs=1)
    again.load(restored_state(again, "run", "s", 1, document))
    return again


def test_repeated_row_does_not_reopen_an_epoch():
    for seq in (0, 1):  # while the epoch is open, and when it is closed
        again = restore_after(seq, [0, 1])
        assert (again.complete, again.epochs) == (True, {})
        assert again.totals.utterances == 30, "what came after a node's answer is not counted"


def test_new_row_reopens_an_epoch():
    again = restore_after(0, [28, 29])
    assert not again.complete
    assert again.epochs[0].count == 29
