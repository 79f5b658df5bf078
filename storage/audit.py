"""Audits a whole object store: verification and repair by indexes and records, and disk usage.

report = verify(store)                    # shards by their indexes, other objects by their outputs' records
report.problems                           # what is missing, damaged or inconsistent
repair(store, report.problems)            # deletes it with its stage's record: the next run recreates it
usage(store)                              # bytes of each stage output
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from storage.index import INDEX_NAME, ShardIndex, ShardRecord
from storage.intact import DamagedObjectError, check_content, object_sha256
from storage.objects import Entry, ObjectMissingError, ObjectStore
from storage.shards import part_name
from storage.stages import DONE, Promise, StageOutput
from storage.union import BESIDE

_INDEX = re.compile(r"(?:^|.*/)index[^/]*\.parquet$")
_OUTPUT = re.compile(r"([a-z][a-z0-9_-]*)/([0-9a-f]{16})/.")
VANISHED = "it was deleted while it was read: check for other programs that delete objects here"


@dataclass(frozen=True)
class StorageProblem:
    """A missing or damaged object."""

    object: str
    """Name of the object in the store."""
    reason: str
    """What is wrong."""


@dataclass
class VerifyReport:
    """The result of `verify`."""

    indexes: int = 0
    shards: int = 0
    bytes: int = 0
    """Total size of the shards."""
    objects: int = 0
    """Number of other objects, neither shards nor indexes."""
    problems: list[StorageProblem] = field(default_factory=list)


Check = Callable[[], str | None]
"""Returns what is wrong with an object, or None."""


def index_names(names: Iterable[str]) -> list[str]:
    """Select the names of shard indexes, such as `index.parquet` and `index-fold-1.parquet`."""
    return [name for name in names if _INDEX.match(name)]


def verify(
    store: ObjectStore, *, quick: bool = False, threads: int = 4, on_progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Compare all shards in a store with their indexes, and all other objects with the records that list them.

    Objects that no record lists, those of unfinished outputs, are read in the format of their suffix.
    Outputs that are deleted meanwhile are not reported.

    Args:
        store: the store, searched at any depth.
        quick: compare sizes only; read only indexes and records.
        threads: number of objects read concurrently; each takes a few megabytes of memory.
        on_progress: called with the number of checked objects and their total.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    audit = _Audit(store, quick)
    checks = audit.plan()
    with ThreadPoolExecutor(threads) as pool:
        for done, (name, reason) in enumerate(pool.map(lambda entry: (entry[0], entry[1]()), checks)):
            if reason:
                audit.add(name, reason)
            if on_progress:
                on_progress(done + 1, len(checks))
    audit.report.problems = sorted(audit.still_problems(), key=lambda problem: problem.object)
    return audit.report


class _Audit:
    """One audit of a store."""

    def __init__(self, store: ObjectStore, quick: bool) -> None:
        self.store, self.quick = store, quick
        self.report = VerifyReport()
        self.sizes = {entry.path: entry.size for entry in store.entries()}
        self._digests: dict[str, str] = {}
        """Digests of the readable indexes by name."""
        self._found: dict[str, StorageProblem] = {}

    def add(self, name: str, reason: str) -> None:
        """Record a problem; keeps only the first, most informative one for each object."""
        self._found.setdefault(name, StorageProblem(name, reason))

    def still_problems(self) -> list[StorageProblem]:
        """The problems found, except in outputs deleted or withdrawn meanwhile, whose records are deleted first."""
        outputs = {match[0][:-2] for name in self._found if (match := _OUTPUT.match(name))}
        gone = {o for o in outputs if f"{o}/{DONE}" in self.sizes and not self.store.exists(f"{o}/{DONE}")}
        return [problem for name, problem in self._found.items() if "/".join(name.split("/")[:2]) not in gone]

    def plan(self) -> list[tuple[str, Check]]:
        """Read indexes and records; returns the remaining checks."""
        wanted: dict[tuple[str, str], ShardRecord] = {}  # with folds, several indexes name the same shard
        for name in index_names(self.sizes):
            for shard, record in self._records(name):
                wanted[shard, record.sha256] = record
        checks: list[tuple[str, Check]] = []
        for (name, _), record in wanted.items():
            size = self.sizes.get(name)
            checks.append((name, partial(shard_problem, self.store, name, record, size, self.quick)))
        listed = {name for name, _ in wanted}
        for name, promise in self._promises():
            if name not in listed:
                checks.append((name, partial(self._promise_problem, name, promise)))
                listed.add(name)
        self.report.shards, self.report.bytes = len(wanted), sum(record.bytes for record in wanted.values())
        checks += [] if self.quick else [(n, partial(self._content_problem, n)) for n in self._unlisted(listed)]
        self.report.objects += sum(1 for name, _ in checks if not _INDEX.match(name)) - len(wanted)
        return checks

    def _records(self, name: str) -> list[tuple[str, ShardRecord]]:
        self.report.indexes += 1
        try:
            index = ShardIndex.read(self.store, name)
            self._digests[name] = index.digest
            if not self.quick:
                for _ in index.batches():  # read all columns: those not used so far may be damaged, too
                    pass
            return _named(index, name)
        except DamagedObjectError as error:
            self.add(name, error.reason)
        except ObjectMissingError:
            self.add(name, VANISHED)
        return []

    def _promises(self) -> Iterator[tuple[str, Promise]]:
        for name in sorted(self.sizes):
            if not (place := _OUTPUT.match(name)) or name != f"{place[1]}/{place[2]}/{DONE}":
                continue
            output = StageOutput(self.store, place[1], place[2])
            self.report.objects += 1
            try:
                record, promised = output.record(), output.promised()
            except DamagedObjectError as error:
                self.add(name, f"not a valid record of a stage: {error.reason}")
                continue
            sets = (record or {}).get("sets")
            for which, entry in sets.items() if isinstance(sets, dict) else ():
                if isinstance(entry, dict) and "digest" in entry and "bytes" in entry:
                    self._check_set(f"{place[1]}/{place[2]}/{which}/{INDEX_NAME}", str(entry["digest"]))
            yield from ((f"{place[1]}/{place[2]}/{part}", promise) for part, promise in (promised or {}).items())

    def _check_set(self, index: str, digest: str) -> None:
        """Check that the index of a set named in a record exists and has the recorded digest."""
        if index not in self.sizes:
            self.add(index, "missing, but the stage's record names it")
        elif self._digests.get(index, digest) != digest:
            self.add(index, "its digest differs from the stage's record")

    def _promise_problem(self, name: str, promise: Promise) -> str | None:
        size = self.sizes.get(name)
        if size is None:
            return "missing, but the stage's record lists it"
        if size != promise.bytes:
            return f"{size} bytes instead of {promise.bytes}"
        if self.quick or not promise.sha256:
            return None
        return _digest_problem(self.store, name, size, promise.sha256, "the stage's record")

    def _unlisted(self, listed: set[str]) -> list[str]:
        unlisted = [n for n in self.sizes if _OUTPUT.match(n) and n not in listed and not _INDEX.match(n)]
        return [n for n in unlisted if n.count("/") != 2 or not n.endswith(f"/{DONE}")]

    def _content_problem(self, name: str) -> str | None:
        try:
            check_content(self.store, name, self.sizes[name])
        except DamagedObjectError as error:
            return error.reason
        except ObjectMissingError:  # a running stage deletes objects that it no longer needs
            return None
        return None


def named_shards(store: ObjectStore, index: str) -> list[tuple[str, ShardRecord]]:
    """Object names in the store, and records, of the shards of an index.

    Raises:
        ShardIndexError: the object is not an index, or the index is inconsistent.
    """
    return _named(ShardIndex.read(store, index), index)


def _named(shard_index: ShardIndex, index: str) -> list[tuple[str, ShardRecord]]:
    folder = index.rpartition("/")[0]
    if BESIDE in shard_index.metadata:
        folder = folder.rpartition("/")[0]
    return [(f"{folder}/{record.name}".removeprefix("/"), record) for record in shard_index.shards]


def shard_problem(store: ObjectStore, name: str, record: ShardRecord, size: int | None, quick: bool) -> str | None:
    """Check a shard, reading it in pieces; returns what is wrong with it, or None.

    Args:
        store: the store.
        name: the shard's object name.
        record: its record in the index.
        size: its size in the store in bytes; None if it does not exist.
        quick: compare only the size.
    """
    if size is None:
        return "missing"
    if size != record.bytes:
        return f"{size} bytes instead of {record.bytes}"
    return None if quick else _digest_problem(store, name, size, record.sha256, "the index")


def _digest_problem(store: ObjectStore, name: str, size: int, digest: str, whose: str) -> str | None:
    try:
        actual = object_sha256(store, name, size)
    except ObjectMissingError:
        return VANISHED
    return None if actual == digest else f"its SHA-256 differs from {whose}"


@dataclass
class Repair:
    """The result of `repair`."""

    deleted: list[str] = field(default_factory=list)
    """Deleted objects: damaged ones, and the part files of damaged shards."""
    outputs: list[str] = field(default_factory=list)
    """Stage outputs (`<stage>/<key>`) that are now incomplete; the next run of their pipeline completes them."""
    left: list[StorageProblem] = field(default_factory=list)
    """What could not be repaired, and why."""


def repair(
    store: ObjectStore,
    problems: Iterable[StorageProblem],
    lock: Callable[[str, str], AbstractContextManager[object]] = lambda stage, key: nullcontext(),
) -> Repair:
    """Delete damaged objects and the records of their outputs, so that the next run recreates them.

    Outputs that depend on a damaged one are kept: readers verify digests, so they were not made from damaged data, and
    if a recreated output differs, its dependents get new addresses.

    Args:
        store: the store.
        problems: from `verify`.
        lock: keeps stages of this machine from writing the output (stage, key) meanwhile; may raise `TimeoutError` if
            one is writing it.
    """
    done = Repair()
    by_output: dict[tuple[str, str], list[StorageProblem]] = defaultdict(list)
    for problem in problems:
        if place := _OUTPUT.match(problem.object):
            by_output[place[1], place[2]].append(problem)
        else:
            done.left.append(
                StorageProblem(problem.object, "not part of a stage's output: delete and recreate it by hand")
            )
    for (stage, key), group in sorted(by_output.items()):
        try:
            with lock(stage, key):
                StageOutput(store, stage, key).withdraw()  # first: an incomplete output must not look complete
                for problem in group:
                    done.deleted += _delete(store, problem.object)
            done.outputs.append(f"{stage}/{key}")
        except TimeoutError:
            done.left += [StorageProblem(problem.object, "a stage is writing it: repair it later") for problem in group]
    return done


def _delete(store: ObjectStore, name: str) -> list[str]:
    """Delete an object, and for a shard its part file, which marks it finished; returns the deleted names."""
    folder, slash, last = name.rpartition("/")
    names = [name, f"{folder}{slash}{part_name(last)}"] if name.endswith(".tar") else [name]
    present = [object_name for object_name in names if store.exists(object_name)]
    for object_name in reversed(present):
        store.delete(object_name)
    return present


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
        """The output's folder."""
        return f"{self.stage}/{self.key}"


def usage(store: ObjectStore) -> list[Output]:
    """All stage outputs of a store with their sizes and times, largest first; ignores other objects."""
    outputs: dict[str, Output] = defaultdict(lambda: Output("", ""))
    for entry in store.entries():
        if not (place := _OUTPUT.match(entry.path)):
            continue
        output = outputs[f"{place[1]}/{place[2]}"]
        output.stage, output.key = place[1], place[2]
        output.bytes += entry.size
        output.modified = max(output.modified, entry.modified)
        output.published |= entry.path == f"{output.name}/{DONE}"
        output.objects.append(entry)
    return sorted(outputs.values(), key=lambda output: (-output.bytes, output.name))
