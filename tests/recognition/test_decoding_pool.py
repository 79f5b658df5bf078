"""Decoding in several processes gives the same results in the same order, even if processes die."""

import os
import signal
from contextlib import suppress

import pytest
import torch
from support import frame_recognizer

from recognition.decoding_pool import DecodingPool, useful_processes
from recognition.systems.acoustic import Scores
from speech.decoding import BeamConfig, DecodeError, WordsConfig
from speech.tokens import CharacterTokenizer

LETTERS = CharacterTokenizer(["<blank>", "▁", "a", "b"])


@pytest.fixture
def recognizer(tmp_path):
    (tmp_path / "words.txt").write_text("a\nab\nbb\n")
    return frame_recognizer(WordsConfig(words=str(tmp_path / "words.txt")), LETTERS)


def batches(count, size=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        log_probs = torch.randn(size, 12, 4, generator=generator).log_softmax(-1)
        yield Scores(log_probs, torch.tensor([12, 0, 5][:size]), torch.zeros(size))


def decoded(recognizer, processes, between=lambda pool: None, count=5):
    results = []
    with DecodingPool(recognizer, processes) as pool:
        for number, scores in enumerate(batches(count)):
            results += pool.add(number, scores)
            between(pool)
        results += pool.rest()
    return results


def test_two_processes_decode_like_this_process(recognizer):
    alone = decoded(recognizer, 1)
    assert [number for number, _ in alone] == list(range(5))
    assert alone == [(n, recognizer.search(s)) for n, s in enumerate(batches(5))]
    assert decoded(recognizer, 2) == alone


def test_killed_process_loses_no_utterance(recognizer, caplog):
    def kill(pool):
        if pool._pool is not None:
            for process in list((pool._pool._processes or {}).values()):
                with suppress(ProcessLookupError):  # the pool ends the others as soon as it misses one
                    os.kill(process.pid, signal.SIGKILL)

    assert decoded(recognizer, 2, kill) == decoded(recognizer, 1)
    assert "this one goes on alone" in caplog.text


def test_nan_scores_are_reported(recognizer):
    scores = next(batches(1))
    scores.log_probs[0, 3, 1] = float("nan")
    with DecodingPool(recognizer, 2) as pool:
        assert list(pool.add(0, scores)) == []
        with pytest.raises(DecodeError, match="NaN"):
            list(pool.rest())


def test_processes_are_started_for_slow_searches_of_many_utterances(recognizer):
    assert useful_processes(recognizer, 4, 1000) == 4
    assert useful_processes(recognizer, 4, 150) == 2
    assert useful_processes(recognizer, 4, 20) == 0
    assert useful_processes(frame_recognizer(BeamConfig(), LETTERS), 4, 1000) == 0
