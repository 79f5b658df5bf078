"""Several sets of shards read as one, without copying a shard: an index whose shards lie in the folders beside it.

The folds of a cross-validation are sharded once each; the training set of a fold is a union of the others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from storage.columns import collect_columns
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
    shards: list[ShardRecord] = []

    def tables() -> Iterator[pa.Table]:
        for folder, index in parts.items():
            for batch in index.batches():
                numbers = pa.array(np.asarray(batch.column("shard")) + len(shards), pa.int32())
                table = pa.Table.from_batches([batch], SCHEMA)
                yield table.set_column(SCHEMA.get_field_index("shard"), SCHEMA.field("shard"), numbers)
            shards.extend(replace(shard, name=f"{folder}/{shard.name}") for shard in index.shards)

    columns = collect_columns(tables(), SCHEMA)
    metadata = {"payload": payloads.pop(), "set": name, BESIDE: "yes"}
    return ShardIndex(columns, tuple(shards), metadata)


def shards_store(store: ObjectStore, index: ShardIndex) -> ObjectStore:
    """The store that the names of an index's shards count from: the index's own, or the one above it."""
    return store.parent() if BESIDE in index.metadata else store
