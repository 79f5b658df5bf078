"""Checks before a run: each mistake that can be seen without computing is named with its field."""

import re

import pytest
from support import small_corpus, tiny_document, write_table

from tasks.config.pipeline import parse_config
from tasks.stages.config_check import find_problems


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
