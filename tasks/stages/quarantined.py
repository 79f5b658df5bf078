"""What a stage has quarantined: fields of its record, and lines with the reasons, first names, and where all are."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NotRequired

from configurable.wording import counted
from storage.intact import DamagedObjectError
from storage.quarantine import QuarantinedShard
from storage.stages import DONE, StageOutput
from tasks.dataset.manifest import QUARANTINE
from tasks.dataset.tables import batches
from tasks.stages.base import Run, StageError, StageRecord
from tasks.stages.sources import EXAMPLES

_TAGS = 8
"""Kinds of tags and of files that are named."""


class QuarantineError(StageError):
    """The share of unusable utterances is larger than the configuration allows."""


class DamageRecord(StageRecord):
    """What the record of a stage that reads shards has besides: the damaged ones, if there are any."""

    quarantined_shards: NotRequired[list[dict[str, Any]]]
    """Name, number of utterances, and reason of each."""


def add_damaged(record: DamageRecord, damaged: list[QuarantinedShard]) -> None:
    """Note damaged shards in a stage's record, and count their utterances; nothing if there are none."""
    if damaged:
        lost = record["counts"].get("quarantined", 0) + sum(entry.utterances for entry in damaged)
        record["counts"] = record["counts"] | {"quarantined": lost}
        record["quarantined_shards"] = [entry.summary() for entry in damaged]


def found_whole(run: Run, record: dict[str, Any]) -> bool:
    """Whether a record has no damaged shards; otherwise the stage runs again, since they may have been repaired."""
    return not record.get("quarantined_shards")


def examples_text(examples: Iterable[tuple[str, str]], count: int) -> str:
    """The first of many refused entries.

    Args:
        examples: Name and detail of the first ones.
        count: Number of all.
    """
    named = [f"{name} ({detail})" if detail else name for name, detail in islice(examples, EXAMPLES)]
    more = count - len(named)
    return "; ".join(named) + (f"; and {more:,} more" if named and more else "")


def left_out_lines(record: dict[str, Any]) -> list[str]:
    """Lines about unused training utterances, tags that were removed from transcripts, and files that were passed over.

    Args:
        record: As `tasks.stages.sources.left_out` returns it, or a stage's record with its fields.
    """
    lines = [_unused_line(**entry) for entry in record.get("unused", ())]
    lines += [_undivided_line(**entry) for entry in record.get("undivided", ())]
    if tags := record.get("tags"):
        named = ", ".join(f"{count:,} {tag}" for tag, count in islice(tags.items(), _TAGS))
        more = f" and {len(tags) - _TAGS} more kinds" if len(tags) > _TAGS else ""
        lines.append(f"tags removed from transcripts: {named}{more}")
    if (passed := record.get("passed_over")) and passed["files"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in islice(passed["kinds"].items(), _TAGS))
        named = examples_text(((name, "") for name in passed["first"]), passed["files"])
        lines.append(f"passed over: {counted(passed['files'], 'file')} in the folders of the corpus ({kinds}): {named}")
    return lines


def _unused_line(source: int, field: str, value: float, utterances: int) -> str:
    what = counted(utterances, "training utterance")
    return f"unused: {what} of data.sources.{source} {_kept_out(field, value, utterances)}"


def _undivided_line(source: int, field: str, value: float, utterances: int) -> str:
    what = counted(utterances, "utterance")
    return (
        f"{what} of data.sources.{source} {_kept_out(field, value, utterances)}: a run leaves out those that its "
        "division puts into the training set"
    )


def _kept_out(field: str, value: float, utterances: int) -> str:
    if field == "min_confidence":
        return f"{'has' if utterances == 1 else 'have'} a confidence below {value:g}"
    return f"{'is' if utterances == 1 else 'are'} not in its share of {value:g}"


def quarantine_lines(output: StageOutput, record: dict[str, Any]) -> list[str]:
    """A line for each reason for which a stage has quarantined utterances, and one that says where all are listed.

    Args:
        output: The stage's output.
        record: Its record.
    """
    if not record.get("counts", {}).get("quarantined"):
        return []
    if "reasons" in record:
        reasons, source = Counter(record["reasons"]), QUARANTINE
        named = _rows(output, list(reasons))
    else:
        reasons, source = Counter(), DONE
        named = {}
        for reason, count, name, detail in _recorded(record):
            reasons[reason] += count
            named.setdefault(reason, []).append((name, detail))
    lines = []
    for reason, count in reasons.most_common():
        examples = examples_text(named.get(reason, []), count if source == QUARANTINE else len(named[reason]))
        lines.append(f"quarantined: {count:,} {reason}" + (f": {examples}" if examples else ""))
    path = output.store.local_path(source) or output.join(source)
    return [*lines, f"all that are quarantined: {path}"]


def _recorded(record: dict[str, Any]) -> Iterator[tuple[str, int, str, str]]:
    """Reason, number of utterances, name and detail of what a record lists: utterances, or damaged shards."""
    for row in record.get("quarantined", ()):
        yield row["reason"], 1, row["id"], row["detail"]
    for entry in record.get("quarantined_shards", ()):
        yield "in damaged shards", entry["utterances"], entry["shard"], entry["reason"]


def _rows(output: StageOutput, reasons: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Name and detail of the first utterances of each reason; none if the table is damaged."""
    examples: dict[str, list[tuple[str, str]]] = {}
    try:
        with TemporaryDirectory() as folder:
            path = output.fetch(QUARANTINE, Path(folder))
            for reason in reasons:
                rows = (
                    (row["id"], row["detail"])
                    for batch in batches(path, ["id", "detail"], {"reason": reason})
                    for row in batch.slice(0, EXAMPLES).to_pylist()
                )
                examples[reason] = list(islice(rows, EXAMPLES))
    except DamagedObjectError:  # a message is no reason to stop: `starling storage verify` finds the damage
        return {}
    return examples
