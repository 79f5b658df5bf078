"""Text normalization beyond English: families of writing systems, numbers as words, and the log of what was changed."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.scripts import FAMILIES, LanguageError, change_case, family_of
from speech.text import NormalizerConfig, TextError, TextNormalizer
from speech.text_log import TextChange, count_kinds, text_changes, undo_changes

WRITTEN = [
    ("fr", "Ça va, l’été ?", "ça va l'été"),
    ("de", "Größe — „ﬁn“ Ａ", "größe fin a"),
    ("tr", "IĞDIR İl", "ığdır il"),
    ("ru", "Всё хорошо\u0301!", "всё хорошо"),
    ("sr-Latn", "Đački, DOM", "đački dom"),
    ("el", "ΟΔΟΣ Άλφα;", "οδος άλφα"),
    ("ar", "كِتَابٌ، ١٢ـ", "كتاب 12"),
    ("fa", "كتاب\u200cها", "کتاب ها"),
    ("he", "שָׁלוֹם צה״ל", "שלום צהל"),
    ("hi", "हिन्दी। १२", "हिन्दी 12"),
    ("th", "น้ำ ไทย", "น้ำ ไทย"),
    ("zh-Hans", "你 好，世界！ABC", "你好世界 abc"),
    ("ja", "かたかな ｶﾅ！", "かたかなカナ"),
    ("ko", unicodedata.normalize("NFD", "안녕 하세요."), "안녕 하세요"),
    ("ka", "გამარჯობა!", "გამარჯობა"),
    ("en", "It's 5", "it's five"),
    ("en-GB", "£1.01", "one pound and one penny"),
    ("xx", "What, ever", "what ever"),
]


@pytest.mark.parametrize(("language", "text", "expected"), WRITTEN)
def test_auto_chooses_the_family_by_language(language, text, expected):
    normalize = TextNormalizer(NormalizerConfig(kind="auto"))
    assert normalize(text, language) == expected
    assert normalize(expected, language) == expected


def test_named_family_needs_no_language():
    assert TextNormalizer(NormalizerConfig(kind="cyrillic"))("Ещё, раз") == "ещё раз"
    assert TextNormalizer(NormalizerConfig(kind="cyrillic", fold=True))("Ещё, раз") == "еще раз"
    assert TextNormalizer(NormalizerConfig(kind="arabic", fold=True))("أحمد إلى") == "احمد الي"
    assert TextNormalizer(NormalizerConfig(kind="greek", fold=True))("ΆΛΦΑ Ωραίο") == "αλφα ωραιο"


def test_punctuation_may_be_kept():
    assert (
        TextNormalizer(NormalizerConfig(kind="latin", punctuation="keep", case="keep"))(" Ja,  genau! ") == "Ja, genau!"
    )


def test_case_conversion_depends_on_the_language():
    assert change_case("istanbul", "upper", "tr") == "İSTANBUL"
    assert change_case("გა", "upper", "ka") == "გა"
    assert change_case("ΟΔΟΣ", "lower", "el") == "οδος"


NUMBERS = [
    ("de", "am 12 Uhr", "am zwölf uhr"),
    ("fr", "21 ans", "vingt et un ans"),
    ("es", "2020", "dos mil veinte"),
    ("ru", "3 дня", "три дня"),
    ("de", "007", "null null sieben"),
    ("de", "3,5 und 12.05.2020 und A4", "drei komma fünf und zwölf null fünf zweitausendzwanzig und a4"),
    ("en", "3.5", "three point five"),
]


@pytest.mark.parametrize(("language", "text", "expected"), NUMBERS)
def test_numbers_may_be_written_as_words(language, text, expected):
    pytest.importorskip("num2words")
    assert TextNormalizer(NormalizerConfig(kind="auto", numbers="words"))(text, language) == expected


def test_numbers_in_language_without_number_words_are_refused():
    pytest.importorskip("num2words")
    with pytest.raises(LanguageError, match=r"'zh'.*numbers: keep"):
        TextNormalizer(NormalizerConfig(kind="auto", numbers="words"))("12", "zh")


def test_text_that_becomes_empty_is_refused_in_every_family():
    for name in FAMILIES:
        with pytest.raises(TextError) as failure:
            TextNormalizer(NormalizerConfig(kind=name))(" ?! ")
        assert failure.value.reason == "empty-text"


@pytest.mark.parametrize("language", ["de", "ru", "ar", "fa", "he", "hi", "th", "zh", "ko", "el", "tr"])
@given(text=st.text(min_size=6, max_size=30))
@settings(max_examples=40)
def test_a_second_pass_changes_nothing(language, text):
    normalize = TextNormalizer(NormalizerConfig(kind="auto", fold=True)).normalize
    once = normalize(text, language)
    assert normalize(once, language) == once
    assert unicodedata.is_normalized("NFC", once)


def test_family_is_chosen_by_language_tag():
    assert family_of("sr").name == "cyrillic"
    assert family_of("sr-Latn").name == "latin"
    assert family_of("zh-Hant-TW").name == "cjk"
    assert family_of("").name == "latin"


def test_changes_have_kinds_and_can_be_undone():
    raw, text = "It's  5 o’clock, Ann!", "it's five o'clock ann"
    changes = text_changes(raw, text)
    assert undo_changes(text, changes) == raw
    assert count_kinds(text_changes("Hello  you, 5 ﬁt", "hello you five fit")).keys() <= {
        "case", "space", "punctuation", "number", "encoding", "spelling",
    }  # fmt: skip
    assert text_changes("same", "same") == []


@pytest.mark.parametrize(
    ("was", "became", "kind"),
    [
        ("Hello", "hello", "case"),
        ("you,", "you", "punctuation"),
        ("5", "five", "number"),
        ("ＡＢ", "AB", "encoding"),
        ("  ", " ", "space"),
        ("ёлка", "елка", "spelling"),
    ],
)
def test_kinds_of_change(was, became, kind):
    (change,) = text_changes(was, became)
    assert change.kind == kind


@given(st.text(max_size=40), st.text(min_size=10, max_size=40))
@settings(max_examples=100)
def test_any_change_is_reversible(raw, text):
    assert undo_changes(text, text_changes(raw, text)) == raw


def test_changes_of_another_text_are_refused():
    with pytest.raises(ValueError, match="the changes of another text"):
        undo_changes("a b", [TextChange(0, "x", "c")])
