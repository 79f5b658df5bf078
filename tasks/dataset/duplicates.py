"""Duplicate utterances within a set, and duplicates shared by training and test sets.

Rows are the same recording if their decoded samples are equal, and near-duplicates if their acoustic fingerprints agree
(`speech.fingerprint`); they have the same text if text and speaker are equal.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configurable.wording import counted
from speech.fingerprint import Words, bit_errors, certain_limit, sketch
from storage.duplicates import Labels, WordIndex, equal_labels, join_labels, text_keys
from tasks.dataset.policies import DuplicatesConfig, Policy
from tasks.dataset.sets import Mask, Sets, is_trained, values
from tasks.dataset.tables import Row, TableWriter

DUPLICATES = "duplicates.parquet"
DUPLICATES_SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("id", "set", "kind", "where", "action", "other_id", "other_set")],
        ("bit_errors", pa.float64()),
    ]
)
SAME, NEAR, TEXT = "same-audio", "near-duplicate", "same-text"
_SKETCH = 96
"""Number of fingerprint words by which a recording is looked up: all of an isolated digit, 5 % of a long sentence."""
_TRIES = 8
"""Number of pairs per recording that are compared although they share only one word; chance matches are few among
thousands of recordings, and many among millions."""
_WHERE = {"overlap": "that another set has, too", "within": "that came earlier in the same set"}
_TEXT_WHERE = {"overlap": "an utterance in another set", "within": "an earlier one in the same set"}
_OVERLAP = 0.6
"""Minimum share of the shorter recording that must overlap the longer one."""


class DuplicateError(ValueError):
    """The data contain duplicates that the configuration refuses."""


class Fingerprints:
    """Fingerprints of all checked utterances, on disk.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "words.bin"
        self._file = self._path.open("wb")
        self._index = WordIndex(folder)
        self._lengths: list[NDArray[np.int32]] = []
        self._pending: list[int] = []
        self._count = 0

    def add(self, words: Words) -> None:
        """Add the fingerprint of the next utterance."""
        chosen, positions = sketch(words, _SKETCH)
        self._index.add(self._count, chosen, positions)
        self._count += 1
        self._file.write(words.tobytes())
        self._pending.append(len(words))
        if len(self._pending) >= 1 << 16:
            self._pack()

    def _pack(self) -> None:
        self._lengths.append(np.array(self._pending, dtype=np.int32))
        self._pending = []

    def near(self, used: Mask, limit: float) -> Iterator[tuple[int, int, float]]:
        """Yield pairs of near-duplicate rows with their share of differing bits; call it once, after all `add`.

        Args:
            used: Rows to compare.
            limit: Share of differing bits below which rows are near-duplicates; lower for short ones, see
                `certain_limit`.
        """
        self._pack()
        self._file.close()
        if self._path.stat().st_size == 0:
            return
        lengths = np.concatenate(self._lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        words = np.memmap(self._path, dtype=np.uint32, mode="r")
        tries = _TRIES * len(lengths)
        for found in self._index.matches():
            first, second = found["first"].astype(np.int64), found["second"].astype(np.int64)
            likely, single = used[first] & used[second], found["votes"] == 1
            late = np.flatnonzero(likely & single)[tries:]
            likely[late] = False
            tries -= int((likely & single).sum())
            for i, j, offset in zip(first[likely], second[likely], found["offset"][likely].tolist(), strict=True):
                one, two = (words[ends[row] - lengths[row] : ends[row]] for row in (i, j))
                errors, share = min(bit_errors(one, two, offset + shift) for shift in (-1, 0, 1))
                common = share * min(np.count_nonzero(one), np.count_nonzero(two))
                if errors < certain_limit(limit, common) and share >= _OVERLAP:
                    yield int(i), int(j), errors


@dataclass(frozen=True)
class DuplicateGroups:
    """Groups of duplicate rows of one kind, and the policies for them."""

    kind: str
    labels: Labels
    """For each row, the first row of its group."""
    within: Policy
    overlap: Policy


@dataclass(frozen=True)
class Doubles:
    """Duplicate rows of one kind."""

    finding: DuplicateGroups
    again: Mask
    """Rows whose group has an earlier row in the same set."""
    leaked: Mask
    """Training rows whose group is also in another set."""
    other: NDArray[np.int64]
    """For each row, the row that it duplicates; -1 if none."""

    @property
    def listed(self) -> Mask:
        """Rows that are listed in the table of duplicates."""
        return self.leaked if self.finding.kind == TEXT else self.leaked | self.again


def find_doubles(finding: DuplicateGroups, sets: Sets) -> Doubles:
    """Find duplicates in each group of more than one row.

    The home of a group is the set of its first row outside training, or, if all rows are training rows, of its first
    row; its training rows in other sets are leaks.
    """
    labels, rows = finding.labels.astype(np.int64), np.arange(len(finding.labels))
    used = sets.codes >= 0
    trained = np.array([is_trained(name) for name in [*sets.names, "unused"]])[sets.codes]
    again, leaked = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
    other = np.full(len(rows), -1, dtype=np.int64)
    sizes = np.bincount(labels[used], minlength=len(rows))
    members = rows[used & (sizes[labels] > 1)]
    # rows outside training first, then in order
    members = members[np.lexsort((members, trained[members], labels[members]))]
    group, codes = labels[members], sets.codes[members]
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]]) if len(members) else np.zeros(0, dtype=np.int64)
    homes = np.repeat(members[starts], np.diff(np.r_[starts, len(members)]))
    leaked[members] = trained[members] & (codes != sets.codes[homes])
    keys = np.stack([group, codes], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    earliest = members[first][inverse.reshape(-1)]
    again[members] = earliest != members
    other[members] = np.where(leaked[members], homes, earliest)
    return Doubles(finding, again & ~leaked, leaked, other)


def look_for_doubles(
    path: Path, sets: Sets, prints: Fingerprints | None, config: DuplicatesConfig
) -> tuple[list[Doubles], Labels, dict[int, float]]:
    """Find duplicates among checked utterances.

    Returns:
        Duplicate recordings and duplicate texts; labels of exactly equal recordings; bit errors of near-duplicates, by
        row.
    """
    used = sets.codes >= 0
    exact = equal_labels(text_keys(values(path, "sha256")))
    near = list(prints.near(used, config.bit_errors)) if prints is not None else []
    pairs = np.array([(i, j) for i, j, _ in near], dtype=np.int64).reshape(-1, 2)
    audio = join_labels(exact, pairs[:, 0], pairs[:, 1])
    errors: dict[int, float] = {}
    for i, j, share in near:
        for row in (i, j):
            errors[row] = min(share, errors.get(row, 1.0))
    spoken = zip(values(path, "speaker"), values(path, "text"), strict=True)
    texts = equal_labels(text_keys(f"{speaker}\t{text}" for speaker, text in spoken))
    findings = (
        DuplicateGroups(NEAR, audio, config.within, config.overlap),
        DuplicateGroups(TEXT, texts, "keep", config.same_text),
    )
    return [find_doubles(finding, sets) for finding in findings], exact, errors


def describe(doubles: Doubles, sets: Sets, exact: Labels, errors: dict[int, float]) -> Iterator[tuple[int, int, Row]]:
    """Yield each duplicate row, the row that it duplicates, and their line of the table of duplicates without ids.

    Repeated texts within a set are frequent and harmless: they are counted, not listed.
    """
    finding = doubles.finding
    for row in np.flatnonzero(doubles.listed).tolist():
        other, leak = int(doubles.other[row]), bool(doubles.leaked[row])
        equal = bool(exact[row] == exact[other])
        kind = finding.kind if finding.kind == TEXT else SAME if equal else NEAR
        yield (
            row,
            other,
            {
                "set": sets.names[sets.codes[row]],
                "kind": kind,
                "where": "overlap" if leak else "within",
                "action": finding.overlap if leak else finding.within,
                "other_set": sets.names[sets.codes[other]],
                "bit_errors": errors.get(row, errors.get(other)) if kind == NEAR else None,
            },
        )


@dataclass
class Treated:
    """Result of the policies for duplicates."""

    dropped: dict[int, Row]
    """Rows to drop, with their line of the table."""
    counts: dict[str, int]
    """Number of rows by kind and place, such as `near-duplicate overlap`."""
    refused: str
    """Error message, if a policy refuses duplicates; else empty."""


def treat_doubles(
    path: Path, sets: Sets, prints: Fingerprints | None, config: DuplicatesConfig, table: TableWriter
) -> Treated:
    """Find duplicates, list them, and decide what to drop.

    Args:
        path: Table of checked utterances.
        sets: Their sets.
        prints: Their fingerprints, if there are any.
        config: The policies.
        table: The duplicates are written to it.
    """
    found, exact, errors = look_for_doubles(path, sets, prints, config)
    wanted = np.zeros(len(sets.codes), dtype=bool)
    for doubles in found:
        wanted |= doubles.listed
        wanted[doubles.other[doubles.listed]] = True
    ids = dict(zip(np.flatnonzero(wanted).tolist(), values(path, "id", wanted), strict=True))
    treated = Treated({}, {}, "")
    counts: Counter[str] = Counter()
    for doubles in found:
        for row, other, line in describe(doubles, sets, exact, errors):
            line |= {"id": ids[row], "other_id": ids[other]}
            table.add(line)
            counts[f"{line['kind']} {line['where']}"] += 1
            if line["action"] == "drop":
                treated.dropped.setdefault(row, line)
            elif line["action"] == "refuse":
                treated.refused = treated.refused or _refusal(doubles, line)
        if doubles.finding.kind == TEXT and doubles.again.any():
            counts[f"{TEXT} within"] = int(doubles.again.sum())
    treated.counts = dict(sorted(counts.items()))
    return treated


def doubles_text(counts: Mapping[str, int], config: DuplicatesConfig) -> list[str]:
    """What was found twice, in sentences; nothing for what was not found, except that no recording is shared.

    Args:
        counts: `Treated.counts`.
        config: The policies.
    """
    said = {"keep": "kept", "drop": "left out", "refuse": "refused"}
    found = {where: counts.get(f"{SAME} {where}", 0) + counts.get(f"{NEAR} {where}", 0) for where in _WHERE}
    lines = []
    if not found["overlap"]:
        searched = "" if config.fingerprint else ", as far as exact copies go"
        lines.append(f"No recording of the training set is in another set{searched}.")
    for where, what in _WHERE.items():
        if found[where]:
            equal, near = counts.get(f"{SAME} {where}", 0), counts.get(f"{NEAR} {where}", 0)
            verb = "is a recording" if found[where] == 1 else "are recordings"
            action = said[config.overlap if where == "overlap" else config.within]
            lines.append(
                f"{_utterances(found[where], where)} {verb} {what}: {equal:,} equal, {near:,} nearly ({action})."
            )
    for where, what in _TEXT_WHERE.items():
        if number := counts.get(f"{TEXT} {where}", 0):
            action = said[config.same_text if where == "overlap" else "keep"]
            lines.append(
                f"{_utterances(number, where)} {'has' if number == 1 else 'have'} the words and the speaker of {what} "
                f"({action})."
            )
    return lines


def _utterances(count: int, where: str) -> str:
    return counted(count, "training utterance" if where == "overlap" else "utterance")


def _refusal(doubles: Doubles, line: Row) -> str:
    leak = line["where"] == "overlap"
    number = int((doubles.leaked if leak else doubles.again).sum())
    field = "same_text" if line["kind"] == TEXT else line["where"]
    what = "are in a training set and in another one" if leak else "are duplicates within one set"
    drop = "drop (leaves them out of training)" if leak else "drop (keeps the first)"
    return (
        f"{number} utterance(s) {what}; the first: {line['id']} ({line['set']}) and {line['other_id']} "
        f"({line['other_set']}), {line['kind']}. Correct data.sources, or set data.duplicates.{field}: {drop}, or keep."
    )
