"""Decoding into words: exact against all paths with the language model included, n-best, times, confidences, files."""

import gzip
import itertools
import math
import operator
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from support import write_arpa

from speech.decoding import DecodeChoice, DecodeError, TokensConfig, WordsConfig, build_decoder
from speech.lm import LmError
from speech.lm.kenlm import arpa_words, load_lm, read_words
from speech.tokens import CharacterTokenizer, TokenConfig, WordTokenizer, train_tokenizer
from speech.words import FrameTimes, timed_words

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


def log10_sentence(words, unigrams=UNIGRAMS, bigrams=BIGRAMS):
    """Score of a sentence by the ARPA file, from the format's definition."""
    known = [word if word in unigrams else "<unk>" for word in words]
    total = 0.0
    for before, word in itertools.pairwise(["<s>", *known, "</s>"]):
        pair = bigrams.get((before, word))
        total += (unigrams[before][1] or 0.0) + unigrams[word][0] if pair is None else pair
    return total


def spelled(path):
    return [token for token, _ in itertools.groupby(path) if token]


def all_sentences(log_probs, text_of, words, score):
    """The score of every word sequence: the sum over its paths and the language model's score."""
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
    (hypothesis,) = build_decoder(cfg, tokenizer).decode(log_probs, torch.tensor([log_probs.shape[1]]))
    totals = all_sentences(log_probs[0].double().numpy(), text_of, set(words), score)
    best = max(totals.values())
    assert hypothesis.score == pytest.approx(best, abs=1e-3)
    assert totals[tuple(hypothesis.text.split())] == pytest.approx(best, abs=1e-3)
    everything = np.logaddexp.reduce(list(totals.values()))
    for alternative in hypothesis.nbest:
        assert alternative.score == pytest.approx(totals[tuple(alternative.text.split())], abs=1e-3)
        assert alternative.posterior == pytest.approx(math.exp(alternative.score - everything), abs=1e-3)
    assert (
        len({alternative.text for alternative in hypothesis.nbest})
        == len(hypothesis.nbest)
        == min(len(totals), cfg.nbest)
    )
    for word, confidence in zip(hypothesis.text.split(), hypothesis.word_confidences, strict=True):
        certain = sum(math.exp(score - everything) for said, score in totals.items() if word in said)
        assert 0 < confidence <= certain + 1e-3
    return hypothesis


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
def test_letter_decoding_equals_search_over_all_paths(files, seed, num_frames, sharpness, weight, with_lm):
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
def test_letters_without_a_space_spell_at_most_one_word(files, seed, num_frames, weight):
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
def test_subword_decoding_equals_search_over_all_paths(files, seed, num_frames, sharpness, weight):
    lm_weight, word_score = weight
    cfg = WordsConfig(**files, **WIDE, lm_weight=lm_weight, word_score=word_score, nbest=5)

    def score(words):
        return lm_weight * log10_sentence(words) + word_score * len(words)

    log_probs = posteriors(1, num_frames, 5, seed=seed, sharpness=sharpness)
    assert_exact(cfg, Pieces(), log_probs, pieces_text, WORDS, score)


@given(seed=seeds, num_frames=st.integers(1, 5), weight=weights)
@settings(max_examples=20)
def test_word_token_decoding_equals_search_over_all_paths(files, seed, num_frames, weight):
    tokenizer = WordTokenizer(["<blank>", "b", "aa", "zz", "ab"])  # "zz" is not in the list
    lm_weight, word_score = weight
    cfg = WordsConfig(**files, **WIDE, lm_weight=lm_weight, word_score=word_score, nbest=5)

    def score(words):
        return lm_weight * log10_sentence(words) + word_score * len(words)

    log_probs = posteriors(1, num_frames, 5, seed=seed)
    hypothesis = assert_exact(cfg, tokenizer, log_probs, lambda t: tuple(tokenizer.decode(t).split()), WORDS, score)
    assert "zz" not in hypothesis.text


@given(seed=seeds, num_frames=st.integers(1, 5), lm_weight=st.sampled_from([0.0, 1.0, 2.3]))
@settings(max_examples=20)
def test_token_language_model_equals_search_over_all_paths(files, seed, num_frames, lm_weight):
    # the file's order is not the tokens'
    tokenizer = WordTokenizer(["<blank>", "b", "aa", "zz", "ab"])
    log_probs = posteriors(1, num_frames, 5, seed=seed)
    cfg = TokensConfig(lm=files["lm"], lm_weight=lm_weight, **WIDE)
    (hypothesis,) = build_decoder(cfg, tokenizer).decode(log_probs, torch.tensor([num_frames]))
    totals = all_sentences(
        log_probs[0].double().numpy(),
        lambda tokens: tuple(tokenizer.decode(tokens).split()),
        {"b", "aa", "zz", "ab"},
        lambda words: lm_weight * log10_sentence(words),
    )
    assert hypothesis.score == pytest.approx(max(totals.values()), abs=1e-3)
    assert totals[tuple(hypothesis.text.split())] == pytest.approx(hypothesis.score, abs=1e-3)


@pytest.fixture
def letters():
    return CharacterTokenizer(["<blank>", "▁", "a", "b"])


def said(text, tokenizer, gap=2, probability=0.9):
    """Posteriors [1, T, V] of a text: each token for one frame, then blanks."""
    path = [token for unit in tokenizer.encode(text) for token in (unit, *[0] * gap)]
    frames = torch.full((1, len(path), tokenizer.size), (1 - probability) / (tokenizer.size - 1))
    frames[0, torch.arange(len(path)), torch.tensor(path)] = probability
    return frames.log(), torch.tensor([len(path)])


def decoded(cfg, tokenizer, log_probs, lengths):
    (hypothesis,) = build_decoder(cfg, tokenizer).decode(log_probs, lengths)
    return hypothesis


def test_word_outside_the_list_becomes_the_nearest_in_it(files, letters):
    log_probs, lengths = said("bab ab", letters)
    assert decoded(WordsConfig(**files), letters, log_probs, lengths).text in ("b ab ab", "ab ab", "bb ab")


def test_the_language_model_decides_between_words_that_sound_alike(tmp_path, letters):
    log_probs, lengths = said("a", letters)
    log_probs[0, 0] = torch.tensor([0.02, 0.02, 0.48, 0.48]).log()
    for likely, rare in (("a", "b"), ("b", "a")):
        lm = write_arpa(
            tmp_path / "lm.arpa",
            {"<s>": (-99, 0), "</s>": (-1, None), "<unk>": (-3, None), rare: (-1.5, 0), likely: (-0.5, 0)},
            {("<s>", rare): -1.4},
        )
        hypothesis = decoded(WordsConfig(lm=lm, lm_weight=2.0), letters, log_probs, lengths)
        assert hypothesis.text == likely
        assert 0.5 < hypothesis.word_confidences[0] < 1
        assert hypothesis.confidence == pytest.approx(hypothesis.word_confidences[0])


def test_higher_word_score_never_gives_fewer_words(files, letters):
    log_probs = posteriors(1, 30, 4, seed=3, sharpness=0.5)
    counts = [
        len(decoded(WordsConfig(**files, word_score=score), letters, log_probs, torch.tensor([30])).text.split())
        for score in (-4, 0, 4)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("kind", ["characters", "bpe", "words"])
def test_words_have_times_and_confidences(tmp_path, kind):
    texts = ["turn the lights on", "turn the lights off", "see the sea"]
    tokenizer = train_tokenizer(TokenConfig(kind=kind, vocab_size=40), texts)
    (tmp_path / "words.txt").write_text("\n".join(sorted({word for text in texts for word in text.split()})))
    log_probs, lengths = said("see the lights", tokenizer)
    hypothesis = decoded(WordsConfig(words=str(tmp_path / "words.txt"), nbest=3), tokenizer, log_probs, lengths)
    assert hypothesis.text == tokenizer.decode(hypothesis.tokens) == "see the lights"
    assert hypothesis.nbest[0].text == hypothesis.text
    assert sum(alternative.posterior for alternative in hypothesis.nbest) <= 1 + 1e-6
    words = timed_words(hypothesis, log_probs[0], tokenizer, FrameTimes(0.04))
    assert [word.word for word in words] == ["see", "the", "lights"]
    assert [word.confidence for word in words] == pytest.approx(hypothesis.word_confidences, abs=1e-4)
    starts = [word.start for word in words]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert all(before.start + before.duration <= after.start + 1e-6 for before, after in itertools.pairwise(words))


def test_batches_with_silence_and_empty_utterances_are_decoded(files, letters):
    log_probs, lengths = posteriors(4, 20, 4, seed=1), [20, 0, 7, 1]
    decoder = build_decoder(WordsConfig(**files), letters)
    together = decoder.decode(log_probs, torch.tensor(lengths))
    alone = [decoder.decode(log_probs[row : row + 1, :n], torch.tensor([n]))[0] for row, n in enumerate(lengths)]
    assert together == alone
    assert together[1].text == ""
    silence = torch.tensor([[[0.97, 0.01, 0.01, 0.01]] * 5]).log()
    (hypothesis,) = decoder.decode(silence, torch.tensor([5]))
    assert (hypothesis.tokens, hypothesis.text, hypothesis.word_confidences) == ([], "", [])
    assert hypothesis.confidence > 0.8


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer(["<blank>", "▁", "a", "b"]), Pieces()])
def test_narrowest_beam_gives_only_complete_words(files, tokenizer):
    cfg = WordsConfig(**files, beam=1, beam_tokens=1)
    decoder = build_decoder(cfg, tokenizer)
    for seed in range(30):
        (hypothesis,) = decoder.decode(posteriors(1, 15, tokenizer.size, seed=seed, sharpness=3.0), torch.tensor([15]))
        assert set(hypothesis.text.split()) <= set(WORDS)
        assert tokenizer.decode(hypothesis.tokens) == hypothesis.text
        assert -1e6 < hypothesis.score < 100


def test_decoder_can_be_pickled(files, letters):
    log_probs, lengths = posteriors(2, 12, 4), torch.tensor([12, 7])
    for cfg in (WordsConfig(**files), TokensConfig(lm=files["lm"])):
        decoder = build_decoder(cfg, letters)
        hypotheses = decoder.decode(log_probs, lengths)
        assert pickle.loads(pickle.dumps(decoder)).decode(log_probs, lengths) == hypotheses


def test_packed_language_models_and_their_words_are_read(files, tmp_path, letters):
    packed = tmp_path / "lm.arpa.gz"
    packed.write_bytes(gzip.compress(Path(files["lm"]).read_bytes()))
    assert arpa_words(str(packed)) == arpa_words(files["lm"]) == ["b", "ab", "aa", "bb", "a"]
    log_probs, lengths = posteriors(1, 20, 4), torch.tensor([20])
    plain = decoded(WordsConfig(lm=files["lm"]), letters, log_probs, lengths)
    assert decoded(WordsConfig(lm=str(packed)), letters, log_probs, lengths) == plain


def test_word_list_may_be_a_lexicon(tmp_path):
    (tmp_path / "lexicon.txt").write_text("<eps> SIL\na AH0\na EY1\n\nab AE1 B\n!SIL SIL\n")
    assert read_words(str(tmp_path / "lexicon.txt")) == ["a", "ab"]


def test_errors_in_files_are_named(files, tmp_path, letters, capfd):
    log_probs, lengths = posteriors(1, 3, 4), torch.tensor([3])
    broken, empty, strange = tmp_path / "broken.arpa", tmp_path / "empty.txt", tmp_path / "strange.txt"
    broken.write_text("hello\n")
    empty.write_text("<s>\n\n")
    strange.write_text("xyz\nABC\n")
    for fields, message in (
        ({"lm": str(tmp_path / "none.arpa"), "words": files["words"]}, "there is no language model .*none.arpa"),
        ({"lm": str(tmp_path / "none.arpa")}, "none.arpa cannot be read"),
        ({"lm": str(broken), "words": files["words"]}, "broken.arpa is no language model"),
        ({"lm": str(broken)}, "broken.arpa lists no words.*decode.words"),
        ({"words": str(tmp_path / "none.txt")}, "none.txt cannot be read"),
        ({"words": str(empty)}, "empty.txt holds no words"),
        ({"words": str(strange)}, "none of the 2 words of .*strange.txt can be written"),
    ):
        with pytest.raises((LmError, DecodeError), match=message):
            decoded(WordsConfig(**fields), letters, log_probs, lengths)
    load_lm(files["lm"], ["a"])
    assert capfd.readouterr().err == ""  # KenLM draws a progress bar


@pytest.mark.parametrize(("cfg", "named"), [(WordsConfig(), "decode.words"), (TokensConfig(), "decode.lm")])
def test_decoder_without_its_files_names_the_required_options(cfg, named, letters):
    with pytest.raises(DecodeError, match=rf"decode.kind {cfg.kind} needs .*{named}"):
        build_decoder(cfg, letters).prepare()


@pytest.mark.parametrize("packed", [False, True])
def test_unigram_model_is_read(tmp_path, letters, packed):
    unigrams = {"<unk>": -2.0, "<s>": -99, "</s>": -0.4, "a": -0.3, "b": -0.9}
    lines = ["\\data\\", f"ngram 1={len(unigrams)}", "", "\\1-grams:"]
    lines += [f"{value}\t{word}" for word, value in unigrams.items()] + ["", "\\end\\", ""]
    path = tmp_path / "lm.arpa"
    path.write_bytes(gzip.compress("\n".join(lines).encode()) if packed else "\n".join(lines).encode())
    words = ["a", "b", "c"]
    lm = load_lm(str(path), words)
    state = lm.start(False)
    for word, expected in (("a", -0.3), ("b", -0.9), ("c", -2.0), ("a", -0.3)):
        state, log10 = lm.score(state, words.index(word))
        assert log10 == pytest.approx(expected)
    assert lm.finish(state)[1] == lm.finish(lm.start(False))[1] == pytest.approx(-0.4)


@pytest.mark.parametrize("tokens", ["letters", "pieces"])
def test_changed_parameters_decode_like_a_new_decoder(files, letters, tokens):
    tokenizer = letters if tokens == "letters" else Pieces()
    log_probs, lengths = posteriors(2, 12, tokenizer.size), torch.tensor([12, 9])
    first = build_decoder(WordsConfig(**files), tokenizer)
    first.prepare()
    before = first.decode(log_probs, lengths)
    hypotheses = []
    for cfg in (WordsConfig(**files, lm_weight=0.1, word_score=3.0), WordsConfig(**files, lm_weight=6.0, beam=2)):
        other = first.with_config(cfg)
        assert other._search.lm is first._search.lm
        hypotheses.append(other.decode(log_probs, lengths))
        assert hypotheses[-1] == build_decoder(cfg, tokenizer).decode(log_probs, lengths)
    assert hypotheses[0] != hypotheses[1]
    assert first.decode(log_probs, lengths) == before


def test_decoder_with_other_files_shares_nothing(files, letters):
    first = build_decoder(WordsConfig(**files), letters)
    first.prepare()
    assert first.with_config(WordsConfig(words=files["words"]))._search is None


@pytest.mark.parametrize("wrong", [{"kind": "tokens", "lm_weight": -1}, {"kind": "words", "lm": "x", "beam": 0}])
def test_config_refuses_impossible_values(wrong):
    with pytest.raises(ValidationError):
        TypeAdapter(DecodeChoice).validate_python(wrong)
