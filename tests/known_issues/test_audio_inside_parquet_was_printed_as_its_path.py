"""A Parquet table with the audio inside, as Hugging Face stores it, ended in an error of 26 kB of binary data."""

import json
import os
import threading
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import write_tone

from storage.corpora import CorpusError, guess_kind, open_corpus
from storage.corpora.embedded import CellError, read_cell
from tasks.config.pipeline import parse_config
from tasks.dataset.audio import load_utterance_audio
from tasks.dataset.discovery import find_corpus
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD

AUDIO = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture
def tones(tmp_path):
    """Encoded audio of 0.1, 0.2, … seconds."""
    return [write_tone(tmp_path / "tones" / f"{n}.wav", seconds=(n + 1) / 10).read_bytes() for n in range(6)]


def write(path, audio, kind=AUDIO, rows_in_group=2, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"sentence": [f"text {n}" for n in range(len(audio))]} | columns
    table = pa.table({"audio": pa.array(audio, kind)} | columns)
    pq.write_table(table, path, row_group_size=rows_in_group)
    return path


def cells(tones, path="a.wav"):
    return [{"bytes": tone, "path": path} for tone in tones]


def seconds(reader):
    return [round(len(wave) / rate, 3) for wave, rate in map(load_utterance_audio, reader)]


@pytest.mark.parametrize("paths", ["unique", "same", "none"])
def test_structures_of_bytes_and_path_are_read(tmp_path, tones, paths):
    names = {"unique": [f"/cache/{n}.wav" for n in range(6)], "same": ["a.wav"] * 6, "none": [None] * 6}[paths]
    audio = [{"bytes": tone, "path": name} for tone, name in zip(tones, names, strict=True)]
    reader = open_corpus("auto", str(write(tmp_path / "hf.parquet", audio)))
    utterances = list(reader)
    assert reader.problems == []
    assert [u.text for u in utterances] == [f"text {n}" for n in range(6)]
    assert seconds(utterances) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert seconds(reversed(utterances)) == [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    folder = tmp_path.name.replace(".", "-")
    ids = {"unique": "{}", "same": folder + "-hf-{}-a", "none": "hf-{}"}[paths]
    assert [u.id for u in utterances] == [ids.format(n) for n in range(6)]


def test_columns_of_bytes_are_read(tmp_path, tones):
    table = pa.table({"speech": pa.array(tones, pa.large_binary()), "text": ["one"] * 6, "id": list("abcdef")})
    pq.write_table(table, tmp_path / "t.parquet")
    reader = open_corpus("table", str(tmp_path / "t.parquet"))
    assert [u.id for u in reader] == list("abcdef")
    assert seconds(reader) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    (source,) = find_corpus(tmp_path / "t.parquet").sources
    assert source.columns == {"audio": "speech"}


def test_cells_without_bytes_name_a_file_or_nothing(tmp_path, tones):
    audio = [{"bytes": tones[0], "path": "x.wav"}, {"bytes": None, "path": "tones/1.wav"}, None, {"bytes": b"x"}]
    audio += [{"bytes": None, "path": "tones/2.wav"}, {"bytes": None, "path": "gone.wav"}]
    reader = open_corpus("table", str(write(tmp_path / "t.parquet", audio)))
    utterances = list(reader)
    assert [u.text for u in utterances] == ["text 0", "text 1", "text 3", "text 4"]
    assert seconds(utterances[:2] + utterances[3:]) == [0.1, 0.2, 0.3]
    assert [p.reason for p in reader.problems] == ["missing-audio", "missing-audio"]
    assert {p.name for p in reader.files()} >= {"t.parquet", "1.wav", "2.wav"}
    with pytest.raises(ValueError, match="cannot be decoded"):
        load_utterance_audio(utterances[2])


def test_numbers_of_sentences_are_no_ids(tmp_path, tones):
    audio = [{"bytes": tone, "path": f"{n}.wav"} for n, tone in enumerate(tones)]
    path = write(tmp_path / "t.parquet", audio, id=[7] * 6)
    assert [u.id for u in open_corpus("table", str(path))] == list("012345")
    assert len(list(open_corpus("table", str(path), columns={"id": "id"}))) == 1


def test_data_set_in_several_files_is_found_with_its_sets(tmp_path, tones, home, invoke):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-00000-of-00001"):
        write(tmp_path / "set" / "data" / f"{name}.parquet", cells(tones), normalized_text=["one"] * 6)
    (tmp_path / "set" / "README.md").write_text("---\n")
    (source,) = find_corpus(tmp_path / "set").sources
    assert (source.kind, guess_kind(str(tmp_path / "set" / "data"))) == ("huggingface", "huggingface")
    reader = open_corpus("auto", str(tmp_path / "set"))
    utterances = list(reader)
    assert [u.split for u in utterances] == ["test"] * 6 + ["train"] * 12 + ["valid"] * 6
    assert len({u.id for u in utterances}) == 24
    assert reader.problems == []
    data = {"sources": [source.config().model_dump(mode="json")], "min_seconds": 0.01}
    data["duplicates"] = {"overlap": "keep"}
    run = Run(parse_config({"name": "k", "data": data}), "r")
    assert PREPARE.execute(run).counts["written"] == 24
    assert SHARD.execute(run).counts["written"] == 24
    report = json.loads(invoke("corpus", "inspect", str(tmp_path / "set"), "--json").stdout.splitlines()[-1])
    assert {name: entry["utterances"] for name, entry in report["sets"].items()} == {"train": 12, "valid": 6, "test": 6}


def test_names_of_folders_tell_sets_and_other_texts_are_found(tmp_path, tones):
    for name in ("train", "test"):
        write(tmp_path / name / "0000.parquet", cells(tones), sentence=list("abcdef")).rename(
            tmp_path / name / "0001.parquet"
        )
    assert {u.split for u in open_corpus("auto", str(tmp_path))} == {"train", "test"}


def test_one_damaged_file_does_not_stop_the_others(tmp_path, tones):
    for number in range(2):
        write(tmp_path / f"train-{number:05d}-of-00003.parquet", cells(tones))
    (tmp_path / "train-00002-of-00003.parquet").write_bytes(b"PAR1" + os.urandom(1000))
    reader = open_corpus("huggingface", str(tmp_path))
    assert len(list(reader)) == 12
    assert [(p.id, p.reason) for p in reader.problems] == [("train-00002-of-00003.parquet", "bad-table")]


def test_values_of_where_may_be_in_one_of_several_files(tmp_path, tones):
    for number, region in enumerate(("north", "south")):
        file = tmp_path / f"train-{number:05}-of-00002.parquet"
        write(file, cells(tones), sentence=["one"] * len(tones), region=[region] * len(tones))
    utterances = list(open_corpus("huggingface", str(tmp_path), where={"region": "south"}))
    assert len(utterances) == len(tones)
    with pytest.raises(CorpusError, match="no row of .* has 'soth' in the column 'region'; did you mean 'south'"):
        list(open_corpus("huggingface", str(tmp_path), where={"region": "soth"}))


def test_rows_are_read_by_threads_and_in_any_order(tmp_path, tones):
    path = str(
        write(tmp_path / "t.parquet", [{"bytes": b"%d" % n, "path": ""} for n in range(1000)], rows_in_group=300)
    )
    wrong = []

    def read(first):
        wrong.extend(n for n in range(first, 1000, 7) if read_cell(path, "audio", n) != b"%d" % n)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert wrong == []
    for row, column in ((1000, "audio"), (-1, "audio"), (0, "sentence"), (0, "none")):
        with pytest.raises(CellError):
            read_cell(path, column, row)


def test_memory_does_not_grow_with_the_file(tmp_path):
    big = [{"bytes": os.urandom(1 << 20), "path": f"{n}.wav"} for n in range(64)]
    path = write(tmp_path / "t.parquet", big, rows_in_group=8)
    del big
    before, most = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    for utterance in open_corpus("table", str(path)):
        assert len(read_cell(utterance.audio, utterance.column, utterance.row)) == 1 << 20
        most = max(most, pa.total_allocated_bytes() - before)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most + python < 40 << 20


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_errors_do_not_repeat_long_values(tmp_path, suffix):
    long = "x" * 100_000
    path = tmp_path / f"t{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({long: ["a"], "audio": [long]}), path)
    elif suffix == ".jsonl":
        path.write_text(json.dumps({"audio": long, "text": long}) + "\n")
    else:
        path.write_text(f"{long},audio\n{long},{long}\n")
    with pytest.raises(CorpusError) as caught:
        find_corpus(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/a.wav", "a/" * 3000])
@pytest.mark.parametrize("kind", ["table", "nemo", "kaldi"])
def test_names_that_no_file_can_have_cost_one_row(tmp_path, kind, name):
    write_tone(tmp_path / "a.wav")
    path = tmp_path / "m.jsonl"
    if kind == "kaldi":
        (tmp_path / "wav.scp").write_text(f"a a.wav\nb {name}\n")
        (tmp_path / "text").write_text("a one\nb two\n")
        path = tmp_path
    else:
        rows = [{"audio_filepath": audio, "text": "one", "id": audio[:9]} for audio in ("a.wav", name)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = open_corpus(kind, str(path))
    assert len(list(reader)) == 1
    assert [p.reason for p in reader.problems] == ["missing-audio"]
    assert len(reader.problems[0].detail) < 1000
    assert len(reader.fingerprint()) == 64
