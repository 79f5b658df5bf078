from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.splits import Item, SplitError, split_utterances

SHARES = {"valid": 0.1, "test": 0.2}


def corpus(sizes):
    return [Item(f"{speaker}-{n}", f"speaker{speaker}") for speaker, size in enumerate(sizes) for n in range(size)]


def sets_of_speakers(items, sets):
    found = defaultdict(set)
    for item in items:
        found[item.speaker].add(sets[item.id])
    return found


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(1, 30), min_size=3, max_size=40),
    st.floats(0.01, 0.45),
    st.floats(0.01, 0.45),
    st.integers(0, 5),
)
def test_speakers_are_disjoint_every_utterance_has_a_set_and_no_set_is_empty(sizes, valid, test, seed):
    items = corpus(sizes)
    sets = split_utterances(items, {"valid": valid, "test": test}, seed=seed)
    assert sets.keys() == {item.id for item in items}
    assert all(len(found) == 1 for found in sets_of_speakers(items, sets).values())
    assert set(sets.values()) == {"train", "valid", "test"}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=3, max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_the_utterances_does_not_matter(sizes, random):
    items = corpus(sizes)
    shuffled = random.sample(items, len(items))
    assert split_utterances(items, SHARES, seed=3) == split_utterances(shuffled, SHARES, seed=3)


def test_shares_are_met_when_there_are_many_speakers():
    items = corpus([10] * 200)
    counts = Counter(split_utterances(items, SHARES).values())
    assert counts["valid"] == pytest.approx(200, abs=10)
    assert counts["test"] == pytest.approx(400, abs=10)


def test_the_seed_chooses_among_divisions():
    items = corpus([5] * 30)
    assert split_utterances(items, SHARES, seed=1) == split_utterances(items, SHARES, seed=1)
    assert split_utterances(items, SHARES, seed=1) != split_utterances(items, SHARES, seed=2)


def test_a_new_speaker_moves_few_others():
    before = split_utterances(corpus([10] * 100), SHARES)
    after = split_utterances(corpus([10] * 101), SHARES)
    assert sum(before[name] != after[name] for name in before) <= 30


def test_by_utterance_divides_a_single_speaker():
    items = corpus([50])
    counts = Counter(split_utterances(items, SHARES, by="utterance").values())
    assert counts == {"train": 35, "valid": 5, "test": 10}


def test_a_share_of_zero_makes_no_set():
    assert set(split_utterances(corpus([3, 3]), {"valid": 0.1, "test": 0.0}).values()) == {"train", "valid"}


@pytest.mark.parametrize("sizes", [[], [5], [5, 5]])
def test_too_few_speakers_are_refused_with_a_remedy(sizes):
    with pytest.raises(SplitError, match="split_by: utterance"):
        split_utterances(corpus(sizes), SHARES)
