"""Threads that decoded into words with word pieces overwrote each other's search, and the process crashed.

A server of MLflow recognizes each request in a thread of its own, with one decoder.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from speech.decoding import WordsConfig, build_decoder
from speech.tokens import TokenConfig, train_tokenizer

TEXT = "ab ba abba baab"


class Watched:
    """A native search that notes how many threads are in it; a lock keeps them from crashing the test."""

    def __init__(self, native):
        self.native, self.inside, self.most = native, set(), 0
        self.lock = threading.Lock()

    def __getattr__(self, name):
        def call(*args):
            self.inside.add(threading.get_ident())
            self.most = max(self.most, len(self.inside))
            time.sleep(0.02)
            with self.lock:
                result = getattr(self.native, name)(*args)
            if name == "get_all_final_hypothesis":  # the last step of an utterance
                self.inside.discard(threading.get_ident())
            return result

        return call


def test_one_thread_at_a_time_searches_word_pieces(tmp_path):
    (tmp_path / "words.txt").write_text(TEXT.replace(" ", "\n"))
    tokenizer = train_tokenizer(TokenConfig(kind="bpe", vocab_size=8), [TEXT])
    decoder = build_decoder(WordsConfig(words=str(tmp_path / "words.txt"), beam=4), tokenizer)
    decoder.prepare()
    search = decoder._search
    search._native = Watched(search._native)
    scores = torch.randn(4, 1, 6, tokenizer.size, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    with ThreadPoolExecutor(4) as pool:
        hypotheses = list(pool.map(lambda log_probs: decoder.decode(log_probs, torch.tensor([6])), scores))
    assert search._native.most == 1
    assert hypotheses == [decoder.decode(log_probs, torch.tensor([6])) for log_probs in scores]
