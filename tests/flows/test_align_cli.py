"""`starling align`: what it prints and writes about transcripts that look wrong."""

import csv
import json

import pytest
from command_line import invoke

from recognition.timings import TimedUtterance
from speech.hypotheses import Word
from tasks.forced_alignment import Alignments


@pytest.fixture
def found(monkeypatch):
    def one(name, score):
        return TimedUtterance(name, "s", 1.0, [Word("w", 0.0, 1.0, 0.5)], [], score)

    made = Alignments(
        [one(f"u{n:02}", 0.0) for n in range(20)] + [one("low", -1.0)], {"bad": "the transcript is empty"}
    )
    made.texts = {"low": "the [cat] sat", "bad": ""}
    made.heard = {"low": "a dog ran", "bad": ""}
    monkeypatch.setattr("flows.cli.align._aligned", lambda *_: made)
    return made


def test_suspicious_utterances_are_shown_with_transcript_and_what_was_heard(found, tmp_path):
    shown = invoke("align", "model", tmp_path, "-o", tmp_path / "out").stdout
    assert (
        "low: score 50.0 times the usual spread below the median; score -1.000, confidence 0.500, 1.00 s\n"
        "  transcript: the [cat] sat\n  heard:      a dog ran\n"
    ) in shown
    assert "bad: the transcript is empty\n  transcript: \n  heard:      (nothing)\n" in shown
    with (tmp_path / "out" / "suspicious.csv").open(newline="") as file:
        rows = {row["id"]: (row["transcript"], row["heard"]) for row in csv.DictReader(file)}
    assert rows == {"low": ("the [cat] sat", "a dog ran"), "bad": ("", "")}


def test_without_a_recognizer_only_the_transcript_is_shown(found, tmp_path):
    found.heard = {}
    shown = invoke("align", "model", tmp_path, "-o", tmp_path / "out").stdout
    assert "transcript: the [cat] sat" in shown
    assert "heard" not in shown
    summary = json.loads(invoke("align", "model", tmp_path, "-o", tmp_path / "out", "--json").stdout)
    assert [(one["transcript"], one["heard"]) for one in summary["suspicious"]] == [("", None), ("the [cat] sat", None)]
