"""Alignments as a file: what is written is read, and what contradicts itself is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hmm_toys import LEXICON, PHONES, context_tree, random_model

from speech.hmm.align import equal_alignment
from speech.hmm.alignments import (
    SCHEMA,
    AlignedUtterance,
    AlignedWord,
    AlignmentInfo,
    AlignmentsError,
    AlignmentTable,
    aligned_utterance,
    write_alignments,
)
from speech.hmm.graphs import utterance_graph
from speech.hmm.model import model_digest

INFO = AlignmentInfo(frame_shift_ms=10.0, num_pdfs=5, model="ab" * 32)


def utterance(name: str, pdfs: list[int]) -> AlignedUtterance:
    """Two phones and one word."""
    durations = np.array([1, len(pdfs) - 1], dtype=np.int32)
    words = (AlignedWord("TO", 1, len(pdfs)),)
    return AlignedUtterance(name, np.array(pdfs, dtype=np.int32), ("SIL", "T"), durations, words, (0.5,), -3.25)


UTTERANCES = [utterance("b", [0, 1, 1, 4]), utterance("a", [0, 2, 3]), utterance("c", [1, 1])]


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_written_alignments_are_read(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "sub" / "alignments.parquet"
    assert write_alignments(path, INFO, iter(UTTERANCES), rows) == 3
    table = AlignmentTable.read(path)
    assert (table.info, list(table), len(table)) == (INFO, ["b", "a", "c"], 3)
    for one in UTTERANCES:
        found = table.utterance(one.id)
        assert replace(found, pdfs=one.pdfs, durations=one.durations) == one
        assert (found.pdfs.tolist(), found.durations.tolist()) == (one.pdfs.tolist(), one.durations.tolist())
        assert found.pdfs.dtype == np.int32
    assert table.counts().tolist() == [2, 4, 1, 1, 1]
    assert [one.name for one in path.parent.iterdir()] == ["alignments.parquet"]


def test_alignments_are_written_to_an_open_file(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        write_alignments(file, INFO, UTTERANCES)
    assert len(AlignmentTable.read(tmp_path / "x")) == 3


def test_empty_file_has_no_utterances(tmp_path: Path) -> None:
    write_alignments(tmp_path / "x", INFO, [])
    table = AlignmentTable.read(tmp_path / "x")
    assert (len(table), table.counts().tolist()) == (0, [0] * 5)


def test_viterbi_alignment_keeps_states_phones_and_words(tmp_path: Path) -> None:
    tree = context_tree(np.random.default_rng(1))
    words = ["AT", "TWO"]
    found = equal_alignment(utterance_graph(PHONES, LEXICON, words, context=False), 40, PHONES)
    assert found is not None
    one = aligned_utterance("u", found, words, tree)
    write_alignments(tmp_path / "x", replace(INFO, num_pdfs=tree.num_pdfs), [one])
    read = AlignmentTable.read(tmp_path / "x").utterance("u")
    assert read.pdfs.tolist() == found.pdfs(tree).tolist()
    assert read.phones == ("SIL", "AE1", "T", "T", "UW1", "SIL")
    assert [word.word for word in read.words] == words
    assert (read.words[0].start, read.words[1].end) == (found.starts[1], found.starts[-2])


def test_utterance_without_alignment_is_an_error(tmp_path: Path) -> None:
    write_alignments(tmp_path / "x", INFO, UTTERANCES)
    table = AlignmentTable.read(tmp_path / "x")
    assert "d" not in table
    with pytest.raises(AlignmentsError, match="utterance d has no alignment"):
        table.pdfs("d")


def test_digest_depends_on_content_and_not_on_order(tmp_path: Path) -> None:
    def digest(info: AlignmentInfo, ones: list[AlignedUtterance]) -> str:
        write_alignments(tmp_path / "x", info, ones)
        return AlignmentTable.read(tmp_path / "x").digest

    assert digest(INFO, UTTERANCES) == digest(INFO, UTTERANCES[::-1])
    different = [
        digest(INFO, UTTERANCES),
        digest(INFO, UTTERANCES[:2]),
        digest(INFO, [*UTTERANCES[:2], utterance("c", [1, 2])]),
        digest(INFO, [*UTTERANCES[:2], utterance("d", [1, 1])]),
        digest(replace(INFO, model="cd" * 32), UTTERANCES),
    ]
    assert len(set(different)) == len(different)


def test_digest_of_a_model_depends_on_its_weights(tmp_path: Path) -> None:
    for seed in (1, 1, 2):
        random_model(np.random.default_rng(seed)).save(tmp_path / str(seed))
        random_model(np.random.default_rng(seed)).save(tmp_path / f"{seed} again")
    assert model_digest(tmp_path / "1") == model_digest(tmp_path / "1 again") != model_digest(tmp_path / "2")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (utterance("a", [0, 5]), "not among the 5"),
        (utterance("a", [0, -1]), "not among the 5"),
        (replace(UTTERANCES[0], durations=np.array([1, 1], dtype=np.int32)), "b has phones that do not fill"),
        (replace(UTTERANCES[0], durations=np.array([4], dtype=np.int32)), "another number of phones"),
        (replace(UTTERANCES[0], durations=np.array([0, 4], dtype=np.int32)), "b has phones that do not fill"),
        (replace(UTTERANCES[0], words=(AlignedWord("TO", 1, 5),)), "b has a word outside"),
        (replace(UTTERANCES[0], confidences=(0.5, 0.5)), "than of confidences"),
    ],
)
def test_contradictory_alignment_is_not_written(tmp_path: Path, broken: AlignedUtterance, reason: str) -> None:
    with pytest.raises(AlignmentsError, match=reason):
        write_alignments(tmp_path / "x", INFO, [UTTERANCES[2], broken])
    assert list(tmp_path.iterdir()) == []


def test_utterance_cannot_be_written_twice(tmp_path: Path) -> None:
    with pytest.raises(AlignmentsError, match="b occurs twice"):
        write_alignments(tmp_path / "x", INFO, [UTTERANCES[0], UTTERANCES[0]])


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
    write_alignments(path, INFO, UTTERANCES)
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
    write_alignments(path, INFO, UTTERANCES)
    pq.write_table(pq.read_table(path).drop_columns(["score"]), path)
    with pytest.raises(AlignmentsError, match="not those of alignments"):
        AlignmentTable.read(path)
    write_alignments(path, INFO, UTTERANCES)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(AlignmentsError, match="damaged"):
        AlignmentTable.read(path)
