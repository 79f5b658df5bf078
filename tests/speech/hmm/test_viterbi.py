"""Training graphs and alignment, against all paths."""

import itertools
import math

import numpy as np
import pytest
from hmm_toys import LEXICON, PHONES, context_tree, corpus, random_model

from speech.hmm.graphs import GraphOptions, state_graph, utterance_graph
from speech.hmm.steps import align, make_graphs
from speech.hmm.topology import NOISE, SILENCE, PhoneSet, Scales, TransitionModel
from speech.hmm.tree import monophone_tree
from speech.hmm.utterances import Shard
from speech.hmm.viterbi import AlignOptions, equal_path, path_of_states, transition_counts, viterbi

SIL = PHONES.silence


def readings(words, silence=0.5):
    """All phone sequences of a transcript with their costs."""
    choices = [LEXICON[word] for word in words]
    for pronunciations in itertools.product(*choices):
        for pauses in itertools.product([False, True], repeat=len(words) + 1):
            phones = [SIL] if pauses[0] else []
            for pronunciation, pause in zip(pronunciations, pauses[1:], strict=True):
                phones += [*PHONES.numbers(pronunciation), *([SIL] if pause else [])]
            cost = -sum(math.log(silence if pause else 1 - silence) for pause in pauses)
            yield tuple(phones), cost


def best_reading(model, words, scores):
    """The best score of all readings, each by an ordinary Viterbi search over a dense matrix."""
    weights = model.transitions.weights(Scales())
    best = (-math.inf, ())
    for phones, cost in readings(words):
        contexts = np.array([*zip((0, *phones[:-1]), phones, (*phones[1:], 0), strict=True)], dtype=np.int32)
        table = model.tree.pdfs(contexts)
        chain = [
            (i, s, int(table[i, s])) for i in range(len(phones)) for s in range(PHONES.topology(phones[i]).num_states)
        ]
        size = len(chain)
        matrix, final = np.full((size, size), -np.inf), -np.inf
        for a, (i, s, pdf) in enumerate(chain):
            owner = model.transitions.states_of(*(np.array([v], dtype=np.int32) for v in (phones[i], s, pdf)))[0]
            count = PHONES.topology(phones[i]).num_states
            for move in range(model.transitions.offsets[owner], model.transitions.offsets[owner + 1]):
                to = model.transitions.destinations[move]
                target = a - s + to
                if to < count or i + 1 < len(phones):
                    matrix[a, target] = weights[move]
                else:
                    final = weights[move]
        current = np.full(size, -np.inf)
        current[0] = scores[0, chain[0][2]]
        pdfs = [pdf for _, _, pdf in chain]
        for row in scores[1:]:
            current = (current[:, None] + matrix).max(0) + row[pdfs]
        best = max(best, (current[-1] + final - cost, phones))
    return best


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_alignment_is_the_best_path(dependent, seed):
    rng = np.random.default_rng(seed)
    model = random_model(rng, context_tree(rng) if dependent else monophone_tree(PHONES))
    words = rng.choice(list(LEXICON), 2).tolist()
    scores = (2 * rng.normal(size=(int(rng.integers(12, 25)), model.gmm.num_pdfs))).astype(np.float32)
    graph = utterance_graph(PHONES, LEXICON, words, context=model.tree.context_dependent)
    states = state_graph(graph, model.tree, model.transitions)
    path = viterbi(states, scores, states.pdfs)
    score, phones = best_reading(model, words, scores)
    best = path_of_states(graph, states, path)
    assert tuple(best.phones) == phones
    np.testing.assert_array_equal(best.pdfs(model.tree), states.pdfs[path])
    total = scores[np.arange(len(path)), states.pdfs[path]].sum()
    assert total < score + 40  # the rest is transitions and silence
    wide = viterbi(states, scores, states.pdfs, beam=60.0)
    np.testing.assert_array_equal(wide, path)


def test_narrow_beam_fails_and_is_retried():
    rng = np.random.default_rng(0)
    model = random_model(rng, dim=12)
    shard = Shard(corpus(8))
    graphs = make_graphs(shard, PHONES, LEXICON, context=False)
    exact = align(model, shard, graphs, AlignOptions(beam=0.0))
    assert not exact.failures
    tried = align(model, shard, graphs, AlignOptions(beam=1e-3, retry_beam=1e6))
    assert tried.retried > 0
    assert set(tried.alignments) == set(exact.alignments)
    failed = align(model, shard, graphs, AlignOptions(beam=1e-3, retry_beam=1e-3))
    assert set(failed.failures) | set(failed.alignments) == set(graphs)
    assert len(failed.failures) > 0


def test_utterance_too_short_for_its_transcript_is_named():
    shard = Shard(
        [
            type(utterance)(utterance.id, utterance.speaker, utterance.features[:5], utterance.words)
            for utterance in corpus(1)
        ]
    )
    graphs = make_graphs(shard, PHONES, LEXICON, context=False)
    aligned = align(random_model(np.random.default_rng(0), dim=12), shard, graphs)
    assert list(aligned.failures) == ["u000"]
    assert "5 frames" in aligned.failures["u000"]
    assert equal_path(graphs["u000"], 5, PHONES) is None


def test_equal_path_distributes_frames_evenly():
    graph = utterance_graph(PHONES, LEXICON, ["AT", "A"], context=False)
    path = equal_path(graph, 38, PHONES)
    assert [PHONES.names[p - 1] for p in path.phones] == [SILENCE, "AE1", "T", "AH0", SILENCE]
    assert np.diff(path.starts).tolist() == [10, 6, 6, 6, 10]
    assert path.words.tolist() == [-1, 0, 0, 1, -1]
    assert path.word_times() == [(0, 10, 22), (1, 22, 28)]


def test_unknown_words_are_noise_and_pronunciations_have_costs():
    options = GraphOptions(0.5, {("AT", ("AH0", "T")): 0.25})
    graph = utterance_graph(PHONES, LEXICON, ["XYZZY", "AT"], options, context=False)
    assert PHONES.number(NOISE) in graph.contexts[:, 1]
    assert options.cost("AT", ("AH0", "T")) == pytest.approx(math.log(4))
    assert options.cost("AT", ("AE1", "T")) == 0.0


def test_transition_counts_equal_those_of_the_path():
    rng = np.random.default_rng(1)
    model = random_model(rng)
    graph = utterance_graph(PHONES, LEXICON, ["A"], context=False)
    path = equal_path(graph, 30, PHONES)
    counts = transition_counts(path, model.tree, model.transitions)
    leaving = model.transitions.destinations == model.transitions.num_states[model.transitions.owners]
    assert counts.sum() == 30
    assert counts[leaving].sum() == 3  # three phones end
    loops = counts[model.transitions.loops]
    assert loops.sum() == 30 - 13  # thirteen states are entered


def test_duration_and_path_transitions_are_scaled_separately():
    keys = monophone_tree(PHONES).transition_keys()
    model = TransitionModel(PHONES, keys)
    np.testing.assert_allclose(model.weights(Scales(1.0, 1.0)), model.log_probs)
    flat = model.weights(Scales(1.0, 0.0))
    leave = np.arange(len(flat))[model.destinations == model.num_states[model.owners]]
    np.testing.assert_allclose(flat[leave], 0.0, atol=1e-12)  # the only way out
    np.testing.assert_allclose(flat[model.loops], 0.0)


def test_phones_depend_on_their_position_in_the_word():
    phones = PhoneSet.of([("AH0", "T"), ("AH0",)], positions=True)
    assert [phones.names[p - 1] for p in phones.numbers(("AH0", "T", "T"))] == ["AH0_B", "T_I", "T_E"]
    assert phones.names[phones.numbers(("AH0",))[0] - 1] == "AH0_S"
    assert phones.numbers((NOISE,)) == (phones.number(NOISE),)
    assert PhoneSet.from_dict(phones.to_dict()) == phones
    families = [sorted(phones.names[p - 1] for p in family) for family in phones.families()]
    assert families == [["SIL"], ["SPN"], ["AH0_B", "AH0_E", "AH0_I", "AH0_S"], ["T_B", "T_E", "T_I", "T_S"]]
    with pytest.raises(ValueError, match="ZH is not in the model's phone set"):
        phones.number("ZH")


def test_alignment_names_states_phones_and_words():
    tree, words = context_tree(np.random.default_rng(1)), ["AT", "TWO"]
    path = equal_path(utterance_graph(PHONES, LEXICON, words, context=False), 40, PHONES)
    alignment = path.alignment("u", words, tree, np.linspace(0.0, 1.0, 40), frame_seconds=0.02)
    assert alignment.pdfs.tolist() == path.pdfs(tree).tolist()
    assert [phone.label for phone in alignment.units] == ["SIL", "AE1", "T", "T", "UW1", "SIL"]
    assert [word.label for word in alignment.words] == words
    first, last = alignment.words
    assert (first.start, last.end) == (path.starts[1], path.starts[-2])
    assert first.confidence == pytest.approx((first.start + first.end - 1) / 2 / 39)
    assert alignment.timed(alignment.words)[0].start == pytest.approx(0.02 * first.start, abs=1e-3)
    assert alignment.duration == pytest.approx(0.8)
