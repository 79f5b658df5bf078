"""Checks before a run: each mistake that can be seen without computing is named with its field."""

import re

import pytest
from support import small_corpus, tiny_document, write_table

from speech.decoding import BeamConfig
from speech.decoding.hot_words import HotWordsConfig
from tasks.config.pipeline import parse_config
from tasks.stages.config_check import find_problems
from tasks.stages.decoder_files import with_digests


def found_problems(*sources, **fields):
    document = tiny_document(**fields)
    if sources:
        document["data"] = {"sources": list(sources)}
    return find_problems(parse_config(document))


def test_runnable_configuration_has_no_problems(home, tmp_path):
    assert found_problems() == []
    assert not (home / "corpora").exists()  # nothing was synthesized
    assert found_problems({"kind": "table", "path": str(small_corpus(tmp_path / "c"))}) == []


def test_every_problem_is_named(tmp_path):
    table = write_table(tmp_path, [])
    problems = found_problems(
        {"kind": "table", "path": str(tmp_path / "nowhere.csv")},
        {"kind": "table", "path": str(table)},
        {"kind": "kaldi", "path": str(tmp_path)},
        {"kind": "table", "path": "$NOT_SET_ANYWHERE/x.csv"},
        decode={"kind": "words", "lm": str(tmp_path / "no.arpa"), "words": str(tmp_path / "no.txt")},
        lexicon={"kind": "file", "path": str(tmp_path / "no.dict")},
        train={"augment": {"noise": {"files": [str(tmp_path / "no-noise")]}}, "launch": {"listen": "here"}},
    )
    assert len(problems) == 8
    parts = ("nowhere.csv", "has no utterance", "wav.scp", "NOT_SET_ANYWHERE")
    parts += ("no.", "lexicon.path", "no-noise", "HOST:PORT")
    assert [part in text for text, part in zip(problems, parts, strict=True)] == [True] * 8
    assert [text.split(":")[0] for text in problems[:3]] == ["data.sources.0", "data.sources.1", "data.sources.2"]


def test_hot_words_that_cannot_be_read_are_named_before_a_run(tmp_path):
    hot = tmp_path / "hot.txt"
    assert found_problems(decode={"kind": "beam", "hot_words": {"file": str(hot)}}) == [
        f"decode.hot_words.file names {hot}, which is not there: correct the path, or make the file"
    ]
    hot.write_text("Anna\tmuch\n")
    (problem,) = found_problems(decode={"kind": "beam", "hot_words": {"file": str(hot)}})
    assert "hot.txt, line 1: 'much' is not the score of a hot word" in problem
    hot.write_text("Anna\t2\n")
    assert found_problems(decode={"kind": "beam", "hot_words": {"file": str(hot)}}) == []


def test_content_of_hot_words_counts_and_not_where_they_are(tmp_path):
    made = []
    for name, text in (("a.txt", "Anna"), ("b.txt", "Anna"), ("c.txt", "Kitty")):
        (tmp_path / name).write_text(text)
        made.append(with_digests(BeamConfig(hot_words=HotWordsConfig(file=str(tmp_path / name)))))
    assert made[0] == made[1] != made[2]


def test_empty_source_is_reported_with_its_first_problem(tmp_path):
    table = write_table(tmp_path, [("a", "missing.wav", "text", "s")])
    (problem,) = found_problems({"kind": "table", "path": str(table)})
    assert "has no utterance; the first of 1 problems" in problem
    assert "missing.wav" in problem


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"train": {"device": "cuda", "learners_per_node": 99, "strategy": "scpsgd"}}, "train.device is 'cuda'"),
        (
            {"train": {"strategy": "pipeline", "learners_per_node": 3}, "model": {"kind": "blstm", "layers": 2}},
            "model.layers is 2",
        ),
    ],
)
def test_devices_and_layers_are_checked(fields, part):
    (problem,) = found_problems(**fields)
    assert part in problem


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("hf://bucket/x", r"storage\.url: unknown scheme 'hf'.*use a path or one of"),
        ("gs://bucket/x", r"storage\.url: gs:// needs the package gcsfs: pip install '\.\[gcs\]'"),
        ("az://container/x", r"storage\.url: az:// needs the package adlfs: pip install '\.\[azure\]'"),
    ],
)
def test_object_store_that_this_machine_cannot_use_is_a_problem(home, monkeypatch, url, problem):
    monkeypatch.setattr("storage.backends.find_spec", lambda name: None)
    problems = found_problems(storage={"url": url})
    assert len(problems) == 1
    assert re.search(problem, problems[0])
