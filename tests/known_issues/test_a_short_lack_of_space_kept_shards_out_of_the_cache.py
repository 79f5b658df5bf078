"""A shard that was first read while the cache's disk was full was read from the store for as long as its reader lived.

Each utterance of each epoch was a request of its own, although there was space again a minute later.
"""

import errno
import random

from support import load_beside

from storage import reading
from storage.objects import ObjectStore, ObjectStoreError

shards = load_beside(__file__, "../storage/cached_shards.py")


def test_shard_gets_into_the_cache_once_there_is_space(tmp_path, monkeypatch):
    store, asked, verified = ObjectStore(f"memory://space-{random.getrandbits(60):x}"), [], []
    reader = reading.ShardReader(store, shards.fill(store), tmp_path)

    def full(name, target):
        asked.append(name)
        raise ObjectStoreError(errno.ENOSPC, "no space")

    with monkeypatch.context() as disk:
        disk.setattr(reader.store, "fetch_into", full)
        for _ in range(3):
            assert reader.payload(0) == shards.content(0)
        reader._full_until = 0.1  # the minute is over
        disk.setattr(reading, "object_sha256", lambda *given: verified.append(given))
        assert reader.payload(0) == shards.content(0)
    assert asked == ["0.tar"] * 2
    assert not verified, "the shard was read as a whole again"
    reader._full_until = 0.1
    assert reader.payload(0) == shards.content(0)
    assert shards.bytes_of(tmp_path) == reader.index.shards[0].bytes
    store.delete("0.tar")
    assert reader.payload(0) == shards.content(0)
