"""Duplicate utterances within a set, and duplicates shared by training, validation and test sets.

Rows are the same recording if their decoded samples are equal, and near-duplicates if their acoustic fingerprints agree
(`speech.fingerprint`); they have the same text if text and speaker are equal.

Recordings that agree as a whole form a class of copies. A recording that contains a part of another one is related to
the copies of that one only, not to what else contains or is contained in either: of ten recordings and their
concatenation, each of the ten is related to the concatenation, and to none of the others.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configurable.wording import counted
from speech.fingerprint import Words, bit_errors, certain_limit, sketch, word_offset
from storage.duplicates import Labels, WordIndex, equal_labels, join_labels, text_keys
from tasks.config.data import DataConfig
from tasks.dataset.policies import DuplicatesConfig, Policy
from tasks.dataset.sets import VALID, Mask, Sets, is_trained, values
from tasks.dataset.speakers import overlap_warnings
from tasks.dataset.splits import Ints
from tasks.dataset.tables import Row, TableWriter

DUPLICATES = "duplicates.parquet"
DUPLICATES_SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("id", "set", "kind", "where", "action", "other_id", "other_set")],
        ("bit_errors", pa.float64()),
        ("common", pa.float64()),
    ]
)
SAME, NEAR, TEXT = "same-audio", "near-duplicate", "same-text"
BIT_ERRORS = 0.17
"""Long recordings are near-duplicates if their fingerprints differ in a smaller share of their bits: copies differ in
at most 13 %, two takes of one digit by one speaker in 15 % and more (benchmarks/bench_duplicates.py)."""
_SKETCH = 96
"""Number of fingerprint words by which a recording is looked up: all of an isolated digit, 5 % of a long sentence."""
_TRIES = 8
"""Number of pairs per recording that are compared although they share only one word; chance matches are few among
thousands of recordings, and many among millions."""
_WHERE = {
    "overlap": "that another set has, too",
    "validation": "that a test set has, too",
    "within": "that came earlier in the same set",
}
_TEXT_WHERE = {"overlap": "an utterance in another set", "within": "an earlier one in the same set"}
_OVERLAP, _WHOLE = 0.6, 0.8
"""Minimum share of the shorter recording that must overlap the longer one, and of both if they are copies."""
_PAIR = np.dtype([("first", "<i4"), ("second", "<i4"), ("first_share", "<f4"), ("second_share", "<f4")])


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
        self._pending: list[tuple[int, int]] = []
        self._count = 0

    def add(self, words: Words) -> None:
        """Add the fingerprint of the next utterance."""
        chosen, positions = sketch(words, _SKETCH)
        self._index.add(self._count, chosen, positions)
        self._count += 1
        self._file.write(words.tobytes())
        self._pending.append((len(words), int(np.count_nonzero(words))))
        if len(self._pending) >= 1 << 16:
            self._pack()

    def _pack(self) -> None:
        self._lengths.append(np.array(self._pending, dtype=np.int32).reshape(-1, 2))
        self._pending = []

    def _close(self) -> None:
        self._pack()
        self._file.close()
        lengths = np.concatenate(self._lengths)
        self._ends = np.cumsum(lengths[:, 0], dtype=np.int64)
        self._begins = self._ends - lengths[:, 0]
        self.words = lengths[:, 1]
        """Number of words of each recording, without those of silence."""
        empty = self._path.stat().st_size == 0
        self._all = np.zeros(0, dtype=np.uint32) if empty else np.memmap(self._path, dtype=np.uint32, mode="r")

    def near(self, used: Mask, limit: float) -> NDArray[np.void]:
        """Find near-duplicates; call it once, after all `add`.

        Args:
            used: Rows to compare.
            limit: Share of differing bits below which rows are near-duplicates; lower for short ones, see
                `certain_limit`.

        Returns:
            Pairs of rows, the first before the second, each pair once; and for both rows the share of their words that
            the other one has, too.
        """
        self._close()
        matches = np.fromiter(self._near(used, limit), dtype=_PAIR)
        # the best offset first
        matches = matches[np.lexsort((-matches["first_share"], matches["second"], matches["first"]))]
        fresh = np.ones(len(matches), dtype=bool)
        fresh[1:] = (matches["first"][1:] != matches["first"][:-1]) | (matches["second"][1:] != matches["second"][:-1])
        pairs: NDArray[np.void] = matches[fresh]
        return pairs

    def _near(self, used: Mask, limit: float) -> Iterator[tuple[int, int, float, float]]:
        tries = _TRIES * self._count
        rank = np.empty(self._count, dtype=np.uint32)
        rank[np.argsort(self.words, kind="stable")] = np.arange(self._count, dtype=np.uint32)
        for matches in self._index.matches(rank):
            first, second = matches["first"].astype(np.int64), matches["second"].astype(np.int64)
            likely, single = used[first] & used[second], matches["votes"] == 1
            late = np.flatnonzero(likely & single)[tries:]
            likely[late] = False
            tries -= int((likely & single).sum())
            for i, j, offset in zip(first[likely], second[likely], matches["offset"][likely].tolist(), strict=True):
                agreement = self._compared(i, j, offset)
                if agreement.certain(limit):
                    yield int(i), int(j), agreement.common / self.words[i], agreement.common / self.words[j]

    def compare(self, first: int, second: int) -> "Agreement":
        """Compare two rows where most of their words agree; after `near`."""
        offset = word_offset(self._words(first), self._words(second))
        return _DIFFERENT if offset is None else self._compared(first, second, offset)

    def _compared(self, first: int, second: int, offset: int) -> "Agreement":
        words, other_words = self._words(first), self._words(second)
        errors, share = min(bit_errors(words, other_words, offset + shift) for shift in (-1, 0, 1))
        few, many = sorted((int(self.words[first]), int(self.words[second])))
        return Agreement(errors, share * few, share, share * few / max(many, 1))

    def _words(self, row: int) -> Words:
        return self._all[self._begins[row] : self._ends[row]]


class Agreement(NamedTuple):
    """How well two recordings agree where they overlap."""

    errors: float
    """Share of differing bits."""
    common: float
    """Number of words of both."""
    shorter: float
    """Share of the shorter recording's words that both have."""
    longer: float
    """Share of the longer recording's words that both have."""

    def certain(self, limit: float) -> bool:
        """Whether most of the shorter one is surely in the longer one."""
        return self.errors < certain_limit(limit, self.common) and self.shorter >= _OVERLAP


_DIFFERENT = Agreement(1.0, 0.0, 0.0, 0.0)


def _no_parts() -> Ints:
    return np.zeros((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class DuplicateGroups:
    """Classes of duplicate rows of one kind, and the policies for them."""

    kind: str
    labels: Labels
    """For each row, the first row of its class."""
    within: Policy
    overlap: Policy
    validation: Policy = "keep"
    parts: Ints = field(default_factory=_no_parts)
    """Labels of a class and of another one whose recordings are longer and contain those of the first, [num, 2]."""


def group_copies(exact: Labels, prints: Fingerprints, used: Mask, limit: float) -> tuple[Labels, Ints]:
    """Classes of rows that are the same recording as a whole, and classes that are parts of others.

    Args:
        exact: Labels of equal recordings.
        prints: Fingerprints of all rows.
        used: Rows to compare.
        limit: See `Fingerprints.near`.

    Returns:
        `labels` and `parts` of `DuplicateGroups`.
    """
    pairs = prints.near(used, limit)
    first, second = exact[pairs["first"]].astype(np.int64), exact[pairs["second"]].astype(np.int64)
    whole = np.minimum(pairs["first_share"], pairs["second_share"]) >= _WHOLE
    heads = _heads(first[whole], second[whole], prints, limit)
    copies = np.flatnonzero(heads != np.arange(len(heads)))
    labels = join_labels(exact, copies, heads[copies])
    swap = prints.words[first] > prints.words[second]
    parts = np.stack([labels[np.where(swap, second, first)], labels[np.where(swap, first, second)]], axis=1)
    return labels, np.unique(parts[parts[:, 0] != parts[:, 1]], axis=0).astype(np.int64)


def _heads(first: Ints, second: Ints, prints: Fingerprints, limit: float) -> Ints:
    """A recording of which each one is a copy as a whole: itself, or a shorter one with which it was compared.

    Copies of copies are compared with the head: windows of a long recording, of which each overlaps the next one, are
    not all copies of the first.
    """
    heads = np.arange(len(prints.words))
    shorter: dict[int, list[int]] = {}

    def length(row: int) -> tuple[int, int]:
        return int(prints.words[row]), row

    for pair in zip(first.tolist(), second.tolist(), strict=True):
        short, long = sorted(pair, key=length)
        shorter.setdefault(long, []).append(short)
    for row in sorted(shorter, key=length):
        for other in shorter[row]:
            head = int(heads[other])
            agreement = prints.compare(head, row) if head != other else None
            if agreement is None or (agreement.certain(limit) and agreement.longer >= _WHOLE):
                heads[row] = head
                break
    return heads


@dataclass(frozen=True)
class Doubles:
    """Duplicate rows of one kind."""

    finding: DuplicateGroups
    again: Mask
    """Rows that come again in the same set: copies of an earlier one, or parts of another one."""
    leaked: Mask
    """Training rows that are also in another set."""
    other: Ints
    """For each row, the row that it duplicates, in a test set first; -1 if none."""
    selected: Mask
    """Validation rows that are also in a test set."""
    source: Ints
    """For each row outside training that is also in the training set or, for tests, in the validation set, the first
    such row there, in the training set first; else -1."""

    @property
    def listed(self) -> Mask:
        """Rows that are listed in the table of duplicates as copies of another one.

        A row outside training that is also in training is listed with that: only if the policy treats duplicates
        within a set is it listed as one of these.
        """
        if self.finding.kind == TEXT:
            return self.leaked
        return self.leaked | self.selected | (self.again & ((self.source < 0) | (self.finding.within != "keep")))

    @property
    def pairs(self) -> tuple[Ints, Ints]:
        """Rows of the table of duplicates, and those that they duplicate.

        Each row outside training that is also in training is in at least one pair.
        """
        listed = np.flatnonzero(self.listed)
        if self.finding.kind == TEXT:
            return listed, self.other[listed]
        more = np.setdiff1d(np.flatnonzero(self.source >= 0), self.other[self.leaked | self.selected])
        return np.concatenate([listed, self.source[more]]), np.concatenate([self.other[listed], more])


class _Relations:
    """Related rows: those of the same class, and those of classes that contain it or are parts of it.

    Args:
        finding: The classes.
        codes: Set of each row.
        used: Rows to relate.
    """

    def __init__(self, finding: DuplicateGroups, codes: Ints, used: Mask) -> None:
        labels, parts = finding.labels.astype(np.int64), finding.parts
        several = np.bincount(labels[used], minlength=len(labels)) > 1
        several[parts.reshape(-1)] = True
        members = np.flatnonzero(used & several[labels])
        self._members = members[np.argsort(labels[members], kind="stable")]
        self._labels = labels[self._members]
        own = np.unique(self._labels)
        classes = np.concatenate([own, parts[:, 0], parts[:, 1]])
        seen = np.concatenate([own, parts[:, 1], parts[:, 0]])
        of_class = np.repeat([0, 1, 2], [len(own), len(parts), len(parts)])
        which, rows = self._expand(seen)
        # the first row of each set is enough: others have the same relation
        keys = np.stack([classes[which], codes[rows], of_class[which], rows], axis=1)
        keys = keys[np.lexsort(keys.T[::-1])]
        fresh = np.ones(len(keys), dtype=bool)
        fresh[1:] = (keys[1:, :3] != keys[:-1, :3]).any(axis=1)
        keys = keys[fresh]
        which, rows = self._expand(keys[:, 0])
        apart = rows != keys[which, 3]
        self.row, self.other = rows[apart], keys[which, 3][apart]
        """Rows, and one related row of each set."""
        self.copy, self.part = (keys[which, 2][apart] == kind for kind in (0, 1))
        """Whether the related one is a copy as a whole, and whether the row is a part of it."""

    def _expand(self, classes: Ints) -> tuple[Ints, Ints]:
        """All rows of these classes, and the position of each row's class."""
        begin, end = (np.searchsorted(self._labels, classes, side) for side in ("left", "right"))
        counts = end - begin
        which = np.repeat(np.arange(len(classes)), counts)
        places = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + begin[which]
        return which, self._members[places]


def _best(count: int, rows: Ints, others: Ints, priority: Ints) -> Ints:
    """For each row the related one with the lowest priority, the first of these; -1 if none."""
    order = np.lexsort((others, priority, rows))[::-1]  # of equal rows, the last assignment stays
    best = np.full(count, -1, dtype=np.int64)
    best[rows[order]] = others[order]
    return best


def find_doubles(finding: DuplicateGroups, sets: Sets) -> Doubles:
    """Find rows that are related to others, see `Doubles`.

    The home of a class of training rows is the set (a fold) of its first row; rows in other folds are leaks. Of a
    recording and a part of it in two folds, the later one is the leak.
    """
    codes, count = sets.codes, len(finding.labels)
    used = codes >= 0
    trained = used & np.array([is_trained(name) for name in [*sets.names, "unused"]])[codes]
    valid = used & np.array([name == VALID for name in [*sets.names, "unused"]])[codes]
    tested = used & ~trained & ~valid
    relations = _Relations(finding, codes, used)
    row, other = relations.row, relations.other
    first = np.full(count, count, dtype=np.int64)
    np.minimum.at(first, finding.labels[used], np.flatnonzero(used))
    earlier = np.where(relations.copy, other == first[finding.labels[row]], other < row)
    folds = trained[row] & trained[other] & (codes[row] != codes[other]) & earlier
    leaks = (trained[row] & ~trained[other]) | folds
    selects = valid[row] & tested[other]
    chosen = leaks | selects
    best = _best(count, row[chosen], other[chosen], np.select([tested[other], valid[other]], [0, 1], 2)[chosen])
    leaked, selected = trained & (best >= 0), valid & (best >= 0)
    sources = (~trained[row] & trained[other]) | (tested[row] & valid[other])
    source = _best(count, row[sources], other[sources], np.where(trained[other], 0, 1)[sources])
    # what is left out elsewhere does not stand for a part of it
    within = _Relations(finding, codes, used & ~leaked)
    row, other = within.row, within.other
    again = (codes[row] == codes[other]) & (within.part | (within.copy & (other < row)))
    before = _best(count, row[again], other[again], np.zeros(int(again.sum()), dtype=np.int64))
    return Doubles(finding, before >= 0, leaked, np.where(best >= 0, best, before), selected, source)


def look_for_doubles(
    path: Path, sets: Sets, prints: Fingerprints | None, config: DuplicatesConfig
) -> tuple[Doubles, Doubles, Labels]:
    """Find duplicates among checked utterances.

    Returns:
        Duplicate recordings, duplicate texts, and labels of exactly equal recordings.
    """
    exact = equal_labels(text_keys(values(path, "sha256")))
    labels, parts = exact, _no_parts()
    if prints is not None:
        labels, parts = group_copies(exact, prints, sets.codes >= 0, BIT_ERRORS)
    spoken = zip(values(path, "corpus"), values(path, "speaker"), values(path, "text"), strict=True)
    # an unknown speaker is not known to be the same as another one
    said = (f"{corpus}\t{who}\t{text}" if who else f"{row}" for row, (corpus, who, text) in enumerate(spoken))
    audio = DuplicateGroups(NEAR, labels, config.within, config.overlap, config.validation, parts)
    texts = DuplicateGroups(TEXT, equal_labels(text_keys(said)), "keep", config.same_text)
    return find_doubles(audio, sets), find_doubles(texts, sets), exact


def describe(
    doubles: Doubles, sets: Sets, exact: Labels, prints: Fingerprints | None
) -> Iterator[tuple[int, int, Row]]:
    """Yield each duplicate row, the row that it duplicates, and their line of the table of duplicates without ids.

    Repeated texts within a set are frequent and harmless: they are counted, not listed.
    """
    finding = doubles.finding
    for row, other in zip(*map(np.ndarray.tolist, doubles.pairs), strict=True):
        name, other_name = (sets.names[sets.codes[number]] for number in (row, other))
        equal = finding.kind != TEXT and bool(exact[row] == exact[other])
        kind = SAME if equal else finding.kind
        agreement = prints.compare(row, other) if kind == NEAR and prints is not None else None
        where = "within" if name == other_name else "overlap" if is_trained(name) else "validation"
        yield (
            row,
            other,
            {
                "set": name,
                "kind": kind,
                "where": where,
                "action": getattr(finding, where),
                "other_set": other_name,
                "bit_errors": agreement.errors if agreement else None,
                "common": agreement.longer if agreement else 1.0 if equal else None,
            },
        )


def count_contaminated(doubles: Doubles, sets: Sets) -> dict[str, dict[str, int]]:
    """Number of utterances by set that are also in `training`, and of others that are also in `validation`."""
    heard = np.flatnonzero(doubles.source >= 0)
    pairs = zip(sets.codes[heard].tolist(), sets.codes[doubles.source[heard]].tolist(), strict=True)
    counts = Counter((sets.names[code], is_trained(sets.names[source])) for code, source in pairs)
    by_set: dict[str, dict[str, int]] = {}
    for (name, trained), count in sorted(counts.items()):
        by_set.setdefault(name, {})["training" if trained else "validation"] = count
    return by_set


@dataclass
class Treated:
    """Result of the policies for duplicates."""

    dropped: dict[int, Row]
    """Rows to drop, with their line of the table."""
    counts: dict[str, int]
    """Number of rows by kind and place, such as `near-duplicate overlap`."""
    contaminated: dict[str, dict[str, int]]
    """By set outside training, the number of utterances that are also in `training`, and of others in `validation`."""
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
    recordings, texts, exact = look_for_doubles(path, sets, prints, config)
    treated = Treated({}, {}, count_contaminated(recordings, sets), "")
    wanted = np.zeros(len(sets.codes), dtype=bool)
    for doubles in (recordings, texts):
        wanted[np.concatenate(doubles.pairs)] = True
    ids = dict(zip(np.flatnonzero(wanted).tolist(), values(path, "id", wanted), strict=True))
    counts, seen = Counter[str](), set[tuple[str, str, int]]()
    for doubles in (recordings, texts):
        for row, other, line in describe(doubles, sets, exact, prints):
            line |= {"id": ids[row], "other_id": ids[other]}
            table.add(line)
            if (key := (doubles.finding.kind, line["where"], row)) not in seen:  # it may be the copy of several
                seen.add(key)
                counts[f"{line['kind']} {line['where']}"] += 1
            if line["action"] == "drop":
                treated.dropped.setdefault(row, line)
            elif line["action"] == "refuse":
                treated.refused = treated.refused or _refusal(doubles, line, treated.contaminated)
    if texts.again.any():
        counts[f"{TEXT} within"] = int(texts.again.sum())
    treated.counts = dict(sorted(counts.items()))
    return treated


_ACTIONS = {"keep": "kept", "drop": "left out", "refuse": "refused"}


def doubles_text(
    counts: Mapping[str, int], config: DuplicatesConfig, contaminated: Mapping[str, Mapping[str, int]] | None = None
) -> list[str]:
    """What was found twice, in sentences; nothing for what was not found, except that no recording is shared.

    Args:
        counts: `Treated.counts`.
        config: The policies.
        contaminated: `Treated.contaminated`.
    """
    by_place = {where: counts.get(f"{SAME} {where}", 0) + counts.get(f"{NEAR} {where}", 0) for where in _WHERE}
    lines = []
    if not by_place["overlap"]:
        searched = "" if config.fingerprint else ", as far as exact copies go"
        lines.append(f"No recording of the training set is in another set{searched}.")
    for where, what in _WHERE.items():
        if by_place[where]:
            equal, near = counts.get(f"{SAME} {where}", 0), counts.get(f"{NEAR} {where}", 0)
            verb = "is a recording" if by_place[where] == 1 else "are recordings"
            action = _ACTIONS[getattr(config, where)]
            lines.append(
                f"{_utterances(by_place[where], where)} {verb} {what}: {equal:,} equal, {near:,} nearly ({action})."
            )
    for part, policy in (("training", config.overlap), ("validation", config.validation)):
        if heard := contaminated_text(contaminated or {}, part):
            lines.append(f"{heard} ({_ACTIONS[policy]} there).")
    for where, what in _TEXT_WHERE.items():
        if number := counts.get(f"{TEXT} {where}", 0):
            action = _ACTIONS[config.same_text if where == "overlap" else "keep"]
            # those of the first sentence are not counted again
            more = where == "within" and counts.get(f"{TEXT} overlap", 0) > 0
            utterances = counted(number, "more utterance") if more else _utterances(number, where)
            lines.append(
                f"{utterances} {'has' if number == 1 else 'have'} the words and the speaker of {what} ({action})."
            )
    return lines


def doubles_of(record: dict[str, Any], data: DataConfig) -> list[str]:
    """What was found twice, in sentences.

    Args:
        record: That of the stage `prepare`.
        data: The configuration.
    """
    return doubles_text(record["duplicates"], data.duplicates, record.get("contaminated"))


def contaminated_text(contaminated: Mapping[str, Mapping[str, int]], part: str) -> str:
    """How many utterances of other sets are also in the training or validation set; empty if none are.

    Args:
        contaminated: `Treated.contaminated`.
        part: `training` or `validation`.
    """
    counts = {name: entry[part] for name, entry in contaminated.items() if entry.get(part)}
    if not counts:
        return ""
    copies = " and ".join(f"{counted(count, 'utterance')} of {name!r}" for name, count in counts.items())
    return f"{copies} {'is' if sum(counts.values()) == 1 else 'are'} also in {part}, as a whole or in part"


def data_warnings(record: dict[str, Any], data: DataConfig) -> list[str]:
    """Warnings of speakers and recordings that training, validation and test sets share.

    Args:
        record: That of the stage `prepare`.
        data: The configuration.
    """
    warnings, policies = overlap_warnings(record, data), data.duplicates
    for part, field_name in (("training", "overlap"), ("validation", "validation")):
        heard = contaminated_text(record.get("contaminated", {}), part)
        if heard and getattr(policies, field_name) == "keep":
            warnings.append(
                f"{heard}, which makes error rates too low. To leave them out there, set "
                f"data.duplicates.{field_name}: drop"
            )
    return warnings


def _utterances(count: int, where: str) -> str:
    nouns = {"overlap": "training utterance", "validation": "validation utterance"}
    return counted(count, nouns.get(where, "utterance"))


def _refusal(doubles: Doubles, line: Row, contaminated: Mapping[str, Mapping[str, int]]) -> str:
    """Why a duplicate is refused, and what to do."""
    rows, part, what = {
        "overlap": (doubles.leaked, "training", "are in a training set and in another one"),
        "validation": (doubles.selected, "validation", "are in the validation set and in a test set"),
        "within": (doubles.again, "", "are duplicates within one set"),
    }[line["where"]]
    drop = f"leaves them out of {part}" if part else "keeps the first"
    text = line["kind"] == TEXT
    heard = "" if text else contaminated_text(contaminated, part)
    field_name = "same_text" if text else line["where"]
    return (
        f"{int(rows.sum())} utterance(s) {what}{f' ({heard})' if heard else ''}; the first: {line['id']} "
        f"({line['set']}) and {line['other_id']} ({line['other_set']}), {line['kind']}. Correct data.sources, or set "
        f"data.duplicates.{field_name}: drop ({drop}), or keep."
    )
