"""Shards that cannot be read, set aside so that a run can go on with the others.

    quarantine = ShardQuarantine(output.store, total=len(index))
    try:
        data = reader.payload(row)
    except ShardError as error:
        quarantine.add(error, ids)            # raises when it is too much; else leave the shard's rows out

One JSON object per shard, written whole: threads, processes and machines may report the same shard at once, and no
lock is needed. The name of the object follows from the shard's, so nothing is counted twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from storage.intact import readable, remedy
from storage.objects import ObjectMissingError, ObjectStore
from storage.reading import ShardError
from storage.shards import member_key

_FOLDER = "damaged-shards"


class TooManyShardsError(ValueError):
    """More of a set has been lost with its shards than the configuration allows."""


@dataclass(frozen=True)
class QuarantinedShard:
    """A shard that was set aside.

    Attributes:
        shard: its object name.
        reason: what is wrong with it.
        utterances: how many were in it.
        seconds: sum of their durations.
        sha256: digest that it should have.
        ids: the utterances, where the reporter knew them.
    """

    shard: str
    reason: str
    utterances: int
    seconds: float
    sha256: str
    ids: tuple[str, ...] = ()

    def summary(self) -> dict[str, str | int | float]:
        """What records and reports say of it."""
        return {"shard": self.shard, "reason": self.reason, "utterances": self.utterances, "seconds": self.seconds}


class ShardQuarantine:
    """The quarantined shards of one set, as one stage or training found them.

    Args:
        store: where the finder writes, such as a stage's output.
        total: utterances of the whole set.
        limit: share of them that may be lost.
        folder: where the objects go below the store; one per set.
    """

    def __init__(self, store: ObjectStore, total: int, limit: float = 1.0, folder: str = _FOLDER) -> None:
        if total < 0 or not 0 <= limit <= 1:
            raise ValueError(f"total={total} must not be negative, and limit={limit} is a share from 0 to 1")
        self._store = store.child(folder)
        self._total = total
        self._limit = limit

    def add(self, error: ShardError, ids: Sequence[str] = ()) -> QuarantinedShard:
        """Sets a shard aside; the same shard may be reported again.

        Args:
            error: what the reader raised; an error that names no shard is raised again.
            ids: utterances in the shard.

        Raises:
            TooManyShardsError: with this shard more than the limit is lost.
        """
        record = error.shard
        if record is None:
            raise error
        entry = QuarantinedShard(record.name, error.reason, record.count, record.seconds, record.sha256, tuple(ids))
        self._store.write_json(f"{member_key(record.name)}.json", asdict(entry))
        self.check()
        return entry

    def entries(self) -> list[QuarantinedShard]:
        """All shards that were set aside, by name."""
        found = []
        for name in self._store.list():
            try:
                value = self._store.read_json(name)
            except ObjectMissingError:  # cleared meanwhile
                continue
            with readable(self._store.join(name)):
                found.append(QuarantinedShard(**{**value, "ids": tuple(value["ids"])}))
        return sorted(found, key=lambda entry: entry.shard)

    @property
    def names(self) -> frozenset[str]:
        """Names of the shards."""
        return frozenset(entry.shard for entry in self.entries())

    def check(self) -> None:
        """Raises an error if too much is lost.

        Raises:
            TooManyShardsError: the shards hold a larger share of the utterances than the limit.
        """
        entries = self.entries()
        lost = sum(entry.utterances for entry in entries)
        if lost > self._limit * self._total or lost == self._total > 0:
            listed = "; ".join(f"{entry.shard}: {entry.reason}" for entry in entries[:3])
            raise TooManyShardsError(
                f"{lost} of {self._total} utterances are lost with {len(entries)} damaged shards, more than the share "
                f"of {self._limit:g} that is allowed ({listed}{'; …' if len(entries) > 3 else ''}). "
                f"{remedy(self._store.url)}. Or allow more."
            )

    def clear(self, names: Iterable[str] | None = None) -> None:
        """Forgets all shards, or those given: they have been found whole."""
        if names is None:
            self._store.delete_tree("")
        for name in names or ():
            self._store.delete(f"{member_key(name)}.json")
