"""Manifest and quarantine table of the prepare stage, read and written as streams."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from configurable.wording import printable
from storage.duplicates import equal_labels, text_keys
from storage.objects import ObjectStore
from tasks.dataset.sets import Mask, Sets, values
from tasks.dataset.tables import Row, TableWriter, batches, iter_table

MANIFEST, QUARANTINE = "utterances.parquet", "quarantine.parquet"
CONTENT = ("id", "set", "text", "speaker", "corpus", "domain", "language", "sha256", "duration", "sample_rate")
"""Columns covered by the digest; paths are not, so a corpus that was only moved needs no new shards."""
QUARANTINE_SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "corpus", "stage", "reason", "detail", "audio")])
_DIGEST_ROWS = 4096
_LONGEST_FIELD = 4096


@dataclass(frozen=True)
class Refused:
    """An utterance that cannot be used."""

    id: str
    corpus: str
    stage: str
    reason: str
    detail: str
    audio: str


def refuse(*fields: str) -> Refused:
    """Create a `Refused` with invalid Unicode in its fields escaped, and the middle of long fields left out."""
    return Refused(*(printable(field, _LONGEST_FIELD) for field in fields))


class Quarantine:
    """The table of refused utterances, written as it grows.

    Args:
        path: A local file.
    """

    def __init__(self, path: Path) -> None:
        self._table = TableWriter(path, QUARANTINE_SCHEMA)
        self.reasons: Counter[str] = Counter()
        self.first: Refused | None = None

    def __len__(self) -> int:
        return self._table.count

    def add(self, refused: Refused) -> None:
        """Add an utterance."""
        self.first = self.first or refused
        self.reasons[refused.reason] += 1
        self._table.add(asdict(refused))

    def publish(self, store: ObjectStore) -> None:
        """Close the table and write it to a store."""
        self._table.close()
        store.write_file(QUARANTINE, self._table.path)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Provide an empty folder and remove it at the end; remains of a killed process are removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def first_of_ids(path: Path) -> Mask:
    """Rows of a table that are the first with their id."""
    labels = equal_labels(text_keys(values(path, "id")))
    first: Mask = labels == np.arange(len(labels))
    return first


def rows_at(path: Path, columns: Sequence[str], rows: Mask) -> Iterator[tuple[int, Row]]:
    """Chosen rows of a table, with their row numbers."""
    begin = 0
    for batch in batches(path, columns):
        chosen = rows[begin : begin + batch.num_rows]
        if chosen.any():
            numbers = (np.flatnonzero(chosen) + begin).tolist()
            yield from zip(numbers, batch.filter(pa.array(chosen)).to_pylist(), strict=True)
        begin += batch.num_rows


class _Digest:
    """SHA-256 of rows, independent of how they are batched."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._columns: list[list[Any]] = [[] for _ in CONTENT]

    def add(self, batch: pa.RecordBatch) -> None:
        for name, column in zip(CONTENT, self._columns, strict=True):
            column += batch.column(name).to_pylist()
        whole = len(self._columns[0]) // _DIGEST_ROWS * _DIGEST_ROWS
        for begin in range(0, whole, _DIGEST_ROWS):
            self._update([column[begin : begin + _DIGEST_ROWS] for column in self._columns])
        self._columns = [column[whole:] for column in self._columns]

    def _update(self, columns: list[list[Any]]) -> None:
        self._hash.update(json.dumps(columns).encode() + b"\n")

    def hexdigest(self) -> str:
        self._update(self._columns)
        return self._hash.hexdigest()


def write_manifest(checked: Path, sets: Sets, target: Path, schema: pa.Schema) -> dict[str, Any]:
    """Write the manifest: the used rows of a table of checked utterances, with their sets.

    Args:
        checked: File of the table; its column `set` is replaced.
        sets: Set of each row.
        target: The manifest's local file.
        schema: Columns of the manifest.

    Returns:
        `sets` (utterances and seconds of each), `digest` and `written`, for the stage's record.
    """
    digest, names = _Digest(), pa.array(sets.names, pa.string())
    counts = np.bincount(sets.codes[sets.codes >= 0], minlength=len(sets.names))
    seconds = np.zeros(len(sets.names))
    begin = 0
    with TableWriter(target, schema) as table:
        for batch in batches(checked):
            codes = sets.codes[begin : begin + batch.num_rows]
            begin += batch.num_rows
            used = codes >= 0
            batch, codes = batch.filter(pa.array(used)), codes[used]
            place = batch.schema.get_field_index("set")
            batch = batch.set_column(place, "set", names.take(pa.array(codes)))
            seconds += np.bincount(codes, weights=batch.column("duration").to_numpy(), minlength=len(names))
            digest.add(batch)
            table.add_batch(batch)
    present = sorted((name, i) for i, name in enumerate(sets.names) if counts[i])
    entries = {name: {"utterances": int(counts[i]), "seconds": float(seconds[i])} for name, i in present}
    return {"sets": entries, "digest": digest.hexdigest(), "written": table.count}


def iter_manifest(
    store: ObjectStore, folder: Path, name: str = "", columns: Sequence[str] | None = None
) -> Iterator[Row]:
    """Iterate over the utterances of a prepared corpus, with one batch in memory at a time.

    Args:
        store: The prepare stage's output.
        folder: Local folder for a copy if the store is remote; the caller removes it.
        name: Only utterances of this set; all by default.
        columns: Columns to read; all by default.
    """
    yield from iter_table(store, MANIFEST, folder, columns, {"set": name} if name else None)
