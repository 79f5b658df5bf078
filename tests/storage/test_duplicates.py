from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.duplicates import SeenTexts, WordIndex, equal_labels, join_labels, repeated_texts, text_keys


@settings(max_examples=50)
@given(st.lists(st.text(max_size=2), min_size=10, max_size=60))
def test_each_row_is_labelled_with_the_first_equal_row(texts):
    assert equal_labels(text_keys(texts)).tolist() == [texts.index(text) for text in texts]


def test_keys_that_agree_in_one_half_only_are_different():
    keys = np.array([[1, 2], [1, 3], [4, 2], [1, 2]], dtype=np.uint64)
    assert equal_labels(keys).tolist() == [0, 1, 2, 0]


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.text("abc", max_size=2), min_size=2, max_size=8), min_size=2, max_size=8), st.integers(1, 4)
)
def test_repeated_texts_are_those_that_occur_twice(parts, limit):
    texts = [text for part in parts for text in part]
    reported = repeated_texts(lambda: iter(parts), len(texts), limit)
    repeated = {text for text in texts if texts.count(text) > 1}
    assert set(reported) <= repeated
    assert len(reported) == len(set(reported)) == min(limit, len(repeated))


def test_texts_with_equal_hashes_are_compared(monkeypatch):
    monkeypatch.setattr("storage.duplicates.hash", lambda text: len(text), raising=False)
    assert repeated_texts(lambda: iter([["a", "b", "cc"], ["c", "dd"]]), 5) == []
    assert repeated_texts(lambda: iter([["a", "b", "cc"], ["c", "b"]]), 5) == ["b"]


def test_each_text_is_new_once_for_any_number_of_texts():
    seen = SeenTexts()
    assert all(seen.add(f"u{n}") for n in range(20_000))
    assert not any(seen.add(f"u{n}") for n in range(20_000))
    assert seen.add("")
    assert seen.add("\udcff")
    assert not seen.add("\udcff")
    assert len(seen) == 20_002


@settings(max_examples=50)
@given(st.integers(1, 60), st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)), min_size=15, max_size=50))
def test_connected_rows_are_labelled_with_their_first_row(count, pairs):
    pairs = [(i % count, j % count) for i, j in pairs]
    texts = [str(n % max(1, count // 2)) for n in range(count)]
    labels = equal_labels(text_keys(texts))
    links = [*pairs, *((n, int(labels[n])) for n in range(count))]
    wanted = list(range(count))
    for _ in range(count):
        for i, j in links:
            wanted[i] = wanted[j] = min(wanted[i], wanted[j])
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    assert join_labels(labels, both[:, 0], both[:, 1]).tolist() == wanted


@pytest.mark.parametrize(("parts", "buffered"), [(1, 1 << 20), (7, 64), (97, 1)])
def test_recordings_sharing_words_are_found_at_any_memory_limit(tmp_path, parts, buffered):
    rng = np.random.default_rng(0)
    words = {n: rng.choice(2**32, 50, replace=False).astype(np.uint32) for n in range(40)}
    words[7] = np.concatenate([words[3][10:40], words[7][:20]])
    words[21] = words[20]
    places = dict.fromkeys(words, np.arange(50, dtype=np.int32)) | {21: rng.permutation(50).astype(np.int32) * 40}
    index = WordIndex(tmp_path / "index", parts, buffered)
    for n, values in words.items():
        index.add(n, values, places[n])
    rows = np.concatenate([pairs for pairs in index.matches() if len(pairs)])
    several = {(int(r["first"]), int(r["second"])): (int(r["offset"]), int(r["votes"])) for r in rows if r["votes"] > 9}
    assert several == {(3, 7): (10, 30)}
    shared = {(i, j) for i, j in combinations(words, 2) if np.intersect1d(words[i], words[j]).size}
    assert {(int(r["first"]), int(r["second"])) for r in rows} == shared
    assert list((tmp_path / "index").rglob("*.bin")) == []


def test_word_shared_by_all_gives_only_a_few_pairs_each(tmp_path):
    index = WordIndex(tmp_path)
    for n in range(1000):
        index.add(n, np.array([5], dtype=np.uint32), np.array([0], dtype=np.int32))
    rows = np.concatenate(list(index.matches()))
    assert len(rows) <= 3 * 1000
    labels = np.arange(1000, dtype=np.int32)
    assert set(join_labels(labels, rows["first"].astype(int), rows["second"].astype(int)).tolist()) == {0}
