"""Decoding into words: exact against all paths with the language model included, n-best, times, confidences, files."""

import gzip
import itertools
import math
import operator
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from speech.decoding import DecodeChoice, DecodeError, LanguageModelError, TokensConfig, WordsConfig, build_decoder
from speech.decoding.language_model import arpa_words, load_lm, read_words
from speech.tokens import CharacterTokenizer, TokenConfig, WordTokenizer, train_tokenizer
from speech.words import timed_words

WIDE = {"beam": 3000, "beam_tokens": 0, "beam_threshold": 1e5}

# Unigrams with back-off weights, then bigrams. b and c come in another order than in any list of words below.
UNIGRAMS = {
    "<unk>": (-2.0, None),
    "</s>": (-0.9, None),
    "b": (-0.5, -0.15),
    "<s>": (-99.0, -0.3),
    "ab": (-0.7, -0.2),
    "aa": (-0.8, -0.05),
    "bb": (-1.1, -0.4),
    "a": (-0.6, -0.25),
}
BIGRAMS = {
    ("<s>", "ab"): -0.3,
    ("<s>", "a"): -0.35,
    ("ab", "b"): -0.4,
    ("b", "</s>"): -0.2,
    ("a", "a"): -0.9,
    ("bb", "a"): -0.1,
    ("aa", "</s>"): -0.6,
}


def write_arpa(path, unigrams, bigrams):
    lines = ["", "\\data\\", f"ngram 1={len(unigrams)}", f"ngram 2={len(bigrams)}", "", "\\1-grams:"]
    for word, (probability, backoff) in unigrams.items():
        lines.append("\t".join([str(probability), word, *([] if backoff is None else [str(backoff)])]))
    lines += ["", "\\2-grams:", *(f"{p}\t{' '.join(words)}" for words, p in bigrams.items()), "", "\\end\\", ""]
    path.write_text("\n".join(lines))
    return str(path)


def log10_sentence(words, unigrams=UNIGRAMS, bigrams=BIGRAMS):
    """What the ARPA file says of a sentence, from the format's definition."""
    known = [word if word in unigrams else "<unk>" for word in words]
    total = 0.0
    for before, word in itertools.pairwise(["<s>", *known, "</s>"]):
        pair = bigrams.get((before, word))
        total += (unigrams[before][1] or 0.0) + unigrams[word][0] if pair is None else pair
    return total


def spelled(path):
    return [token for token, _ in itertools.groupby(path) if token]


def all_sentences(log_probs, text_of, words, score):
    """The score of every word sequence: all its paths added up, and what the language model says."""
    sequences, totals = {}, {}
    frames = log_probs.tolist()
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        probability = math.exp(sum(map(operator.getitem, frames, path)))
        tokens = tuple(spelled(path))
        sequences[tokens] = sequences.get(tokens, 0.0) + probability
    for tokens, probability in sequences.items():
        sentence = text_of(list(tokens))
        if sentence is not None and all(word in words for word in sentence):
            totals[sentence] = totals.get(sentence, 0.0) + probability
    return {sentence: math.log(total) + score(sentence) for sentence, total in totals.items()}


def posteriors(*shape, seed=0, sharpness=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * sharpness).log_softmax(-1)


def assert_exact(cfg, tokenizer, log_probs, text_of, words, score):
    """The best hypothesis and the n-best's posteriors equal brute force."""
    (found,) = build_decoder(cfg, tokenizer).decode(log_probs, torch.tensor([log_probs.shape[1]]))
    totals = all_sentences(log_probs[0].double().numpy(), text_of, set(words), score)
    best = max(totals.values())
    assert found.score == pytest.approx(best, abs=1e-3)
    assert totals[tuple(found.text.split())] == pytest.approx(best, abs=1e-3)
    everything = np.logaddexp.reduce(list(totals.values()))
    for one in found.nbest:
        assert one.score == pytest.approx(totals[tuple(one.text.split())], abs=1e-3)
        assert one.posterior == pytest.approx(math.exp(one.score - everything), abs=1e-3)
    assert len({one.text for one in found.nbest}) == len(found.nbest) == min(len(totals), cfg.nbest)
    for word, confidence in zip(found.text.split(), found.word_confidences, strict=True):
        certain = sum(math.exp(score - everything) for said, score in totals.items() if word in said)
        assert 0 < confidence <= certain + 1e-3
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    (folder / "words.txt").write_text("aa\nb\nab\nunseen\nabb\n<s>\na\nbb\n")
    return {"lm": write_arpa(folder / "lm.arpa", UNIGRAMS, BIGRAMS), "words": str(folder / "words.txt")}


WORDS = ("aa", "b", "ab", "abb", "a", "bb")  # "abb" is in the list, but not in the language model

seeds = st.integers(0, 100_000)
sharpnesses = st.sampled_from([0.1, 0.5, 1.0, 3.0])
weights = st.sampled_from([(0.0, 0.0), (1.5, 0.0), (2.3, -0.7), (0.5, 1.5)])


@given(seed=seeds, num_frames=st.integers(1, 6), sharpness=sharpnesses, weight=weights, with_lm=st.booleans())
@settings(max_examples=30)
def test_letters_equal_all_paths(files, seed, num_frames, sharpness, weight, with_lm):
    tokenizer = CharacterTokenizer(["<blank>", "▁", "a", "b"])
    lm_weight, word_score = weight
    given = files if with_lm else {"words": files["words"]}
    cfg = WordsConfig(**given, **WIDE, lm_weight=lm_weight, word_score=word_score, nbest=5)

    def score(words):
        return with_lm * lm_weight * log10_sentence(words) + word_score * len(words)

    log_probs = posteriors(1, num_frames, 4, seed=seed, sharpness=sharpness)
    assert_exact(cfg, tokenizer, log_probs, lambda t: tuple(tokenizer.decode(t).split()), WORDS, score)


@given(seed=seeds, num_frames=st.integers(1, 6), weight=weights)
@settings(max_examples=20)
def test_letters_without_a_space_spell_one_word_at_most(files, seed, num_frames, weight):
    tokenizer = CharacterTokenizer(["<blank>", "a", "b"])
    lm_weight, word_score = weight
    cfg = WordsConfig(**files, **WIDE, lm_weight=lm_weight, word_score=word_score, nbest=3)

    def score(words):
        return lm_weight * log10_sentence(words) + word_score * len(words)

    log_probs = posteriors(1, num_frames, 3, seed=seed)
    assert_exact(cfg, tokenizer, log_probs, lambda t: tuple(tokenizer.decode(t).split()), WORDS, score)


PIECES = {"aa": ["▁a", "a"], "a": ["▁a"], "b": ["▁b"], "bb": ["▁b", "b"], "ab": ["▁a", "b"], "abb": ["▁a", "b", "b"]}


class Pieces(WordTokenizer):
    """A toy of byte pairs; some words end in two equal pieces."""

    kind = "bpe"

    def __init__(self):
        super().__init__(["<blank>", "▁a", "▁b", "a", "b"])

    def encode(self, text):
        if text not in PIECES:
            raise self._unknown(text, [text])
        return [self._ids[piece] for piece in PIECES[text]]

    def _join(self, pieces):
        return "".join(pieces).replace("▁", " ")


def pieces_text(tokens):
    """The words of canonical spellings only."""
    tokenizer = Pieces()
    if tokens and tokenizer.symbols[tokens[0]][0] != "▁":
        return None
    words = tuple(tokenizer.decode(tokens).split())
    known = all(word in PIECES for word in words)
    return words if known and [t for word in words for t in tokenizer.encode(word)] == tokens else None


@given(seed=seeds, num_frames=st.integers(1, 5), sharpness=sharpnesses, weight=weights)
@settings(max_examples=30)
def test_pieces_equal_all_paths(files, seed, num_frames, sharpness, weight):
    lm_weight, word_score = weight
    cfg = WordsConfig(**files, **WIDE, lm_weight=lm_weight, word_score=word_score, nbest=5)

    def score(words):
        return lm_weight * log10_sentence(words) + word_score * len(words)

    log_probs = posteriors(1, num_frames, 5, seed=seed, sharpness=sharpness)
    assert_exact(cfg, Pieces(), log_probs, pieces_text, WORDS, score)


@given(seed=seeds, num_frames=st.integers(1, 5), weight=weights)
@settings(max_examples=20)
def test_words_as_tokens_equal_all_paths(files, seed, num_frames, weight):
    tokenizer = WordTokenizer(["<blank>", "b", "aa", "zz", "ab"])  # "zz" is not in the list
    lm_weight, word_score = weight
    cfg = WordsConfig(**files, **WIDE, lm_weight=lm_weight, word_score=word_score, nbest=5)

    def score(words):
        return lm_weight * log10_sentence(words) + word_score * len(words)

    log_probs = posteriors(1, num_frames, 5, seed=seed)
    found = assert_exact(cfg, tokenizer, log_probs, lambda t: tuple(tokenizer.decode(t).split()), WORDS, score)
    assert "zz" not in found.text


@given(seed=seeds, num_frames=st.integers(1, 5), lm_weight=st.sampled_from([0.0, 1.0, 2.3]))
@settings(max_examples=20)
def test_a_language_model_of_tokens_equals_all_paths(files, seed, num_frames, lm_weight):
    # the file's order is not the tokens'
    tokenizer = WordTokenizer(["<blank>", "b", "aa", "zz", "ab"])
    log_probs = posteriors(1, num_frames, 5, seed=seed)
    cfg = TokensConfig(lm=files["lm"], lm_weight=lm_weight, **WIDE)
    (found,) = build_decoder(cfg, tokenizer).decode(log_probs, torch.tensor([num_frames]))
    totals = all_sentences(
        log_probs[0].double().numpy(),
        lambda tokens: tuple(tokenizer.decode(tokens).split()),
        {"b", "aa", "zz", "ab"},
        lambda words: lm_weight * log10_sentence(words),
    )
    assert found.score == pytest.approx(max(totals.values()), abs=1e-3)
    assert totals[tuple(found.text.split())] == pytest.approx(found.score, abs=1e-3)
