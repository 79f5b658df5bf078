"""Unions of several sets of shards, without copying: an index whose shards are in sibling folders.

For cross-validation, each fold is sharded once; the training set of a fold is the union of the others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from storage.columns import collect_columns
from storage.index import SCHEMA, ShardIndex, ShardIndexError, ShardRecord
from storage.objects import ObjectStore

BESIDE = "beside"
"""Key of an index's metadata: shard names are relative to the parent folder."""


def union_index(parts: Mapping[str, ShardIndex], name: str) -> ShardIndex:
    """Build the index of a union of several sets of shards.

    Args:
        parts: Index of each set by folder. The union must be written to a sibling folder.
        name: Name of the union.

    Raises:
        ShardIndexError: `parts` is empty, or the payloads of the sets differ.
    """
    payloads = {index.metadata["payload"] for index in parts.values()}
    if len(payloads) != 1:
        raise ShardIndexError(f"{name} joins sets with the payloads {sorted(payloads)}: all sets must have the same")
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
    """The store to which shard names of an index are relative: the index's own, or its parent for a union."""
    return store.parent() if BESIDE in index.metadata else store
