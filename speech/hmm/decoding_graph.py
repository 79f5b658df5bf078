"""The decoding graph HCLG: states, contexts, lexicon and language model in one transducer (Mohri et al. 2002).

G is the n-gram with back-off arcs (#0), L the lexicon with optional silence, C the phonetic context, H the states.
LG = min(det(L ∘ G)), a `WordGraph`, serves all models of a phone set and a lexicon; HCLG = H' ∘ C ∘ LG, determinized
and minimized, without disambiguation symbols, with self loops. Its input labels are pdf + 1, its output labels words.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np
from numpy.typing import NDArray

from speech.hmm.fst_arrays import FstArrays, arc_records, from_arcs
from speech.hmm.graphs import GraphOptions, Lexicon
from speech.hmm.model import HmmModel
from speech.hmm.topology import SILENCE, PhoneSet, Scales, TransitionModel
from speech.hmm.tree import DecisionTree
from speech.lm.base import LmError
from speech.lm.kenlm import arpa_copy, arpa_words, unreadable

BACKOFF, BEGIN, END, EPSILON = "#0", "<s>", "</s>", "<eps>"


_PARSER = """import sys, kaldilm
kaldilm.arpa2fst(input_arpa=sys.argv[1], output_fst=sys.argv[2], read_symbol_table=sys.argv[3],
                 disambig_symbol=sys.argv[4], max_arpa_warnings=0)"""
"""A process of its own: kaldilm ends the process that it runs in if a file is damaged."""
_Row = tuple[int, int, int, float, int]
"""An arc: source, input label, output label, cost, target."""


@dataclass(frozen=True)
class WordTable:
    """Words by number; 0 is no word, and the last three are the symbols of the language model.

    Attributes:
        words: Word i + 1 is `words[i]`.
    """

    words: tuple[str, ...]

    @classmethod
    def of(cls, words: Iterable[str]) -> WordTable:
        """The table of some words."""
        return cls((*sorted(set(words) - {BACKOFF, BEGIN, END, EPSILON}),))

    @property
    def backoff(self) -> int:
        """Number of the back-off symbol."""
        return len(self.words) + 1

    def write(self, path: Path) -> None:
        """Write an OpenFst symbol table."""
        symbols = [EPSILON, *self.words, BACKOFF, BEGIN, END]
        path.write_text("".join(f"{symbol} {number}\n" for number, symbol in enumerate(symbols)), encoding="utf-8")


def grammar(arpa: Path, words: WordTable) -> Any:
    """G from an ARPA file; n-grams with other words are left out.

    Raises:
        LmError: The file is damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        table, output = Path(folder) / "words.txt", Path(folder) / "G.fst"
        words.write(table)
        command = [sys.executable, "-c", _PARSER, str(arpa), str(output), str(table), BACKOFF]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            reasons = [line for line in done.stderr.splitlines() if line.startswith(("[E]", "[F]"))]
            raise unreadable(arpa, " ".join(reasons[-1:]) or f"its parser ended with {done.returncode}")
        if (graph := kaldifst.StdVectorFst.read(str(output))) is None:
            raise OSError(errno.ENOSPC, "a graph could not be written: is the disk full?", str(output))
        return graph


@dataclass(frozen=True)
class LexiconFst:
    """L, with symbols that tell homophones and prefixes apart.

    Attributes:
        fst: From phones to words.
        symbols: Numbers of the disambiguation symbols among the phones; the first is #0's.
    """

    fst: Any
    symbols: tuple[int, ...]


def _disambiguated(
    entries: Sequence[tuple[int, tuple[int, ...], float]], first: int
) -> tuple[list[tuple[int, tuple[int, ...], float]], int]:
    """Add a symbol to pronunciations that several words share or that begin another one; and how many there are."""
    prefixes = {phones[:size] for _, phones, _ in entries for size in range(1, len(phones))}
    count: dict[tuple[int, ...], int] = {}
    for _, phones, _ in entries:
        count[phones] = count.get(phones, 0) + 1
    used: dict[tuple[int, ...], int] = {}
    marked = []
    for word, phones, cost in entries:
        if count[phones] > 1 or phones in prefixes:
            used[phones] = used.get(phones, 0) + 1
            marked.append((word, (*phones, first + used[phones] - 1), cost))
        else:
            marked.append((word, phones, cost))
    return marked, max(used.values(), default=0)


def lexicon_fst(
    phones: PhoneSet, lexicon: Lexicon, words: WordTable, options: GraphOptions | None = None
) -> LexiconFst:
    """L from pronunciations: each word, then silence or not (as Kaldi's `make_lexicon_fst.pl`).

    Raises:
        ValueError: A word of the table has no pronunciation.
    """
    options = options or GraphOptions()
    missing = [word for word in words.words if not lexicon.get(word)]
    if missing:
        raise ValueError(
            f"the lexicon lacks {len(missing)} words of the language model, such as {missing[0]}: add them"
        )
    backoff = len(phones) + 1
    entries = [
        (number, phones.numbers(pronunciation), options.cost(word, pronunciation))
        for number, word in enumerate(words.words, 1)
        for pronunciation in dict.fromkeys(map(tuple, lexicon[word]))
    ]
    entries, count = _disambiguated(entries, backoff + 1)
    pause_end = backoff + 1 + count
    pauses = [options.pause_costs(word) for word in (None, *words.words)]
    fst = _lexicon_arrays(phones, entries, pauses, pause_end).vector()
    kaldifst.add_self_loops(fst, [backoff], [words.backoff])
    kaldifst.arcsort(fst, "olabel")
    return LexiconFst(fst, tuple(range(backoff, pause_end + 1)))


def _lexicon_arrays(
    phones: PhoneSet,
    entries: Sequence[tuple[int, tuple[int, ...], float]],
    pauses: Sequence[tuple[float, float]],
    pause_end: int,
) -> FstArrays:
    """States: 0 beginning, 1 between words, 2 before silence, 3 after it; costs of silence and of none by word."""
    pause, direct = pauses[0]
    rows: list[_Row] = [
        (0, 0, 0, direct, 1),
        (0, 0, 0, pause, 2),
        (2, phones.number(SILENCE), 0, 0.0, 3),
        (3, pause_end, 0, 0.0, 1),
    ]
    states = 4
    for word, symbols, cost in entries:
        source, (pause, direct) = 1, pauses[word]
        for place, symbol in enumerate(symbols[:-1]):
            rows.append((source, symbol, word if place == 0 else 0, cost if place == 0 else 0.0, states))
            source, states = states, states + 1
        label, extra = (word, cost) if len(symbols) == 1 else (0, 0.0)
        rows += [(source, symbols[-1], label, extra + direct, 1), (source, symbols[-1], label, extra + pause, 2)]
    finals = np.full(states, np.inf, dtype=np.float32)
    finals[1] = 0.0
    return _of_rows(rows, finals)


def _of_rows(rows: Sequence[_Row], finals: NDArray[np.float32]) -> FstArrays:
    sources, *columns = (np.array(column) for column in zip(*rows, strict=True))
    return from_arcs(0, finals, sources, arc_records(*columns))


def compose_lexicon(lexicon: LexiconFst, language_model: Any) -> Any:
    """LG = min(det(L ∘ G)): serves all models that share the lexicon."""
    kaldifst.arcsort(language_model, "ilabel")
    lg = kaldifst.compose(lexicon.fst, language_model)
    kaldifst.determinize_star(lg, use_log=True)
    kaldifst.minimize_encoded(lg)
    return lg


@dataclass(frozen=True)
class _States:
    """H: a loop over all phones in context.

    Attributes:
        fst: From transition states + 1 (and disambiguation symbols) to classes of contexts.
        classes: For each input label of CLG, the class.
        symbols: Disambiguation symbols on the input side.
    """

    fst: Any
    classes: NDArray[np.int32]
    symbols: NDArray[np.int32]


def _states_fst(
    windows: Sequence[Sequence[int]], tree: DecisionTree, transitions: TransitionModel, scales: Scales
) -> _States:
    """H for the windows that occur: contexts with the same pdfs are one class."""
    # [0] stands for the frames' delay at the beginning, [-symbol] for a disambiguation symbol
    is_context = np.array([len(window) == 3 or (len(window) == 1 and window[0] > 0) for window in windows])
    contexts = np.array(
        [_triple(window) for window, real in zip(windows, is_context, strict=True) if real], dtype=np.int32
    )
    pdfs = tree.pdfs(contexts)
    models, inverse = np.unique(np.concatenate([contexts[:, 1:2], pdfs], axis=1), axis=0, return_inverse=True)
    classes = np.zeros(len(windows), dtype=np.int32)
    classes[is_context] = inverse.ravel() + 1
    disambiguation = [i for i, window in enumerate(windows) if len(window) > 0 and not is_context[i]]
    classes[disambiguation] = len(models) + 1 + np.arange(len(disambiguation))
    symbols = len(transitions.keys) + 1 + np.arange(len(disambiguation), dtype=np.int32)
    rows: list[_Row] = [
        (0, int(symbol), int(classes[i]), 0.0, 0) for symbol, i in zip(symbols, disambiguation, strict=True)
    ]
    weights = transitions.weights(scales)
    states = 1
    for number, (phone, *row) in enumerate(models.tolist(), 1):
        states = _add_phone(rows, states, number, phone, [pdf for pdf in row if pdf >= 0], transitions, weights)
    finals = np.full(states, np.inf, dtype=np.float32)
    finals[0] = 0.0
    fst = _of_rows(rows, finals).vector()
    kaldifst.arcsort(fst, "olabel")
    return _States(fst, classes, symbols)


def _triple(window: Sequence[int]) -> tuple[int, int, int]:
    """Left phone, phone, right phone of a window of one or three."""
    return (0, window[0], 0) if len(window) == 1 else (window[0], window[1], window[2])


def _add_phone(
    rows: list[_Row],
    states: int,
    number: int,
    phone: int,
    pdfs: Sequence[int],
    transitions: TransitionModel,
    weights: NDArray[np.float64],
) -> int:
    """A path for a phone from state 0 back to it, without self loops; returns the number of states after it.

    An arc that enters a state of the phone consumes a frame, and carries what leaving the last one costs.
    """
    size = len(pdfs)
    local = np.arange(size, dtype=np.int32)
    owners = transitions.states_of(np.full(size, phone, dtype=np.int32), local, np.array(pdfs, dtype=np.int32))
    leave = -weights[transitions.transition(owners[-1:], np.array([size]))][0]
    nodes = [*range(states, states + size - 1), 0]
    rows.append((0, int(owners[0]) + 1, number, leave if size == 1 else 0.0, nodes[0]))
    for state in range(size):
        for move in range(transitions.offsets[owners[state]], transitions.offsets[owners[state] + 1]):
            to = int(transitions.destinations[move])
            if to not in (state, size):
                cost = -weights[move] + (leave if to == size - 1 else 0.0)
                rows.append((nodes[state], int(owners[to]) + 1, 0, float(cost), nodes[to]))
    return states + size - 1


def _context(phones: PhoneSet, lg: Any, symbols: Sequence[int], dependent: bool) -> tuple[Any, list[list[int]]]:
    """C ∘ LG and what its input labels stand for."""
    if dependent:
        return kaldifst.compose_context(list(symbols), 3, 1, lg)  # type: ignore[no-any-return]
    windows = [[], *([phone] for phone in range(1, len(phones) + 1)), *([-symbol] for symbol in symbols)]
    return kaldifst.StdVectorFst(lg), windows


def decoding_graph(
    lg: Any, symbols: Sequence[int], tree: DecisionTree, transitions: TransitionModel, scales: Scales | None = None
) -> FstArrays:
    """HCLG for a model.

    Args:
        lg: See `compose_lexicon`.
        symbols: Disambiguation symbols, of the lexicon.
        tree: Contexts to pdfs.
        transitions: Transition probabilities.
        scales: Weights of the transitions.

    Returns:
        The graph: input labels are pdf + 1.

    Raises:
        LmError: The n-gram has no sentence.
    """
    if lg.start < 0:
        raise LmError("the language model has no sentence of words with a pronunciation: give another one")
    scales = scales or Scales()
    composed, windows = _context(tree.phones, lg, symbols, tree.context_dependent)
    states = _states_fst(windows, tree, transitions, scales)
    relabelled = FstArrays.of(composed)
    relabelled.arcs["ilabel"] = states.classes[relabelled.arcs["ilabel"]]
    composed = relabelled.vector()
    kaldifst.arcsort(composed, "ilabel")
    hclg = kaldifst.compose(states.fst, composed)
    del composed, relabelled
    kaldifst.determinize_star(hclg, use_log=True)
    hclg = _without(hclg, states.symbols)
    kaldifst.minimize_encoded(hclg)
    weights = -transitions.weights(scales)[transitions.loops]
    return _with_loops(FstArrays.of(hclg), weights, transitions.keys[:, 2])


def _without(fst: Any, symbols: NDArray[np.int32]) -> Any:
    """The transducer with some input labels replaced by epsilon."""
    arrays = FstArrays.of(fst)
    labels = arrays.arcs["ilabel"]
    if len(symbols):
        labels[labels >= symbols.min()] = 0
    return arrays.vector()


def _with_loops(fst: FstArrays, loops: NDArray[np.float64], pdfs: NDArray[np.int32]) -> FstArrays:
    """Add self loops, and label arcs with pdf + 1.

    A loop repeats the label by which its state was entered. A state that is entered by several labels gets a copy for
    each, which loops and goes on to the state without consuming a frame.
    """
    arcs = fst.arcs.copy()
    count = len(fst.finals)
    codes = arcs["target"].astype(np.int64) * (len(pdfs) + 1) + arcs["ilabel"]
    entries, which = np.unique(codes, return_inverse=True)
    target, label = np.divmod(entries, len(pdfs) + 1)
    ways = np.bincount(target, minlength=count)
    ways[fst.start] += 1
    alone = (label > 0) & (ways[target] == 1)
    several = (label > 0) & ~alone
    place = target.copy()
    place[several] = count + np.arange(several.sum())
    arcs["target"] = place[which]
    looping = alone | several
    own = arc_records(label[looping], 0, loops[label[looping] - 1], place[looping])
    onward = arc_records(0, np.zeros(several.sum()), 0, target[several])
    everything = np.concatenate([arcs, own, onward])
    sources = np.concatenate([fst.sources, place[looping], place[several]])
    everything["ilabel"] = np.concatenate([[0], pdfs + 1])[everything["ilabel"]]
    finals = np.concatenate([fst.finals, np.full(several.sum(), np.inf, dtype=np.float32)])
    return from_arcs(fst.start, finals, sources, everything)


class WordGraphError(ValueError):
    """Lexicon and language model have no words in common."""


@dataclass(frozen=True)
class WordGraph:
    """L ∘ G.

    Attributes:
        words: The words that can be recognized.
        fst: The transducer.
        symbols: Disambiguation symbols of the lexicon.
        unpronounced: Number of the language model's words that have no pronunciation.
    """

    words: WordTable
    fst: Any
    symbols: tuple[int, ...]
    unpronounced: int

    def decoding_graph(self, model: HmmModel) -> FstArrays:
        """HCLG for a model."""
        return decoding_graph(self.fst, self.symbols, model.tree, model.transitions)


def word_graph(phones: PhoneSet, lexicon: Lexicon, arpa: Path, options: GraphOptions | None = None) -> WordGraph:
    """Compose lexicon and language model.

    Args:
        phones: The phones of the model.
        lexicon: Pronunciations of words; those with other phones are left out.
        arpa: The n-gram, plain or gzip.
        options: Probabilities of pronunciations and silence.

    Raises:
        WordGraphError: No word of the language model has a pronunciation.
        LmError: The file is not an ARPA file.
    """
    known = {phones.base(phone) for phone in range(1, len(phones) + 1)}
    listed = arpa_words(str(arpa))
    possible = {word: [spoken for spoken in lexicon.get(word, ()) if known.issuperset(spoken)] for word in listed}
    usable = {word: variants for word, variants in possible.items() if variants}
    if not usable:
        raise WordGraphError(
            f"none of the {len(listed)} words of {arpa}, such as {listed[0]}, has a pronunciation: is it written in "
            "another case than the lexicon?"
        )
    words = WordTable.of(usable)
    fst = lexicon_fst(phones, usable, words, options)
    with arpa_copy(arpa) as path:
        return WordGraph(words, compose_lexicon(fst, grammar(path, words)), fst.symbols, len(listed) - len(usable))
