"""Outputs in an object store that are no longer needed: found first, deleted only when asked.

Garbage is what killed stages have left unfinished, shards that no index names, and, on request, finished outputs that
no registered model comes from. Never garbage is what a stage is just making, what has changed within an age limit (on
on any machine), and what any of these or a registered model stands on, by the notes that runs leave (`uses/`).
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
        bytes: what it takes.
        why: why it is not needed.
        objects: the names to delete; empty for the whole folder.
        modified: time of its last change when it was judged.
    """

    name: str
    bytes: int
    why: str
    objects: tuple[str, ...] = ()
    modified: float = 0.0


@dataclass
class GarbagePlan:
    """What may go.

    Attributes:
        garbage: what is not needed.
        kept: why each of the other outputs stays.
        bytes: sum of the garbage.
    """

    garbage: list[Garbage] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """What deleting it frees."""
        return sum(entry.bytes for entry in self.garbage)


def plan_garbage(
    store: ObjectStore,
    *,
    now: float,
    min_age_s: float,
    in_use: Callable[[str, str], bool] = lambda stage, key: False,
    registered: Collection[str] | None = None,
) -> GarbagePlan:
    """Finds what is not needed; deletes nothing.

    Args:
        store: the store of all stage outputs.
        now: the time, s since 1970.
        min_age_s: what has changed since is left alone, with all that it stands on: another machine may use it.
        in_use: whether a stage of this machine is making the output (stage, key).
        registered: outputs (`register/<key>`) that registered models come from; finished outputs that none of them
            stands on are garbage, too. None keeps every finished output.
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
            reason = "no registered model comes from it"
            plan.garbage.append(Garbage(name, output.bytes, reason, modified=output.modified))
        else:
            kept[name] = "finished" if registered is None else "finished; some kept output does not say what it uses"
    young = {name for name, output in outputs.items() if output.modified > now - min_age_s}
    finished = [o for o in outputs.values() if o.published and o.name in kept and o.name not in young]
    plan.garbage += _unnamed_shards(store, [o for o in finished if not in_use(o.stage, o.key)])
    plan.garbage.sort(key=lambda entry: (-entry.bytes, entry.name))
    return plan


def _why_kept(
    output: Output, limit: float, in_use: Callable[[str, str], bool], registered: Collection[str]
) -> str | None:
    if in_use(output.stage, output.key):
        return "a stage is making it"
    if output.modified > limit:
        return "changed or used lately"
    return "a registered model" if output.name in registered else None


def _made_from(store: ObjectStore, outputs: Collection[str], registered: Collection[str]) -> list[str]:
    """Outputs, such as reports, that were made from those of registered models."""

    def used(name: str) -> set[str]:
        uses = StageOutput(store, *name.split("/")).uses() or {}
        return {f"{stage}/{key}" for stage, keys in uses.items() for key in keys}

    return [name for name in outputs if registered and used(name) & set(registered)]


def _add_foundations(store: ObjectStore, kept: dict[str, str], outputs: Collection[str]) -> bool:
    """Adds what the kept outputs stand on; returns whether all of them say what that is."""
    complete, pending = True, list(kept)
    while pending:
        name = pending.pop()
        uses = StageOutput(store, *name.split("/")).uses()
        complete &= uses is not None
        for stage, keys in (uses or {}).items():
            for used in (f"{stage}/{key}" for key in keys):
                if used in outputs and used not in kept:
                    kept[used] = f"{name} stands on it"
                    pending.append(used)
    return complete


def _unnamed_shards(store: ObjectStore, outputs: Iterable[Output]) -> list[Garbage]:
    """Tars, with their part files, that no index beside or above them names."""
    found = []
    for output in outputs:
        sizes = {entry.path: entry.size for entry in output.objects}
        tars = {name for name in sizes if name.endswith(".tar")}
        try:
            indexes = index_names(sizes) if tars else []
            named = {shard for index in indexes for shard, _ in named_shards(store, index)}
        except (DamagedObjectError, ObjectMissingError):
            continue  # a damaged index is a matter for `verify`; nothing is deleted for its sake
        places = {index.rpartition("/")[0] for index in indexes}
        # where no index is, it is missing: a matter for `verify`, too
        extra = sorted(name for name in tars - named if any(name.startswith(f"{place}/") for place in places))
        folders = [name.rpartition("/") for name in extra]
        extra += [part for folder, _, tar in folders if (part := f"{folder}/parts/{tar}.json") in sizes]
        if extra:
            reason = f"{len(folders)} shard{'s' if len(folders) > 1 else ''} that no index names"
            size = sum(sizes[name] for name in extra)
            found.append(Garbage(output.name, size, reason, tuple(extra), output.modified))
    return found


def collect(
    store: ObjectStore,
    garbage: Iterable[Garbage],
    lock: Callable[[str, str], AbstractContextManager[object]] = lambda stage, key: nullcontext(),
) -> list[Garbage]:
    """Deletes garbage, each entry under its output's lock and only if nothing has changed since it was judged.

    Args:
        store: the store.
        garbage: from `plan_garbage`.
        lock: keeps stages of this machine from making the output (stage, key) meanwhile; may raise `TimeoutError`
            where one is at it.

    Returns:
        What was deleted.
    """
    deleted = []
    for entry in garbage:
        stage, key = entry.name.split("/")
        try:
            with lock(stage, key):
                if max((e.modified for e in store.entries(entry.name)), default=0.0) > entry.modified:
                    continue  # somebody has taken it up again
                output = StageOutput(store, stage, key)
                if entry.objects:
                    output.forget([name.removeprefix(f"{entry.name}/") for name in entry.objects])
                    for name in entry.objects:
                        store.delete(name)
                else:
                    output.clear()
        except (TimeoutError, DamagedObjectError):  # a damaged record is a matter for `verify`
            continue
        deleted.append(entry)
    return deleted
