"""Garbage collection of stage outputs in an object store: planned first, deleted in a separate step.

Garbage is unfinished outputs of killed stages, shards that no index names, and, on request, finished outputs on which
no registered model depends. Never garbage are outputs that a stage is writing, outputs that changed (on any machine)
within an age limit, registered models, and the dependencies of all these according to the runs' usage notes (`uses/`).
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from storage.audit import Output, index_names, named_shards, usage
from storage.intact import DamagedObjectError
from storage.objects import ObjectMissingError, ObjectStore
from storage.stages import StageOutput


@dataclass(frozen=True)
class Garbage:
    """Something to delete: a whole stage output, or some of its objects.

    Attributes:
        name: the output's folder.
        bytes: its size.
        why: why it is not needed.
        objects: names of the objects to delete; empty for the whole folder.
        modified: time of its last change when the plan was made.
    """

    name: str
    bytes: int
    why: str
    objects: tuple[str, ...] = ()
    modified: float = 0.0


@dataclass
class GarbagePlan:
    """What can be deleted.

    Attributes:
        garbage: what is no longer needed.
        kept: for each other output, the reason to keep it.
        bytes: total size of the garbage.
    """

    garbage: list[Garbage] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes freed by deleting the garbage."""
        return sum(entry.bytes for entry in self.garbage)


def plan_garbage(
    store: ObjectStore,
    *,
    now: float,
    min_age_s: float,
    in_use: Callable[[str, str], bool] = lambda stage, key: False,
    registered: Collection[str] | None = None,
) -> GarbagePlan:
    """Find what is no longer needed; deletes nothing.

    Args:
        store: the store of all stage outputs.
        now: the current time in seconds since 1970.
        min_age_s: outputs that changed more recently are kept with their dependencies: another machine may use them.
        in_use: whether a stage of this machine is writing the output (stage, key).
        registered: outputs (`register/<key>`) of registered models; finished outputs on which none of them depends are
            garbage, too. None keeps every finished output.
    """
    outputs = {output.name: output for output in usage(store)}
    kept = {
        name: reason
        for name, output in outputs.items()
        if (reason := _why_kept(output, now - min_age_s, in_use, registered or ()))
    }
    kept |= dict.fromkeys(_made_from(store, set(outputs) - set(kept), registered or ()), "of a registered model")
    complete = _add_foundations(store, kept, outputs)
    plan = GarbagePlan(kept=kept)
    for name, output in outputs.items():
        if name in kept:
            continue
        if not output.published:
            plan.garbage.append(Garbage(name, output.bytes, "never finished", modified=output.modified))
        elif registered is not None and complete:
            reason = "no registered model depends on it"
            plan.garbage.append(Garbage(name, output.bytes, reason, modified=output.modified))
        else:
            kept[name] = "finished" if registered is None else "finished; not all dependencies are known"
    young = {name for name, output in outputs.items() if output.modified > now - min_age_s}
    finished = [o for o in outputs.values() if o.published and o.name in kept and o.name not in young]
    plan.garbage += _unnamed_shards(store, [o for o in finished if not in_use(o.stage, o.key)])
    plan.garbage.sort(key=lambda entry: (-entry.bytes, entry.name))
    return plan


def _why_kept(
    output: Output, limit: float, in_use: Callable[[str, str], bool], registered: Collection[str]
) -> str | None:
    if in_use(output.stage, output.key):
        return "a stage is writing it"
    if output.modified > limit:
        return "changed or used recently"
    return "a registered model" if output.name in registered else None


def _made_from(store: ObjectStore, outputs: Collection[str], registered: Collection[str]) -> list[str]:
    """Outputs, such as reports, that depend on registered models."""

    def used(name: str) -> set[str]:
        uses = StageOutput(store, *name.split("/")).uses() or {}
        return {f"{stage}/{key}" for stage, keys in uses.items() for key in keys}

    return [name for name in outputs if registered and used(name) & set(registered)]


def _add_foundations(store: ObjectStore, kept: dict[str, str], outputs: Collection[str]) -> bool:
    """Add the dependencies of kept outputs; returns whether the dependencies of all of them are known."""
    complete, pending = True, list(kept)
    while pending:
        name = pending.pop()
        uses = StageOutput(store, *name.split("/")).uses()
        complete &= uses is not None
        for stage, keys in (uses or {}).items():
            for used in (f"{stage}/{key}" for key in keys):
                if used in outputs and used not in kept:
                    kept[used] = f"{name} depends on it"
                    pending.append(used)
    return complete


def _unnamed_shards(store: ObjectStore, outputs: Iterable[Output]) -> list[Garbage]:
    """Tars that no index in their folder or above names, with their part files."""
    unnamed = []
    for output in outputs:
        sizes = {entry.path: entry.size for entry in output.objects}
        tars = {name for name in sizes if name.endswith(".tar")}
        try:
            indexes = index_names(sizes) if tars else []
            named = {shard for index in indexes for shard, _ in named_shards(store, index)}
        except (DamagedObjectError, ObjectMissingError):
            continue  # `verify` handles damaged indexes; delete nothing here
        places = {index.rpartition("/")[0] for index in indexes}
        # folders whose index is missing are left to `verify`, too
        extra = sorted(name for name in tars - named if any(name.startswith(f"{place}/") for place in places))
        folders = [name.rpartition("/") for name in extra]
        extra += [part for folder, _, tar in folders if (part := f"{folder}/parts/{tar}.json") in sizes]
        if extra:
            reason = f"{len(folders)} shard{'s' if len(folders) > 1 else ''} that no index names"
            size = sum(sizes[name] for name in extra)
            unnamed.append(Garbage(output.name, size, reason, tuple(extra), output.modified))
    return unnamed


def collect(
    store: ObjectStore,
    garbage: Iterable[Garbage],
    lock: Callable[[str, str], AbstractContextManager[object]] = lambda stage, key: nullcontext(),
) -> list[Garbage]:
    """Delete garbage, each entry under its output's lock and only if it has not changed since the plan was made.

    Args:
        store: the store.
        garbage: from `plan_garbage`.
        lock: keeps stages of this machine from writing the output (stage, key) meanwhile; may raise `TimeoutError` if
            one is writing it.

    Returns:
        The deleted entries.
    """
    deleted = []
    for entry in garbage:
        stage, key = entry.name.split("/")
        try:
            with lock(stage, key):
                if max((e.modified for e in store.entries(entry.name)), default=0.0) > entry.modified:
                    continue  # in use again
                output = StageOutput(store, stage, key)
                if entry.objects:
                    output.forget([name.removeprefix(f"{entry.name}/") for name in entry.objects])
                    for name in entry.objects:
                        store.delete(name)
                else:
                    output.clear()
        except (TimeoutError, DamagedObjectError):  # `verify` handles damaged records
            continue
        deleted.append(entry)
    return deleted
