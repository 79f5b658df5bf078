"""Forced alignments as a Parquet file: the tied state of each frame, phones with durations, words with times.

    info = AlignmentInfo(frame_shift_ms=10.0, num_pdfs=model.gmm.num_pdfs, model=model_digest(folder))
    rows = (aligned_utterance(name, found, words[name], model.tree) for name, found in aligned.alignments.items())
    write_alignments(Path("alignments.parquet"), info, rows)

    table = AlignmentTable.read(Path("alignments.parquet"))
    table.pdfs("84-121123-0001")          # int32, one tied state (pdf) for each feature frame

The file has one row for each aligned utterance; an utterance that could not be aligned has none. Columns, all filled:

    id                string         the utterance, once
    pdfs              list<int32>    tied state of each feature frame, 0 to num_pdfs - 1
    phones            list<string>   phones in order, silence included
    durations         list<int32>    frames of each phone, at least 1; they add up to the length of `pdfs`
    words             list<string>   words in order
    word_starts       list<int32>    first frame of each word
    word_ends         list<int32>    the frame after the last of each word
    word_confidences  list<float>    0 to 1 for each word, or an empty list if none were computed
    score             double         log likelihood of the path for a frame, acoustics scaled

The schema's metadata has `starling.alignments`: JSON with `format`, `frame_shift_ms`, `num_pdfs`, `model`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from configurable.files import replacing
from speech.files import DAMAGED
from speech.hmm.align import Alignment
from speech.hmm.topology import Ints
from speech.hmm.tree import DecisionTree

FORMAT = 1
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("pdfs", pa.list_(pa.int32())),
        ("phones", pa.list_(pa.string())),
        ("durations", pa.list_(pa.int32())),
        ("words", pa.list_(pa.string())),
        ("word_starts", pa.list_(pa.int32())),
        ("word_ends", pa.list_(pa.int32())),
        ("word_confidences", pa.list_(pa.float32())),
        ("score", pa.float64()),
    ]
)
_KEY = b"starling.alignments"
_ROWS = 4096
_MOST_PDFS = 1_000_000
"""Tied states, at most: a table of their frames is made, and recipes have some thousands."""


class AlignmentsError(ValueError):
    """A file that holds no alignments, or contradictory ones."""


@dataclass(frozen=True)
class AlignmentInfo:
    """What all alignments of a file share.

    Attributes:
        frame_shift_ms: time between two frames, milliseconds.
        num_pdfs: number of tied states of the model.
        model: SHA-256 of the model that aligned, in hex; see `model_digest`.
    """

    frame_shift_ms: float
    num_pdfs: int
    model: str


@dataclass(frozen=True)
class AlignedWord:
    """A word, its first frame, and the frame after its last."""

    word: str
    start: int
    end: int


@dataclass(frozen=True)
class AlignedUtterance:
    """The alignment of one utterance.

    Attributes:
        id: the utterance.
        pdfs: int32 `[T]`, the tied state of each frame.
        phones: the phones in order, by name.
        durations: int32 `[M]`, frames of each phone.
        words: the words with their times.
        confidences: of each word, 0 to 1; or empty.
        score: log likelihood of the path for a frame, acoustics scaled.
    """

    id: str
    pdfs: Ints
    phones: tuple[str, ...]
    durations: Ints
    words: tuple[AlignedWord, ...]
    confidences: tuple[float, ...] = ()
    score: float = 0.0


def aligned_utterance(
    name: str, alignment: Alignment, words: Sequence[str], tree: DecisionTree, confidences: Sequence[float] = ()
) -> AlignedUtterance:
    """The alignment of an utterance under a tree.

    Args:
        name: the utterance.
        alignment: its best path.
        words: its transcript.
        tree: of the model that aligned.
        confidences: of each word, if known.
    """
    spans = tuple(AlignedWord(words[number], start, end) for number, start, end in alignment.word_times())
    return AlignedUtterance(
        name,
        alignment.pdfs(tree).astype(np.int32),
        tuple(tree.phones.names[phone - 1] for phone in alignment.phones.tolist()),
        np.diff(alignment.starts).astype(np.int32),
        spans,
        tuple(confidences),
        alignment.score,
    )


def write_alignments(
    target: Path | BinaryIO, info: AlignmentInfo, utterances: Iterable[AlignedUtterance], rows: int = _ROWS
) -> int:
    """Write alignments.

    Args:
        target: a local file, which appears when it is complete; or an open file, which the caller publishes.
        info: what they share.
        utterances: taken one by one, so that they need not fit into memory.
        rows: utterances to a row group.

    Returns:
        Their number.

    Raises:
        AlignmentsError: an utterance occurs twice or contradicts itself.
    """
    if not isinstance(target, Path):
        return _write(target, info, utterances, rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, sync=True) as file:
        return _write(file, info, utterances, rows)


def _write(file: BinaryIO, info: AlignmentInfo, utterances: Iterable[AlignedUtterance], rows: int) -> int:
    facts = json.dumps({"format": FORMAT, **asdict(info)}, sort_keys=True).encode()
    schema = SCHEMA.with_metadata({_KEY: facts})
    known: set[str] = set()
    waiting: list[AlignedUtterance] = []
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        for one in utterances:
            if one.id in known:
                raise AlignmentsError(f"utterance {one.id} occurs twice: write each one once")
            known.add(one.id)
            waiting.append(one)
            if len(waiting) == rows:
                writer.write_batch(_batch(info, waiting, schema))
                waiting = []
        writer.write_batch(_batch(info, waiting, schema))
    return len(known)


def _batch(info: AlignmentInfo, ones: Sequence[AlignedUtterance], schema: pa.Schema) -> pa.RecordBatch:
    columns: list[list[Any]] = [
        [one.id for one in ones],
        [one.pdfs for one in ones],
        [one.phones for one in ones],
        [one.durations for one in ones],
        [[word.word for word in one.words] for one in ones],
        [[word.start for word in one.words] for one in ones],
        [[word.end for word in one.words] for one in ones],
        [one.confidences for one in ones],
        [one.score for one in ones],
    ]
    arrays = [pa.array(column, kind.type) for column, kind in zip(columns, schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    AlignmentTable(info, pa.Table.from_batches([batch]))  # checks it
    return batch


class AlignmentTable:
    """Alignments of a file, by utterance.

    Args:
        info: what they share.
        table: rows of `SCHEMA`, which are checked.
    """

    def __init__(self, info: AlignmentInfo, table: pa.Table) -> None:
        self.info = info
        self._table = table.combine_chunks()
        self._rows = {name: row for row, name in enumerate(self._table.column("id").to_pylist())}
        self._pdfs, self._offsets = _flat(self._table, "pdfs")
        self._check()

    @classmethod
    def read(cls, path: Path) -> AlignmentTable:
        """Read and check a file.

        Raises:
            AlignmentsError: it is missing, damaged, or holds something else.
        """
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                schema = file.schema_arrow
                facts = json.loads((schema.metadata or {})[_KEY])
                if facts.pop("format") != FORMAT:
                    raise AlignmentsError(f"{path} has another format than {FORMAT}: align again with this version")
                info = AlignmentInfo(float(facts["frame_shift_ms"]), int(facts["num_pdfs"]), str(facts["model"]))
                if not schema.remove_metadata().equals(SCHEMA):
                    raise AlignmentsError(f"{path} has the columns {schema.names}, which are not those of alignments")
                return cls(info, file.read(use_threads=False).replace_schema_metadata(None))
        except AlignmentsError as error:
            raise AlignmentsError(f"{path}: {error}") from error
        except (*DAMAGED, pa.ArrowException) as error:
            raise AlignmentsError(f"{path} holds no alignments, or damaged ones ({error!r}): align again") from error

    def _check(self) -> None:
        if not 1 <= self.info.num_pdfs <= _MOST_PDFS or not 0 < self.info.frame_shift_ms < math.inf:
            raise AlignmentsError(
                f"{self.info.num_pdfs} states and frames of {self.info.frame_shift_ms} ms are impossible: align again"
            )
        if any(self._table.column(name).null_count for name in SCHEMA.names):
            raise AlignmentsError("a value is missing: align again")
        if len(self._rows) != self._table.num_rows:
            raise AlignmentsError("an utterance occurs twice: align again")
        frames = np.diff(self._offsets)
        durations, offsets = _flat(self._table, "durations")
        ends = np.concatenate([[0], np.cumsum(durations, dtype=np.int64)])
        words, confidences = (_sizes(self._table, name) for name in ("words", "word_confidences"))
        starts, stops = (_flat(self._table, name)[0] for name in ("word_starts", "word_ends"))
        phones = np.diff(offsets)
        self._refuse(
            _any(phones, durations < 1) | (np.diff(ends[offsets]) != frames), "phones that do not fill its frames"
        )
        self._refuse(_sizes(self._table, "phones") != phones, "another number of phones than of durations")
        for name in ("word_starts", "word_ends"):
            self._refuse(_sizes(self._table, name) != words, "another number of words than of times")
        self._refuse((confidences != words) & (confidences > 0), "another number of words than of confidences")
        outside = (starts < 0) | (starts >= stops) | (stops > np.repeat(frames, words))
        self._refuse(_any(words, outside), "a word outside its frames")
        shares = _flat(self._table, "word_confidences")[0]
        self._refuse(_any(confidences, ~((shares >= 0) & (shares <= 1))), "a confidence that is not between 0 and 1")
        scores = self._table.column("score").to_numpy()
        self._refuse(~np.isfinite(scores), "a score that is no number")
        beyond = (self._pdfs < 0) | (self._pdfs >= self.info.num_pdfs)
        self._refuse(_any(frames, beyond), f"a state that is not among the {self.info.num_pdfs}")

    def _refuse(self, wrong: NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            name = self._table.column("id")[int(wrong.argmax())].as_py()
            raise AlignmentsError(f"utterance {name} has {what}: align again")

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def _row(self, name: str) -> int:
        row = self._rows.get(name)
        if row is None:
            raise AlignmentsError(f"utterance {name} has no alignment")
        return row

    def pdfs(self, name: str) -> Ints:
        """The tied state of each frame of an utterance: int32 `[T]`.

        Raises:
            AlignmentsError: it has no alignment.
        """
        row = self._row(name)
        found: Ints = self._pdfs[self._offsets[row] : self._offsets[row + 1]]
        return found

    def utterance(self, name: str) -> AlignedUtterance:
        """Everything about an utterance.

        Raises:
            AlignmentsError: it has none.
        """
        row = self._table.slice(self._row(name), 1).to_pylist()[0]
        spans = zip(row["words"], row["word_starts"], row["word_ends"], strict=True)
        return AlignedUtterance(
            name,
            self.pdfs(name),
            tuple(row["phones"]),
            np.array(row["durations"], dtype=np.int32),
            tuple(AlignedWord(*span) for span in spans),
            tuple(row["word_confidences"]),
            float(row["score"]),
        )

    def counts(self) -> NDArray[np.int64]:
        """Frames of each tied state in all utterances: `[num_pdfs]`."""
        return np.bincount(self._pdfs, minlength=self.info.num_pdfs)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of ids and states and of what they share, in any order of utterances; not of the file's bytes."""
        digest = hashlib.sha256(json.dumps(asdict(self.info), sort_keys=True).encode())
        for name in sorted(self._rows):
            states = self.pdfs(name)
            digest.update(f"{json.dumps(name)} {len(states)}\n".encode())
            digest.update(np.ascontiguousarray(states, dtype="<i4").tobytes())
        return digest.hexdigest()


def _flat(table: pa.Table, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The values of a column of lists one after the other, and where each row begins, with the end of the last."""
    sizes = _sizes(table, name)
    values = pc.list_flatten(table.column(name)).combine_chunks()
    return values.to_numpy(zero_copy_only=False), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _sizes(table: pa.Table, name: str) -> NDArray[np.int64]:
    """Length of the list in each row of a column."""
    return np.asarray(pc.list_value_length(table.column(name)), dtype=np.int64)


def _any(sizes: NDArray[np.int64], values: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether any value of each row holds, for rows of these sizes one after the other."""
    counts = np.concatenate([[0], np.cumsum(values)])
    ends = np.cumsum(sizes)
    found: NDArray[np.bool_] = counts[ends] > counts[ends - sizes]
    return found
