"""If the second language model could not be read, only the first utterance failed: all others were not rescored.

The same happened to a server's first requests while another thread was still reading the model.
"""

from types import SimpleNamespace

import pytest
import torch
from support import write_arpa

from speech.decoding import GraphConfig, WordsConfig, build_decoder
from speech.hmm.priors import StateOutputs
from speech.lm import LmError
from speech.tokens import WordTokenizer

TOKENIZER = WordTokenizer(["<blank>", "a", "b"])
SCORES = torch.tensor([[[0.2, 0.41, 0.39]]]).log()


@pytest.fixture
def first(tmp_path):
    unigrams = {"<s>": (-99.0, -0.1), "</s>": (-0.5, None), "a": (-0.5, -0.1), "b": (-0.5, -0.1)}
    return write_arpa(tmp_path / "first.arpa", unigrams, {("<s>", "a"): -0.2})


def test_search_of_words_fails_each_time(first, tmp_path):
    decoder = build_decoder(WordsConfig(lm=first, rescore_lm=str(tmp_path / "missing.arpa")), TOKENIZER)
    for _ in range(2):
        with pytest.raises(LmError, match="missing"):
            decoder.decode(SCORES, torch.tensor([1]))


def test_search_of_a_graph_fails_each_time(first, tmp_path, monkeypatch):
    graph = SimpleNamespace(words=SimpleNamespace(words=["a", "b"]))
    monkeypatch.setattr("speech.decoding.graph.open_search", lambda *_: graph)
    cfg = GraphConfig(graph="g", words="w", graph_lm=first, rescore_lm=str(tmp_path / "missing.arpa"))
    decoder = build_decoder(cfg, TOKENIZER, StateOutputs((0.0, 0.0, 0.0)))
    for _ in range(2):
        with pytest.raises(LmError, match="missing"):
            decoder.prepare()
