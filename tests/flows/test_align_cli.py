"""`starling align`: what it prints and writes about transcripts that look wrong."""

import csv
import json
from dataclasses import replace

import pytest
from command_line import invoke
from support import small_corpus

from speech.alignments import AlignedUtterance, Alignment, Span
from storage.corpora import open_corpus
from tasks.alignment import AlignedCorpus
from tasks.dataset.sources import SourceConfig


@pytest.fixture
def corpus(monkeypatch):
    def utterance(name, score, text="", heard=None):
        alignment = Alignment(name, (Span("w", 0, 100, 0.5),), (), score, duration=1.0)
        return AlignedUtterance(name, text, alignment, heard=heard)

    utterances = [utterance(f"u{n:02}", 0.0) for n in range(20)]
    utterances += [utterance("low", -1.0, "the [cat] sat", "a dog ran")]
    utterances += [AlignedUtterance("bad", "", None, "the transcript is empty", "")]
    made = AlignedCorpus(utterances)
    monkeypatch.setattr("flows.cli.align._aligned", lambda *_: made)
    return made


def test_suspicious_utterances_are_shown_with_transcript_and_what_was_heard(corpus, tmp_path):
    shown = invoke("align", "model", tmp_path, "-o", tmp_path / "out").stdout
    assert (
        "low: score 50.0 times the usual spread below the median; score -1.000, confidence 0.500, 1.00 s\n"
        "  transcript: the [cat] sat\n  heard:      a dog ran\n"
    ) in shown
    assert "bad: the transcript is empty\n  transcript: \n  heard:      (nothing)\n" in shown
    with (tmp_path / "out" / "suspicious.csv").open(newline="") as file:
        rows = {row["id"]: (row["transcript"], row["heard"]) for row in csv.DictReader(file)}
    assert rows == {"low": ("the [cat] sat", "a dog ran"), "bad": ("", "")}


def test_all_utterances_are_a_source_from_which_doubtful_ones_can_be_left_out(corpus, tmp_path):
    table = small_corpus(tmp_path / "corpus", speakers=2, each=2)
    original = list(open_corpus("table", str(table), corpus="c"))
    corpus.sources = [SourceConfig(kind="table", path=str(table))]
    names = [utterance.id for utterance in original]
    good, bad = (AlignedUtterance(name, "", Alignment(name, (Span("w", 0, 9, 0.75),), (), -0.5)) for name in names[:2])
    failed = AlignedUtterance(names[2], "", None, "no path")  # and the last one could not be used
    corpus.utterances = [bad, good, failed]
    invoke("align", "model", tmp_path, "-o", tmp_path / "out")
    read = list(open_corpus("table", str(tmp_path / "out" / "utterances.csv"), corpus="c"))
    assert read == [replace(u, confidence=c) for u, c in zip(original, (0.75, 0.75, 0.0), strict=False)]
    with (tmp_path / "out" / "utterances.csv").open(newline="") as file:
        assert [(row["score"], row["suspicious"]) for row in csv.DictReader(file)] == [
            ("-0.500", ""),
            ("-0.500", ""),
            ("", "no path"),
        ]


def test_without_a_recognizer_only_the_transcript_is_shown(corpus, tmp_path):
    corpus.utterances = [replace(utterance, heard=None) for utterance in corpus.utterances]
    shown = invoke("align", "model", tmp_path, "-o", tmp_path / "out").stdout
    assert "transcript: the [cat] sat" in shown
    assert "heard" not in shown
    summary = json.loads(invoke("align", "model", tmp_path, "-o", tmp_path / "out", "--json").stdout)
    assert [(entry["transcript"], entry["heard"]) for entry in summary["suspicious"]] == [
        ("", None),
        ("the [cat] sat", None),
    ]
