"""Assigns checked utterances to sets: by source, by the corpus' own split, by a random split, or by folds."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from configurable.wording import similar
from storage.batching import derive_seed
from tasks.config.data import DataConfig
from tasks.dataset.sources import SourceConfig
from tasks.dataset.splits import (
    TRAIN,
    Groups,
    Ints,
    SplitError,
    bin_numbers,
    encode,
    fold_groups,
    group_strata,
    name_order,
    split_groups,
)
from tasks.dataset.tables import batches

VALID, TEST = "valid", "test"
SOURCE = "source"
"""Column of the table of checked utterances: position in `data.sources`."""
CONFIDENCE = "confidence"
"""Another one: confidence of the transcript, if it is known."""
Unused = Counter[tuple[int, str]]
"""Number of training utterances that are not used, by position of their source and its field that keeps them out."""
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Sets:
    """Sets of all rows of a table of checked utterances."""

    codes: Ints
    """Position of each row's set in `names`; -1 for unused rows."""
    names: list[str]
    """Set names, in order."""


def fold_name(number: int) -> str:
    """Name of a fold's set; folds are numbered from 1."""
    return f"fold-{number}"


def is_fold(name: str) -> bool:
    """Whether a set is a fold."""
    return name.startswith("fold-")


def is_trained(name: str) -> bool:
    """Whether a set is used for training: the training set, or any fold."""
    return name == TRAIN or is_fold(name)


def values(path: Path, name: str, rows: Mask | None = None) -> Iterator[Any]:
    """Values of a column of a local table, for all or some rows."""
    begin = 0
    for batch in batches(path, [name]):
        column = batch.column(0)
        if rows is not None:
            column = column.filter(pa.array(rows[begin : begin + batch.num_rows]))
        begin += batch.num_rows
        yield from column.to_pylist()


def source_numbers(path: Path, count: int) -> Ints:
    """Source of each row of a table; -1 if the table does not contain it."""
    if SOURCE not in pq.read_schema(path).names:
        return np.full(count, -1, dtype=np.int64)
    return np.fromiter((-1 if number is None else number for number in values(path, SOURCE)), dtype=np.int64)


def in_share(identity: str, share: float, seed: int) -> bool:
    """Whether an utterance is in a share that is drawn by a seed; larger shares contain smaller ones."""
    return share >= 1 or derive_seed("share", seed, identity) < share * 2**63


def kept_out_by(source: SourceConfig, identity: str, confidence: float | str | None, seed: int) -> str:
    """The field of a source that keeps an utterance out of training, `min_confidence` or `share`; empty if none does.

    Args:
        source: The source.
        identity: The utterance.
        confidence: Its confidence; without one, it is not kept out.
        seed: Seed of the shares.
    """
    if isinstance(confidence, float) and confidence < source.min_confidence:
        return "min_confidence"
    return "" if in_share(identity, source.share, seed) else "share"


def leave_out(path: Path, sets: Sets, data: DataConfig, seed: int) -> Unused:
    """Leave out the training utterances that fields of their source keep out; returns their numbers.

    Args:
        path: The table of checked utterances.
        sets: Their sets, which are changed.
        data: The sources.
        seed: Seed of the shares.
    """
    left = Unused()
    if all(source.share == 1 and not source.min_confidence for source in data.sources) or TRAIN not in sets.names:
        return left
    trained = sets.codes == sets.names.index(TRAIN)
    numbers = source_numbers(path, len(sets.codes)).tolist()
    columns = zip(values(path, "id"), values(path, CONFIDENCE), numbers, strict=True)
    for row, (identity, confidence, number) in enumerate(columns):
        if trained[row] and (field := kept_out_by(data.sources[number], identity, confidence, seed)):
            sets.codes[row] = -1
            left[number, field] += 1
    return left


def _own_training(path: Path, codes: Ints, names: list[str], data: DataConfig) -> Mask:
    """Rows that are in the training set by their corpus' own split, not by their source's `set`."""
    numbers = source_numbers(path, len(codes))
    unnamed = [number for number, source in enumerate(data.sources) if not source.set]
    own: Mask = np.isin(numbers, unnamed) & np.isin(codes, [code for code, name in enumerate(names) if name == TRAIN])
    return own


def check_strata(data: DataConfig, columns: Collection[str]) -> None:
    """Check that the utterances have the columns by which sets are stratified.

    Raises:
        SplitError: If one is missing.
    """
    if unknown := [name for name in data.stratify if name not in columns]:
        hint = f"; did you mean {near!r}?" if (near := similar(unknown[0], columns, 0.6)) else ""
        raise SplitError(f"data.stratify: utterances have no {unknown[0]!r}, but {', '.join(columns)}{hint}")


def _is_number(path: Path, name: str) -> bool:
    kind = pq.read_schema(path).field(name).type
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _strata_of_rows(path: Path, rows: Mask, column: str, groups: Ints, sizes: Ints) -> tuple[Ints, list[str]]:
    """Code of each chosen row by one column, and the codes' names; numbers are binned by their group's mean."""
    if not _is_number(path, column):
        return encode(values(path, column, rows))
    numbers = np.fromiter((value or 0 for value in values(path, column, rows)), dtype=np.float64)
    means = np.bincount(groups, weights=numbers, minlength=len(sizes)) / np.maximum(sizes, 1)
    codes = bin_numbers(means)[groups]
    return codes, [f"{column}-{number}" for number in range(int(codes.max(initial=0)) + 1)]


def _groups(path: Path, rows: Mask, data: DataConfig, seed: int) -> tuple[Groups, Ints]:
    """The groups of the chosen rows, and the group of each."""
    if data.split_by == "speaker":
        group_of, names = encode(values(path, "speaker", rows))
        order, unnamed = name_order(names, seed), names == [""]
    else:
        group_of = np.arange(int(rows.sum()))
        order, unnamed = name_order(values(path, "id", rows), seed), False
    sizes = np.bincount(group_of, minlength=len(order)).astype(np.int64)
    if not data.stratify:
        return Groups(sizes, order, unnamed=unnamed), group_of
    strata, labels = np.zeros(len(group_of), dtype=np.int64), [""]
    for column in data.stratify:
        codes, column_labels = _strata_of_rows(path, rows, column, group_of, sizes)
        # only combinations that occur, since all combinations of many columns may be too many
        used, strata = np.unique(strata * len(column_labels) + codes, return_inverse=True)
        labels = [
            f"{labels[pair // len(column_labels)]}/{column_labels[pair % len(column_labels)]}" for pair in used.tolist()
        ]
    return Groups(sizes, order, group_strata(group_of, strata, len(sizes)), labels, unnamed), group_of


def assign_sets(path: Path, used: Mask, data: DataConfig, seed: int) -> Sets:
    """Assign a set to every used row of a table of checked utterances; existing sets get no share of the split.

    If all rows have a set and none is `valid`, the corpora's own `train` part is divided.

    Args:
        path: Parquet table with the columns `id`, `speaker`, `set` (may be empty) and those of `data.stratify`, and
            optionally `source`, which is needed to divide the corpora's own `train` part.
        used: Rows to assign.
        data: Configuration of the split.
        seed: Seed of the split.

    Raises:
        SplitError: If there are too few speakers (or utterances) for the sets, or no column of `data.stratify`.
    """
    check_strata(data, pq.read_schema(path).names)
    codes, names = encode(values(path, "set"))
    codes[~used] = -1
    present = {names[code] for code in np.unique(codes[used]).tolist()} - {""}
    pool = {"", TRAIN} if data.folds else {""}
    free = np.isin(codes, [names.index(name) for name in pool if name in names]) & used
    if not free.any() and VALID not in present and data.valid_share > 0:
        free = _own_training(path, codes, names, data) & used
    if free.any():
        division, set_names = _divide(path, free, data, seed, present)
        merged = [*names, *(name for name in set_names if name not in names)]
        codes[free] = np.array([merged.index(name) for name in set_names], dtype=np.int64)[division]
        names = merged
    return Sets(codes, names)


def _divide(path: Path, free: Mask, data: DataConfig, seed: int, present: set[str]) -> tuple[Ints, list[str]]:
    """Position of each free row's set in a list of names."""
    groups, group_of = _groups(path, free, data, seed)
    shares = {VALID: 0.0 if VALID in present else data.valid_share}
    if data.folds and shares[VALID] and len(groups.sizes) <= data.folds:
        raise SplitError(
            f"{len(groups.sizes)} {data.split_by}s are too few for {data.folds} folds and a validation set: give a "
            "source `set: valid`, or use fewer folds"
        )
    if not data.folds:
        shares[TEST] = 0.0 if present - {TRAIN, VALID} else data.test_share
    shares = {name: share for name, share in shares.items() if share > 0}
    division = split_groups(groups, shares, seed)[group_of]
    if not data.folds:
        return division, [TRAIN, *shares]
    names = [*shares, *(fold_name(number + 1) for number in range(data.folds))]
    rest = free.copy()
    rest[free] = division == 0
    groups, group_of = _groups(path, rest, data, seed)
    division -= 1
    division[division < 0] = fold_groups(groups, data.folds, seed)[group_of] + len(shares)
    return division, names
