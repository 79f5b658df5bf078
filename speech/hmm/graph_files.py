"""Decoding graphs in files: made from HMMs, a lexicon and an ARPA file; opened for the search."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from speech.decoding.base import DecodeError
from speech.decoding.language_model import arpa_words
from speech.hmm.decode import DecodeOptions, GraphSearch
from speech.hmm.decoding_graph import WordTable, compose_lexicon, decoding_graph, grammar, lexicon_fst
from speech.hmm.fst_arrays import FstArrays
from speech.hmm.graphs import GraphOptions
from speech.hmm.model import HmmModel
from speech.hmm.topology import PhoneSet
from speech.lexicon.base import Pronunciation
from speech.lexicon.formats import read_lexicon

if TYPE_CHECKING:
    from speech.decoding.graph import GraphConfig

Entries = dict[str, list[Pronunciation]]


def write_graph(hmm: Path, lexicon: Path, lm: Path, graph: Path, words: Path, silence_probability: float) -> None:
    """Make the graph of some HMMs, a lexicon and an n-gram.

    Args:
        hmm: `model.json` of the HMMs.
        lexicon: Pronunciations; their probabilities count, if they have any.
        lm: ARPA file, also .gz; words without a pronunciation are left out.
        graph: Where to write the graph.
        words: Where to write its words.
        silence_probability: Of silence between two words.

    Raises:
        ModelError: `hmm` is no model.
        DecodeError: No word of the n-gram has a pronunciation in the HMMs' phones.
    """
    model = HmmModel.load(hmm.parent)
    phones = model.tree.phones
    entries = _usable(read_lexicon(lexicon).entries, phones)
    usual = {word: entries[word] for word in arpa_words(str(lm)) if word in entries}
    if not usual:
        raise DecodeError(
            f"no word of {lm} has a pronunciation in {lexicon} made of the phones of {hmm}: is one of them of another "
            "language, or in another case?"
        )
    table = WordTable.of(usual)
    options = GraphOptions(silence_probability, _probabilities(usual))
    found = lexicon_fst(phones, {word: [one.phones for one in ones] for word, ones in usual.items()}, table, options)
    with tempfile.TemporaryDirectory() as folder:
        lg = compose_lexicon(found, grammar(_plain(lm, Path(folder)), table))
    decoding_graph(lg, found.symbols, model.tree, model.transitions).write(graph)
    words.write_text("".join(f"{word}\n" for word in table.words), encoding="utf-8")


def _usable(entries: Entries, phones: PhoneSet) -> Entries:
    """Pronunciations whose phones the HMMs have."""
    known = {phones.base(number) for number in range(1, len(phones) + 1)}
    usable = {word: [one for one in ones if known.issuperset(one.phones)] for word, ones in entries.items()}
    return {word: ones for word, ones in usable.items() if ones}


def _probabilities(entries: Entries) -> dict[tuple[str, tuple[str, ...]], float]:
    """Probabilities of pronunciations relative to the word's most probable one, as in Kaldi's graphs."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for word, ones in entries.items():
        known = [one.probability for one in ones if one.probability]
        for one in ones:
            if one.probability:
                found[word, tuple(one.phones)] = one.probability / max(known)
    return found


def _plain(lm: Path, folder: Path) -> Path:
    """An uncompressed ARPA file."""
    if lm.suffix != ".gz":
        return lm
    with gzip.open(lm, "rb") as source, (folder / "lm.arpa").open("wb") as target:
        shutil.copyfileobj(source, target)
    return folder / "lm.arpa"


def open_search(cfg: GraphConfig, num_states: int) -> GraphSearch:
    """The search that a configuration describes.

    Args:
        cfg: The configuration; a graph that it only names the sources of is made.
        num_states: Tied states of the network.

    Raises:
        DecodeError: The graph is damaged, or of another model.
    """
    with tempfile.TemporaryDirectory(prefix="starling-graph-") as folder:
        cfg = cfg.prepared(Path(folder))
        try:
            arrays = FstArrays.read(Path(cfg.graph))
            words = Path(cfg.words).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise DecodeError(f"the graph {cfg.graph} cannot be read ({error}): make it again") from error
        if len(arrays.arcs) and int(arrays.arcs["ilabel"].max()) > num_states:
            raise DecodeError(
                f"decode.graph has {int(arrays.arcs['ilabel'].max())} states, the network {num_states}: make it from "
                "the HMMs that aligned the network's training data"
            )
        if len(arrays.arcs) and int(arrays.arcs["olabel"].max()) > len(words):
            raise DecodeError(f"{cfg.words} has {len(words)} words, fewer than the graph: make both again")
    options = DecodeOptions(cfg.beam, cfg.max_active, cfg.acoustic_scale)
    return GraphSearch(arrays.constant(), WordTable(tuple(words)), options)
