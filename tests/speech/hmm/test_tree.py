"""Decision trees and phonetic questions."""

import itertools
import json

import numpy as np
import pytest
from hmm_toys import PHONES, context_tree, random_stats

from speech.hmm.topology import MAX_STATES, PhoneSet
from speech.hmm.tree import (
    ContextStatistics,
    DecisionTree,
    dendrogram,
    gaussian_log_likelihood,
    grow_tree,
    merge_clusters,
    monophone_tree,
    phonetic_questions,
)

FLOOR = 0.01


def test_likelihood_equals_that_of_the_frames():
    frames = np.random.default_rng(0).normal(size=(50, 3)) * [1, 2, 3]
    row = np.concatenate([[50], frames.sum(0), np.square(frames).sum(0)])[None]
    variance = frames.var(0)
    expected = (-0.5 * (np.log(2 * np.pi * variance) + np.square(frames - frames.mean(0)) / variance)).sum()
    assert gaussian_log_likelihood(row, FLOOR)[0] == pytest.approx(expected)
    assert gaussian_log_likelihood(0 * row, FLOOR)[0] == 0.0


def test_first_split_is_the_best_of_all_questions():
    phones = PhoneSet(("SIL", "SPN", "A", "B", "C", "D"))
    stats = random_stats(np.random.default_rng(3), phones)
    spoken = [3, 4, 5, 6]
    # one family only, so that there is one tree
    rows = stats.contexts[:, 1] == 3
    stats = ContextStatistics(stats.contexts[rows], stats.counts[rows], stats.sums[rows])
    questions = [set(some) for size in (1, 2) for some in itertools.combinations(spoken, size)]
    tree = grow_tree(phones, stats, [tuple(sorted(q)) for q in questions], leaves=5, minimum=1, merge=False)
    gains = {}
    states = [{0}, {0, 1}]
    for position, sets in ((0, questions), (2, questions), (3, states)):
        for yes in sets:
            answer = np.isin(stats.contexts[:, position], list(yes))
            parts = [stats.rows()[answer].sum(0), stats.rows()[~answer].sum(0)]
            gains[position, tuple(sorted(yes))] = gaussian_log_likelihood(np.stack(parts), FLOOR).sum()
    position, yes, _, _ = tree.nodes[tree.roots[3, 0]]
    assert gains[position, yes] == max(gains.values())


def test_tree_has_the_wanted_leaves_and_a_pdf_for_every_context():
    rng = np.random.default_rng(0)
    spoken = range(3, len(PHONES) + 1)
    questions = [(phone,) for phone in spoken]
    tree = grow_tree(PHONES, random_stats(rng), questions, leaves=40, minimum=10, merge=False)
    assert tree.num_pdfs == 40 + 2 * 5
    contexts = np.array(
        list(itertools.product(range(len(PHONES) + 1), range(1, len(PHONES) + 1), range(len(PHONES) + 1)))
    )
    pdfs = tree.pdfs(contexts)
    for row, (_, phone, _) in zip(pdfs, contexts.tolist(), strict=True):
        count = PHONES.topology(phone).num_states
        assert (row[:count] >= 0).all()
        assert (row[count:] == -1).all()
    assert set(pdfs[pdfs >= 0].tolist()) == set(range(50))
    noises = pdfs[contexts[:, 1] <= 2]
    assert len(np.unique(noises, axis=0)) == 2  # silence and noise know no context


def test_phones_that_differ_in_stress_share_a_tree():
    tree = context_tree(np.random.default_rng(0), leaves=5)
    assert tree.roots[PHONES.number("T"), 0] != tree.roots[PHONES.number("UW1"), 0]
    phones = PhoneSet.of([("AH0", "AH1")])
    stats = random_stats(np.random.default_rng(0), phones)
    grown = grow_tree(phones, stats, [(3,), (4,)], leaves=4, minimum=1)
    assert grown.roots[3, 0] == grown.roots[4, 0]


def test_similar_leaves_are_merged():
    rng = np.random.default_rng(0)
    questions = [(phone,) for phone in range(3, len(PHONES) + 1)]
    stats = random_stats(rng)
    apart = grow_tree(PHONES, stats, questions, 60, minimum=10, merge=False)
    merged = grow_tree(PHONES, stats, questions, 60, minimum=10)
    assert merged.num_pdfs < apart.num_pdfs
    rows = np.array([[10, 0.0, 10.0], [10, 0.1, 10.0], [10, 90.0, 820.0]])
    assert merge_clusters(rows, 1.0, FLOOR) == [0, 0, 1]
    assert merge_clusters(rows, 0.0, FLOOR) == [0, 1, 2]


def test_dendrogram_merges_the_nearest_first():
    rows = np.array([[10, 10 * mean, 10 * (mean**2 + 1)] for mean in (0.0, 5.0, 0.5, 5.2)])
    assert dendrogram(rows, FLOOR) == [(1, 3), (0, 2), (0, 1)]
    assert phonetic_questions([11, 12, 13, 14], [rows]) == [
        (11,), (11, 12, 13, 14), (11, 13), (12,), (12, 14), (13,), (14,),
    ]  # fmt: skip


def test_tree_survives_json_and_statistics_merge_in_any_order():
    rng = np.random.default_rng(1)
    tree = context_tree(rng)
    again = DecisionTree.from_dict(json.loads(json.dumps(tree.to_dict())))
    contexts = rng.integers(0, len(PHONES), size=(200, 3)).astype(np.int32)
    contexts[:, 1] = rng.integers(1, len(PHONES) + 1, size=200)
    np.testing.assert_array_equal(tree.pdfs(contexts), again.pdfs(contexts))
    assert again.context_dependent
    assert not monophone_tree(PHONES).context_dependent
    frames = rng.normal(size=(500, 4)).astype(np.float32)
    states = np.concatenate([contexts, rng.integers(0, MAX_STATES, size=(200, 1))], axis=1)[rng.integers(0, 200, 500)]
    whole = ContextStatistics.of_frames(states, frames)
    parts = [ContextStatistics.of_frames(states[a:b], frames[a:b]) for a, b in ((0, 100), (100, 350), (350, 500))]
    for order in (parts, parts[::-1]):
        merged = ContextStatistics.merge(order)
        np.testing.assert_array_equal(merged.contexts, whole.contexts)
        np.testing.assert_allclose(merged.rows(), whole.rows(), rtol=1e-6, atol=1e-6)
