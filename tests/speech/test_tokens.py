"""Tokenizers: one suite for every kind, then what each has of its own."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from speech.tokens import (
    TOKENIZERS,
    CharacterTokenizer,
    TokenConfig,
    TokenError,
    tokenizer_from_dict,
    train_tokenizer,
)

TEXTS = [
    "turn the kitchen lights on",
    "turn the lights off",
    "set a timer for twenty five minutes",
    "don't call room three zero nine",
    "the lights in the kitchen",
]
# Each class inherits the same test functions, on purpose.
WORDS = sorted({word for text in TEXTS for word in text.split()})


class TokenizerSuite:
    """What every kind of tokenizer does."""

    cfg: TokenConfig

    @pytest.fixture(scope="class")
    def tokenizer(self):
        return train_tokenizer(self.cfg, iter(TEXTS))

    def test_blank_comes_first(self, tokenizer):
        assert tokenizer.blank == 0
        assert tokenizer.symbols[0] == "<blank>"
        assert tokenizer.size == len(tokenizer.symbols) == len(set(tokenizer.symbols))

    def test_training_texts_survive_a_round_trip(self, tokenizer):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert all(0 < token < tokenizer.size for token in ids)
            assert tokenizer.decode(ids) == text

    @given(words=st.lists(st.sampled_from(WORDS), max_size=12))
    @settings(max_examples=60)
    def test_texts_survive_a_round_trip(self, tokenizer, words):
        text = " ".join(words)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_languages_stand_behind_the_tokens_of_texts(self, tokenizer):
        made = tokenizer.with_languages(["de-CH", "en", "", "de"])
        assert (made.num_text, made.symbols) == (tokenizer.size, [*tokenizer.symbols, "<|de|>", "<|en|>"])
        assert made.languages == {"de": tokenizer.size, "en": tokenizer.size + 1}
        assert [made.start_of(language) for language in ("de_AT", "EN")] == [(0, tokenizer.size), (0, made.size - 1)]
        assert made.suppressed == (tokenizer.size, tokenizer.size + 1)
        for text in TEXTS:
            assert made.encode(text) == tokenizer.encode(text)
            assert made.decode(made.encode(text)) == text
        with pytest.raises(TokenError, match="is not text"):
            made.decode([tokenizer.size])
        assert made.pieces() == [*tokenizer.pieces(), b"", b""]
        value = json.loads(json.dumps(made.to_dict()))
        again = tokenizer_from_dict(value)
        assert (again.symbols, again.languages, again.start) == (made.symbols, made.languages, made.start)
        assert {name: value[name] for name in value if name != "languages"} == tokenizer.to_dict()
        none = made.with_languages([])
        assert (none.symbols, none.languages, none.start, none.suppressed) == (tokenizer.symbols, {}, (0,), ())
        with pytest.raises(TokenError, match="'fr' is none of the languages of the tokens"):
            made.start_of("fr")
        for languages in ("de", [3]):
            with pytest.raises(TokenError, match="must be a list of codes"):
                tokenizer_from_dict(value | {"languages": languages})

    def test_tokenizer_survives_a_json_round_trip(self, tokenizer):
        value = json.loads(json.dumps(tokenizer.to_dict()))
        again = tokenizer_from_dict(value)
        assert type(again) is type(tokenizer)
        assert again.symbols == tokenizer.symbols
        assert again.to_dict() == tokenizer.to_dict()
        assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]

    def test_training_is_deterministic(self, tokenizer):
        assert train_tokenizer(self.cfg, TEXTS).to_dict() == tokenizer.to_dict()

    def test_unknown_units_are_named(self, tokenizer):
        with pytest.raises(TokenError, match="ж") as caught:
            tokenizer.encode("turn ж on ж")
        assert caught.value.symbols == ["ж"]

    def test_space_symbol_in_a_text_is_refused(self, tokenizer):
        with pytest.raises(TokenError, match=r"U\+2581"):
            tokenizer.encode("turn▁on")
        with pytest.raises(TokenError, match=r"U\+2581"):
            train_tokenizer(self.cfg, ["turn▁on"])

    @pytest.mark.parametrize("token", [0, -1, 10_000])
    def test_ids_out_of_range_are_refused(self, tokenizer, token):
        with pytest.raises(TokenError, match="blank"):
            tokenizer.decode([1, token])

    def test_empty_text_has_no_tokens(self, tokenizer):
        assert tokenizer.encode("") == []
        assert tokenizer.decode([]) == ""

    @given(data=st.data())
    @settings(max_examples=40)
    def test_any_ids_give_words_with_single_spaces(self, tokenizer, data):
        ids = data.draw(st.lists(st.integers(1, tokenizer.size - 1), min_size=8, max_size=30))
        text = tokenizer.decode(ids)
        assert text == " ".join(text.split())

    @pytest.mark.parametrize("texts", [[], [""]])
    def test_training_without_text_is_refused(self, texts):
        with pytest.raises(TokenError, match="no text"):
            train_tokenizer(self.cfg, texts)

    def test_damaged_description_is_refused(self):
        with pytest.raises(TokenError, match=self.cfg.kind):
            tokenizer_from_dict({"kind": self.cfg.kind})


class TestCharacters(TokenizerSuite):
    cfg = TokenConfig(kind="characters")

    def test_symbols_are_sorted(self, tokenizer):
        assert tokenizer.symbols[1:3] == ["▁", "'"]
        assert tokenizer.symbols[3:] == sorted(tokenizer.symbols[3:])

    def test_order_of_texts_does_not_matter(self, tokenizer):
        assert train_tokenizer(self.cfg, TEXTS[::-1]).symbols == tokenizer.symbols

    def test_each_character_is_one_token(self, tokenizer):
        assert len(tokenizer.encode("turn the")) == 8


class TestBpe(TokenizerSuite):
    cfg = TokenConfig(kind="bpe", vocab_size=60)

    def test_vocabulary_has_the_requested_size(self, tokenizer):
        assert tokenizer.size == 60

    def test_pieces_are_longer_than_characters(self, tokenizer):
        assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2

    def test_small_corpus_gives_fewer_tokens(self):
        tokenizer = train_tokenizer(TokenConfig(kind="bpe", vocab_size=5000), TEXTS)
        assert 60 < tokenizer.size < 5000
        assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]

    def test_too_small_vocabulary_names_the_required_size(self):
        with pytest.raises(TokenError, match="vocab_size 5 is smaller than the 24 tokens"):
            train_tokenizer(TokenConfig(kind="bpe", vocab_size=5), TEXTS)
        assert train_tokenizer(TokenConfig(kind="bpe", vocab_size=24), TEXTS).size == 24

    def test_long_lines_are_not_left_out(self):
        line = "abc " * 3000 + "xyz"
        assert "x" in "".join(train_tokenizer(TokenConfig(kind="bpe", vocab_size=20), [line]).symbols[1:])

    @pytest.mark.parametrize("model", ["?", base64.b64encode(b"nonsense").decode(), 5])
    def test_damaged_model_is_refused(self, model):
        with pytest.raises(TokenError):
            tokenizer_from_dict({"kind": "bpe", "model": model})


class TestWords(TokenizerSuite):
    cfg = TokenConfig(kind="words")

    def test_most_frequent_words_come_first(self, tokenizer):
        assert tokenizer.symbols[1:4] == ["the", "lights", "kitchen"]

    def test_vocabulary_may_be_limited(self):
        tokenizer = train_tokenizer(TokenConfig(kind="words", vocab_size=3), TEXTS)
        assert tokenizer.symbols == ["<blank>", "the", "lights"]
        with pytest.raises(TokenError, match="'turn', 'off'"):
            tokenizer.encode("turn the lights off")


def test_every_kind_is_registered():
    assert set(TOKENIZERS) == {"characters", "bpe", "words", "whisper"}


@pytest.mark.parametrize("value", [{}, {"kind": "phones"}, {"kind": 3}])
def test_unknown_kind_is_refused(value):
    with pytest.raises(TokenError, match="bpe, characters, whisper, words"):
        tokenizer_from_dict(value)


@pytest.mark.parametrize("symbols", [[], ["a", "b"], ["<blank>", "a", "a"], "abc", ["<blank>", 1]])
def test_damaged_symbols_are_refused(symbols):
    with pytest.raises(TokenError):
        tokenizer_from_dict({"kind": "characters", "symbols": symbols})


def test_text_that_looks_like_the_token_of_a_language_is_refused():
    with pytest.raises(TokenError, match=r"the texts have the token <\|de\|>"):
        train_tokenizer(TokenConfig(kind="words"), ["ja <|de|>"]).with_languages(["en", "de"])


def test_symbols_of_another_language_are_accepted():
    tokenizer = CharacterTokenizer(["<blank>", "▁", "é"])
    assert tokenizer.decode(tokenizer.encode("é éé")) == "é éé"


def test_list_of_unknown_characters_is_shortened():
    tokenizer = CharacterTokenizer(["<blank>", "a"])
    with pytest.raises(TokenError, match="…"):
        tokenizer.encode("bcdefghi")


def test_config_refuses_impossible_values():
    with pytest.raises(ValidationError):
        TokenConfig(vocab_size=1)
    with pytest.raises(ValidationError):
        TokenConfig(kind="phones")
