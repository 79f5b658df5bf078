"""Tuning: all combinations are tried, in one process or several, and ties are broken by rules."""

import pytest
import torch
from support import frame_recognizer

from recognition import decoder_tuning
from recognition.decoder_tuning import Trial, best_trial, try_all
from recognition.systems.acoustic import Scores
from speech.decoding import WordsConfig
from speech.scoring import ErrorCounts
from speech.tokens import CharacterTokenizer

GRID = {"a": [0.0, 1.0, 2.0], "b": [0.0, 1.0]}


def trial(a, b, sub=1, char_errors=3):
    return Trial({"a": a, "b": b}, ErrorCounts(cor=5, sub=sub, char_errors=char_errors))


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        ([trial(0.0, 0.0), trial(2.0, 1.0, sub=0, char_errors=9)], (2.0, 1.0)),  # fewest word errors
        ([trial(1.0, 0.0), trial(2.0, 1.0, char_errors=2)], (2.0, 1.0)),  # then fewest character errors
        ([trial(0.0, 1.0), trial(2.0, 1.0), trial(1.0, 1.0)], (1.0, 1.0)),  # then nearest to what is configured
        ([trial(0.0, 0.0), trial(2.0, 0.0)], (0.0, 0.0)),  # then the first
    ],
)
def test_ties_are_broken_by_rules(trials, best):
    chosen = best_trial(trials, GRID, {"a": 1.0, "b": 0.0})
    assert tuple(chosen.values.values()) == best


@pytest.fixture
def recognizer(tmp_path):
    (tmp_path / "words.txt").write_text("a\nab\nbb\n")
    tokenizer = CharacterTokenizer(["<blank>", "▁", "a", "b"])
    return frame_recognizer(WordsConfig(words=str(tmp_path / "words.txt")), tokenizer)


def test_every_combination_is_tried_here_or_in_processes(recognizer, monkeypatch):
    scores = torch.randn(4, 12, 4, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    scored = [(["a", "ab", "bb", "a bb"], Scores(scores, torch.tensor([12, 8, 12, 5]), torch.zeros(4)))] * 2
    grid, seen = {"word_score": [-3.0, 0.0, 3.0], "beam": [1, 8]}, []
    alone = try_all(recognizer, scored, grid, 1, lambda done, total: seen.append((done, total)))
    assert [trial.values for trial in alone] == [
        {"word_score": s, "beam": b} for s in grid["word_score"] for b in grid["beam"]
    ]
    assert seen == [(number, 6) for number in range(1, 7)]
    assert len({trial.counts for trial in alone}) > 2
    assert {trial.counts.utterances for trial in alone} == {8}
    monkeypatch.setattr(decoder_tuning, "useful_processes", lambda *_: 2)
    assert try_all(recognizer, scored, grid, 2) == alone
