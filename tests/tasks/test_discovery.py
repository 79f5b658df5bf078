"""Corpora that are found in folders as people have them."""

import csv
import json
import shutil

import pytest
from support import small_corpus, write_table, write_tone

from storage.corpora import CorpusError
from tasks.dataset.discovery import find_sources
from tasks.dataset.table_columns import set_of_name


def table(folder, columns, rows, name="transcripts.csv"):
    """A table with the audio files that its rows name in the first column."""
    for number, row in enumerate(rows):
        write_tone(folder / row[0], seconds=0.3, seed=number)
    with (folder / name).open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return folder / name


def kaldi(folder, count=3):
    folder.mkdir(parents=True)
    waves = [write_tone(folder / f"{number}.wav", seconds=0.3, seed=number) for number in range(count)]
    (folder / "wav.scp").write_text("".join(f"u{n} {wave}\n" for n, wave in enumerate(waves)))
    (folder / "text").write_text("".join(f"u{n} some words\n" for n in range(count)))
    (folder / "utt2spk").write_text("".join(f"u{n} s{n}\n" for n in range(count)))


def sources_of(folder):
    return [
        (source.kind, source.path.relative_to(folder).as_posix(), source.set) for source in find_sources(folder).sources
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train-clean-5", "train"),
        ("Dev_other", "valid"),
        ("val", "valid"),
        ("eval.2", "test"),
        ("trainers", ""),
        ("", ""),
    ],
)
def test_set_names_are_recognized_in_folders_and_columns(name, expected):
    assert set_of_name(name) == expected


def test_table_of_any_name_with_usual_columns_is_found(tmp_path):
    table(tmp_path, ["path", "text", "speaker"], [("a.wav", "one", "x"), ("b.wav", "two", "y")])
    (source,) = find_sources(tmp_path).sources
    assert (source.kind, source.path.name, source.columns, source.where) == ("table", "transcripts.csv", {}, {})


def test_columns_with_other_names_are_guessed(tmp_path):
    table(tmp_path, ["Nr", "FileName", "Label", "user"], [("clips/a.wav", "a.wav", "one", "x")])
    shutil.copy(tmp_path / "clips" / "a.wav", tmp_path / "a.wav")
    (source,) = find_sources(tmp_path).sources
    assert source.columns == {"audio": "FileName", "text": "Label", "speaker": "user"}
    assert source.document()["options"] == {"columns": source.columns}


def test_audio_column_is_the_one_whose_files_exist(tmp_path):
    rows = [("a.wav", "/elsewhere/1.wav", "one"), ("b.wav", "/elsewhere/2.wav", "two")]
    table(tmp_path, ["local", "path", "text"], rows)
    assert find_sources(tmp_path).sources[0].columns == {"audio": "local"}


def test_column_of_sets_becomes_sources(tmp_path):
    rows = [("a.wav", "one", "training"), ("b.wav", "two", "dev"), ("c.wav", "three", "eval")]
    table(tmp_path, ["path", "text", "part"], rows)
    assert [(source.where, source.set) for source in find_sources(tmp_path).sources] == [
        ({"part": "dev"}, "valid"),
        ({"part": "eval"}, "test"),
        ({"part": "training"}, "train"),
    ]


def test_split_known_to_the_reader_stays_one_source(tmp_path):
    table(tmp_path, ["path", "text", "split"], [("a.wav", "one", "train"), ("b.wav", "two", "test")])
    (source,) = find_sources(tmp_path).sources
    assert (source.where, source.set) == ({}, "")


def test_column_of_other_values_is_not_taken_for_sets(tmp_path):
    table(tmp_path, ["path", "text", "part"], [("a.wav", "one", "train"), ("b.wav", "two", "chapter 2")])
    (source,) = find_sources(tmp_path).sources
    assert source.where == {}


def test_tables_of_each_set_become_sources(tmp_path):
    for number, name in enumerate(("train", "dev", "test")):
        table(tmp_path, ["path", "text"], [(f"{name}.wav", f"text {number}")], f"{name}.csv")
    table(tmp_path, ["speaker", "age"], [], "speakers.csv")
    expected = [("table", "dev.csv", "valid"), ("table", "test.csv", "test"), ("table", "train.csv", "train")]
    assert sources_of(tmp_path) == expected


def test_kaldi_folders_of_each_set_become_sources(tmp_path):
    for name in ("train", "dev", "test_clean", "test_other"):
        kaldi(tmp_path / "data" / name)
    expected = [("dev", "valid"), ("test_clean", "test_clean"), ("test_other", "test_other"), ("train", "train")]
    assert sources_of(tmp_path) == [("kaldi", f"data/{name}", label) for name, label in expected]
    assert sources_of(tmp_path / "data" / "train") == [("kaldi", ".", "")]


def test_text_files_beside_recordings_are_found(tmp_path):
    for name in ("anna/1", "anna/2", "ben/1"):
        write_tone(tmp_path / f"{name}.wav", seconds=0.3)
        (tmp_path / f"{name}.txt").write_text("hello")
    assert sources_of(tmp_path) == [("sidecar", ".", "")]
    (tmp_path / "anna").rename(tmp_path / "train")
    (tmp_path / "ben").rename(tmp_path / "test")
    assert sources_of(tmp_path) == [("sidecar", "test", "test"), ("sidecar", "train", "train")]


def test_nemo_manifests_are_found(tmp_path):
    for name in ("train", "val"):
        wave = write_tone(tmp_path / f"{name}.wav", seconds=0.3)
        line = {"audio_filepath": str(wave), "duration": 0.3, "text": "a"}
        (tmp_path / f"{name}_manifest.json").write_text(json.dumps(line) + "\n")
    expected = [("nemo", "train_manifest.json", "train"), ("nemo", "val_manifest.json", "valid")]
    assert sources_of(tmp_path) == expected


def test_corpus_with_its_own_sets_is_one_source(tmp_path):
    write_tone(tmp_path / "recordings" / "0_anna_7.wav")
    assert sources_of(tmp_path) == [("fsdd", ".", "")]


def test_single_file_is_one_source(tmp_path):
    path = small_corpus(tmp_path)
    assert [source.path for source in find_sources(path).sources] == [path]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "has no recordings (aif, aifc"),
        (lambda folder: write_tone(folder / "x" / "a.flac"), "1 flac), but no transcripts: put NAME.txt beside"),
        (lambda folder: table(folder, ["path", "content2"], [("a.wav", "x")]), "rename the one with the transcripts"),
        (lambda folder: (folder / "t.csv").write_text("path,text\nnone.wav,a\n"), "names audio files that exist"),
        (lambda folder: (folder / "t.csv").write_text("path,text\n"), "t.csv has no rows"),
    ],
)
def test_missing_parts_of_a_corpus_are_reported(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(CorpusError) as caught:
        find_sources(tmp_path)
    assert message in str(caught.value)


def test_missing_folder_is_reported(tmp_path):
    with pytest.raises(CorpusError, match="does not exist: check the path of your recordings"):
        find_sources(tmp_path / "nowhere")


def test_table_of_which_most_audio_is_missing_is_read(tmp_path):
    rows = [(str(number), f"{number}.wav", "one", "anna", "") for number in range(4)]
    path = write_table(tmp_path, rows)
    with pytest.raises(CorpusError, match="names audio files that exist"):
        find_sources(path)
    write_tone(tmp_path / "3.wav", seconds=0.3)
    assert [(source.path, source.columns) for source in find_sources(path).sources] == [(path, {})]
