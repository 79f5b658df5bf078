"""Alignments as files: what is written is read, what contradicts itself is refused; and suspicious transcripts."""

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech.alignments import (
    SCHEMA,
    AlignedUtterance,
    Alignment,
    AlignmentInfo,
    AlignmentsError,
    AlignmentTable,
    Span,
    ctm_lines,
    low_confidences,
    low_scores,
    suspicious,
    textgrid,
    write_alignments,
)
from speech.hypotheses import Word

INFO = AlignmentInfo(frame_shift_ms=10.0, num_pdfs=5, model="ab" * 32)


def aligned(name: str, pdfs: list[int]) -> Alignment:
    """Two phones and one word."""
    words, phones = (Span("TO", 1, len(pdfs), 0.5),), (Span("SIL", 0, 1), Span("T", 1, len(pdfs)))
    states = np.array(pdfs, dtype=np.int32)
    return Alignment(name, words, phones, -3.25, states, frame_seconds=0.01, duration=len(pdfs) * 0.01)


ALIGNMENTS = [aligned("b", [0, 1, 1, 4]), aligned("a", [0, 2, 3]), aligned("c", [1, 1])]


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_written_alignments_are_read(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "sub" / "alignments.parquet"
    assert write_alignments(path, INFO, iter(ALIGNMENTS), rows) == 3
    table = AlignmentTable.read(path)
    assert (table.info, list(table), len(table)) == (INFO, ["b", "a", "c"], 3)
    for written in ALIGNMENTS:
        read = table.alignment(written.id)
        assert replace(read, pdfs=written.pdfs) == written
        assert read.pdfs.tolist() == written.pdfs.tolist()
        assert read.pdfs.dtype == np.int32
    assert table.counts().tolist() == [2, 4, 1, 1, 1]
    assert [file.name for file in path.parent.iterdir()] == ["alignments.parquet"]


def test_words_without_confidences_are_read_without(tmp_path: Path) -> None:
    unsure = replace(ALIGNMENTS[0], words=(Span("TO", 1, 4),))
    write_alignments(tmp_path / "x", INFO, [unsure, ALIGNMENTS[1]])
    table = AlignmentTable.read(tmp_path / "x")
    assert [table.alignment(name).words[0].confidence for name in "ba"] == [None, 0.5]


def test_alignments_are_written_to_an_open_file(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        write_alignments(file, INFO, ALIGNMENTS)
    assert len(AlignmentTable.read(tmp_path / "x")) == 3


def test_empty_file_has_no_utterances(tmp_path: Path) -> None:
    write_alignments(tmp_path / "x", INFO, [])
    table = AlignmentTable.read(tmp_path / "x")
    assert (len(table), table.counts().tolist()) == (0, [0] * 5)


def test_utterance_without_alignment_is_an_error(tmp_path: Path) -> None:
    write_alignments(tmp_path / "x", INFO, ALIGNMENTS)
    table = AlignmentTable.read(tmp_path / "x")
    assert "d" not in table
    with pytest.raises(AlignmentsError, match="utterance d has no alignment"):
        table.pdfs("d")


def test_digest_depends_on_content_and_not_on_order(tmp_path: Path) -> None:
    def digest(info: AlignmentInfo, alignments: list[Alignment]) -> str:
        write_alignments(tmp_path / "x", info, alignments)
        return AlignmentTable.read(tmp_path / "x").digest

    assert digest(INFO, ALIGNMENTS) == digest(INFO, ALIGNMENTS[::-1])
    different = [
        digest(INFO, ALIGNMENTS),
        digest(INFO, ALIGNMENTS[:2]),
        digest(INFO, [*ALIGNMENTS[:2], aligned("c", [1, 2])]),
        digest(INFO, [*ALIGNMENTS[:2], aligned("d", [1, 1])]),
        digest(replace(INFO, model="cd" * 32), ALIGNMENTS),
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (aligned("a", [0, 5]), "not among the 5"),
        (aligned("a", [0, -1]), "not among the 5"),
        (replace(ALIGNMENTS[0], units=(Span("SIL", 0, 1), Span("T", 1, 2))), "b has phones that do not fill"),
        (replace(ALIGNMENTS[0], units=(Span("SIL", 0, 0), Span("T", 0, 4))), "b has phones that do not fill"),
        (replace(ALIGNMENTS[0], words=(Span("TO", 1, 5),)), "b has a word outside"),
        (replace(ALIGNMENTS[0], words=(Span("TO", 1, 3, 0.5), Span("A", 3, 4))), "than of confidences"),
        (replace(ALIGNMENTS[0], pdfs=None), "a value is missing"),
    ],
)
def test_contradictory_alignment_is_not_written(tmp_path: Path, broken: Alignment, reason: str) -> None:
    with pytest.raises(AlignmentsError, match=reason):
        write_alignments(tmp_path / "x", INFO, [ALIGNMENTS[2], broken])
    assert list(tmp_path.iterdir()) == []


def test_utterance_cannot_be_written_twice(tmp_path: Path) -> None:
    with pytest.raises(AlignmentsError, match="b occurs twice"):
        write_alignments(tmp_path / "x", INFO, [ALIGNMENTS[0], ALIGNMENTS[0]])


def changed(path: Path, name: str, values: list[object]) -> None:
    """Replace a column of a file, keeping its metadata."""
    table = pq.read_table(path)
    table = table.set_column(SCHEMA.names.index(name), SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type))
    pq.write_table(table, path)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("id", ["a", "a", "c"], "occurs twice"),
        ("id", ["a", None, "c"], "value is missing"),
        ("pdfs", [[0, 1, 1, 5], [0, 2, 3], [1, 1]], "not among the 5"),
        ("pdfs", [[0, 1, 1, 4, 0], [0, 2], [1, 1]], "do not fill"),
        ("durations", [[1, 3], [1, 2], [2, 0]], "do not fill"),
        ("phones", [["SIL"], ["SIL", "T", "T"], ["SIL", "T"]], "another number of phones"),
        ("word_starts", [[1, 1], [], [1]], "another number of words"),
        ("word_ends", [[5], [3], [2]], "word outside its frames"),
    ],
)
def test_contradictory_file_is_refused(tmp_path: Path, name: str, values: list[object], reason: str) -> None:
    path = tmp_path / "x"
    write_alignments(path, INFO, ALIGNMENTS)
    changed(path, name, values)
    with pytest.raises(AlignmentsError, match=reason) as caught:
        AlignmentTable.read(path)
    assert str(path) in str(caught.value)


def test_missing_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(AlignmentsError, match="holds no alignments"):
        AlignmentTable.read(path)
    pq.write_table(pa.table({"id": ["a"]}), path)
    with pytest.raises(AlignmentsError, match="holds no alignments"):
        AlignmentTable.read(path)
    write_alignments(path, INFO, ALIGNMENTS)
    pq.write_table(pq.read_table(path).drop_columns(["score"]), path)
    with pytest.raises(AlignmentsError, match="not those of alignments"):
        AlignmentTable.read(path)
    write_alignments(path, INFO, ALIGNMENTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(AlignmentsError, match="damaged"):
        AlignmentTable.read(path)


WORDS = [Word("one", 0.5, 0.25, 0.9), Word('say "a"', 0.8, 0.2, 0.5)]


def intervals(text):
    """Start, end and text of a TextGrid's intervals, by tier."""
    tiers = {}
    for part in re.split(r"    item \[\d+\]:\n", text)[1:]:
        name = re.search(r'name = "(.*)"', part)[1]
        parts = re.findall(r'xmin = ([\d.]+)\n +xmax = ([\d.]+)\n +text = "(.*)"\n', part)
        assert int(re.search(r"intervals: size = (\d+)", part)[1]) == len(parts)
        tiers[name] = [(float(a), float(b), c.replace('""', '"')) for a, b, c in parts]
    return tiers


def test_ctm_has_a_line_for_each_unit():
    assert ctm_lines("a b", WORDS[:1]) == "a_b 1 0.500 0.250 one 0.9000\n"
    assert ctm_lines("", []) == ""


def test_textgrid_covers_the_time_with_units_and_gaps():
    text = textgrid(1.2, {"words": WORDS, "phones": []})
    assert text.startswith('File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\nxmax = 1.2000\n')
    assert intervals(text) == {
        "words": [(0, 0.5, ""), (0.5, 0.75, "one"), (0.75, 0.8, ""), (0.8, 1.0, 'say "a"'), (1.0, 1.2, "")],
        "phones": [(0, 1.2, "")],
    }


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8), st.integers(0, 100))
def test_intervals_of_any_units_are_contiguous(gaps, duration):
    now, units = 0, []
    for gap, length in gaps:
        units.append(Word("x", (now + gap) / 100, length / 100, 1.0))
        now += gap + length
    spans = intervals(textgrid(duration / 100, {"words": units}))["words"]
    assert spans[0][0] == 0
    assert spans[-1][1] == max(duration, now) / 100
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert sum(text == "x" for _, _, text in spans) == sum(unit.duration > 0 for unit in units)


def test_scores_far_below_the_median_are_found_worst_first():
    draw = random.Random(1)
    scores = {f"u{number}": draw.gauss(-50, 1) for number in range(100)}
    assert low_scores(scores) == {}
    low = low_scores(scores | {"bad": -60.0, "worse": -70.0})
    assert list(low) == ["worse", "bad"]
    assert low["worse"] == pytest.approx(20, rel=0.3)
    assert low_scores({"a": -1.0, "b": -90.0}) == {}


def test_nearly_equal_scores_of_a_saturated_ctc_model_are_not_suspicious():
    """Of 2,000 correct digits, 248 were reported, the worst 1,539 deviations below the median."""
    scores = {f"u{number}": -0.0001 * (number % 5) for number in range(100)}
    fine = {"sure": -0.003, "less sure": -0.09}
    low = low_scores(scores | fine | {"wrong word": -0.12, "wrong": -2.0})
    assert list(low) == ["wrong", "wrong word"]
    assert low["wrong"] == pytest.approx(100, rel=0.01)
    assert low_scores(dict.fromkeys(scores, -0.5)) == {}


def test_confidence_of_an_utterance_weighs_words_by_their_duration():
    words = (Span("one", 50, 75, 0.9), Span("two", 80, 100, 0.5))
    assert Alignment("u", words, ()).confidence == pytest.approx((0.25 * 0.9 + 0.2 * 0.5) / 0.45)
    assert Alignment("u", (), ()).confidence == 0.0


def test_confidences_below_half_the_median_are_found_lowest_first():
    confidences = {f"u{number}": 0.8 + 0.01 * number for number in range(12)}
    assert low_confidences(confidences) == {}
    assert low_confidences(confidences | {"low": 0.4, "lower": 0.0}) == {"lower": 0.0, "low": 0.4}
    assert low_confidences({"a": 0.9, "b": 0.0}) == {}


def test_reasons_for_suspicion_are_sentences():
    def utterance(name, score, confidence=1.0):
        alignment = Alignment(name, (Span("w", 0, 100, confidence),), (), score, duration=1.0)
        return AlignedUtterance(name, "w", alignment)

    utterances = [utterance(f"u{n}", 0.0) for n in range(20)]
    utterances += [utterance("unsure", 0.0, 0.25), utterance("low", -0.619)]
    utterances += [AlignedUtterance("failed", "", None, "the transcript is empty")]
    assert [(wrong.id, reason) for wrong, reason in suspicious(utterances, 5.0)] == [
        ("failed", "the transcript is empty"),
        ("low", "score 30.9 times the usual spread below the median"),
        ("unsure", "confidence 0.25, less than half the median"),
    ]
