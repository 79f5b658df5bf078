"""The index of a set of shards: location and metadata of each utterance, size and digest of each shard.

It is a Parquet file beside the shards, written last: a set of shards without an index is incomplete.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.columns import Columns, TableColumns, open_columns, write_columns
from storage.duplicates import repeated_texts
from storage.intact import DamagedObjectError, readable, remedy
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


class ShardIndexError(DamagedObjectError):
    """The index is inconsistent, or the file is not an index."""


@dataclass(frozen=True)
class ShardRecord:
    """One shard of an index.

    Attributes:
        name: object name of the tar.
        count: number of utterances in it.
        seconds: sum of their durations.
        bytes: size of the tar.
        sha256: digest of the tar, in hex.
    """

    name: str
    count: int
    seconds: float
    bytes: int
    sha256: str


class ShardIndex:
    """The utterances of a set of shards, in the order of writing.

    Args:
        table: one row per utterance with the columns of `SCHEMA`: `id`, `shard` (position in `shards`), `offset` and
            `length` (bytes of the payload within the tar), `duration` (seconds), `num_frames` (audio samples, or
            feature frames), `sample_rate` (Hz), `text`, `speaker`, `corpus`, `domain`, `language`. Columns of a file
            are read on demand.
        shards: one record per tar.
        metadata: free text values; `payload` is the suffix of the payload members ("flac", "npy").
    """

    def __init__(self, table: pa.Table | Columns, shards: tuple[ShardRecord, ...], metadata: dict[str, str]) -> None:
        self.shards = shards
        self.metadata = metadata
        self._source: Columns = TableColumns(table) if isinstance(table, pa.Table) else table
        self._names: tuple[str, ...] = tuple(self._source.schema.names)
        self._loaded: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._source.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": {}}

    @property
    def table(self) -> pa.Table:
        """All columns in memory; for millions of utterances, use single columns instead."""
        return self._source.table()

    def row(self, position: int) -> dict[str, Any]:
        """All columns of one utterance as Python values."""
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of an index of {len(self)} utterances")
        return {name: self.values(name)[position].as_py() for name in self._names}

    def column(self, name: str) -> Any:
        """A column: a numpy array [num_utterances] for numbers, a list for text."""
        values = self.values(name)
        return values.to_pylist() if pa.types.is_string(values.type) else np.asarray(values)

    def values(self, name: str) -> Any:
        """A column as an Arrow array: for text, this takes a tenth of the memory of a list.

        Returns:
            An array for numbers, a chunked array for text; both support `[row].as_py()`, slices and `to_pylist()`.
        """
        self._check_name(name)
        if name not in self._loaded:
            column = self._source.load(name)
            if column.num_chunks == 1:
                column = column.chunk(0)
            elif not pa.types.is_string(column.type):  # in one chunk, numpy needs no copy; text may be too long
                column = pa.concat_arrays(column.chunks or [pa.array([], column.type)])
            self._loaded[name] = column
        return self._loaded[name]

    def batches(self, names: Sequence[str] = tuple(SCHEMA.names)) -> Iterator[pa.RecordBatch]:
        """Yield some columns in batches."""
        yield from self._source.batches(names)

    def codes(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        """A text column as integer codes [num_utterances], and the text of each code."""
        self._check_name(name)
        numbers: dict[str, int] = {}
        parts = [np.zeros(0, dtype=np.int64)]
        for batch in self._source.batches([name]):
            encoded = batch.column(0).dictionary_encode()
            known = [numbers.setdefault(value, len(numbers)) for value in encoded.dictionary.to_pylist()]
            parts.append(np.array(known, dtype=np.int64)[np.asarray(encoded.indices)])
        return np.concatenate(parts), list(numbers)

    def _check_name(self, name: str) -> None:
        if name not in self._names:
            raise ShardIndexError(f"the index has no column {name!r}: it has {', '.join(self._names)}")

    @property
    def seconds(self) -> float:
        """Sum of all durations."""
        return float(sum(shard.seconds for shard in self.shards))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content (digests of shards, ids and texts), not of the Parquet file, whose bytes may vary."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(f"{shard.sha256}\n".encode())
        for batch in self._source.batches(["id", "text"]):
            pairs = zip(*(column.to_pylist() for column in batch.columns), strict=True)
            digest.update("".join(f"{json.dumps(pair)}\n" for pair in pairs).encode())
        return digest.hexdigest()

    def validate(self) -> None:
        """Check that the index is consistent.

        Raises:
            ShardIndexError: a wrong schema, a missing value, a duplicate id, a row that points outside its shard, or
                counts and seconds that do not add up.
        """
        schema = self._source.schema
        if not schema.equals(SCHEMA):
            raise ShardIndexError(f"the index has the columns {schema.names} and types, not those of SCHEMA")
        for name in SCHEMA.names:
            if self._source.empty_values(name):
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
        repeated = repeated_texts(
            lambda: (batch.column(0).to_pylist() for batch in self._source.batches(["id"])), len(self)
        )
        if repeated:
            raise ShardIndexError(
                f"utterance ids occur more than once ({', '.join(map(repr, repeated))}): make them unique"
            )

    def _validate_shards(self) -> None:
        counts = np.zeros(len(self.shards), dtype=np.int64)
        seconds = np.zeros(len(self.shards))
        sizes = np.array([record.bytes for record in self.shards], dtype=np.int64)
        for batch in self._source.batches(["shard", "duration", "offset", "length"]):
            shard, duration, offset, length = (column.to_numpy() for column in batch.columns)
            if len(shard) and (shard.min() < 0 or shard.max() >= len(self.shards)):
                raise ShardIndexError(
                    f"a row names shard {shard.max()} of {len(self.shards)}: build the index from its parts again"
                )
            if ((offset < 0) | (length < 0) | (offset + length > sizes[shard])).any():
                raise ShardIndexError("a row points outside its shard: build the index from its parts again")
            # a batch contains rows of only a few of the many shards
            present, place = np.unique(shard, return_inverse=True)
            counts[present] += np.bincount(place)
            seconds[present] += np.bincount(place, weights=duration)
        for record, count, length_s in zip(self.shards, counts.tolist(), seconds.tolist(), strict=True):
            if count != record.count:
                raise ShardIndexError(f"shard {record.name} has {record.count} utterances, the index {count}")
            if not math.isclose(length_s, record.seconds, rel_tol=1e-6, abs_tol=1e-6):
                raise ShardIndexError(f"shard {record.name} has {record.seconds} s, the index {length_s} s")

    def write(self, store: ObjectStore, name: str = INDEX_NAME) -> None:
        """Validate the index and write it; the last step of writing a set of shards.

        Raises:
            ShardIndexError: the index is inconsistent (see `validate`).
        """
        self.validate()
        shards = json.dumps([asdict(shard) for shard in self.shards], sort_keys=True)
        metadata = json.dumps(self.metadata, sort_keys=True)
        write_columns(store, name, self._source, {_SHARDS_KEY: shards.encode(), _METADATA_KEY: metadata.encode()})

    @classmethod
    def read(cls, store: ObjectStore, name: str = INDEX_NAME) -> "ShardIndex":
        """Read and validate an index.

        Raises:
            ObjectMissingError: the index does not exist: the shards are not published.
            ShardIndexError: the object is not an index, or the index is inconsistent.
        """
        url = store.join(name)
        try:
            with readable(url, "is not a shard index"):
                columns = open_columns(store, name)
                shards = tuple(ShardRecord(**entry) for entry in json.loads(columns.metadata[_SHARDS_KEY]))
                metadata = {str(key): str(value) for key, value in json.loads(columns.metadata[_METADATA_KEY]).items()}
                index = cls(columns, shards, metadata)
                index.validate()
        except ShardIndexError as error:
            raise ShardIndexError(f"{url}: {error}. {remedy(url)}.", error.reason) from error
        except DamagedObjectError as error:
            raise ShardIndexError(str(error), error.reason) from error
        return index
