"""Decoding graphs in files: made from HMMs, a lexicon and an ARPA file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from speech.hmm.decoding_graph import WordGraph, WordGraphError, WordTable, word_graph
from speech.hmm.fst_arrays import FstArrays
from speech.hmm.graphs import GraphOptions
from speech.hmm.model import HmmModel
from speech.hypotheses import DecodeError
from speech.lexicon.base import Pronunciation
from speech.lexicon.formats import read_lexicon

GRAPH, WORDS = "graph.fst", "graph-words.txt"
"""Names of a graph's files: the transducer, and a text file whose line n is its word n."""


def write_graph(hmm: Path, lexicon: Path, lm: Path, folder: Path, silence_probability: float) -> dict[str, int]:
    """Make the graph of some HMMs, a lexicon and an n-gram, and write its two files.

    Args:
        hmm: `model.json` of the HMMs.
        lexicon: Pronunciations; their probabilities count, if they have any.
        lm: ARPA file, also .gz; words without a pronunciation are left out.
        folder: Where to write `GRAPH` and `WORDS`.
        silence_probability: Of silence between two words.

    Returns:
        What `save_graph` returns.

    Raises:
        ModelError: `hmm` is no model.
        DecodeError: No word of the n-gram has a pronunciation in the HMMs' phones.
    """
    model = HmmModel.load(hmm.parent)
    entries = read_lexicon(lexicon).entries
    options = GraphOptions(silence_probability, _probabilities(entries))
    pronunciations = {
        word: [tuple(pronunciation.phones) for pronunciation in variants] for word, variants in entries.items()
    }
    try:
        words = word_graph(model.tree.phones, pronunciations, lm, options)
    except WordGraphError as error:
        raise DecodeError(
            f"no word of {lm} has a pronunciation in {lexicon} made of the phones of {hmm}: is one of them of another "
            "language, or in another case?"
        ) from error
    return save_graph(words, model, folder)


def save_graph(words: WordGraph, model: HmmModel, folder: Path) -> dict[str, int]:
    """Make a model's graph and write its two files.

    Args:
        words: Its word part.
        model: The HMMs.
        folder: Where to write `GRAPH` and `WORDS`.

    Returns:
        Number of states, arcs and words, and of words of the language model without a pronunciation.
    """
    graph = words.decoding_graph(model)
    graph.write(folder / GRAPH)
    (folder / WORDS).write_text("".join(f"{word}\n" for word in words.words.words), encoding="utf-8")
    return {
        "states": len(graph.finals),
        "arcs": len(graph.arcs),
        "words": len(words.words.words),
        "unpronounced": words.unpronounced,
    }


def _probabilities(entries: dict[str, list[Pronunciation]]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Probabilities of pronunciations relative to the word's most probable one, as in Kaldi's graphs."""
    probabilities: dict[tuple[str, tuple[str, ...]], float] = {}
    for word, variants in entries.items():
        known = [pronunciation.probability for pronunciation in variants if pronunciation.probability]
        for pronunciation in variants:
            if pronunciation.probability:
                probabilities[word, tuple(pronunciation.phones)] = pronunciation.probability / max(known)
    return probabilities


@dataclass(frozen=True)
class SavedGraph:
    """A decoding graph, as read from its two files.

    Attributes:
        arrays: The transducer.
        words: Its output labels.
    """

    arrays: FstArrays
    words: WordTable


def read_graph(graph: Path, words: Path) -> SavedGraph:
    """Read the files that `save_graph` has written.

    Raises:
        DecodeError: One is missing or damaged, or they do not belong together.
    """
    try:
        arrays = FstArrays.read(graph)
        table = WordTable(tuple(words.read_text(encoding="utf-8").splitlines()))
    except (OSError, ValueError) as error:
        raise DecodeError(f"the graph {graph} cannot be read ({error}): make it again") from error
    if not len(arrays.finals) or arrays.has_silent_cycle():
        raise DecodeError(f"the graph {graph} has no states, or a cycle that consumes no frame: make it again")
    if len(arrays.arcs) and int(arrays.arcs["olabel"].max()) > len(table.words):
        raise DecodeError(f"{words} has {len(table.words)} words, fewer than the graph: make both again")
    return SavedGraph(arrays, table)
