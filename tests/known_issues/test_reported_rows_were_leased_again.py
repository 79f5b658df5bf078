"""Rows that were returned and reported afterwards were leased again, as an empty lease: its node idled for ever."""

from support import load_beside

from training.coordinator.packing import unpack_rows

bookkeeping = load_beside(__file__, "../training/bookkeeping.py")


def test_late_report_of_dropped_node_leaves_work_for_others(tmp_path):
    coordinator, clock = bookkeeping.make_coordinator(tmp_path, nodes=3)
    for node in range(3):
        bookkeeping.join(coordinator, node)
        bookkeeping.beat(coordinator, node)
    (lease,) = bookkeeping.beat(coordinator, 0, want=True)["leases"]
    rows = unpack_rows(lease["rows"]).tolist()
    for _ in range(12):  # node 0 sends no heartbeats
        clock.now += 1.0
        for node in (1, 2):
            bookkeeping.beat(coordinator, node)
    assert bookkeeping.beat(coordinator, 0)["dropped"]
    bookkeeping.join(coordinator, 0)
    bookkeeping.beat(coordinator, 0, reports=[bookkeeping.report(1, rows)])
    for node in (1, 2):
        (lease,) = bookkeeping.beat(coordinator, node, want=True)["leases"]
        assert len(unpack_rows(lease["rows"]))


def test_rows_lost_twice_are_counted_twice():
    player = bookkeeping.Player()
    for node in range(2):
        name = player.join(node)
        player.ask(name)
        player.train(name, 5, told=False)
        player.drop_node(name)
    player.finish()
    rows = {row for row, count in player.times_trained(0).items() if count > 1}
    assert set(player.times_trained(0).values()) == {1, 3}
    assert set(player.ledger.closed[0].repeats.rows) == rows
    assert player.ledger.repeated == 2 * len(rows)
