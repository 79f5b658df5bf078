"""Text normalization: results, refused texts, and idempotence."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from speech.text import (
    LARGEST_NUMBER,
    NormalizerConfig,
    TextError,
    TextNormalizer,
    number_words,
    ordinal_words,
)

ENGLISH = TextNormalizer()

SAID = {
    "It's 5 o’clock — 1,200 people!": "it's five o'clock one thousand two hundred people",
    "HELLO   world\n": "hello world",
    "well-known, re-do; and/or": "well known re do and or",
    "‘I don’t know,’ he said": "i don't know he said",
    "“Quoted”": "quoted",
    "''quoted''": "quoted",
    "'word' alone": "word alone",
    "'tis the dogs' bowl": "'tis the dogs' bowl",
    "rock ' roll": "rock roll",
    "café naïve Straße Ærø": "cafe naive strasse aero",
    "ﬁne ＡＢＣ": "fine abc",
    "soft\u00adhyphen zero\u200bwidth \ufeff": "softhyphen zerowidth",
    "U.S.A.": "u s a",
    "Q&A": "q and a",
    "½ a mile": "one half a mile",
    "21°": "twenty one degrees",
}

NUMBERS = {
    "0": "zero",
    "13": "thirteen",
    "40": "forty",
    "99": "ninety nine",
    "100": "one hundred",
    "101": "one hundred one",
    "1984": "one thousand nine hundred eighty four",
    "1,000,000": "one million",
    "12,34": "twelve thirty four",
    "007": "zero zero seven",
    "1234567890": "one two three four five six seven eight nine zero",
    "3.14": "three point one four",
    "0.5 and .5": "zero point five and point five",
    "It is 3.": "it is three",
    "-5": "minus five",
    "5-6": "five six",
    "1st 2nd 3rd 4th 5th 8th 9th 12th": "first second third fourth fifth eighth ninth twelfth",
    "20th 21ST 100th": "twentieth twenty first one hundredth",
    "mp3": "mp three",
    "5:30": "five thirty",
    "50%": "fifty percent",
    "$1": "one dollar",
    "$20": "twenty dollars",
    "$3.50": "three dollars and fifty cents",
    "£1.01": "one pound and one penny",
    "£2.20": "two pounds and twenty pence",
    "€5 million": "five million euros",
    "$1.5 billion": "one point five billion dollars",
    "$2.00": "two dollars",
    "$1.123": "one point one two three dollars",
}


@pytest.mark.parametrize(("typed", "said"), [*SAID.items(), *NUMBERS.items()])
def test_english_is_normalized(typed, said):
    assert ENGLISH(typed) == said
    assert ENGLISH(said) == said


@given(st.integers(0, LARGEST_NUMBER))
@settings(max_examples=200)
def test_number_words_read_back_to_the_number(number):
    assert read_back(number_words(number)) == number
    assert ENGLISH.normalize(str(number)) == ENGLISH.normalize(f"{number:,}") == number_words(number)


def read_back(words):
    """An independent reader of English number words."""
    small = {number_words(n): n for n in range(20)} | {number_words(n): n for n in range(20, 100, 10)}
    total = group = 0
    for word in words.split():
        if word == "hundred":
            group *= 100
        elif word in ("thousand", "million"):
            total, group = total + group * (1000 if word == "thousand" else 1_000_000), 0
        else:
            group += small[word]
    return total + group


def test_numbers_are_all_different():
    assert len({number_words(n) for n in range(3000)}) == 3000
    assert len({ordinal_words(n) for n in range(3000)}) == 3000


@pytest.mark.parametrize("number", [-1, LARGEST_NUMBER + 1])
def test_numbers_out_of_range_are_refused(number):
    with pytest.raises(ValueError, match="999,999,999"):
        number_words(number)


NORMALIZERS = [
    TextNormalizer(NormalizerConfig(kind=kind, case=case))
    for kind, case in product(["english", "basic", "none"], ["lower", "upper", "keep"])
]


@given(text=st.text(max_size=40) | st.text(alphabet="aB'’‘`\" -.,$5210İŉßé½²ﬁ\u0301\u200b", min_size=8, max_size=40))
@settings(max_examples=160)
def test_normalizing_twice_changes_nothing(text):
    for normalizer in NORMALIZERS:
        once = normalizer.normalize(text)
        assert normalizer.normalize(once) == once, normalizer.cfg
        assert once == " ".join(once.split()), normalizer.cfg


@given(st.text(alphabet=st.characters(codec="ascii"), min_size=15, max_size=80))
@settings(max_examples=80)
def test_every_ascii_text_fits_the_english_alphabet(text):
    result = ENGLISH.normalize(text)
    assert set(result) <= set("abcdefghijklmnopqrstuvwxyz' ")
    assert all(word.strip("'") for word in result.split())


def test_case_is_as_configured():
    assert TextNormalizer(NormalizerConfig(case="upper"))("Room 3, it's") == "ROOM THREE IT'S"
    assert TextNormalizer(NormalizerConfig(case="keep"))("Room 3") == "Room three"


def test_basic_keeps_other_languages():
    basic = TextNormalizer(NormalizerConfig(kind="basic"))
    assert basic("¿Qué pasa, Señor Müller? 25 €") == "qué pasa señor müller 25"
    assert basic("«Привет», мир!") == "привет мир"
    assert basic("नमस्ते दुनिया।") == "नमस्ते दुनिया"


def test_none_leaves_case_and_punctuation():
    none = TextNormalizer(NormalizerConfig(kind="none"))
    assert none("  Hello,\tWorld! e\u0301 ") == "Hello, World! é"


@pytest.mark.parametrize("text", ["", "  \n", "...", "—", "'", "\u200b"])
def test_empty_text_is_refused(text):
    with pytest.raises(TextError) as caught:
        ENGLISH(text)
    assert caught.value.reason == "empty-text"
    assert ENGLISH.normalize(text) == ""


def test_characters_outside_the_alphabet_are_named():
    with pytest.raises(TextError, match=r"U\+0436") as caught:
        ENGLISH("hello жд ж")
    assert caught.value.reason == "outside-alphabet"
    assert caught.value.characters == "дж"
    assert isinstance(caught.value, ValueError)


def test_given_alphabet_is_used():
    digits = TextNormalizer(NormalizerConfig(kind="basic", alphabet="0123456789"))
    assert digits("12, 7") == "12 7"
    with pytest.raises(TextError, match="alphabet"):
        digits("12a")
    umlauts = TextNormalizer(NormalizerConfig(kind="basic", alphabet="abcdefghijklmnopqrstuvwxyzäöüß"))
    assert umlauts("Grüße!") == "grüße"


def test_long_texts_are_shortened_in_messages():
    with pytest.raises(TextError) as caught:
        ENGLISH("ж" * 10_000)
    assert len(str(caught.value)) < 300


def test_unknown_setting_is_refused():
    with pytest.raises(ValidationError):
        NormalizerConfig(kind="french")
    with pytest.raises(ValidationError):
        NormalizerConfig(lower=True)


def test_real_transcripts_only_change_case(shared_data):
    files = sorted((shared_data / "LibriSpeech").rglob("*.trans.txt"))
    lines = [line.split(" ", 1)[1].strip() for file in files for line in file.read_text().splitlines()]
    assert len(lines) > 1000
    assert [ENGLISH(line) for line in lines] == [line.lower() for line in lines]


@given(st.text(alphabet="aB' ", max_size=4) | st.text(alphabet="aB' ", min_size=6, max_size=30))
@settings(max_examples=100)
def test_fast_path_for_plain_text_gives_the_same(text):
    # A trailing full stop avoids the fast path and is removed.
    assert ENGLISH.normalize(text) == ENGLISH.normalize(text + " .")


@pytest.mark.parametrize(
    ("text", "case", "expected"),
    [
        ("Mr. Smith and Mrs. Jones", "lower", "mister smith and missus jones"),
        ("Mr Smith and MRS JONES", "keep", "Mister Smith and MISSUS JONES"),
        ("MR SMITH", "lower", "mister smith"),
        ("mrs", "upper", "MISSUS"),
        ("Mr.Smith, 3 Mr", "lower", "mister smith three mister"),
        ("Mr's mrsa amr m r", "lower", "mr's mrsa amr m r"),
    ],
)
def test_titles_are_written_out_as_librispeech_writes_them(text, case, expected):
    normalizer = TextNormalizer(NormalizerConfig(case=case))
    assert normalizer.normalize(text) == expected
    assert normalizer.normalize(expected) == expected
    assert TextNormalizer(NormalizerConfig(kind="basic")).normalize("Mr. Smith") == "mr smith"
