import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from speech.text import NormalizerConfig, TextNormalizer
from speech.text_log import TextChange, text_changes, undo_changes


@given(st.text(), st.text())
@example("a - b", "a b")
@example("A  A", "a a")
@example(" a", "a ")
@example("a a", "a")
def test_original_text_is_restored_from_any_result(raw, text):
    changes = text_changes(raw, text)
    assert undo_changes(text, changes) == raw
    assert all(change.was != change.became for change in changes)
    assert [change.start for change in changes] == sorted(change.start for change in changes)


@given(
    st.lists(st.sampled_from(["Ann's", "HELLO", "12", "-", "café,", "ok", "…", "3rd"]), min_size=5, max_size=20).map(
        " ".join
    )
)
def test_original_text_is_restored_from_normalized_text(raw):
    text = TextNormalizer(NormalizerConfig()).normalize(raw)
    assert undo_changes(text, text_changes(raw, text)) == raw


def test_consecutive_words_with_changed_case_are_one_change():
    assert text_changes("ALL IN CAPITALS", "all in capitals") == [TextChange(0, "ALL IN CAPITALS", "all in capitals")]
    changes = text_changes("HELLO THERE, MY FRIEND", "hello there my friend")
    assert [change.kind for change in changes] == ["case", "punctuation", "case"]
    assert changes[2] == TextChange(12, "MY FRIEND", "my friend")
    assert len(text_changes("ONE  TWO", "one two")) == 3, "the space between them has changed, too"


def test_only_spans_between_equal_words_are_searched():
    changes = text_changes("So, 12 men - and One dog.", "so twelve men and one dog")
    assert [(change.was, change.became, change.kind) for change in changes] == [
        ("So,", "so", "punctuation"),
        ("12", "twelve", "number"),
        (" -", "", "punctuation"),
        ("One", "one", "case"),
        ("dog.", "dog", "punctuation"),
    ]


def test_another_texts_changes_are_refused():
    with pytest.raises(ValueError, match="the changes of another text"):
        undo_changes("something else", text_changes("HELLO", "hello"))
