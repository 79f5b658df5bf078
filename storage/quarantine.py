"""Quarantine of unreadable shards, so that a run can continue without them.

    quarantine = ShardQuarantine(output.store, total=len(index))
    try:
        data = reader.payload(row)
    except ShardError as error:
        quarantine.add(error, ids)            # raises if too much is lost; otherwise skip the shard's rows

Each shard has one JSON object, written atomically: threads, processes and machines may report the same shard
concurrently without locks. The name of the object is derived from the shard's name, so no shard is counted twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from storage.intact import readable, remedy
from storage.objects import ObjectMissingError, ObjectStore
from storage.reading import ShardError
from storage.shards import member_key

_FOLDER = "damaged-shards"


class TooManyShardsError(ValueError):
    """A larger share of a set is lost than the configuration allows."""


@dataclass(frozen=True)
class QuarantinedShard:
    """A quarantined shard.

    Attributes:
        shard: its object name.
        reason: what is wrong with it.
        utterances: number of utterances in it.
        seconds: sum of their durations.
        sha256: its expected digest.
        ids: ids of the utterances, if known.
    """

    shard: str
    reason: str
    utterances: int
    seconds: float
    sha256: str
    ids: tuple[str, ...] = ()

    def summary(self) -> dict[str, str | int | float]:
        """The entry for records and reports."""
        return {"shard": self.shard, "reason": self.reason, "utterances": self.utterances, "seconds": self.seconds}


class ShardQuarantine:
    """The quarantined shards of one set, as found by one stage or training.

    Args:
        store: where to write, such as a stage's output.
        total: number of utterances in the set.
        limit: share of the utterances that may be lost.
        folder: folder of the objects within the store; one per set.
    """

    def __init__(self, store: ObjectStore, total: int, limit: float = 1.0, folder: str = _FOLDER) -> None:
        if total < 0 or not 0 <= limit <= 1:
            raise ValueError(f"total={total} must not be negative, and limit={limit} is a share from 0 to 1")
        self._store = store.child(folder)
        self._total = total
        self._limit = limit

    def add(self, error: ShardError, ids: Sequence[str] = ()) -> QuarantinedShard:
        """Quarantine a shard; the same shard may be reported repeatedly.

        Args:
            error: the reader's error; re-raised if it names no shard.
            ids: utterances in the shard.

        Raises:
            TooManyShardsError: the limit is exceeded.
        """
        record = error.shard
        if record is None:
            raise error
        entry = QuarantinedShard(record.name, error.reason, record.count, record.seconds, record.sha256, tuple(ids))
        self._store.write_json(f"{member_key(record.name)}.json", asdict(entry))
        self.check()
        return entry

    def entries(self) -> list[QuarantinedShard]:
        """All quarantined shards, sorted by name."""
        shards = []
        for name in self._store.list():
            try:
                value = self._store.read_json(name)
            except ObjectMissingError:  # cleared meanwhile
                continue
            with readable(self._store.join(name)):
                shards.append(QuarantinedShard(**{**value, "ids": tuple(value["ids"])}))
        return sorted(shards, key=lambda entry: entry.shard)

    @property
    def names(self) -> frozenset[str]:
        """Names of the quarantined shards."""
        return frozenset(entry.shard for entry in self.entries())

    def check(self) -> None:
        """Check the share of lost utterances.

        Raises:
            TooManyShardsError: the quarantined shards contain a larger share of the utterances than the limit, or all
                of them.
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
        """Remove all shards, or those given, from the quarantine, for example after they were found intact."""
        if names is None:
            self._store.delete_tree("")
        for name in names or ():
            self._store.delete(f"{member_key(name)}.json")
