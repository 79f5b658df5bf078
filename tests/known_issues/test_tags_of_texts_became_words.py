"""A tag of a text became the words in it: "<unk> one [noise]" was "unk one noise"."""

import pytest

from speech.lm import Text, TextConfig
from speech.text import NormalizerConfig, TextNormalizer


@pytest.mark.parametrize("kind", ["english", "basic", "auto", "latin"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<unk> one [noise]", "one"),
        ("<s> five </s>", "five"),
        ("six [laughter]two <SPOKEN_NOISE>", "six laughter two"),
        ("a < b, c > d [ e ]", "a b c d e"),
        ("th[at] was", "th at was"),
        ("[12]", {"english": "twelve"}),
    ],
)
def test_tags_are_no_words(kind, text, expected):
    expected = expected if isinstance(expected, str) else expected.get(kind, "12")
    assert TextNormalizer(NormalizerConfig(kind=kind)).normalize(text, "fr") == expected


def test_kinds_that_keep_punctuation_keep_tags():
    text = "<unk> one [noise]"
    assert TextNormalizer(NormalizerConfig(kind="none")).normalize(text) == text
    assert TextNormalizer(NormalizerConfig(kind="latin", punctuation="keep")).normalize(text) == text


@pytest.mark.parametrize("kind", ["english", "none"])
def test_text_of_language_models_has_no_symbols(tmp_path, kind):
    (tmp_path / "text").write_text("<s> one two </s>\none <unk> two\nthree\n")
    (block,) = Text(TextConfig(paths=[str(tmp_path / "text")]), NormalizerConfig(kind=kind)).blocks()
    assert block.lines == ["one two", "three"]
    assert (block.counts["kept"], block.counts["special-symbol"], block.counts["lines"]) == (2, 1, 3)
