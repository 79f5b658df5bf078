"""Damaged shards are set aside, counted once, and stop a run only beyond the limit."""

import threading
import uuid

import pytest

from storage.index import ShardRecord
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine, TooManyShardsError
from storage.reading import ShardError


def damage(number, count=10):
    record = ShardRecord(f"part/{number}.tar", count, 12.5, 1000, f"{number:064x}")
    return ShardError("shard …: it is missing. Write it again.", record, "it is missing")


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return ObjectStore(tmp_path) if request.param == "local" else ObjectStore(f"memory://q{uuid.uuid4().hex}")


def test_quarantined_shards_have_reason_utterances_and_seconds(store):
    quarantine = ShardQuarantine(store, total=100, limit=0.5)
    entry = quarantine.add(damage(2), ["a", "b"])
    quarantine.add(damage(1))
    quarantine.add(damage(2), ["a", "b"])  # another process found it, too
    assert quarantine.entries()[1] == entry
    assert quarantine.names == {"part/1.tar", "part/2.tar"}
    assert entry.ids == ("a", "b")
    assert entry.summary() == {"shard": "part/2.tar", "reason": "it is missing", "utterances": 10, "seconds": 12.5}
    assert ShardQuarantine(store, total=100).entries() == quarantine.entries()


def test_damage_beyond_the_limit_stops_with_a_remedy(store):
    quarantine = ShardQuarantine(store, total=100, limit=0.1)
    quarantine.add(damage(1))
    with pytest.raises(TooManyShardsError, match=r"20 of 100 .* 2 damaged shards.*part/1\.tar: it is missing.*rerun"):
        quarantine.add(damage(2))


def test_complete_loss_of_a_set_stops_at_any_limit(store):
    with pytest.raises(TooManyShardsError, match="10 of 10"):
        ShardQuarantine(store, total=10, limit=1.0).add(damage(1))


def test_repaired_shard_leaves_the_quarantine(store):
    quarantine = ShardQuarantine(store, total=100)
    for number in range(3):
        quarantine.add(damage(number))
    quarantine.clear(["part/1.tar", "never/seen.tar"])
    assert quarantine.names == {"part/0.tar", "part/2.tar"}
    quarantine.clear()
    assert quarantine.entries() == []
    assert store.list() == []


def test_threads_may_report_the_same_shards(store):
    def work():
        for number in range(8):
            ShardQuarantine(store, total=1000).add(damage(number))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert sum(entry.utterances for entry in ShardQuarantine(store, total=1000).entries()) == 80


def test_an_error_without_a_shard_is_raised_again(store):
    with pytest.raises(ShardError, match="no idea"):
        ShardQuarantine(store, total=10).add(ShardError("no idea"))


@pytest.mark.parametrize("values", [{"total": -1}, {"total": 1, "limit": 1.5}])
def test_refuses_nonsense(store, values):
    with pytest.raises(ValueError):
        ShardQuarantine(store, **values)
