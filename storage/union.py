"""Several sets of shards read as one, without copying a shard: an index whose shards lie in the folders beside it.

The folds of a cross-validation are sharded once each; the training set of a fold is a union of the others.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from storage.index import SCHEMA, ShardIndex, ShardIndexError, ShardRecord
from storage.objects import ObjectStore

BESIDE = "beside"
"""Key of an index's metadata: its shards are named from the folder above."""


def union_index(parts: Mapping[str, ShardIndex], name: str) -> ShardIndex:
    """The index of several sets of shards together.

    Args:
        parts: Folder to the index in it. The union is written into another folder beside them.
        name: Name of the whole set.

    Raises:
        ShardIndexError: There is none, or they hold different payloads.
    """
    payloads = {index.metadata["payload"] for index in parts.values()}
    if len(payloads) != 1:
        raise ShardIndexError(f"{name} joins sets of the payloads {sorted(payloads)}: they must have one in common")
    tables: list[pa.Table] = []
    shards: list[ShardRecord] = []
    for folder, index in parts.items():
        numbers = pa.array(np.asarray(index.column("shard")) + len(shards), pa.int32())
        tables.append(index.table.set_column(SCHEMA.get_field_index("shard"), SCHEMA.field("shard"), numbers))
        shards += [ShardRecord(f"{folder}/{s.name}", s.count, s.seconds, s.bytes, s.sha256) for s in index.shards]
    metadata = {"payload": payloads.pop(), "set": name, BESIDE: "yes"}
    return ShardIndex(pa.concat_tables(tables), tuple(shards), metadata)


def shards_store(store: ObjectStore, index: ShardIndex) -> ObjectStore:
    """The store that the names of an index's shards count from: the index's own, or the one above it."""
    return store.parent() if BESIDE in index.metadata else store
