"""Content addressing: where the output of a stage lives, and whether it is complete.

The folder of an output is named by a hash of what it is made from: the stage, the version of its code, its
configuration and the digests of its inputs. So a rerun finds its work done, a change of anything gives another
folder, and two runs that want the same output write the same bytes. An output exists when its `done.json` does.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from storage.objects import ObjectMissingError, ObjectStore

DONE = "done.json"
USES = "uses.json"
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

    def __repr__(self) -> str:
        return f"StageOutput({self.store.url!r})"

    def record(self) -> dict[str, Any] | None:
        """What `publish` wrote, or None while the output is incomplete."""
        try:
            value = self.store.read_json(DONE)
        except ObjectMissingError:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"{self.store.join(DONE)} is not a JSON object: delete it and run the stage again")
        return value

    def uses(self) -> dict[str, list[str]] | None:
        """Stage to keys of the outputs that this one was made from or used with; None where nobody noted it."""
        try:
            value = self.store.read_json(USES)
            return {str(stage): [str(key) for key in keys] for stage, keys in value["uses"].items()}
        except (ObjectMissingError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def note_use(self, uses: Mapping[str, str], day: str) -> None:
        """Notes that a run uses this output today, and what it stands on: `storage.garbage` leaves both alone.

        Args:
            uses: Stage to key of the run's earlier outputs.
            day: The date; a second note of the same day costs no write.
        """
        known = self.uses() or {}
        joined = {stage: sorted({*known.get(stage, ()), key}) for stage, key in uses.items()}
        value = {"day": day, "uses": known | joined}
        try:
            if self.store.read_json(USES) == value:
                return
        except (ObjectMissingError, ValueError):
            pass
        self.store.write_json(USES, value)

    def publish(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Declares the output complete, with `stage` and `key` added to the record; call it last."""
        complete = {**record, "stage": self.stage, "key": self.key}
        self.store.sweep()
        self.store.write_json(DONE, _canonical(complete, "record"))
        return complete

    def clear(self) -> None:
        """Removes the output; its record first, so that no half of it looks complete."""
        self.store.delete(DONE)
        self.store.delete_tree("")
