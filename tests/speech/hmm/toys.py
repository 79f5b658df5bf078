"""Small phone sets, lexicons and models for tests of the HMM room."""

import itertools
import math

import numpy as np
import torch

from speech.hmm.gmm import DiagGmm
from speech.hmm.graphs import state_graph, utterance_graph
from speech.hmm.model import FeatureChain, HmmModel
from speech.hmm.topology import PhoneSet, TransitionModel
from speech.hmm.tree import ContextStatistics, DecisionTree, grow_tree, monophone_tree
from speech.hmm.utterances import InMemoryUtterance
from speech.hmm.viterbi import viterbi

LEXICON = {
    "A": [("AH0",)],
    "AT": [("AE1", "T"), ("AH0", "T")],
    "TO": [("T", "UW1"), ("T", "AH0")],
    "TWO": [("T", "UW1")],
}
PHONES = PhoneSet.of(p for ps in LEXICON.values() for p in ps)


def random_stats(rng: np.random.Generator, phones: PhoneSet = PHONES, dim: int = 3) -> ContextStatistics:
    """Frames of all states in all contexts, that depend on the context."""
    spoken = range(phones.noises + 1, len(phones) + 1)
    everything = [0, 1, *spoken]
    rows = [(a, b, c, s) for a, b, c in itertools.product(everything, spoken, everything) for s in range(3)]
    rows += [(a, 1, c, s) for a in (0, *spoken) for c in spoken for s in range(5)]
    contexts = np.repeat(np.array(rows, dtype=np.int32), 8, axis=0)
    effect = [rng.normal(size=(len(phones) + 1, dim)) * scale for scale in (0.7, 2.0, 0.5)]
    means = sum(table[contexts[:, place]] for place, table in enumerate(effect))
    frames = means + rng.normal(size=(8, dim))[contexts[:, 3]] + 0.5 * rng.normal(size=(len(contexts), dim))
    return ContextStatistics.of_frames(contexts, frames.astype(np.float32))


def context_tree(rng: np.random.Generator, leaves: int = 25) -> DecisionTree:
    """A tree that asks for neighbours."""
    spoken = range(PHONES.noises + 1, len(PHONES) + 1)
    questions = [(phone,) for phone in spoken] + [tuple(pair) for pair in itertools.combinations(spoken, 2)]
    return grow_tree(PHONES, random_stats(rng), questions, leaves, minimum=10)


def random_model(rng: np.random.Generator, tree: DecisionTree | None = None, dim: int = 3, size: int = 2) -> HmmModel:
    """A model with random parameters."""
    tree = tree or monophone_tree(PHONES)
    keys = tree.transition_keys()
    transitions = TransitionModel(PHONES, keys)
    counts = rng.uniform(5, 50, len(transitions.log_probs))
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    shape = (tree.num_pdfs, size)
    weights = torch.softmax(torch.randn(*shape, generator=generator), 1)
    means = 2 * torch.randn(*shape, dim, generator=generator)
    gmm = DiagGmm(weights, means, torch.rand(*shape, dim, generator=generator) + 0.5)
    return HmmModel(tree, transitions.updated(counts), gmm, FeatureChain())


def speech_like(rng: np.random.Generator, words: list[str], dim: int = 4) -> torch.Tensor:
    """Frames of some words: each phone has its own mean, silence the origin."""
    places = np.random.default_rng(7).normal(size=(len(PHONES) + 1, 3, dim)) * 3.0
    rows = [np.zeros((int(rng.integers(4, 9)), dim))]
    for word in words:
        for phone in PHONES.numbers(LEXICON[word][0]):
            rows += [np.repeat(place[None], int(rng.integers(2, 4)), 0) for place in places[phone]]
        if rng.random() < 0.3:
            rows.append(np.zeros((int(rng.integers(4, 9)), dim)))
    rows.append(np.zeros((int(rng.integers(4, 9)), dim)))
    frames = np.concatenate(rows)
    return torch.from_numpy((frames + 0.4 * rng.normal(size=frames.shape)).astype(np.float32))


def corpus(count: int = 60, seed: int = 0, speakers: int = 2) -> list[InMemoryUtterance]:
    """Utterances of random words."""
    rng = np.random.default_rng(seed)
    utterances = []
    for number in range(count):
        words = rng.choice(list(LEXICON), int(rng.integers(1, 5))).tolist()
        speaker = number % speakers
        utterances.append(
            InMemoryUtterance(
                f"u{number:03}", f"s{speaker}", speech_like(rng, words) * (1 + 0.2 * speaker), tuple(words)
            )
        )
    return utterances


BIGRAMS = {("<s>", "A"): 0.5, ("<s>", "TO"): 0.2, ("A", "TWO"): 0.3, ("TO", "AT"): 0.4, ("AT", "</s>"): 0.6}
UNIGRAMS = {"A": 0.2, "AT": 0.2, "TO": 0.15, "TWO": 0.15, "</s>": 0.3}
BACKOFFS = {"<s>": 0.5, "A": 0.8, "AT": 0.5, "TO": 0.6, "TWO": 1.0}


def arpa() -> str:
    """A bigram model in ARPA's format."""
    lines = ["\\data\\", f"ngram 1={len(UNIGRAMS) + 1}", f"ngram 2={len(BIGRAMS)}", "", "\\1-grams:"]
    lines.append(f"-99\t<s>\t{math.log10(BACKOFFS['<s>']):.6f}")
    for word, probability in UNIGRAMS.items():
        backoff = f"\t{math.log10(BACKOFFS[word]):.6f}" if word in BACKOFFS else ""
        lines.append(f"{math.log10(probability):.6f}\t{word}{backoff}")
    lines += ["", "\\2-grams:"]
    lines += [f"{math.log10(p):.6f}\t{a} {b}" for (a, b), p in BIGRAMS.items()]
    return "\n".join([*lines, "", "\\end\\", ""])


def sentence_cost(words: tuple[str, ...]) -> float:
    """Cost of the cheapest reading of a sentence under the bigrams: a graph may back off where it need not."""
    total = 0.0
    for first, second in itertools.pairwise(("<s>", *words, "</s>")):
        backed = BACKOFFS[first] * UNIGRAMS[second]
        total -= math.log(max(BIGRAMS.get((first, second), 0.0), backed))
    return total


def sentence_costs(model, scores, options=None):
    """The costs of all sentences of up to three words that take as many frames."""
    costs = {}
    for size in range(4):
        for words in itertools.product(LEXICON, repeat=size):
            graph = utterance_graph(PHONES, LEXICON, words, options, model.tree.context_dependent)
            states = state_graph(graph, model.tree, model.transitions)
            path = viterbi(states, scores, states.pdfs)
            if path is not None:
                costs[words] = sentence_cost(words) - path_score(states, scores, path)
    return costs


def best_sentence(model, scores, options=None):
    """The cheapest of all sentences of up to three words, and its cost."""
    return min((cost, words) for words, cost in sentence_costs(model, scores, options).items())


def path_score(states, scores, path):
    total, before = 0.0, 0
    for t, state in enumerate(path):
        total += scores[t, states.pdfs[state]]
        arcs = range(states.starts[state], states.starts[state + 1])
        ways = [states.weights[arc] for arc in arcs if states.sources[arc] == before]
        total += max([*ways, *([states.loops[state]] if state == before else [])])
        before = state
    return total + states.finals[before]
