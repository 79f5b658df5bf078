"""Runs, data sets and licences were named "metadata.csv", and the corpus of each utterance "metadata".

So the speakers of two folders with a `metadata.csv` each were taken for the same people, and those of `train.csv` and
`test.csv` of one folder for different ones.
"""

import pytest
from support import small_corpus

from storage.corpora import open_corpus
from storage.corpora.base import corpus_name
from tasks.config.pipeline import parse_config
from tasks.dataset.speakers import overlap_warnings
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE
from tasks.tracking.model_card import corpora


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/speech/digits/metadata.csv", "digits"),
        ("/speech/digits", "digits"),
        ("/speech/digits/", "digits"),
        ("file:///speech/digits/metadata.csv", "digits"),
        ("/speech/digits/train.tsv", "digits"),
        ("/speech/digits/train_manifest.jsonl.gz", "digits"),
        ("/speech/digits/tarred_audio_manifest.json", "digits"),
        ("/speech/digits/data/valid-00000.parquet", "digits"),
        ("/speech/LibriSpeech/train-clean-100", "LibriSpeech"),
        ("/speech/LibriSpeech/test-other", "LibriSpeech"),
        ("/speech/speechocean762/train", "speechocean762"),
        ("/speech/cv-corpus-17.0-2024-03-15/de", "de"),
        ("/speech/cv-corpus-17.0", "cv-corpus-17.0"),
        ("/speech/hospital/2024-11/metadata.csv", "hospital"),
        ("/manifests/train-announcements.jsonl", "train-announcements"),
        ("/manifests/ted.jsonl", "ted"),
        ("digits/../words/metadata.csv", "words"),
        ("/speech/заметки/metadata.csv", "заметки"),
        ("train.csv", "train"),
        ("/data/train.csv", "train"),
    ],
)
def test_corpus_has_the_name_of_its_folder(path, name):
    assert corpus_name(path) == name


def prepared(*paths):
    sources = [
        {"kind": "table", "path": str(path), "set": name} for path, name in zip(paths, ("train", "test"), strict=True)
    ]
    data = {"sources": sources, "duplicates": {"fingerprint": False, "overlap": "keep"}}
    run = Run(parse_config({"name": "p", "data": data}), "r")
    PREPARE.execute(run)
    return run


def test_runs_licences_and_utterances_have_the_name(home, tmp_path):
    path = small_corpus(tmp_path / "digits", speakers=1)
    other = small_corpus(tmp_path / "words", speakers=1)
    other.write_text(other.read_text().replace("\ns0-", "\nother-"))
    run = prepared(path, other)
    assert run.config.corpora == "digits, words"
    assert [entry["corpus"] for entry in corpora(run.config.data.sources)] == ["digits", "words"]
    assert {utterance.corpus for utterance in open_corpus("table", str(path))} == {"digits"}
    assert overlap_warnings(run.result("prepare").record, run.config.data) == []  # both have a speaker of one name


def test_speakers_of_two_tables_of_a_folder_are_the_same(home, tmp_path):
    path = small_corpus(tmp_path / "digits", speakers=2)
    rows = path.read_text().splitlines(keepends=True)
    tables = [path.with_name(name) for name in ("train.csv", "test.csv")]
    for start, table in enumerate(tables, 1):
        table.write_text("".join([rows[0], *rows[start::2]]))
    (warning,) = overlap_warnings((run := prepared(*tables)).result("prepare").record, run.config.data)
    assert "speaker" in warning
    assert run.config.corpora == "digits"
