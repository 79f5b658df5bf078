from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.dataset.splits import (
    Groups,
    SplitError,
    bin_numbers,
    encode,
    fold_groups,
    group_strata,
    name_order,
    split_groups,
)

SHARES = {"valid": 0.1, "test": 0.2}
SETS = ["train", "valid", "test"]


def sets_of(sizes, shares=SHARES, seed=0, strata=None, names=None):
    """Set of each speaker."""
    who = names or [f"speaker{n}" for n in range(len(sizes))]
    codes, labels = encode(strata) if strata is not None else (None, ("",))
    groups = Groups(np.array(sizes, dtype=np.int64), name_order(who, seed), codes, labels)
    sets = split_groups(groups, shares, seed)
    return dict(zip(who, sets.tolist(), strict=True))


def utterances_by_set(sizes, sets):
    counts = Counter()
    for size, number in zip(sizes, sets.values(), strict=True):
        counts[number] += size
    return counts


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 30), min_size=3, max_size=5) | st.lists(st.integers(1, 30), min_size=12, max_size=40),
    st.floats(0.01, 0.45),
    st.floats(0.01, 0.45),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_every_speaker_has_one_set_and_no_set_is_empty(sizes, valid, test, seed, strata):
    kinds = [f"domain{n % strata}" for n in range(len(sizes))] if strata else None
    sets = sets_of(sizes, {"valid": valid, "test": test}, seed, kinds)
    assert set(sets.values()) == {0, 1, 2}


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=8, max_size=24), st.randoms(use_true_random=False))
def test_order_of_speakers_does_not_matter(sizes, random):
    named = [(f"speaker{n}", size, f"d{n % 2}") for n, size in enumerate(sizes)]
    shuffled = random.sample(named, len(named))

    def division(rows):
        names, sizes, strata = zip(*rows, strict=True)
        return sets_of(list(sizes), seed=3, strata=list(strata), names=list(names))

    assert division(named) == division(shuffled)


def test_shares_are_met_with_many_speakers():
    sizes = [10] * 200
    counts = utterances_by_set(sizes, sets_of(sizes))
    assert counts[1] == pytest.approx(200, abs=10)
    assert counts[2] == pytest.approx(400, abs=10)


def test_seed_chooses_among_splits():
    assert sets_of([5] * 30, seed=1) == sets_of([5] * 30, seed=1)
    assert sets_of([5] * 30, seed=1) != sets_of([5] * 30, seed=2)


def test_new_speaker_moves_few_others_and_none_of_another_stratum():
    before, after = sets_of([10] * 100), sets_of([10] * 101)
    assert sum(before[name] != after[name] for name in before) <= 3
    strata = [f"d{n % 5}" for n in range(100)]
    before, after = sets_of([10] * 100, strata=strata), sets_of([10] * 101, strata=[*strata, "d2"])
    moved = [name for name in before if before[name] != after[name]]
    assert len(moved) <= 3
    assert {int(name.removeprefix("speaker")) % 5 for name in moved} <= {2}


def test_split_is_the_same_in_every_version():
    """An upgrade keeps the test set: models that were scored on another one could not be compared."""
    strata = [f"d{n % 4}" for n in range(24)]
    sets = sets_of([1 + n % 3 for n in range(24)], strata=strata, seed=5)
    assert "".join(map(str, sets.values())) == "201110200000000122020020"
    assert "".join(map(str, sets_of([1 + n % 3 for n in range(24)], seed=5).values())) == "001212000000000222000000"
    groups = Groups(np.array([1 + n % 3 for n in range(24)]), name_order([f"s{n}" for n in range(24)], 5))
    assert "".join(map(str, fold_groups(groups, 3, 5))) == "221201220202011020211020"


def test_single_utterances_are_split_exactly():
    counts = Counter(sets_of([1] * 50).values())
    assert counts == {0: 35, 1: 5, 2: 10}


def test_strata_have_their_shares_in_every_set():
    strata = ["rare" if n % 10 == 0 else "common" for n in range(400)]
    sets = sets_of([1] * 400, strata=strata)
    rare = Counter(sets[f"speaker{n}"] for n in range(0, 400, 10))
    assert rare[1] == pytest.approx(4, abs=1)
    assert rare[2] == pytest.approx(8, abs=1)


def test_many_small_strata_meet_the_shares_in_total():
    strata = [f"speaker{n // 3}" for n in range(3000)]
    counts = Counter(sets_of([1] * 3000, strata=strata).values())
    assert counts[1] == pytest.approx(300, abs=50)
    assert counts[2] == pytest.approx(600, abs=70)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 30), min_size=6, max_size=8) | st.lists(st.integers(1, 30), min_size=20, max_size=60),
    st.integers(2, 6),
    st.integers(0, 9),
)
def test_folds_are_complete_and_none_is_empty(sizes, folds, seed):
    names = [f"s{n}" for n in range(len(sizes))]
    groups = Groups(np.array(sizes), name_order(names, seed))
    assert set(fold_groups(groups, folds, seed).tolist()) == set(range(folds))


def test_folds_are_of_similar_size_and_represent_strata():
    names, strata = [f"s{n}" for n in range(500)], np.array([n % 100 for n in range(500)])
    for groups in (
        Groups(np.ones(500, dtype=np.int64), name_order(names, 1)),
        Groups(np.ones(500, dtype=np.int64), name_order(names, 1), strata, [f"d{n}" for n in range(100)]),
    ):
        folds = fold_groups(groups, 5, 1)
        assert np.bincount(folds).tolist() == [100] * 5
    assert all(sorted(folds[strata == n]) == [0, 1, 2, 3, 4] for n in range(100))


@pytest.mark.parametrize(
    ("sizes", "folds", "expected"),
    [
        ([4, 2, 2, 4], 2, [0, 0, 1, 1]),
        ([4, 4, 4], 2, [0, 1, 1]),
        ([1, 5, 1, 5, 1, 5], 3, [0, 0, 1, 1, 2, 2]),
        ([6, 1, 1, 1, 1, 1, 1, 6], 3, [0, 1, 1, 1, 1, 1, 1, 2]),
    ],
)
def test_group_belongs_to_the_fold_of_its_middle(sizes, folds, expected):
    groups = Groups(np.array(sizes), np.arange(len(sizes)))
    assert fold_groups(groups, folds, 0).tolist() == expected


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=20, max_size=60), st.integers(2, 6), st.integers(0, 9))
def test_folds_of_unequal_groups_differ_by_a_group_at_most(sizes, folds, seed):
    groups = Groups(np.array(sizes), name_order([f"s{n}" for n in range(len(sizes))], seed))
    totals = np.bincount(fold_groups(groups, folds, seed), weights=sizes, minlength=folds)
    assert np.abs(totals - sum(sizes) / folds).max() <= max(sizes)


def test_each_stratum_starts_at_a_different_fold():
    strata = np.arange(300)
    groups = Groups(np.ones(300, dtype=np.int64), name_order(map(str, strata), 1), strata, [f"d{n}" for n in strata])
    assert np.bincount(fold_groups(groups, 3, 1)).min() > 70  # all strata of one group would fill one fold


@pytest.mark.parametrize("sizes", [[], [5], [5, 5]])
def test_too_few_speakers_are_refused_with_a_remedy(sizes):
    with pytest.raises(SplitError, match="split_by: utterance"):
        sets_of(sizes)
    with pytest.raises(SplitError, match="3 folds"):
        fold_groups(Groups(np.array(sizes, dtype=np.int64), name_order(map(str, sizes), 0)), 3, 0)


def test_a_group_belongs_to_the_stratum_of_most_of_its_utterances():
    groups, strata = np.array([0, 0, 0, 1, 1, 2]), np.array([1, 1, 0, 2, 0, 3])
    assert group_strata(groups, strata, 3).tolist() == [1, 0, 3]


def test_numbers_fall_into_quantiles_and_codes_do_not_depend_on_the_order():
    assert np.bincount(bin_numbers(np.arange(100.0))).tolist() == [25, 25, 25, 25]
    codes, names = encode(["b", "a", "b", "c"])
    assert names == ["a", "b", "c"]
    assert codes.tolist() == [1, 0, 1, 2]
