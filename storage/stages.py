"""Content addressing: where the output of a stage lives, and whether it is complete.

The folder of an output is named by a hash of what it is made from: the stage, the version of its code, its
configuration and the digests of its inputs. So a rerun finds its work done, a change of anything gives another
folder, and two runs that want the same output write the same bytes. An output exists when its `done.json` does: the
record, which lists the output's objects with their sizes and digests, and has a checksum of its own.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from storage.intact import DamagedObjectError, damaged, object_sha256, parse_json, readable
from storage.objects import Entry, ObjectMissingError, ObjectStore

DONE = "done.json"
USES = "uses"
"""Folder of the notes of who used an output."""
_JOINT_USES = "uses.json"
"""The one note of all users that earlier versions wrote."""
_OBJECTS, _CHECKSUM = "objects", "checksum"
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def _canonical(value: object, where: str) -> object:
    """Mappings and sequences as plain dictionaries and lists; refuses what JSON would blur or not know."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}, which is no text: JSON would turn it into one silently")
        return {key: _canonical(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_canonical(item, f"{where}[{position}]") for position, item in enumerate(value)]
    raise ValueError(
        f"{where} is a {type(value).__name__}, which has no canonical JSON form: convert it to text or numbers"
    )


def digest_json(value: object) -> str:
    """SHA-256 (64 hex digits) of a value's canonical JSON: sorted keys, no spaces, UTF-8.

    Raises:
        ValueError: the value contains something other than JSON's types, a key that is no text, NaN or infinity.
    """
    plain = _canonical(value, "value")
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def stage_key(stage: str, version: int, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """The address (16 hex digits) of what a stage makes.

    Args:
        stage: the stage's name.
        version: of the stage's code; raise it when the same configuration gives another output.
        config: everything that shapes the output, in JSON's types.
        inputs: name of each input to its digest.
    """
    return digest_json({"stage": stage, "version": version, "config": config, "inputs": inputs})[:16]


class Promise(NamedTuple):
    """What a record says of an object."""

    bytes: int
    """Its size."""
    sha256: str
    """Its digest in hex; empty for a shard, whose digest is in the index."""


class StageOutput:
    """The output of one stage: the store `<stage>/<key>`, complete when it has a record.

    Attributes:
        stage: the stage's name.
        key: the address, from `stage_key`.
        store: where the stage writes its objects.
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
        """The output in the folder `<stage>/<key>` of a store that a URL names."""
        store = ObjectStore(url)
        stage, key = store.url.rsplit("/", 2)[1:]
        return cls(store.parent().parent(), stage, key)

    def __repr__(self) -> str:
        return f"StageOutput({self.store.url!r})"

    def record(self) -> dict[str, Any] | None:
        """What `publish` was given, or None while the output is incomplete.

        Raises:
            DamagedObjectError: there is a record, but not as it was written.
        """
        found = self._load()
        return None if found is None else {name: value for name, value in found.items() if name != _OBJECTS}

    def _load(self) -> dict[str, Any] | None:
        url = self.store.join(DONE)
        try:
            value = self.store.read_json(DONE)
        except ObjectMissingError:
            return None
        if not isinstance(value, dict) or (value.get("stage"), value.get("key")) != (self.stage, self.key):
            raise damaged(url, "it is no record of this stage")
        checksum = value.pop(_CHECKSUM, None)  # records of earlier versions have none
        with readable(url):
            if checksum is not None and checksum != digest_json(value):
                raise damaged(url, "its checksum is not that of its content")
        return value

    def promised(self) -> dict[str, Promise] | None:
        """The objects that the record lists; None without a record, or with one of an earlier version."""
        found = self._load() or {}
        if _OBJECTS not in found:
            return None
        return {name: Promise(*entry) for name, entry in found[_OBJECTS].items()}

    def lacking(self) -> list[str]:
        """Objects that the record lists and that are missing or of another size, by one listing of the store."""
        promised = self.promised() or {}
        sizes = {entry.path: entry.size for entry in self.store.entries()} if promised else {}
        return [name for name, promise in promised.items() if sizes.get(name) != promise.bytes]

    def join(self, name: str) -> str:
        """The URL of an object."""
        return self.store.join(name)

    def read(self, name: str) -> bytes:
        """An object, compared with what the record says of it, if it does.

        Raises:
            DamagedObjectError: it is missing, or not what was written.
        """
        try:
            data = self.store.read(name)
        except ObjectMissingError as error:
            raise self._damaged(name, "it is missing") from error
        self._compare(name, hashlib.sha256(data).hexdigest())
        return data

    def read_json(self, name: str) -> Any:
        """An object's JSON value, compared as in `read`.

        Raises:
            DamagedObjectError: it is missing, or not what was written.
        """
        return parse_json(self.join(name), self.read(name))

    def fetch(self, name: str, folder: Path) -> Path:
        """A local file with an object's content, see `ObjectStore.fetch`, compared as in `read`.

        Raises:
            DamagedObjectError: it is missing, or not what was written.
        """
        try:
            path = self.store.fetch(name, folder)
        except ObjectMissingError as error:
            raise self._damaged(name, "it is missing") from error
        with path.open("rb") as file:
            self._compare(name, hashlib.file_digest(file, "sha256").hexdigest())
        return path

    def _compare(self, name: str, digest: str) -> None:
        promise = (self.promised() or {}).get(name)
        if promise is not None and promise.sha256 not in ("", digest):
            raise self._damaged(name, "its SHA-256 is not that of the stage's record")

    def _damaged(self, name: str, reason: str) -> DamagedObjectError:
        return damaged(self.join(name), reason)

    def uses(self) -> dict[str, list[str]] | None:
        """Stage to keys of the outputs that this one was made from or used with; None where it is not known."""
        joined: dict[str, set[str]] = {}
        try:
            notes = self.store.list(USES)
            known = [self.store.read_json(name)["uses"] for name in notes]
            known += [self.store.read_json(_JOINT_USES)["uses"]] if self.store.exists(_JOINT_USES) else []
            for uses in known:
                for stage, keys in uses.items():
                    joined.setdefault(str(stage), set()).update([keys] if isinstance(keys, str) else map(str, keys))
        except (ObjectMissingError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return {stage: sorted(joined[stage]) for stage in sorted(joined)} if known else None

    def note_use(self, uses: Mapping[str, str], day: str) -> None:
        """Notes that a run uses this output today, and what it stands on: `storage.garbage` leaves both alone.

        Each combination of uses has a note of its own, so that runs on several machines may write at once.

        Args:
            uses: Stage to key of the run's earlier outputs.
            day: The date; a second note of the same day costs no write.
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
        """Declares the output complete; call it last.

        The record is given the `stage` and `key`, a list of all objects that are there now, and a checksum.
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
        """All objects but the record and what others note about the output."""
        for entry in self.store.entries():
            if entry.path not in (DONE, _JOINT_USES) and not entry.path.startswith(f"{USES}/"):
                yield entry

    def _promise(self, entry: Entry) -> tuple[str, Promise | None]:
        if entry.path.endswith(".tar"):
            return entry.path, Promise(entry.size, "")
        try:
            return entry.path, Promise(entry.size, object_sha256(self.store, entry.path, entry.size))
        except ObjectMissingError:  # deleted meanwhile
            return entry.path, None

    def forget(self, names: Sequence[str]) -> None:
        """Takes objects from the record's list, such as those that are about to be deleted as garbage."""
        found = self._load()
        if found is not None and not found.get(_OBJECTS, {}).keys().isdisjoint(names):
            kept = {name: entry for name, entry in found[_OBJECTS].items() if name not in names}
            self._write({**found, _OBJECTS: kept})

    def withdraw(self) -> None:
        """Takes back the record: the stage runs again and keeps what is whole."""
        self.store.delete(DONE)

    def clear(self) -> None:
        """Removes the output; its record first, so that no half of it looks complete."""
        self.store.delete(DONE)
        self.store.delete_tree("")
