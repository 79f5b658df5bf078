"""Transcripts in the written form of a model: its words where they are right, the transcript's where they are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech.restoring import restored
from speech.text import NormalizerConfig, TextNormalizer

ENGLISH = TextNormalizer()
SPOKEN = st.lists(st.sampled_from(["a", "mister", "thirty", "two", "he's", "go", "dogs'"]), max_size=8).map(" ".join)
WRITTEN = st.lists(st.sampled_from(["A", "Mr.", "32", "He's", "go,", "--", "go.", "dogs'", "two-a", "€"]), max_size=8)


@pytest.mark.parametrize(
    ("text", "written", "expected"),
    [
        ("it was mister thirty", "It was Mr. 30.", "It was Mr. 30."),
        ("it was mister smith", "It was Mr. Schmid.", "It was Mr. smith."),
        ("it was mister smith", "It was Ms. Smith!", "It was mister Smith!"),
        ("and eighteen hundred and twelve men", "And 1812 men!", "And eighteen hundred and twelve men."),
        ("the men of twenty one", "The men of 21", "The men of 21"),
        ("the men of twenty two", "The men of 21", "The men of twenty two"),
        ("mud some other way we go", "Mod. Some other way. He go.", "Mud. Some other way. We go."),
        ("the would be assassins", "the would-be assassins -- ready", "The would-be assassins"),
        ("he said yes", 'He said, "Yes."', 'He said, "Yes."'),
        ("he said yes you know", 'He said, "Yes." Now', 'He said, "Yes." You know'),
        ("one and two", "two", "One and two."),
        ("one two", "One, too, two.", "One, two."),
        ("a b c d", "x y z", "A b c d."),
        ("hello", "", "Hello."),
        ("", "", ""),
    ],
)
def test_words_that_are_right_keep_their_form(text, written, expected):
    assert restored(text, written, ENGLISH) == expected


@given(SPOKEN, WRITTEN.map(" ".join))
def test_the_normalized_form_is_the_transcript(text, written):
    text = ENGLISH.normalize(text)
    assert ENGLISH.normalize(restored(text, written, ENGLISH)) == text


def test_too_many_errors_make_a_sentence_of_the_transcript():
    text, written = "one two three four", "One, two, free, for."
    assert restored(text, written, ENGLISH, most_errors=0.5) == "One, two, three, four."
    assert restored(text, written, ENGLISH, most_errors=0.4) == "One two three four."


def test_form_that_the_normalizer_would_keep_is_not_given():
    plain = TextNormalizer(NormalizerConfig(kind="none"))
    assert restored("one two", "One, two.", plain) == "one two"
