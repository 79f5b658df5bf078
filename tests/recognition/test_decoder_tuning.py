"""Tuning: every trial decodes the same encoded speech, in one process or several, and one that fails harms no other."""

import pytest
import torch
from support import frame_recognizer

from recognition import decoder_tuning
from recognition.decoder_tuning import DecoderTrials
from recognition.systems.acoustic import Scores
from speech.decoding import WordsConfig
from speech.tokens import CharacterTokenizer

VALUES = [{"word_score": score, "beam": beam} for score in (-3.0, 0.0, 3.0) for beam in (1, 8)]


@pytest.fixture
def recognizer(tmp_path):
    (tmp_path / "words.txt").write_text("a\nab\nbb\n")
    tokenizer = CharacterTokenizer(["<blank>", "▁", "a", "b"])
    return frame_recognizer(WordsConfig(words=str(tmp_path / "words.txt")), tokenizer)


@pytest.fixture
def scored():
    scores = torch.randn(4, 12, 4, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    return [(["a", "ab", "bb", "a bb"], Scores(scores, torch.tensor([12, 8, 12, 5]), torch.zeros(4)))] * 2


def errors(recognizer, scored, processes):
    with DecoderTrials(recognizer, scored, processes, len(VALUES)) as trials:
        assert trials.utterances == 8
        return [trials.errors(values) for values in VALUES]


def test_values_give_the_same_errors_here_and_in_processes(recognizer, scored, monkeypatch):
    alone = errors(recognizer, scored, 1)
    assert len(set(alone)) > 2
    assert {counts.utterances for counts in alone} == {8}
    monkeypatch.setattr(decoder_tuning, "useful_processes", lambda *_: 2)
    assert errors(recognizer, scored, 2) == alone


@pytest.mark.parametrize("processes", [1, 2])
def test_a_trial_that_is_ended_leaves_nothing_to_the_next(recognizer, scored, processes, monkeypatch):
    def end():
        raise TimeoutError("too long")

    alone = errors(recognizer, scored, 1)
    monkeypatch.setattr(decoder_tuning, "useful_processes", lambda *_: processes)
    with DecoderTrials(recognizer, scored, processes) as trials:
        with pytest.raises(TimeoutError):
            trials.errors(VALUES[1], end)
        assert trials.errors(VALUES[0]) == alone[0]
