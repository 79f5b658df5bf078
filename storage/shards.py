"""Writes WebDataset shards: plain tars with `<id>.json` and `<id>.<payload>` for each utterance.

The same samples give the same bytes: a tar contains no times or owners, and the order of members is fixed. A shard is
finished when its part file `parts/<name>.json` exists, which is written after the tar. A resumed stage calls
`load_part` for each shard, writes the missing ones, and joins all parts into the index.
"""

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa

from storage.columns import collect_columns
from storage.index import SCHEMA, ShardIndex, ShardRecord
from storage.objects import ObjectMissingError, ObjectStore
from storage.retries import explain
from storage.safety import ALLOWED_SUFFIXES

_NUMBER_COLUMNS = ("duration", "num_frames", "sample_rate")
_TEXT_COLUMNS = ("text", "speaker", "corpus", "domain", "language")
_MAX_ENCODED_ID = 240  # with the suffix, a member name stays within the 255 bytes that file systems allow
_PIECE = 1 << 20
"""Bytes of a tar that are written at once."""
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class ShardWriteError(ValueError):
    """A sample or a name that cannot be written to a shard."""


def shard_name(number: int) -> str:
    """Name of a shard in its set's folder."""
    return f"shard-{number:06d}.tar"


@dataclass(frozen=True)
class Sample:
    """One utterance to be written.

    Attributes:
        id: unique in the corpus; any text of up to 240 bytes (after escaping).
        members: contents by suffix; must include the payload. `json` is created from `row` if absent.
        row: the index's columns (`duration`, `num_frames`, `sample_rate`, and `text`, `speaker`, `corpus`, `domain`,
            `language`, which default to ""), and further fields of the JSON member.
    """

    id: str
    members: Mapping[str, bytes]
    row: Mapping[str, Any]


@dataclass(frozen=True)
class ShardPart:
    """A finished shard: its record, its rows of the index (all columns except `shard`), and the payload's suffix."""

    record: ShardRecord
    rows: list[dict[str, Any]] = field(repr=False)
    payload: str = ""


def member_key(utterance_id: str) -> str:
    """Encode an utterance id for member names.

    WebDataset uses everything before the first dot of the base name as the key, so every character outside
    `[A-Za-z0-9_-]`, including dots and slashes, is percent-encoded (as UTF-8). Different ids give different keys.

    Raises:
        ShardWriteError: the id is empty, too long, not encodable, or has control characters.
    """
    if not utterance_id or any(ord(character) < 32 for character in utterance_id):
        raise ShardWriteError(f"utterance id {utterance_id!r} is empty or has control characters: give it another id")
    try:
        key = "".join(chr(b) if chr(b) in _PLAIN else f"%{b:02X}" for b in utterance_id.encode())
    except UnicodeEncodeError as error:
        raise ShardWriteError(f"utterance id {utterance_id!r} is not valid Unicode: give it another id") from error
    if len(key) > _MAX_ENCODED_ID:
        raise ShardWriteError(
            f"utterance id {utterance_id[:60]!r}... is longer than {_MAX_ENCODED_ID} bytes: shorten it"
        )
    return key


class _HashedFile:
    """The file of a tar: computes its digest and size, and names the object in write errors.

    Data are collected and written in large pieces: tarfile writes each header and each padding by itself.
    """

    def __init__(self, file: BinaryIO, url: str) -> None:
        self._descriptor, self._url = file.fileno(), url
        self._digest = hashlib.sha256()
        self._pending = bytearray()
        self.discarded = False
        self.size = 0

    def write(self, data: bytes) -> int:
        """Take data; ignores them once the tar is discarded, because tarfile still writes the end on deletion."""
        if not self.discarded:
            self._pending += data
            self.size += len(data)
            if len(self._pending) >= _PIECE:
                self.flush()
        return len(data)

    def flush(self) -> None:
        """Write what was taken.

        Raises:
            ObjectStoreError: The disk is full, or the like; the message names the object.
        """
        data, self._pending = self._pending, bytearray()
        self._digest.update(data)
        try:
            view = memoryview(data)
            while view:  # a write may be partial
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise explain(error, self._url) from error

    @property
    def sha256(self) -> str:
        """Digest of the written data in hex."""
        return self._digest.hexdigest()


class _Tar:
    """A tar with fixed times, owners and modes, so that the same samples give the same bytes."""

    def __init__(self, file: _HashedFile) -> None:
        from webdataset.writer import TarWriter  # imports torch, which readers of indexes do not need

        self._file = file
        self._writer = TarWriter(file, user="", group="", mode=0o644, mtime=0, encoder=False, format="PAX_FORMAT")

    def add(self, key: str, suffix: str, data: bytes) -> int:
        """Append a member; returns the offset of its data."""
        self._writer.write({"__key__": key, suffix: data})
        return int(self._writer.tarstream.offset) - len(data) - (-len(data) % tarfile.BLOCKSIZE)

    def __enter__(self) -> "_Tar":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Finish the tar; after an error, discard it."""
        try:
            if kind is None:
                self._writer.close()
                self._file.flush()
        finally:
            self._file.discarded = True


def write_shard(store: ObjectStore, name: str, samples: Iterable[Sample], payload: str) -> ShardPart:
    """Write a shard and then its part file, without which the shard does not count as finished.

    Args:
        store: the store of the shard.
        name: object name of the tar; must end in ".tar".
        samples: consumed one by one, never all in memory; may be empty.
        payload: suffix of the members that the index refers to, such as "flac" or "npy".

    Raises:
        ShardWriteError: the name, the payload's suffix or a sample is not usable; the message names it.
    """
    if not re.search(r"[^/]\.tar$", name):
        raise ShardWriteError(f"shard name {name!r} must end in '.tar': rename it")
    if payload not in ALLOWED_SUFFIXES - {"json"}:
        raise ShardWriteError(
            f"payload suffix {payload!r} is not one of {', '.join(sorted(ALLOWED_SUFFIXES - {'json'}))}"
        )
    store.delete(part_name(name))
    rows: dict[str, dict[str, Any]] = {}
    with store.create(name) as raw:
        file = _HashedFile(raw, store.join(name))
        with _Tar(file) as tar:
            for sample in samples:
                if sample.id in rows:
                    raise ShardWriteError(f"shard {name}: utterance id {sample.id!r} occurs twice: make ids unique")
                rows[sample.id] = _add_sample(tar, sample, payload)
    seconds = sum(row["duration"] for row in rows.values())
    part = ShardPart(ShardRecord(name, len(rows), seconds, file.size, file.sha256), list(rows.values()), payload)
    value = {"record": asdict(part.record), "rows": part.rows, "payload": payload}
    # not indented: indented JSON is ten times slower to write, and only programs read this file
    store.write(part_name(name), json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False).encode())
    return part


def _add_sample(tar: _Tar, sample: Sample, payload: str) -> dict[str, Any]:
    row = _index_row(sample)
    members = {"json": _row_json(sample), **sample.members}
    if payload not in members:
        raise ShardWriteError(f"utterance {sample.id!r} has no member {payload!r}: add it, or name another payload")
    unknown = sorted(members.keys() - ALLOWED_SUFFIXES)
    if unknown:
        raise ShardWriteError(f"utterance {sample.id!r} has a member {unknown[0]!r}, which readers reject: remove it")
    key = member_key(sample.id)
    for suffix in ("json", payload, *sorted(members.keys() - {"json", payload})):
        offset = tar.add(key, suffix, members[suffix])
        if suffix == payload:
            row["offset"], row["length"] = offset, len(members[suffix])
    return row


def _row_json(sample: Sample) -> bytes:
    try:
        text = json.dumps({**sample.row, "id": sample.id}, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise ShardWriteError(f"utterance {sample.id!r}: its row is not JSON ({error}): convert its values") from error


def _index_row(sample: Sample) -> dict[str, Any]:
    row: dict[str, Any] = {"id": sample.id}
    for column in _NUMBER_COLUMNS:
        value = sample.row.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ShardWriteError(f"utterance {sample.id!r}: {column} is {value!r}: it must be a number of at least 0")
        row[column] = float(value) if column == "duration" else int(value)
    for column in _TEXT_COLUMNS:
        value = sample.row.get(column, "")
        if not isinstance(value, str):
            raise ShardWriteError(f"utterance {sample.id!r}: {column} is {value!r}: it must be text")
        row[column] = value
    return row


def part_name(name: str) -> str:
    """Object name of the part file of a shard."""
    return f"parts/{name}.json"


def load_part(store: ObjectStore, name: str) -> ShardPart | None:
    """Load the part of a finished shard; None if the shard must be written (again)."""
    try:
        value = store.read_json(part_name(name))
        record = ShardRecord(**value["record"])
        part = ShardPart(record, list(value["rows"]), str(value["payload"]))
        whole = record.name == name and len(part.rows) == record.count and store.size(name) == record.bytes
    except (ObjectMissingError, KeyError, TypeError, ValueError):
        return None
    return part if whole else None


def build_index(parts: Iterable[ShardPart], metadata: Mapping[str, str]) -> ShardIndex:
    """Join parts, in the given order, into an index; leaves out shards without utterances.

    Args:
        parts: parts of all shards of the set; consumed one by one, so they need not be in memory together.
        metadata: text values to store with the index; `payload` is taken from the parts unless given.

    Raises:
        ShardIndexError: the index is inconsistent (see `ShardIndex.validate`).
        ShardWriteError: the payloads of the parts differ.
    """
    records: list[ShardRecord] = []
    payloads: set[str] = set()

    def tables() -> Iterator[pa.Table]:
        for part in parts:
            payloads.update({part.payload} - {""})
            if part.record.count:
                yield _part_table(part, len(records))
                records.append(part.record)

    columns = collect_columns(tables(), SCHEMA)
    if len(payloads) > 1:
        raise ShardWriteError(f"the parts have different payloads ({', '.join(sorted(payloads))}): index each alone")
    payload = {"payload": next(iter(payloads))} if payloads else {}
    index = ShardIndex(columns, tuple(records), {**payload, **metadata})
    index.validate()
    return index


def _part_table(part: ShardPart, position: int) -> pa.Table:
    columns = {name: pa.array([row[name] for row in part.rows], SCHEMA.field(name).type) for name in part.rows[0]}
    columns["shard"] = pa.array([position] * len(part.rows), pa.int32())
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)
