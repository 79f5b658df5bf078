"""The word part of a decoding graph, L ∘ G: from a lexicon and an n-gram; serves all models of a phone set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speech.hmm.decoding_graph import WordTable, compose_lexicon, decoding_graph, grammar, lexicon_fst
from speech.hmm.fst_arrays import FstArrays
from speech.hmm.graphs import GraphOptions, Lexicon
from speech.hmm.model import HmmModel
from speech.hmm.topology import PhoneSet
from speech.lm.kenlm import arpa_copy, arpa_words


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
    usable = {
        word: ones for word in listed if (ones := [one for one in lexicon.get(word, ()) if known.issuperset(one)])
    }
    if not usable:
        raise WordGraphError(
            f"none of the {len(listed)} words of {arpa}, such as {listed[0]}, has a pronunciation: is it written in "
            "another case than the lexicon?"
        )
    words = WordTable.of(usable)
    found = lexicon_fst(phones, usable, words, options)
    with arpa_copy(arpa) as path:
        return WordGraph(words, compose_lexicon(found, grammar(path, words)), found.symbols, len(listed) - len(usable))
