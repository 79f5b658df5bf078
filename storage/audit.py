"""Looks after a whole object store: does everything that the indexes and records promise exist, and how big is it?

report = verify(store)                    # every shard of every index, by size and SHA-256
report.problems                           # what is missing, damaged or contradicts itself
usage(store)                              # bytes of each stage output
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from storage.index import INDEX_NAME, ShardIndex, ShardIndexError, ShardRecord
from storage.objects import Entry, ObjectMissingError, ObjectStore
from storage.stages import DONE
from storage.union import BESIDE

_INDEX = re.compile(r"(?:^|.*/)index[^/]*\.parquet$")
_OUTPUT = re.compile(r"([a-z][a-z0-9_-]*)/([0-9a-f]{16})/.")
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Problem:
    """An object that is not what it should be."""

    object: str
    """Its name in the store."""
    reason: str
    """What is wrong, and what to do."""


@dataclass
class VerifyReport:
    """What `verify` looked at, and what it found."""

    indexes: int = 0
    shards: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)


def index_names(names: Iterable[str]) -> list[str]:
    """Those names that are indexes of shards: `index.parquet`, and others like `index-fold-1.parquet`."""
    return [name for name in names if _INDEX.match(name)]


def verify(
    store: ObjectStore, *, quick: bool = False, threads: int = 4, on_progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Compares all shards below a store with the indexes that name them, and sets with the records that name those.

    Args:
        store: where to look, at any depth.
        quick: compare sizes only, without reading a shard.
        threads: shards read at once; each takes a few megabytes of memory.
        on_progress: called with shards done and in all.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    report = VerifyReport()
    sizes = {entry.path: entry.size for entry in store.entries()}
    wanted: dict[tuple[str, str], ShardRecord] = {}  # folds name a shard several times
    for name in index_names(sizes):
        for shard, record in _records(store, name, report):
            wanted[shard, record.sha256] = record
    _check_sets(store, sizes, report)

    def check(entry: tuple[tuple[str, str], ShardRecord]) -> Problem | None:
        (name, _), record = entry
        reason = shard_problem(store, name, record, sizes.get(name), quick)
        return Problem(name, reason) if reason else None

    with ThreadPoolExecutor(threads) as pool:
        for done, problem in enumerate(pool.map(check, wanted.items())):
            report.problems += [problem] if problem else []
            if on_progress:
                on_progress(done + 1, len(wanted))
    report.shards, report.bytes = len(wanted), sum(record.bytes for record in wanted.values())
    report.problems.sort(key=lambda problem: problem.object)
    return report


def named_shards(store: ObjectStore, index: str) -> list[tuple[str, ShardRecord]]:
    """Object names, as the store has them, and records of the shards of an index.

    Raises:
        ShardIndexError: the object is no index.
    """
    found = ShardIndex.read(store, index)
    folder = index.rpartition("/")[0]
    if BESIDE in found.metadata:
        folder = folder.rpartition("/")[0]
    return [(f"{folder}/{record.name}".removeprefix("/"), record) for record in found.shards]


def _records(store: ObjectStore, index: str, report: VerifyReport) -> list[tuple[str, ShardRecord]]:
    report.indexes += 1
    try:
        return named_shards(store, index)
    except (ShardIndexError, ObjectMissingError) as error:
        report.problems.append(Problem(index, str(error)))
        return []


def shard_problem(store: ObjectStore, name: str, record: ShardRecord, size: int | None, quick: bool) -> str | None:
    """What is wrong with a shard in a store, read in pieces, or None.

    Args:
        store: the store.
        name: the shard's object name.
        record: what the index says of it.
        size: bytes that the store says it has; None if it does not exist.
        quick: believe the size.
    """
    if size is None:
        return "missing: run the stage that writes it again"
    if size != record.bytes:
        return f"{size} bytes instead of {record.bytes}: delete it with its part file and run its stage again"
    if quick:
        return None
    digest = hashlib.sha256()
    try:
        for start in range(0, size, _CHUNK):
            digest.update(store.read(name, start, min(size, start + _CHUNK)))
    except ObjectMissingError:
        return "it vanished while it was read: is somebody deleting here?"
    if digest.hexdigest() == record.sha256:
        return None
    return "its SHA-256 is not that of the index: delete it with its part file and run its stage again"


def _check_sets(store: ObjectStore, names: Iterable[str], report: VerifyReport) -> None:
    """A record that names sets with digests promises an index with this digest for each."""
    known = set(names)
    for name in sorted(known):
        if not (found := _OUTPUT.match(name)) or name != f"{found[1]}/{found[2]}/{DONE}":
            continue
        try:
            sets = store.read_json(name).get("sets")
        except (ValueError, AttributeError) as error:
            report.problems.append(Problem(name, f"no record of a stage ({error}): delete it and run the stage again"))
            continue
        for which, entry in sets.items() if isinstance(sets, dict) else ():
            index = f"{found[1]}/{found[2]}/{which}/{INDEX_NAME}"
            if isinstance(entry, dict) and "digest" in entry and "bytes" in entry:
                report.problems += _set_problem(store, index, str(entry["digest"]), index in known)


def _set_problem(store: ObjectStore, index: str, digest: str, exists: bool) -> Iterator[Problem]:
    if not exists:
        yield Problem(index, "missing, but the stage's record names it: run the stage again with --from")
        return
    try:
        found = ShardIndex.read(store, index).digest
    except ShardIndexError:
        return  # reported as an unreadable index
    if found != digest:
        yield Problem(index, "its digest is not that of the stage's record: run the stage again with --from")


@dataclass
class Output:
    """The objects of one stage output: everything below `<stage>/<key>`."""

    stage: str
    key: str
    bytes: int = 0
    modified: float = 0.0
    published: bool = False
    objects: list[Entry] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder."""
        return f"{self.stage}/{self.key}"


def usage(store: ObjectStore) -> list[Output]:
    """All stage outputs of a store with their sizes and times, largest first; what has another form is left alone."""
    found: dict[str, Output] = defaultdict(lambda: Output("", ""))
    for entry in store.entries():
        if not (place := _OUTPUT.match(entry.path)):
            continue
        output = found[f"{place[1]}/{place[2]}"]
        output.stage, output.key = place[1], place[2]
        output.bytes += entry.size
        output.modified = max(output.modified, entry.modified)
        output.published |= entry.path == f"{output.name}/{DONE}"
        output.objects.append(entry)
    return sorted(found.values(), key=lambda output: (-output.bytes, output.name))
