"""A segment that started at 0 was the whole file, an id or speaker 0 was none, and NaN was the word "nan"."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import write_tone

from storage.corpora import open_corpus

NAN = math.nan


def write_table(folder: Path, suffix: str, rows: list[dict]) -> Path:
    write_tone(folder / "a.wav")
    path = folder / f"table{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix in (".jsonl", ".json"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        separator = "\t" if suffix == ".tsv" else ","
        lines = [rows[0].keys(), *(map(str, row.values()) for row in rows)]
        path.write_text("".join(separator.join(cells) + "\n" for cells in lines))
    return path


SUFFIXES = [".csv", ".tsv", ".jsonl", ".parquet"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_segment_that_starts_at_zero_has_its_duration(tmp_path, suffix):
    rows = [{"path": "a.wav", "start": start, "duration": 0.5, "text": "one"} for start in (0.0, 0.5)]
    utterances = open_corpus("table", str(write_table(tmp_path, suffix, rows)))
    assert [(u.start, u.end) for u in utterances] == [(0.0, 0.5), (0.5, 1.0)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nan_is_a_missing_value(tmp_path, suffix):
    rows = [{"path": "a.wav", "text": "one", "speaker": NAN, "id": "a", "start": NAN, "duration": NAN, "lang": NAN}]
    rows += [{**rows[0], "id": "b", "text": NAN if suffix != ".parquet" else "nan"}]
    reader = open_corpus("table", str(write_table(tmp_path, suffix, rows)))
    (utterance,) = reader
    assert (utterance.id, utterance.speaker, utterance.start, utterance.end, utterance.duration) == (
        "a",
        "",
        0.0,
        None,
        None,
    )
    assert utterance.language == "en"
    assert [problem[:2] for problem in reader.problems] == [("b", "missing-transcript")]


def test_numbers_in_a_column_with_gaps_are_whole(tmp_path):
    rows = [{"path": "a.wav", "text": 5.0, "speaker": 3.0, "id": 1.0}, {"path": "a.wav", "text": None, "id": 2.0}]
    reader = open_corpus("table", str(write_table(tmp_path, ".parquet", rows)))
    assert [(u.id, u.text, u.speaker) for u in reader] == [("1", "5", "3")]
    assert [problem[:2] for problem in reader.problems] == [("2", "missing-transcript")]


@pytest.mark.parametrize("kind", ["nemo", "lhotse", "peoples_speech", "table"])
def test_speaker_and_id_zero_are_kept_and_nan_is_missing(tmp_path, kind):
    (zeros, other), wrong = (
        ({"text": 7, "speaker": 0, "id": 0}, {"text": "one", "speaker": NAN, "id": 1}),
        {"text": NAN},
    )
    rows = [zeros, other, wrong | {"id": 2, "speaker": 0}]
    if kind == "nemo":
        path = write_table(tmp_path, ".json", [{"audio_filepath": "a.wav", "duration": 1, **row} for row in rows])
    elif kind == "table":
        path = write_table(tmp_path, ".jsonl", [{"path": "a.wav", **row} for row in rows])
    elif kind == "lhotse":
        recording = {"id": "r", "duration": 1.0, "sources": [{"type": "file", "channels": [0], "source": "a.wav"}]}
        cut = {"start": 0, "duration": 1.0, "recording": recording, "channel": 0}
        cuts = [{**cut, "id": row.pop("id"), "supervisions": [{"start": 0, "duration": 1.0, **row}]} for row in rows]
        path = write_table(tmp_path, ".jsonl", cuts).rename(tmp_path / "cuts.jsonl")
    else:
        rows = [{"identifier": row["speaker"], "training_data": {"name": f"{row['id']}.wav", **row}} for row in rows]
        for number in range(3):
            write_tone(tmp_path / f"{number}.wav")
        path = write_table(tmp_path, ".json", rows)
    reader = open_corpus(kind, str(path))
    assert [(u.id, u.text, u.speaker) for u in reader] == [("0", "7", "0"), ("1", "one", "")]
    assert [problem[:2] for problem in reader.problems] == [("2", "missing-transcript")]


def test_nan_in_text_files_is_a_missing_transcript(tmp_path):
    for name, text in (("a", "one"), ("b", "nan\n"), ("c", "Nan")):
        write_tone(tmp_path / f"{name}.wav")
        (tmp_path / f"{name}.txt").write_text(text)
    reader = open_corpus("sidecar", str(tmp_path))
    assert [u.id for u in reader] == ["a", "c"]
    assert [problem[:2] for problem in reader.problems] == [("b", "missing-transcript")]
    assert "write the word Nan" in reader.problems[0].detail


@pytest.mark.parametrize("duration", [0, -1, "x" * 10_000])
def test_segment_of_no_valid_duration_is_no_whole_file(tmp_path, duration):
    row = {"audio_filepath": "a.wav", "offset": 0, "duration": duration, "text": "one"}
    reader = open_corpus("nemo", str(write_table(tmp_path, ".json", [row])))
    assert list(reader) == []
    assert [problem.reason for problem in reader.problems] == ["bad-line"]
    assert len(reader.problems[0].detail) < 1000
