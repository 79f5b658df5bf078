"""Hot words: what they add is exact in every search, by its definition over whole texts; lists; what is left out."""

import itertools
import json
import logging
import math
import operator
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support import load_beside, write_arpa

from speech.decoding import (
    AttentionDecodeConfig,
    AttentionSearch,
    BeamConfig,
    DecodeError,
    GraphConfig,
    GreedyConfig,
    TokensConfig,
    TransducerDecodeConfig,
    TransducerSearch,
    WordsConfig,
    build_decoder,
)
from speech.decoding.hot_words import HotPhrase, HotWords, HotWordsConfig, hot_tokens, hot_vocabulary
from speech.hmm.priors import StateOutputs, log_priors, scaled_likelihoods
from speech.tokens import CharacterTokenizer, TokenConfig, WordTokenizer, train_tokenizer

words_tests = load_beside(__file__, "test_words.py")
attention_tests = load_beside(__file__, "test_attention_search.py")
transducer_tests = load_beside(__file__, "test_transducer_search.py")
toys = load_beside(__file__, "../hmm/toys.py")
WIDE = words_tests.WIDE
LETTERS = CharacterTokenizer(["<blank>", "▁", "a", "b"])
PHRASES = ("ab\t0.9", "ab b\t0.7", "b a\t1.3", "a\t0.25")
HOT = HotWordsConfig(phrases=PHRASES)


def by_definition(text, hot=HOT):
    """The score of each letter of each occurrence of a phrase as whole words."""
    padded, total = f" {' '.join(text.split())} ", 0.0
    for phrase, score in hot.read():
        count = sum(padded.startswith(f" {phrase} ", place) for place in range(len(padded)))
        total += count * score * len(phrase.replace(" ", ""))
    return total


# --- the automaton


UNITS = [b"", b" ", b"a", b"b", b"ab", b" a", b" ba", b"a b", b"c", b"b b a"]


@given(
    units=st.lists(st.integers(0, len(UNITS) - 1), max_size=12),
    phrases=st.dictionaries(
        st.sampled_from(["a", "b", "ab", "a b", "ab a", "b a b", "a a", "a b a", "bb", "b b"]),
        st.sampled_from([0.25, 0.5, 2.0]),
        min_size=1,
    ),
)
@settings(max_examples=100)
def test_units_add_up_to_the_definition_whatever_they_are(units, phrases):
    hot = HotWords([HotPhrase(*pair) for pair in phrases.items()], UNITS)
    text = b"".join(UNITS[unit] for unit in units).decode()
    cfg = HotWordsConfig(phrases=[f"{phrase}\t{score}" for phrase, score in phrases.items()])
    assert hot.bonus(units) == pytest.approx(by_definition(text, cfg))
    state = hot.start
    for unit in units:
        steps = [hot.step(state, other)[1] for other in range(len(UNITS))]
        assert hot.gains(state) == pytest.approx([*steps, hot.end(state)])
        state = hot.step(state, unit)[0]


def test_letters_are_paid_at_once_and_taken_back_where_the_text_goes_on_otherwise():
    hot = HotWords([HotPhrase("abba", 0.5)], [b" ", b"a", b"b"])
    state, first = hot.step(hot.start, 1)
    state, second = hot.step(state, 2)
    assert (first, second) == (0.5, 0.5)
    assert hot.step(state, 1)[1] == -1.0
    assert hot.end(state) == -1.0
    assert hot.bonus([1, 2, 2, 1]) == hot.bonus([0, 1, 2, 2, 1, 0, 0]) == 2.0
    assert hot.bonus([1, 2, 2, 1, 1]) == hot.bonus([1, 1, 2, 2, 1]) == 0.0


def test_words_without_spaces_are_found_inside_texts_of_such_writing_systems():
    letters = sorted(set("我在北京大学a"))
    units = [letter.encode() for letter in letters]

    def bonus(text, phrase):
        hot = HotWords([HotPhrase(phrase, 1.0)], units)
        return hot.bonus([letters.index(letter) for letter in text])

    assert bonus("我在北京大学", "北京") == 2.0
    assert bonus("北京北京", "北京") == 4.0
    assert bonus("我在大学", "北京") == 0.0
    assert bonus("aa", "a") == 0.0


def test_written_texts_may_have_capitals_and_punctuation():
    phrases = [HotPhrase("Dr. Élan", 1.0), HotPhrase("dr élan", 2.0), HotPhrase("o'neill", 1.0)]
    for text, worth in {
        "Dr. Élan": 12.0,
        "DR ÉLAN!": 12.0,
        "“dr. Élan”, he said": 12.0,
        "Dr. Élans": 0.0,
        "O'Neill, (O’NEILL)": 14.0,
    }.items():
        for units in ([text], list(text), [text[:4], text[4:]]):
            hot = HotWords(phrases, [unit.encode() for unit in units], "written")
            assert hot.bonus(range(len(units))) == pytest.approx(worth)


def test_automaton_is_made_again_in_another_process():
    hot = hot_tokens(HOT, LETTERS)
    again = pickle.loads(pickle.dumps(hot))
    for tokens in itertools.product(range(1, 4), repeat=4):
        assert again.bonus(tokens) == hot.bonus(tokens)


# --- exactness of searches


def all_token_sequences(log_probs, score):
    """The score of every token sequence: the sum over its paths, and what is added."""
    totals = {}
    frames = log_probs.double().tolist()
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        tokens = tuple(words_tests.spelled(path))
        probability = math.exp(sum(map(operator.getitem, frames, path)))
        totals[tokens] = totals.get(tokens, 0.0) + probability
    return {tokens: math.log(total) + score(tokens) for tokens, total in totals.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lm_weight", [None, 0.0, 1.3])
def test_ctc_search_over_tokens_equals_all_paths(tmp_path, seed, lm_weight):
    tokenizer = WordTokenizer(["<blank>", "b", "a", "ab"])
    log_probs = words_tests.posteriors(1, 5, 4, seed=seed)
    cfg, lm = BeamConfig(**WIDE, hot_words=HOT), 0.0
    if lm_weight is not None:
        path = write_arpa(tmp_path / "lm.arpa", words_tests.UNIGRAMS, words_tests.BIGRAMS)
        cfg, lm = TokensConfig(**WIDE, lm=path, lm_weight=lm_weight, hot_words=HOT), lm_weight
    cfg = cfg.model_copy(update={"nbest": 1000})
    (hypothesis,) = build_decoder(cfg, tokenizer).decode(log_probs, torch.tensor([5]))

    def score(tokens):
        said = tokenizer.decode(tokens)
        return by_definition(said) + lm * words_tests.log10_sentence(said.split())

    expected = {tokenizer.decode(tokens): total for tokens, total in all_token_sequences(log_probs[0], score).items()}
    assert {option.text: option.score for option in hypothesis.nbest} == pytest.approx(expected, abs=1e-3)
    assert hypothesis.text == max(expected, key=expected.get)


@pytest.mark.parametrize("seed", range(3))
def test_ctc_search_over_letters_equals_all_paths(seed):
    log_probs = words_tests.posteriors(1, 6, 4, seed=seed)
    (hypothesis,) = build_decoder(BeamConfig(**WIDE, hot_words=HOT), LETTERS).decode(log_probs, torch.tensor([6]))
    totals = all_token_sequences(log_probs[0], lambda tokens: by_definition(LETTERS.decode(tokens)))
    best = max(totals, key=totals.get)
    assert (tuple(hypothesis.tokens), hypothesis.score) == (best, pytest.approx(totals[best], abs=1e-3))


SEARCHES_OF_WORDS = {
    "letters": (LETTERS, lambda tokens: tuple(LETTERS.decode(tokens).split()), 6),
    "pieces": (words_tests.Pieces(), words_tests.pieces_text, 5),
    "words": (
        WordTokenizer(["<blank>", "b", "aa", "a", "ab"]),
        lambda tokens: tuple(SEARCHES_OF_WORDS["words"][0].decode(tokens).split()),
        5,
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    (folder / "words.txt").write_text("aa\nb\nab\nabb\na\nbb\n")
    lm = write_arpa(folder / "lm.arpa", words_tests.UNIGRAMS, words_tests.BIGRAMS)
    return {"lm": lm, "words": str(folder / "words.txt")}


@pytest.mark.parametrize("lm_weight", [0.0, 1.7])
@pytest.mark.parametrize("kind", sorted(SEARCHES_OF_WORDS))
def test_search_over_words_equals_all_paths(files, kind, lm_weight):
    tokenizer, text_of, frames = SEARCHES_OF_WORDS[kind]
    cfg = WordsConfig(**files, **WIDE, lm_weight=lm_weight, word_score=-0.3, nbest=5, hot_words=HOT)

    def score(words):
        return by_definition(" ".join(words)) + lm_weight * words_tests.log10_sentence(words) - 0.3 * len(words)

    for seed in range(3):
        log_probs = words_tests.posteriors(1, frames, tokenizer.size, seed=seed)
        words_tests.assert_exact(cfg, tokenizer, log_probs, text_of, words_tests.WORDS, score)


HOT_LETTERS = HotWordsConfig(phrases=("aab\t0.8", "ba\t0.5"))
"""For tokens without a space: a text is one word."""


@pytest.mark.parametrize("weight", [0.0, 1.7])
@pytest.mark.parametrize("with_lm", [False, True])
def test_search_with_a_decoder_network_equals_all_texts(tmp_path, weight, with_lm):
    (tmp_path / "lm.arpa").write_text(attention_tests.ARPA)
    lm = attention_tests.KenlmModel(tmp_path / "lm.arpa", ["a", "b"])
    size, counts = 3, (4, 2)
    net, tokenizer = attention_tests.network(size), attention_tests.tokenizer(size)
    encoded, frames, posteriors = attention_tests.speech(counts, size)
    named = {"lm": str(tmp_path / "lm.arpa")} if with_lm else {}
    cfg = AttentionDecodeConfig(
        **attention_tests.ALL, **named, ctc_weight=0.2, lm_weight=weight, nbest=500, hot_words=HOT_LETTERS
    )
    hypotheses = AttentionSearch(cfg, net, tokenizer)(encoded, frames, posteriors)
    for row, count in enumerate(counts):
        expected = {}
        for text in attention_tests.texts(size, count):
            if math.isfinite(own := attention_tests.by_ctc(posteriors[row, :count], text)):
                said = transducer_tests.letters(text)
                score = 0.8 * attention_tests.by_decoder(net, encoded[row, :count], text) + 0.2 * own
                score += by_definition(said, HOT_LETTERS) + with_lm * weight * sum(lm.sentence(said))
                expected[said] = score
        several = {option.text: option.score for option in hypotheses[row].nbest}
        assert {text: several[text] for text in expected} == pytest.approx(expected, abs=1e-4)
        assert hypotheses[row].text == max(expected, key=expected.get)


@pytest.mark.parametrize("weight", [0.0, 1.7])
@pytest.mark.parametrize("with_lm", [False, True])
def test_search_with_a_transducer_equals_all_alignments(tmp_path, weight, with_lm):
    (tmp_path / "lm.arpa").write_text(attention_tests.ARPA)
    lm = attention_tests.KenlmModel(tmp_path / "lm.arpa", ["a", "b"])
    size, counts = 3, (5, 2, 4, 1)
    net = transducer_tests.network(size)
    encoded, frames, _ = transducer_tests.speech(counts, net)
    named = {"lm": str(tmp_path / "lm.arpa")} if with_lm else {}
    cfg = TransducerDecodeConfig(**transducer_tests.ALL, **named, lm_weight=weight, nbest=500, hot_words=HOT_LETTERS)
    hypotheses = TransducerSearch(cfg, net, attention_tests.tokenizer(size))(encoded, frames)
    for row, count in enumerate(counts):
        expected = {}
        for text in attention_tests.texts(size, count):
            said = transducer_tests.letters(text)
            score = transducer_tests.by_alignments(net, encoded[row, :count], text)
            expected[said] = score + by_definition(said, HOT_LETTERS) + with_lm * weight * sum(lm.sentence(said))
        assert {option.text: option.score for option in hypotheses[row].nbest} == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A model of tied states, and an exact search of a graph with it."""
    folder = tmp_path_factory.mktemp("graph")
    rng = np.random.default_rng(3)
    model = toys.random_model(rng, toys.context_tree(rng))
    model.save(folder / "hmm")
    lines = [f"{word} {' '.join(phones)}\n" for word, several in toys.LEXICON.items() for phones in several]
    (folder / "lexicon.txt").write_text("".join(lines))
    (folder / "lm.arpa").write_text(toys.arpa())
    cfg = GraphConfig(
        hmm=str(folder / "hmm" / "model.json"),
        lexicon=str(folder / "lexicon.txt"),
        lm=str(folder / "lm.arpa"),
        beam=1000.0,
        acoustic_scale=0.7,
        lattice_beam=1000.0,
        rescore_nbest=1000,
    )
    return model, cfg


@pytest.mark.parametrize("phrases", [("AT\t1.5", "TWO\t2"), ("TO AT\t2", "AT\t0.5", "A TWO\t1.5"), ("TWO A\t3",)])
@pytest.mark.parametrize("seed", [1, 2])
def test_search_in_a_graph_equals_all_sentences(graph, phrases, seed):
    model, cfg = graph
    hot = HotWordsConfig(phrases=phrases)
    priors = log_priors(np.random.default_rng(8).integers(1, 50, model.gmm.num_pdfs))
    scores = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, 12, model.gmm.num_pdfs)) * 2)
    log_probs = scores.float().log_softmax(-1)
    cfg = cfg.model_copy(update={"hot_words": hot})
    (hypothesis,) = build_decoder(cfg, LETTERS, StateOutputs(priors)).decode(log_probs, torch.tensor([12]))
    likelihoods = cfg.acoustic_scale * scaled_likelihoods(log_probs[0].numpy(), priors, 1)
    costs = toys.sentence_costs(model, likelihoods)
    expected = {words: by_definition(" ".join(words), hot) - cost for words, cost in costs.items()}
    assert hypothesis.score == pytest.approx(max(expected.values()), abs=2e-2)
    assert expected[tuple(hypothesis.text.split())] == pytest.approx(hypothesis.score, abs=2e-2)


# --- what they are for


def weakly_said(tokenizer, rare, common, share=0.1):
    """Posteriors [1, T, V] of two texts of equally many tokens, of which one is much less probable."""
    pair = [tokenizer.encode(rare), tokenizer.encode(common)]
    frames = torch.full((1, 2 * len(pair[0]), tokenizer.size), 1e-4)
    frames[0, 1::2, 0] = 1.0
    for place, (one, other) in enumerate(zip(*pair, strict=True)):
        frames[0, 2 * place, other] += 1 - share
        frames[0, 2 * place, one] += share
    return (frames / frames.sum(-1, keepdim=True)).log(), torch.tensor([frames.shape[1]])


TEXTS = ["call anna merkle now", "call anna marble now"]


@pytest.mark.parametrize("kind", ["beam", "words"])
@pytest.mark.parametrize("phrase", ["merkle", "anna merkle"])
def test_rare_phrase_is_found_only_with_the_list(tmp_path, kind, phrase):
    tokenizer = train_tokenizer(TokenConfig(kind="characters"), TEXTS)
    (tmp_path / "words.txt").write_text("\n".join(" ".join(TEXTS).split()))
    cfg = BeamConfig() if kind == "beam" else WordsConfig(words=str(tmp_path / "words.txt"))
    log_probs, lengths = weakly_said(tokenizer, *TEXTS)
    found = []
    for hot in (HotWordsConfig(), HotWordsConfig(phrases=(phrase,), score=1.5)):
        decoder = build_decoder(cfg.model_copy(update={"hot_words": hot}), tokenizer)
        found.append(decoder.decode(log_probs, lengths)[0].text)
    assert found == TEXTS[::-1]


def test_tokens_of_a_phrase_are_tried_that_the_network_does_not_prefer():
    size = 8
    net, tokenizer = attention_tests.network(size), attention_tests.tokenizer(size)
    encoded, frames, _ = attention_tests.speech((6,), size)
    common = {"beam": 2, "beam_tokens": 1, "times": "none"}
    transducer = transducer_tests.network(size)
    heard = transducer_tests.speech((6,), transducer)[:2]
    for phrase in ("gfe", "dcb"):
        hot = HotWordsConfig(phrases=(phrase,), score=30.0)
        cfg = AttentionDecodeConfig(**common, patience=0, hot_words=hot)
        assert AttentionSearch(cfg, net, tokenizer)(encoded, frames)[0].text == phrase
        search = TransducerSearch(TransducerDecodeConfig(**common, hot_words=hot), transducer, tokenizer)
        assert search(*heard)[0].text == phrase


def searches(files, graph):
    """A decoder and its posteriors for each kind that reads these, without hot words."""
    model, cfg = graph
    states = StateOutputs(log_priors(np.arange(1, model.gmm.num_pdfs + 1)))
    yield build_decoder(BeamConfig(), LETTERS), words_tests.posteriors(2, 9, 4)
    yield build_decoder(TokensConfig(lm=files["lm"]), LETTERS), words_tests.posteriors(2, 9, 4)
    yield build_decoder(WordsConfig(**files), LETTERS), words_tests.posteriors(2, 9, 4)
    yield build_decoder(cfg, LETTERS, states), words_tests.posteriors(2, 9, model.gmm.num_pdfs)


@pytest.mark.parametrize("hot", [{"phrases": ()}, {"phrases": ("ab",), "score": 0.0}, {"phrases": ("xyz",)}])
def test_lists_without_usable_phrases_change_nothing(files, graph, hot):
    lengths = torch.tensor([9, 6])
    for decoder, log_probs in searches(files, graph):
        other = decoder.with_config(decoder.cfg.model_copy(update={"hot_words": HotWordsConfig(**hot)}))
        assert other.decode(log_probs, lengths) == decoder.decode(log_probs, lengths)


def test_decoders_with_other_parameters_share_files_but_not_hot_words(files, graph):
    lengths = torch.tensor([9, 6])
    for decoder, log_probs in searches(files, graph):
        phrases = ("A TWO", "AT") if decoder.states else ("ab b",)
        changed = {"hot_words": HotWordsConfig(phrases=phrases, score=5.0), "nbest": 3}
        decoder.prepare()
        hot = decoder.with_config(decoder.cfg.model_copy(update=changed))
        fresh = build_decoder(hot.cfg, LETTERS, decoder.states)
        wanted = fresh.decode(log_probs, lengths)
        assert hot.decode(log_probs, lengths) == wanted != decoder.decode(log_probs, lengths)
        assert pickle.loads(pickle.dumps(hot)).decode(log_probs, lengths) == wanted
        if "lm_weight" in type(hot.cfg).model_fields:
            cfg = hot.cfg.model_copy(update={"lm_weight": 0.3})
            tuned, alone = hot.with_config(cfg), build_decoder(cfg, LETTERS)
            assert tuned.decode(log_probs, lengths) == alone.decode(log_probs, lengths)


def test_searches_with_a_network_share_the_language_model_but_not_hot_words(tmp_path):
    (tmp_path / "lm.arpa").write_text(attention_tests.ARPA)
    net, tokenizer = attention_tests.network(3), attention_tests.tokenizer(3)
    encoded, frames, _ = attention_tests.speech((4, 2), 3)
    plain = AttentionDecodeConfig(beam=3, times="none", lm=str(tmp_path / "lm.arpa"))
    cfgs = [
        plain,
        plain.model_copy(update={"hot_words": HOT_LETTERS}),
        plain.model_copy(update={"hot_words": HOT_LETTERS, "lm_weight": 2.0}),
    ]
    for first, second in itertools.permutations(cfgs, 2):
        search = AttentionSearch(first, net, tokenizer)
        search.prepare()
        other = search.with_config(second)
        wanted = AttentionSearch(second, net, tokenizer)(encoded, frames)
        assert other(encoded, frames) == wanted
        assert other._own_lm is search._own_lm


# --- lists


def test_lines_of_a_file_may_have_scores_of_their_own(tmp_path):
    (tmp_path / "hot.txt").write_text("\ufeffAnna  Karenina\n\nLevin\t2.5\nAnna Karenina\t0.1\n Wronski \t\n")
    cfg = HotWordsConfig(file=str(tmp_path / "hot.txt"), phrases=("Kitty\t1",), score=0.7)
    assert cfg.read() == [("Kitty", 1.0), ("Anna Karenina", 0.7), ("Levin", 2.5), ("Wronski", 0.7)]


@pytest.mark.parametrize("score", ["much", "nan", "-1", "1e9"])
def test_wrong_scores_are_refused_with_their_line(tmp_path, score):
    (tmp_path / "hot.txt").write_text(f"one\ntwo\t{score}\n")
    with pytest.raises(DecodeError, match=f"hot.txt, line 2: '{score}' is not the score"):
        HotWordsConfig(file=str(tmp_path / "hot.txt")).read()
    with pytest.raises(ValidationError, match="not the score"):
        HotWordsConfig(phrases=(f"two\t{score}",))


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("none.txt", "binary"):
        with pytest.raises(DecodeError, match=f"{name} cannot be read"):
            HotWordsConfig(file=str(tmp_path / name)).read()


def test_too_many_phrases_are_refused(monkeypatch):
    monkeypatch.setattr("speech.decoding.hot_words._MOST_ENTRIES", 100)
    with pytest.raises(DecodeError, match="2 hot words are too many"):
        HotWords([HotPhrase("abcdefgh", 1.0), HotPhrase("ijklmnop", 1.0)], [b"a"])


def test_phrases_that_cannot_be_recognized_are_named_and_left_out(caplog):
    phrases = HotWordsConfig(phrases=("ab", "xylophone", "b zither", "!?"))
    with caplog.at_level(logging.WARNING):
        assert [phrase.text for phrase in hot_tokens(phrases, LETTERS).phrases] == ["ab"]
        assert [phrase.text for phrase in hot_vocabulary(phrases, ["ab", "b"]).phrases] == ["ab"]
        assert hot_vocabulary(phrases, ["c"]) is None
    counted = [record.getMessage() for record in caplog.records]
    assert [message.split(" are ")[0] for message in counted] == ["3 of 4 hot words"] * 2 + ["4 of 4 hot words"]
    assert all("'xylophone', 'b zither', '!?'" in message for message in counted)


def test_phrases_get_the_form_of_the_transcripts(caplog):
    cfg = BeamConfig(hot_words=HotWordsConfig(phrases=("Ab-B", "...", "A\t3")))
    with caplog.at_level(logging.WARNING):
        made = cfg.with_normalized_phrases(lambda text: text.lower().replace("-", " ").replace(".", ""))
    assert made.hot_words.read() == [("ab b", 0.5), ("a", 3.0)]
    assert "1 of 3 hot words are left out" in caplog.text
    assert GreedyConfig().with_normalized_phrases(str.lower) == GreedyConfig()
    assert json.loads(made.model_dump_json())["hot_words"]["file"] == ""


def test_model_takes_no_hot_words_of_another_one():
    assert BeamConfig().completed({"hot_words.file": "theirs.txt"}) == BeamConfig()


def test_greedy_decoding_becomes_a_search_if_there_are_phrases(tmp_path):
    (tmp_path / "hot.txt").write_text("ab\n")
    (tmp_path / "empty.txt").write_text("\n")
    made = GreedyConfig().with_hot_words(str(tmp_path / "hot.txt"), 2.0)
    assert (made.kind, made.hot_words.read()) == ("beam", [("ab", 2.0)])
    assert GreedyConfig().with_hot_words(str(tmp_path / "empty.txt")) == GreedyConfig()


def test_streams_share_the_index_of_words_but_not_what_the_search_remembers(files):
    decoder = build_decoder(WordsConfig(**files, hot_words=HOT), LETTERS)
    decoder.prepare()
    other = decoder._search.alone()
    assert other._trie is decoder._search._trie
    assert other.lm is not decoder._search.lm
    log_probs = words_tests.posteriors(1, 9, 4)[0].numpy()
    assert other.paths(log_probs)[0].words == decoder._search.paths(log_probs)[0].words
