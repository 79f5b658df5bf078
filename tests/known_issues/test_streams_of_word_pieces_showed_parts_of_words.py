"""Partial results of a search of words over pieces had the beginning of a word that had not ended.

Where that was a space alone, there was a time without a word, and the stream failed.
"""

import torch

from speech.decoding import WordsConfig, build_decoder
from speech.tokens import TokenConfig, train_tokenizer
from speech.words import FrameTimes, timed_words


def test_partial_results_have_whole_words_with_their_times(tmp_path):
    (tmp_path / "words.txt").write_text("bad\ncab\n")
    tokenizer = train_tokenizer(TokenConfig(kind="bpe", vocab_size=9), ["cab bad bed"] * 3)
    tokens = tokenizer.encode("bad cab")
    assert "▁" in [tokenizer.symbols[token] for token in tokens]
    path = [label for token in tokens for label in (token, tokenizer.blank)]
    log_probs = torch.full((len(path), tokenizer.size), -8.0)
    log_probs[range(len(path)), path] = 0.0
    log_probs = log_probs.log_softmax(-1)
    stream = build_decoder(WordsConfig(words=str(tmp_path / "words.txt"), beam=16), tokenizer).stream()
    shown = []
    for frame in range(len(path)):
        stream.accept(log_probs[frame : frame + 1].numpy())
        best = stream.best()
        words = timed_words(best, log_probs[: frame + 1], tokenizer, FrameTimes(0.04))
        assert [word.word for word in words] == best.text.split()
        shown.append(best.text)
    assert list(dict.fromkeys(shown)) == ["", "bad", "bad cab"]
    assert stream.finish().text == "bad cab"
