"""The index of a set of shards: where each utterance is, what it is, and how to know that a shard is whole.

One Parquet file beside the shards. It is written last, so a set of shards without an index does not exist.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.objects import ObjectStore

INDEX_NAME = "index.parquet"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("shard", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("duration", pa.float64()),
        ("num_frames", pa.int64()),
        ("sample_rate", pa.int32()),
        ("text", pa.string()),
        ("speaker", pa.string()),
        ("corpus", pa.string()),
        ("domain", pa.string()),
        ("language", pa.string()),
    ]
)
_SHARDS_KEY = b"starling.shards"
_METADATA_KEY = b"starling.metadata"


class ShardIndexError(ValueError):
    """An index that contradicts itself, or a file that is no index."""


@dataclass(frozen=True)
class ShardRecord:
    """One shard of an index.

    Attributes:
        name: object name of the tar.
        count: utterances in it.
        seconds: sum of their durations.
        bytes: size of the tar.
        sha256: digest of the tar, in hex.
    """

    name: str
    count: int
    seconds: float
    bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The utterances of a set of shards, in the order in which they were written.

    Attributes:
        table: one row per utterance with the columns of `SCHEMA`: `id`, `shard` (position in `shards`), `offset` and
            `length` (bytes of the payload within the tar), `duration` (seconds), `num_frames` (audio samples, or
            feature frames), `sample_rate` (Hz), `text`, `speaker`, `corpus`, `domain`, `language`.
        shards: one record per tar.
        metadata: free text values; `payload` is the suffix of the payload members ("flac", "npy").
    """

    table: pa.Table
    shards: tuple[ShardRecord, ...]
    metadata: dict[str, str]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def row(self, position: int) -> dict[str, Any]:
        """All columns of one utterance as Python values."""
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of an index of {len(self)} utterances")
        return {name: column[position].as_py() for name, column in self._columns.items()}

    def column(self, name: str) -> Any:
        """A column: a numpy array [num_utterances] for numbers, a list for text."""
        if name not in self._columns:
            raise ShardIndexError(f"the index has no column {name!r}: it has {', '.join(self._columns)}")
        column = self._columns[name]
        return column.to_pylist() if pa.types.is_string(column.type) else np.asarray(column)

    def values(self, name: str) -> pa.Array:
        """A column as it is stored: text of millions of utterances takes a tenth of the memory of a list."""
        if name not in self._columns:
            raise ShardIndexError(f"the index has no column {name!r}: it has {', '.join(self._columns)}")
        return self._columns[name]

    @cached_property
    def _columns(self) -> dict[str, pa.Array]:
        table = self.table.combine_chunks()
        # One chunk per column makes the access to a row a matter of microseconds.
        return {name: pa.concat_arrays(table.column(name).chunks or [pa.array([], t)]) for name, t in _fields(table)}

    @property
    def seconds(self) -> float:
        """Sum of all durations."""
        return float(sum(shard.seconds for shard in self.shards))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content (shards' digests, ids and texts), the same whatever wrote the Parquet file."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(f"{shard.sha256}\n".encode())
        for pair in zip(self.column("id"), self.column("text"), strict=True):
            digest.update(json.dumps(pair, ensure_ascii=True).encode() + b"\n")
        return digest.hexdigest()

    def validate(self) -> None:
        """Checks that the index is consistent in itself.

        Raises:
            ShardIndexError: a wrong schema, a missing value, an id that occurs twice, a row that points outside its
                shard, or counts and seconds that do not add up.
        """
        if not self.table.schema.equals(SCHEMA):
            raise ShardIndexError(f"the index has the columns {self.table.schema.names} and types, not those of SCHEMA")
        for name in SCHEMA.names:
            if self.table.column(name).null_count:
                raise ShardIndexError(
                    f"the index has an empty value in column {name!r}: fill it in the stage that wrote it"
                )
        if "payload" not in self.metadata:
            raise ShardIndexError("the index's metadata lacks 'payload', the suffix of the payload members: add it")
        if len({shard.name for shard in self.shards}) != len(self.shards):
            raise ShardIndexError("two shards of the index have one name: name each shard differently")
        self._validate_ids()
        self._validate_shards()

    def _validate_ids(self) -> None:
        counts = pc.value_counts(self.table.column("id"))
        repeated = [entry["values"] for entry in counts.filter(pc.greater(counts.field("counts"), 1)).to_pylist()[:3]]
        if repeated:
            raise ShardIndexError(
                f"utterance ids occur more than once ({', '.join(map(repr, repeated))}): make them unique"
            )

    def _validate_shards(self) -> None:
        shard = self.column("shard")
        if len(shard) and (shard.min() < 0 or shard.max() >= len(self.shards)):
            raise ShardIndexError(
                f"a row names shard {shard.max()} of {len(self.shards)}: build the index from its parts again"
            )
        counts = np.bincount(shard, minlength=len(self.shards))
        seconds = np.bincount(shard, weights=self.column("duration"), minlength=len(self.shards))
        sizes = np.array([record.bytes for record in self.shards], dtype=np.int64)
        for position, record in enumerate(self.shards):
            if counts[position] != record.count:
                raise ShardIndexError(
                    f"shard {record.name} has {record.count} utterances, the index {counts[position]}"
                )
            if not np.isclose(seconds[position], record.seconds, rtol=1e-6, atol=1e-6):
                raise ShardIndexError(f"shard {record.name} has {record.seconds} s, the index {seconds[position]} s")
        offset, length = self.column("offset"), self.column("length")
        if len(shard) and ((offset < 0) | (length < 0) | (offset + length > sizes[shard])).any():
            raise ShardIndexError("a row points outside its shard: build the index from its parts again")

    def write(self, store: ObjectStore, name: str = INDEX_NAME) -> None:
        """Validates the index and publishes it; the last thing that a stage does with its shards.

        Raises:
            ShardIndexError: see `validate`.
        """
        self.validate()
        shards = json.dumps([asdict(shard) for shard in self.shards], sort_keys=True)
        metadata = json.dumps(self.metadata, sort_keys=True)
        table = self.table.replace_schema_metadata({_SHARDS_KEY: shards.encode(), _METADATA_KEY: metadata.encode()})
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression="zstd")
        store.write(name, buffer.getvalue().to_pybytes())

    @classmethod
    def read(cls, store: ObjectStore, name: str = INDEX_NAME) -> "ShardIndex":
        """Reads and validates an index.

        Raises:
            ObjectMissingError: there is none: the shards are not published.
            ShardIndexError: the object is no index, or contradicts itself.
        """
        data = store.read(name)
        try:
            table = pq.read_table(pa.BufferReader(data))
            found = table.schema.metadata or {}
            shards = tuple(ShardRecord(**entry) for entry in json.loads(found[_SHARDS_KEY]))
            metadata = {str(key): str(value) for key, value in json.loads(found[_METADATA_KEY]).items()}
        except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise ShardIndexError(
                f"{store.join(name)} is no shard index ({error}): run the stage that writes it"
            ) from error
        index = cls(table.replace_schema_metadata(None), shards, metadata)
        try:
            index.validate()
        except ShardIndexError as error:
            raise ShardIndexError(f"{store.join(name)}: {error}") from error
        return index


def _fields(table: pa.Table) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in table.schema]
