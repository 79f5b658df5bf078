"""A recording that contains others made them all duplicates of each other: `drop` removed innocent training rows."""

import io
import logging

import numpy as np
import pytest
import soundfile
import torch
from rich.console import Console
from support import tone, write_table

from flows.summary import set_table
from speech.fingerprint import fingerprint
from tasks.config.pipeline import parse_config
from tasks.dataset.duplicates import (
    NEAR,
    DuplicateError,
    DuplicateGroups,
    Fingerprints,
    data_warnings,
    doubles_of,
    find_doubles,
    group_copies,
)
from tasks.dataset.sets import Sets
from tasks.dataset.speakers import set_rows
from tasks.dataset.tables import read_table
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run
from tasks.stages.prepare import MANIFEST, PREPARE, QUARANTINE

RATE = 8000


def piece(n, seconds=1.5):
    return np.asarray(tone(seconds, rate=RATE, seed=n))


def corpus(folder, **recordings):
    """A table of recordings: (samples, set) by id; each is another speaker's."""
    rows = []
    for number, (name, (wave, where)) in enumerate(recordings.items()):
        path = folder / f"{name}.flac"
        folder.mkdir(exist_ok=True)
        soundfile.write(path, wave, RATE)
        rows.append((name, path, f"text {number}", f"s{number}", where))
    return str(write_table(folder, rows))


def prepared(path, **policies):
    document = {"name": "d", "data": {"sources": [{"kind": "table", "path": path}], "duplicates": policies}}
    document["data"]["valid_share"] = 0
    run = Run(parse_config(document), "parts")
    run.results["prepare"] = PREPARE.execute(run)
    return run


def table_of(run):
    rows = read_table(run.result("prepare").store, "duplicates.parquet")
    return sorted((row["id"], row["where"], row["other_id"]) for row in rows)


def ids(run, name=MANIFEST):
    return {row["id"] for row in read_table(run.result("prepare").store, name)}


def joined(*numbers):
    return np.concatenate([piece(n) for n in numbers])


def test_only_the_training_recording_that_contains_test_speech_is_dropped(home, tmp_path):
    pieces = {f"p{n}": (piece(n), "test" if n == 4 else "train") for n in range(10)}
    path = corpus(tmp_path, **pieces, whole=(joined(*range(10)), "train"))
    run = prepared(path, overlap="drop")
    assert ids(run, QUARANTINE) == {"whole"}
    assert table_of(run)[-1] == ("whole", "overlap", "p4")
    record = run.result("prepare").record
    assert record["contaminated"] == {"test": {"training": 1, "left": 0}}
    assert record["duplicates"] == {"near-duplicate overlap": 1}


def test_parts_of_one_recording_are_no_duplicates_of_each_other(home, tmp_path):
    pieces = {f"p{n}": (piece(n), "train" if n < 5 else "valid") for n in range(10)}
    run = prepared(corpus(tmp_path, **pieces, whole=(joined(*range(10)), "other")), overlap="keep")
    wanted = [(f"p{n}", "overlap" if n < 5 else "validation", "whole") for n in range(10)]
    assert table_of(run) == wanted
    lines = read_table(run.result("prepare").store, "duplicates.parquet")
    assert {row["kind"] for row in lines} == {"near-duplicate"}
    assert all(0.08 < row["common"] < 0.12 and row["bit_errors"] < 0.1 for row in lines)  # a tenth of the longer one


def test_parts_within_a_set_are_left_out_and_what_contains_them_stays(home, tmp_path):
    path = corpus(tmp_path, a=(piece(0), "train"), both=(joined(0, 1), "train"), b=(piece(1), "train"),
                  again=(piece(2), "train"), other=(piece(2), "train"), test=(piece(9), "test"))  # fmt: skip
    run = prepared(path, within="drop")
    assert ids(run) == {"both", "again", "test"}
    assert table_of(run) == [("a", "within", "both"), ("b", "within", "both"), ("other", "within", "again")]


def test_part_of_a_recording_that_is_left_out_stays(home, tmp_path):
    path = corpus(tmp_path, a=(piece(0), "train"), both=(joined(0, 1), "train"), test=(piece(1), "test"))
    assert ids(prepared(path, within="drop", overlap="drop")) == {"a", "test"}


def test_windows_of_which_each_overlaps_the_next_are_not_all_copies_of_the_first(home, tmp_path):
    long = joined(*range(8))
    windows = {f"w{n}": long[n * 4000 : n * 4000 + 24000] for n in range(12)}  # 3 s, 83 % of the next one
    prints = Fingerprints(tmp_path / "prints")
    for wave in windows.values():
        prints.add(fingerprint(torch.from_numpy(wave).float(), RATE))
    used = np.ones(12, dtype=bool)
    labels, parts = group_copies(np.arange(12, dtype=np.int32), prints, used, 0.17)
    assert (np.arange(12) - labels <= 1).all()  # windows 0 and 1, not 0 and 2
    codes = np.array([0] + [1] * 11)
    doubles = find_doubles(DuplicateGroups(NEAR, labels, "keep", "keep", parts=parts), Sets(codes, ["test", "train"]))
    leaked = np.flatnonzero(doubles.leaked)
    assert {1, 2} <= set(leaked.tolist()) <= {1, 2, 3}


def test_piece_in_many_recordings_is_found_in_each(tmp_path):
    prints = Fingerprints(tmp_path / "prints")
    waves = [piece(0), *(np.concatenate([piece(n), piece(0), piece(n + 50)]) for n in range(1, 40))]
    for wave in waves:
        prints.add(fingerprint(torch.from_numpy(wave).float(), RATE))
    labels, parts = group_copies(np.arange(40, dtype=np.int32), prints, np.ones(40, dtype=bool), 0.17)
    assert labels.tolist() == list(range(40))
    assert parts.tolist() == [[0, n] for n in range(1, 40)]


@pytest.fixture
def heard(tmp_path):
    """Test and validation sets that repeat training and each other, also within themselves."""
    return corpus(
        tmp_path / "heard",
        train0=(piece(0), "train"),
        train1=(piece(1), "train"),
        train2=(piece(2), "train"),
        test0=(piece(0), "test"),
        test0b=(piece(0) * 0.3, "test"),
        test1=(piece(1), "test"),
        test3=(piece(3), "test"),
        test4=(piece(4), "test"),
        test4b=(piece(4), "test"),
        valid1=(piece(1), "valid"),
        valid3=(piece(3), "valid"),
        valid5=(piece(5), "valid"),
    )


def test_relation_to_training_is_listed_before_the_one_within_a_set(home, heard):
    assert table_of(prepared(heard, overlap="keep")) == [
        ("test4b", "within", "test4"),
        ("train0", "overlap", "test0"),
        ("train0", "overlap", "test0b"),  # not within the test set
        ("train1", "overlap", "test1"),
        ("train1", "overlap", "valid1"),
        ("valid1", "validation", "test1"),
        ("valid3", "validation", "test3"),
    ]


def test_lines_say_how_much_two_recordings_have_in_common(home, heard):
    lines = read_table(prepared(heard, overlap="keep").result("prepare").store, "duplicates.parquet")
    same = [(row["bit_errors"], row["common"]) for row in lines if row["kind"] == "same-audio"]
    assert same == [(None, 1.0)] * 6
    (near,) = (row for row in lines if row["kind"] == "near-duplicate")
    assert (near["id"], near["other_id"]) == ("train0", "test0b")
    assert 0 <= near["bit_errors"] < 0.05
    assert 0.95 < near["common"] <= 1


def test_number_of_contaminated_utterances_is_stated(home, heard, caplog):
    run = prepared(heard, overlap="keep")
    record, data = run.result("prepare").record, run.config.data
    assert record["contaminated"] == {
        "test": {"training": 3, "validation": 1, "left": 3},
        "valid": {"training": 1, "left": 1},
    }
    counts = {"same-audio overlap": 2, "same-audio validation": 2, "same-audio within": 1}
    assert record["duplicates"] == counts  # of training, validation and other utterances, each once
    said = "3 utterances of 'test' and 1 utterance of 'valid' are also in training, as a whole or in part"
    also = "1 utterance of 'test' is also in validation, as a whole or in part"
    assert doubles_of(record, data)[-2:] == [f"{said} (kept there).", f"{also} (kept there)."]
    assert [warning.partition(", which")[0] for warning in data_warnings(record, data)] == [said, also]
    with caplog.at_level(logging.INFO):
        run_plainly(run, until="prepare")
    assert said in caplog.text
    text = io.StringIO()
    Console(file=text, width=200).print(set_table(set_rows(record)))
    assert "utterances also in training" in text.getvalue()
    assert [row.get("contaminated", 0) for row in set_rows(record)] == [3, 0, 1]


def test_validation_and_test_sets_are_compared_and_drop_leaves_out_validation(home, heard, tmp_path):
    run = prepared(heard, overlap="drop", validation="drop")
    assert ids(run, QUARANTINE) == {"train0", "train1", "valid1", "valid3"}
    record = run.result("prepare").record
    assert record["contaminated"]["test"] == {"training": 3, "validation": 1, "left": 0}
    assert data_warnings(record, run.config.data) == []
    path = corpus(tmp_path / "two", a=(piece(0), "train"), b=(piece(1), "valid"), c=(piece(1), "test"))
    match = r"1 utterance\(s\) are in the validation set and in a test set \(1 utterance of 'test' is .*b \(valid\)"
    with pytest.raises(DuplicateError, match=match):
        prepared(path, validation="refuse")


def test_recordings_in_several_folds_stay_in_the_first_with_parts(home):
    names = ["fold-1", "fold-2"]
    codes = np.array([0, 1, 1, 0])
    parts = np.array([[1, 3], [2, 0]])
    doubles = find_doubles(
        DuplicateGroups(NEAR, np.arange(4, dtype=np.int32), "keep", "keep", parts=parts), Sets(codes, names)
    )
    assert np.flatnonzero(doubles.leaked).tolist() == [2, 3]
    assert doubles.other[[2, 3]].tolist() == [0, 1]


def test_texts_of_unknown_speakers_are_not_those_of_one_speaker(home, tmp_path):
    rows = []
    for n, (where, who) in enumerate([("train", ""), ("test", ""), ("train", "ann"), ("test", "ann")]):
        soundfile.write(tmp_path / f"{n}.wav", piece(n), RATE)
        rows.append((f"u{n}", tmp_path / f"{n}.wav", "the same words", who, where))
    run = prepared(str(write_table(tmp_path, rows)))
    assert table_of(run) == [("u2", "overlap", "u3")]
