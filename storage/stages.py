"""Content addressing of stage outputs, and their completion records.

The folder of an output is named by a hash of the stage, the version of its code, its configuration and the digests of
its inputs. So a rerun finds existing results, any change leads to another folder, and two runs that need the same
output write the same bytes. An output is complete if its record `done.json` exists. The record lists the output's
objects with their sizes and digests, and includes a checksum of itself.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from configurable.files import file_sha256
from storage.intact import DamagedObjectError, damaged, object_sha256, parse_json, readable
from storage.objects import Entry, ObjectMissingError, ObjectStore

DONE = "done.json"
USES = "uses"
"""Folder of an output's usage notes."""
_OBJECTS, _CHECKSUM = "objects", "checksum"
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def _canonical(value: object, where: str) -> object:
    """Convert mappings and sequences to dictionaries and lists; rejects what JSON would change or not support."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}, which is not a string: convert it to one")
        return {key: _canonical(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_canonical(item, f"{where}[{position}]") for position, item in enumerate(value)]
    raise ValueError(
        f"{where} is a {type(value).__name__}, which has no canonical JSON form: convert it to text or numbers"
    )


def digest_json(value: object) -> str:
    """SHA-256 (64 hex digits) of a value's canonical JSON: sorted keys, no spaces, UTF-8.

    Raises:
        ValueError: the value contains types unknown to JSON, a key that is not a string, NaN or infinity.
    """
    plain = _canonical(value, "value")
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def stage_key(stage: str, version: int, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """The address (16 hex digits) of a stage's output.

    Args:
        stage: the stage's name.
        version: version of the stage's code; raise it if the same configuration gives a different output.
        config: everything that affects the output, in JSON's types.
        inputs: digest of each input by name.
    """
    return digest_json({"stage": stage, "version": version, "config": config, "inputs": inputs})[:16]


class Promise(NamedTuple):
    """The size and digest of an object according to a record."""

    bytes: int
    """Its size in bytes."""
    sha256: str
    """Its digest in hex; empty for a shard, whose digest is in its index."""


class StageOutput:
    """The output of a stage: the folder `<stage>/<key>`, complete once it has a record.

    Attributes:
        stage: the stage's name.
        key: the address, from `stage_key`.
        store: object store at the output's folder.
    """

    def __init__(self, store: ObjectStore, stage: str, key: str) -> None:
        for field, text in (("stage", stage), ("key", key)):
            if not _STAGE_NAME.fullmatch(text):
                raise ValueError(f"{field} {text!r} may have letters, digits, '_', '.' and '-' only: rename it")
        self.stage = stage
        self.key = key
        self.store = store.child(f"{stage}/{key}")

    @classmethod
    def at(cls, url: str) -> "StageOutput":
        """The output whose folder `<stage>/<key>` has this URL."""
        store = ObjectStore(url)
        stage, key = store.url.rsplit("/", 2)[1:]
        return cls(store.parent().parent(), stage, key)

    def __repr__(self) -> str:
        return f"StageOutput({self.store.url!r})"

    def record(self) -> dict[str, Any] | None:
        """The record written by `publish`, or None if the output is incomplete.

        Raises:
            DamagedObjectError: the record is damaged.
        """
        record = self._load()
        return None if record is None else {name: value for name, value in record.items() if name != _OBJECTS}

    def _load(self) -> dict[str, Any] | None:
        url = self.store.join(DONE)
        try:
            value = self.store.read_json(DONE)
        except ObjectMissingError:
            return None
        if not isinstance(value, dict) or (value.get("stage"), value.get("key")) != (self.stage, self.key):
            raise damaged(url, "it is not a record of this stage")
        checksum = value.pop(_CHECKSUM, None)
        with readable(url):
            if checksum != digest_json(value):
                raise damaged(url, "its checksum does not match its content")
        return value

    def promised(self) -> dict[str, Promise] | None:
        """The objects listed in the record; None without a record."""
        record = self._load()
        if record is None:
            return None
        return {name: Promise(*entry) for name, entry in record[_OBJECTS].items()}

    def lacking(self) -> list[str]:
        """Names of listed objects that are missing or have another size; needs a single listing of the store."""
        promised = self.promised() or {}
        sizes = {entry.path: entry.size for entry in self.store.entries()} if promised else {}
        return [name for name, promise in promised.items() if sizes.get(name) != promise.bytes]

    def join(self, name: str) -> str:
        """The URL of an object."""
        return self.store.join(name)

    def read(self, name: str) -> bytes:
        """Read an object; verifies its digest if the record lists it.

        Raises:
            DamagedObjectError: it is missing or damaged.
        """
        try:
            data = self.store.read(name)
        except ObjectMissingError as error:
            raise self._damaged(name, "it is missing") from error
        self._compare(name, hashlib.sha256(data).hexdigest())
        return data

    def read_json(self, name: str) -> Any:
        """Read an object's JSON value; verifies it like `read`.

        Raises:
            DamagedObjectError: it is missing or damaged.
        """
        return parse_json(self.join(name), self.read(name))

    def fetch(self, name: str, folder: Path) -> Path:
        """Fetch an object like `ObjectStore.fetch`; verifies it like `read`.

        Raises:
            DamagedObjectError: it is missing or damaged.
        """
        try:
            path = self.store.fetch(name, folder)
        except ObjectMissingError as error:
            raise self._damaged(name, "it is missing") from error
        self._compare(name, file_sha256(path))
        return path

    def _compare(self, name: str, digest: str) -> None:
        promise = (self.promised() or {}).get(name)
        if promise is not None and promise.sha256 not in ("", digest):
            raise self._damaged(name, "its SHA-256 differs from the stage's record")

    def _damaged(self, name: str, reason: str) -> DamagedObjectError:
        return damaged(self.join(name), reason)

    def uses(self) -> dict[str, list[str]] | None:
        """Keys, by stage, of the outputs that this one depends on or was used with; None if unknown."""
        joined: dict[str, set[str]] = {}
        try:
            known = [self.store.read_json(name)["uses"] for name in self.store.list(USES)]
            for uses in known:
                for stage, keys in uses.items():
                    joined.setdefault(str(stage), set()).update([keys] if isinstance(keys, str) else map(str, keys))
        except (ObjectMissingError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return {stage: sorted(joined[stage]) for stage in sorted(joined)} if known else None

    def note_use(self, uses: Mapping[str, str], day: str) -> None:
        """Note that a run uses this output today, and its dependencies; `storage.garbage` then keeps them all.

        Each combination of uses has its own note, so that runs on several machines can write concurrently.

        Args:
            uses: Keys of the run's earlier outputs by stage.
            day: The date; notes that already have this date are not rewritten.
        """
        name = f"{USES}/{digest_json(uses)[:16]}.json"
        value = {"day": day, "uses": dict(uses)}
        try:
            if self.store.read_json(name) == value:
                return
        except (ObjectMissingError, ValueError):
            pass
        self.store.write_json(name, value)

    def publish(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Declare the output complete; call this last.

        The record also gets `stage` and `key`, a list of all present objects, and a checksum.
        """
        complete = {**record, "stage": self.stage, "key": self.key}
        assert not {_OBJECTS, _CHECKSUM} & record.keys()
        self.store.sweep()
        with ThreadPoolExecutor(8) as pool:
            listed = pool.map(self._promise, self._content())
            self._write({**complete, _OBJECTS: {name: list(promise) for name, promise in listed if promise}})
        return complete

    def _write(self, record: dict[str, Any]) -> None:
        self.store.write_json(DONE, {**record, _CHECKSUM: digest_json(record)})

    def _content(self) -> Iterator[Entry]:
        """All objects except the record and the usage notes."""
        for entry in self.store.entries():
            if entry.path != DONE and not entry.path.startswith(f"{USES}/"):
                yield entry

    def _promise(self, entry: Entry) -> tuple[str, Promise | None]:
        if entry.path.endswith(".tar"):
            return entry.path, Promise(entry.size, "")
        try:
            return entry.path, Promise(entry.size, object_sha256(self.store, entry.path, entry.size))
        except ObjectMissingError:  # deleted meanwhile
            return entry.path, None

    def forget(self, names: Sequence[str]) -> None:
        """Remove objects from the record's list, for example before they are deleted as garbage."""
        record = self._load()
        if record is not None and not record[_OBJECTS].keys().isdisjoint(names):
            kept = {name: entry for name, entry in record[_OBJECTS].items() if name not in names}
            self._write({**record, _OBJECTS: kept})

    def withdraw(self) -> None:
        """Delete the record, so that the stage runs again; it reuses intact objects."""
        self.store.delete(DONE)

    def clear(self) -> None:
        """Delete the output, its record first, so that a partially deleted output never looks complete."""
        self.store.delete(DONE)
        self.store.delete_tree("")
