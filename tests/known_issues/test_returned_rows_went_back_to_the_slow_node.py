"""A node that returned rows was leased them again in the same heartbeat, while the node without work waited for them.

With one of eight learners 100 times slower, the others lost two seconds at the end of each epoch, in which a batch went
back and forth: an epoch took 1.38 times as long instead of 1.15 (`python -m benchmarks.scaling`).
"""

from support import load_beside

bookkeeping = load_beside(__file__, "../training/bookkeeping.py")
beat = bookkeeping.beat


def test_returned_rows_go_to_the_node_without_work(tmp_path):
    coordinator, clock = bookkeeping.make_coordinator(tmp_path, shards=4)
    for node in range(2):
        bookkeeping.join(coordinator, node)
        beat(coordinator, node)
    leases = []
    for _ in range(4):
        leases += beat(coordinator, 0, want=True, have=[lease["id"] for lease in leases])["leases"]
    have, last = [lease["id"] for lease in leases], leases[-1]
    clock.now += 1.0
    assert beat(coordinator, 1, want=True)["leases"] == []
    revoke = beat(coordinator, 0, have=have)["revoke"]
    returned = [{"epoch": 0, "lease": last["id"], "rows": last["rows"]}]
    reply = beat(coordinator, 0, want=True, have=have, returned=returned, answered=revoke["number"])
    assert reply["leases"] == []
    (got,) = beat(coordinator, 1, want=True)["leases"]
    assert got["rows"] == last["rows"]
