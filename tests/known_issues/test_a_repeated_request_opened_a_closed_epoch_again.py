"""A node that had trained an epoch's last rows during an outage seemed to hold leases of that epoch for good.

It repeats its request until it is answered. The first one closed the epoch, and the next one leased its rows again.
"""

import numpy as np
import pytest
from support import load_beside

from training.coordinator.packing import pack_rows


@pytest.fixture(scope="module")
def bookkeeping():
    return load_beside(__file__, "../training/bookkeeping.py")


def test_rows_of_a_closed_epoch_are_not_adopted(bookkeeping, tmp_path):
    coordinator, _ = bookkeeping.ring(tmp_path, nodes=1, epochs=3)
    rows = list(range(coordinator.ledger.size))
    started = [{"epoch": 0, "own": True, "rows": pack_rows(np.array(rows))}]
    for _ in range(2):
        bookkeeping.beat(coordinator, 0, started=started, reports=[bookkeeping.report(1, rows)])
        status = bookkeeping.ask(coordinator, op="status")
        assert (status["progress"]["closed"], status["progress"]["trained"]) == (1, len(rows))
        assert [(member["leases"], member["leased"]) for member in status["members"]] == [(0, 0)]
        assert not coordinator.ledger.epochs
