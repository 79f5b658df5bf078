"""Without ids, tables named files by their stems: of `anna/1.wav` and `ben/1.wav`, one was quarantined."""

import io
import json
import tarfile

import pytest

from storage.corpora import open_corpus

AUDIO = ["anna/1.wav", "ben/1.wav", "./ben/1.wav", "ben/2.wav", "ben/old/2.flac", "../shared/2.wav", "3.wav"]
IDS = ["anna-1", "ben-1", "ben-2", "ben-old-2", "shared-2", "3"]


def _table(folder):
    path = folder / "metadata.csv"
    path.write_text("path,text\n" + "".join(f"{name},word\n" for name in AUDIO))
    return path


def _manifest(folder):
    path = folder / "manifest.json"
    path.write_text("".join(json.dumps({"audio_filepath": name, "text": "word"}) + "\n" for name in AUDIO))
    return path


@pytest.mark.parametrize(("kind", "write"), [("table", _table), ("nemo", _manifest)])
def test_folders_tell_them_apart(tmp_path, kind, write):
    folder = tmp_path / "corpus"
    for name in AUDIO:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    corpus = open_corpus(kind, str(write(folder)))
    assert [utterance.id for utterance in corpus] == IDS
    assert [(problem.id, problem.reason) for problem in corpus.problems] == [("ben-1", "duplicate-id")]


def test_rows_with_an_id_keep_it_and_do_not_change_that_of_others(tmp_path):
    for name in ("anna", "ben"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.wav").touch()
    table = tmp_path / "metadata.csv"
    table.write_text("path,text,id\nanna/1.wav,word,first\nben/1.wav,word,\n")
    assert [utterance.id for utterance in open_corpus("table", str(table))] == ["first", "1"]


def test_same_names_in_two_tars_of_a_manifest(tmp_path):
    for shard in range(2):
        with tarfile.open(tmp_path / f"audio_{shard}.tar", "w") as tar:
            info = tarfile.TarInfo("1.wav")
            info.size = 4
            tar.addfile(info, io.BytesIO(b"RIFF"))
    manifest = tmp_path / "tarred.json"
    rows = [{"audio_filepath": "1.wav", "shard_id": shard, "text": "word"} for shard in range(2)]
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [utterance.id for utterance in open_corpus("nemo", str(manifest))] == ["0-1", "1-1"]


def test_names_without_a_last_part_are_missing_audio(tmp_path):
    (tmp_path / "metadata.csv").write_text("path,text\n,word\n.,word\n/,word\n")
    corpus = open_corpus("table", str(tmp_path))
    assert list(corpus) == []
    assert [(problem.id, problem.reason) for problem in corpus.problems] == [
        (f"metadata.csv:{line}", "missing-audio") for line in (2, 3, 4)
    ]
