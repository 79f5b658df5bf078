"""Alignments as data and as files: words and phones or tokens with times and confidences, tied states of all frames.

Every aligner returns an `Alignment`: a GMM-HMM (`speech.hmm.aligner`), a network of tied states, a CTC model
(`recognition.alignment`). Files:

- NIST's CTM, a line for each unit: file, channel, start and duration in seconds, label, confidence

      84-121123-0001 1 0.480 0.310 GO 0.9713

- Praat's TextGrid in the long text format, with one interval for each unit and each gap

      intervals [2]:
          xmin = 0.4800
          xmax = 0.7900
          text = "GO"

- Parquet for training on tied states, one row for each aligned utterance; others have none

      info = AlignmentInfo(frame_shift_ms=10.0, num_pdfs=model.gmm.num_pdfs, model=model_digest(folder))
      write_alignments(Path("alignments.parquet"), info, alignments)
      AlignmentTable.read(Path("alignments.parquet")).pdfs("84-121123-0001")   # int32, one tied state a frame

Its columns, all filled:

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
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from configurable.files import replacing
from speech.files import DAMAGED
from speech.hypotheses import Word
from speech.words import FrameTimes, Piece

Ints = NDArray[np.int32]


class Span(NamedTuple):
    """A word, phone or token of an alignment."""

    label: str
    """Its text or name."""
    start: int
    """Its first frame."""
    end: int
    """The frame after its last."""
    confidence: float | None = None
    """Mean posterior of its frames, 0 to 1; None if it was not computed."""


@dataclass(frozen=True)
class Alignment:
    """The alignment of an utterance with its transcript.

    Attributes:
        id: The utterance.
        words: The words of the transcript.
        units: Phones, which fill the frames, silence included; or tokens of a CTC model, with blanks between them.
        score: Log likelihood (HMM) or log posterior (CTC) of the path for a frame.
        pdfs: int32 `[T]`, the tied state of each frame; None for a CTC model.
        frame_seconds: Frame shift in seconds.
        offset: Start of the first frame in seconds.
        duration: Length of the utterance in seconds; 0 if it is not known.
        later: If the utterance was cut for the model: all pieces of it after the first one.
    """

    id: str
    words: tuple[Span, ...]
    units: tuple[Span, ...]
    score: float = 0.0
    pdfs: Ints | None = None
    frame_seconds: float = 0.01
    offset: float = 0.0
    duration: float = 0.0
    later: tuple[Piece, ...] = ()

    def timed(self, spans: Iterable[Span]) -> list[Word]:
        """Words or units with times in seconds from the start of the utterance, all of them within it."""
        times = FrameTimes(self.frame_seconds, self.offset, 0.0, self.duration or math.inf, self.later)
        return times.words(
            [(label, start, end, min(confidence or 0.0, 1.0)) for label, start, end, confidence in spans]
        )

    @property
    def confidence(self) -> float:
        """Mean confidence of the words, weighted by their durations."""
        words = self.timed(self.words)
        total = sum(word.duration for word in words)
        return sum(word.confidence * word.duration for word in words) / total if total else 0.0


@dataclass(frozen=True)
class AlignedUtterance:
    """What became of an utterance that was to be aligned.

    Attributes:
        id: The utterance.
        text: Its normalized transcript.
        alignment: The alignment, or None.
        failure: The reason why there is none.
        heard: What the model hears without the transcript; None if it recognizes nothing by itself.
    """

    id: str
    text: str
    alignment: Alignment | None
    failure: str = ""
    heard: str | None = None


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


def write_alignments(
    target: Path | BinaryIO, info: AlignmentInfo, alignments: Iterable[Alignment], rows: int = _ROWS
) -> int:
    """Write alignments.

    Args:
        target: a local file, which appears when it is complete; or an open file, which the caller publishes.
        info: what they share.
        alignments: with tied states; taken one by one, so that they need not fit into memory.
        rows: utterances to a row group.

    Returns:
        Their number.

    Raises:
        AlignmentsError: an utterance occurs twice or contradicts itself.
    """
    if not isinstance(target, Path):
        return _write(target, info, alignments, rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, sync=True) as file:
        return _write(file, info, alignments, rows)


def _write(file: BinaryIO, info: AlignmentInfo, alignments: Iterable[Alignment], rows: int) -> int:
    facts = json.dumps({"format": FORMAT, **asdict(info)}, sort_keys=True).encode()
    schema = SCHEMA.with_metadata({_KEY: facts})
    known: set[str] = set()
    waiting: list[Alignment] = []
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        for alignment in alignments:
            if alignment.id in known:
                raise AlignmentsError(f"utterance {alignment.id} occurs twice: write each one once")
            known.add(alignment.id)
            waiting.append(alignment)
            if len(waiting) == rows:
                writer.write_batch(_batch(info, waiting, schema))
                waiting = []
        writer.write_batch(_batch(info, waiting, schema))
    return len(known)


def _batch(info: AlignmentInfo, group: Sequence[Alignment], schema: pa.Schema) -> pa.RecordBatch:
    columns: list[list[Any]] = [
        [alignment.id for alignment in group],
        [alignment.pdfs for alignment in group],
        [[phone.label for phone in alignment.units] for alignment in group],
        [[phone.end - phone.start for phone in alignment.units] for alignment in group],
        [[word.label for word in alignment.words] for alignment in group],
        [[word.start for word in alignment.words] for alignment in group],
        [[word.end for word in alignment.words] for alignment in group],
        [[word.confidence for word in alignment.words if word.confidence is not None] for alignment in group],
        [alignment.score for alignment in group],
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
        if any(table.column(name).null_count for name in SCHEMA.names):
            raise AlignmentsError("a value is missing: align again")
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
        pdfs: Ints = self._pdfs[self._offsets[row] : self._offsets[row + 1]]
        return pdfs

    def alignment(self, name: str) -> Alignment:
        """Everything about an utterance.

        Raises:
            AlignmentsError: it has no alignment.
        """
        row = self._table.slice(self._row(name), 1).to_pylist()[0]
        confidences = row["word_confidences"] or [None] * len(row["words"])
        words = zip(row["words"], row["word_starts"], row["word_ends"], confidences, strict=True)
        ends = np.cumsum([0, *row["durations"]]).tolist()
        phones = zip(row["phones"], ends[:-1], ends[1:], strict=True)
        shift = self.info.frame_shift_ms / 1000
        return Alignment(
            name,
            tuple(Span(*word) for word in words),
            tuple(Span(*phone) for phone in phones),
            float(row["score"]),
            self.pdfs(name),
            shift,
            duration=ends[-1] * shift,
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
    answers: NDArray[np.bool_] = counts[ends] > counts[ends - sizes]
    return answers


_SMALLEST = 10
"""With fewer utterances, their scores and confidences are not compared: the spread is unknown."""
_NORMAL = 1.4826
"""1 / Φ⁻¹(3/4): the standard deviation of a normal distribution in median absolute deviations (Hampel 1974)."""
_LEAST_SPREAD = 0.02
"""Smallest robust standard deviation of scores, in nats per frame. A CTC model that is sure of nearly every frame has
scores of nearly 0 (the digits of docs/own-recordings.md: a spread of 0.0004), and one good utterance in eight would be
more than five deviations below the median. With this floor, five deviations are a posterior per frame that is 10 %
lower. Scores of GMMs spread more widely."""


def ctm_label(name: str) -> str:
    """A name as CTM files have it: white space becomes underscores, since it separates columns."""
    return re.sub(r"\s", "_", name) or "_"


def scored_name(name: str) -> str:
    """What is left of a name when CTM files are scored: programs ignore case, and how accents are composed."""
    return normalize("NFC", ctm_label(name)).casefold()


def distinct_names(names: Iterable[str]) -> list[str]:
    """Adds -2, -3 and so on to names that a CTM file would not tell from an earlier one."""
    given = list(names)
    first = {scored_name(name): place for place, name in reversed(list(enumerate(given)))}
    taken, distinct = set(first), []
    for place, name in enumerate(given):
        longer, count = name, 1
        while place != first.get(scored_name(name)) and scored_name(longer) in taken:
            count += 1
            longer = f"{name}-{count}"
        taken.add(scored_name(longer))
        distinct.append(longer)
    return distinct


def ctm_lines(name: str, units: Sequence[Word]) -> str:
    """Lines of a CTM file: file, channel, start, duration, word, confidence; times in seconds.

    Args:
        name: Name of the utterance; see `distinct_names` if there are several.
        units: Words, or phones.
    """
    label = ctm_label(name)
    return "".join(f"{label} 1 {w.start:.3f} {w.duration:.3f} {w.word} {w.confidence:.4f}\n" for w in units)


def textgrid(duration: float, tiers: Mapping[str, Sequence[Word]]) -> str:
    """A TextGrid in Praat's long text format; gaps between units are intervals without text.

    Args:
        duration: Seconds.
        tiers: Units in order, by name of the tier. Units must not overlap.
    """
    end = max([duration, *(unit.start + unit.duration for units in tiers.values() for unit in units)])
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "xmin = 0", f"xmax = {end:.4f}"]
    lines += ["tiers? <exists>", f"size = {len(tiers)}", "item []:"]
    for number, (name, units) in enumerate(tiers.items(), start=1):
        intervals = _intervals(units, end)
        lines += [f"    item [{number}]:", '        class = "IntervalTier"', f"        name = {_quoted(name)}"]
        lines += ["        xmin = 0", f"        xmax = {end:.4f}", f"        intervals: size = {len(intervals)}"]
        for place, (start, stop, text) in enumerate(intervals, start=1):
            lines += [
                f"        intervals [{place}]:",
                f"            xmin = {start:.4f}",
                f"            xmax = {stop:.4f}",
            ]
            lines.append(f"            text = {_quoted(text)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'


def _intervals(units: Sequence[Word], end: float) -> list[tuple[float, float, str]]:
    """Start, end and text of the units and of the gaps between them; they fill the time from 0 to the end."""
    intervals: list[tuple[float, float, str]] = []
    now = 0.0
    for unit in units:
        start, stop = max(unit.start, now), unit.start + unit.duration
        if stop - start <= 1e-6:  # Praat has no empty intervals
            continue
        if start - now > 1e-6:
            intervals.append((now, start, ""))
        intervals.append((start, stop, unit.word))
        now = stop
    if end - now > 1e-6 or not intervals:
        intervals.append((now, end, ""))
    return intervals


def low_scores(scores: Mapping[str, float], deviations: float = 5.0) -> dict[str, float]:
    """Utterances whose score is far below the median: their transcripts are probably wrong.

    Args:
        scores: Score per frame of each utterance.
        deviations: How many robust standard deviations (1.4826 times the median absolute deviation, at least 0.02)
            below the median.

    Returns:
        The number of deviations below the median of each of them, the worst first; none if there are fewer than ten
        utterances.
    """
    if len(scores) < _SMALLEST:
        return {}
    median = statistics.median(scores.values())
    spread = max(_LEAST_SPREAD, _NORMAL * statistics.median(abs(score - median) for score in scores.values()))
    below = {name: (median - score) / spread for name, score in scores.items()}
    return dict(sorted(((n, d) for n, d in below.items() if d > deviations), key=lambda item: (-item[1], item[0])))


def confidence_limit(confidences: Iterable[float], share: float = 0.5) -> float:
    """The confidence below which few words are where the transcript has them: a share of the median.

    Args:
        confidences: Mean confidence of each utterance, of at least one.
        share: The share.
    """
    return share * statistics.median(confidences)


def low_confidences(confidences: Mapping[str, float], share: float = 0.5) -> dict[str, float]:
    """Utterances whose confidence is below `confidence_limit`.

    Args:
        confidences: Mean confidence of each utterance.
        share: The share.

    Returns:
        The confidence of each of them, the lowest first; none if there are fewer than ten utterances.
    """
    if len(confidences) < _SMALLEST:
        return {}
    limit = confidence_limit(confidences.values(), share)
    low = ((name, value) for name, value in confidences.items() if value < limit)
    return dict(sorted(low, key=lambda item: (item[1], item[0])))


def suspicious(utterances: Sequence[AlignedUtterance], deviations: float) -> list[tuple[AlignedUtterance, str]]:
    """Utterances whose transcripts are probably wrong, with the reasons.

    Failures come first, then low scores, then low confidences.

    Args:
        utterances: All utterances of a corpus.
        deviations: How many standard deviations below the median a score is low.
    """
    by_name = {utterance.id: utterance for utterance in utterances}
    aligned = {name: utterance.alignment for name, utterance in by_name.items() if utterance.alignment is not None}
    scores = {name: alignment.score for name, alignment in aligned.items()}
    confidences = {name: alignment.confidence for name, alignment in aligned.items()}
    reasons = {name: by_name[name].failure for name in sorted(by_name.keys() - aligned.keys())}
    for name, distance in low_scores(scores, deviations).items():
        reasons[name] = f"score {distance:.1f} times the usual spread below the median"
    for name, confidence in low_confidences(confidences).items():
        reasons.setdefault(name, f"confidence {confidence:.2f}, less than half the median")
    return [(by_name[name], reason) for name, reason in reasons.items()]
