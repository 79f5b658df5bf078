"""Decoding of tied states with a graph of lexicon and language model (HCLG), by kaldi-decoder's beam search.

The search uses likelihoods: posteriors minus priors of the states (Bourlard and Morgan 1994). The graph is made
from the HMMs that the training data were aligned with, a lexicon and an n-gram, or is given as a file.

Where several hypotheses are asked for, or a second language model ranks them again, they come from a lattice.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from speech.decoding.base import DecodeConfig, Decoder, DecoderStream
from speech.decoding.hot_words import HOT_WORDS_FILE, HotWords, HotWordsConfig, hot_vocabulary
from speech.decoding.nbest import WordPath, alternatives, posteriors, silence_posterior, word_confidences
from speech.decoding.rescoring import RescoredConfig, Rescorer
from speech.hmm.priors import StateOutputs, scaled_likelihoods
from speech.hypotheses import DecodeError, Hypothesis
from speech.tokens import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from speech.hmm.decode import DecodeOptions, GraphPath, GraphSearch
    from speech.hmm.topology import Ints

_SOURCES = ("hmm", "lexicon", "lm")
"""Fields that name what a graph is made from."""
_CONSIDERED = 100
"""Hypotheses over which posteriors are computed, if not more are asked for."""


class GraphConfig(RescoredConfig):
    """The best word sequence of a decoding graph, for models of tied states."""

    kind: Literal["graph"] = "graph"
    packages: ClassVar[tuple[str, ...]] = ("kaldifst", "kaldi-decoder", "kaldilm", "numba", "flashlight-text")
    """The last one reads the second model."""
    hmm: str = ""
    """The `model.json` of the HMMs that aligned the training data, with `model.safetensors` beside it; by default the
    model of the stage `align`."""
    lexicon: str = ""
    """Pronunciations in the HMMs' phones: a file in one of the formats of section `lexicon`; by default the lexicon of
    the stage `align`, with the probabilities that it estimated."""
    lm: str = ""
    """Language model of words: an ARPA file; by default that of the stage `lm`. Words without a pronunciation are left
    out."""
    graph: str = ""
    """The graph, instead of `hmm`, `lexicon` and `lm`: a constant OpenFst transducer from states + 1 to words."""
    words: str = ""
    """The words of `graph`: a text file whose line n is word n."""
    graph_lm: str = ""
    """The language model that a finished `graph` was made with, for `rescore_lm`: an ARPA file or a KenLM binary."""
    silence_probability: float = Field(default=0.5, gt=0, lt=1)
    """Probability of silence between two words, in a graph that is made from `hmm` and `lexicon`."""
    beam: float = Field(default=12.0, gt=0)
    """Partial hypotheses are dropped if their scaled score is this much below the best one's."""
    max_active: int = Field(default=7000, ge=1)
    """Most states of the graph that are kept after each frame."""
    acoustic_scale: float = Field(default=0.1, gt=0)
    """Weight of the log likelihoods beside the graph's probabilities."""
    lattice_beam: float = Field(default=8.0, gt=0)
    """Hypotheses beside the best one are left out if their scaled score is this much below its."""
    word_score: float = 0.0
    """Added for each word when the best `rescore_nbest` hypotheses are ranked again; less than 0 makes fewer and longer
    words."""
    hot_words: HotWordsConfig = HotWordsConfig()
    """Phrases whose score is raised; those of several words when the best `rescore_nbest` hypotheses are ranked
    again."""

    lm_unit: ClassVar[str] = "word"
    grid: ClassVar[Mapping[str, tuple[float, ...]]] = {"acoustic_scale": (0.05, 0.07, 0.09, 0.12)}
    file_fields: ClassVar[dict[str, str]] = {
        "hmm": "hmm",
        "lexicon": "lexicon",
        "lm": "lm",
        "graph": "graph",
        "words": "graph-words",
        "graph_lm": "graph-lm",
        "rescore_lm": "rescore-lm",
        **HOT_WORDS_FILE,
    }

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        given = [name for name in _SOURCES if getattr(self, name)]
        if bool(self.graph) != bool(self.words):
            raise ValueError("kind graph needs graph and words together: one is what the other's numbers mean")
        if bool(self.hmm) != bool(self.lexicon):
            raise ValueError("kind graph needs hmm and lexicon together: the lexicon has the phones of the HMMs")
        if self.graph and given:
            raise ValueError(f"graph is given, so nothing is made from {', '.join(given)}: leave out one or the other")
        if self.graph and self.rescore_lm and not self.graph_lm:
            raise ValueError("rescore_lm takes the graph's language model out of the scores: name it in graph_lm")
        if self.graph_lm and not self.graph:
            raise ValueError("graph_lm is the language model of a finished graph: without graph, name it in lm")
        return self

    @property
    @override
    def ranks_again(self) -> bool:
        return super().ranks_again or self.word_score != 0

    @property
    @override
    def takes_language_model(self) -> bool:
        return not self.graph and not self.lm

    @property
    @override
    def makes_graph(self) -> bool:
        return not self.graph

    @override
    def completed(self, files: Mapping[str, str]) -> Self:
        made = super().completed(files)
        return made if self.graph else made._finished(made.graph, made.words, made.graph_lm or self.lm)

    def _finished(self, graph: str, words: str, lm: str) -> Self:
        """This configuration with a graph in place of what it was made from."""
        made = {"graph": graph, "words": words, "graph_lm": lm if self.rescore_lm else ""}
        return self.model_copy(update={**dict.fromkeys(_SOURCES, ""), **made})

    def same_graph(self, other: GraphConfig) -> bool:
        """Whether another configuration reads, or makes, the same graph."""
        made_alike = bool(self.graph) or self.silence_probability == other.silence_probability
        return self.files() == other.files() and self.hot_words == other.hot_words and made_alike

    @override
    def lacking(self) -> str:
        missing = [name for name in _SOURCES if not getattr(self, name)]
        if self.graph or not missing:
            return ""
        return f"decode.kind graph lacks {', '.join(missing)}: name files in decode, or a finished graph and its words"

    @override
    def prepared(self, folder: Path) -> Self:
        if self.graph:
            return self
        if lacking := self.lacking():
            raise DecodeError(lacking)
        from speech.hmm.graph_files import GRAPH, WORDS, write_graph

        write_graph(Path(self.hmm), Path(self.lexicon), Path(self.lm), folder, self.silence_probability)
        return self._finished(str(folder / GRAPH), str(folder / WORDS), self.lm)

    def options(self) -> DecodeOptions:
        """Parameters of the search."""
        from speech.hmm.decode import DecodeOptions

        return DecodeOptions(self.beam, self.max_active, self.acoustic_scale)

    @override
    def build(self, tokenizer: Tokenizer, states: StateOutputs | None = None) -> Decoder:
        return GraphDecoder(self, tokenizer, states)


def open_search(cfg: GraphConfig, num_states: int, families: Ints | None = None) -> GraphSearch:
    """The search that a configuration describes.

    Args:
        cfg: The configuration; a graph that it only names the sources of is made.
        num_states: Tied states of the model.
        families: Of `GraphSearch`.

    Raises:
        DecodeError: The graph is damaged, or of another model.
    """
    from speech.hmm.decode import GraphSearch
    from speech.hmm.graph_files import read_graph

    with tempfile.TemporaryDirectory(prefix="starling-graph-") as folder:
        cfg = cfg.prepared(Path(folder))
        graph = read_graph(Path(cfg.graph), Path(cfg.words))
    search = GraphSearch(graph.arrays, graph.words, cfg.options(), families)
    if search.num_states > num_states:
        raise DecodeError(
            f"decode.graph has {search.num_states} states, the model {num_states}: make it from the HMMs that "
            "aligned its training data"
        )
    return search


class GraphDecoder(Decoder):
    """Viterbi beam search in a graph; a graph is read or made before the first utterance.

    The score of a hypothesis is the natural logarithm of its graph's probability, plus the scaled log likelihood. With
    one hypothesis asked for, the confidence of all its words is the mean posterior of the path's states; with several,
    and after ranking again, each word's is its posterior over the hypotheses.

    Hot words are cheaper in the graph. What phrases of several words add is more than words can be cheaper that may be
    said without the others: hypotheses are ranked again by it.
    """

    slow = True
    native = ("_search", "_rescorer")
    cfg: GraphConfig

    def __init__(self, cfg: DecodeConfig, tokenizer: Tokenizer, states: StateOutputs | None = None) -> None:
        super().__init__(cfg, tokenizer, states)
        self._search: GraphSearch | None = None
        self._rescorer: Rescorer | None = None
        self._phrases: GraphPhrases | None = None

    @property
    def search(self) -> GraphSearch:
        """The search of the graph, which is read or made if it has not been."""
        self.prepare()
        assert self._search is not None
        return self._search

    @override
    def with_config(self, cfg: DecodeConfig) -> Decoder:
        other = GraphDecoder(cfg, self.tokenizer, self.states)
        if self._search is not None and other.cfg.same_graph(self.cfg):
            other._search, other._rescorer = self._search.with_options(other.cfg.options()), self._rescorer
            other._phrases = self._phrases
        return other

    @override
    def prepare(self) -> None:
        if self._search is None:
            search = open_search(self.cfg, self.num_outputs)
            if self.cfg.rescore_lm:
                first = self.cfg.graph_lm or self.cfg.lm
                self._rescorer = Rescorer(first, self.cfg.rescore_lm, search.words.words)
            if hot := hot_vocabulary(self.cfg.hot_words, search.words.words):
                self._phrases = GraphPhrases(hot, search.words.words)
                search = search.cheaper(self._phrases.worth)
            if self._asked > 1:
                search.prepare_lists()
            self._search = search  # last: other threads decode as soon as it is there

    @property
    @override
    def silence(self) -> frozenset[int]:
        return frozenset(self.search.silence.tolist())

    @override
    def stream(self) -> DecoderStream:
        return _GraphStream(self)

    def _decode(self, log_probs: Tensor, lengths: Sequence[int]) -> list[Hypothesis]:
        self.prepare()
        batch = log_probs.cpu().numpy()
        return [self._one(batch[row, :count]) for row, count in enumerate(lengths)]

    def _one(self, log_probs: NDArray[np.float32]) -> Hypothesis:
        assert self._search is not None
        if len(log_probs) == 0:
            return Hypothesis()
        likelihoods, factor = self.likelihoods(log_probs)
        if self._asked > 1:
            return self._ranked(likelihoods, factor)
        return self.hypothesis(self._search(likelihoods), log_probs, factor)

    def likelihoods(self, log_probs: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
        """What the graph is searched with [frames * factor, states], and its frames to an output frame."""
        assert self.states is not None
        factor = self.states.frame_factor
        return scaled_likelihoods(log_probs, self.states.log_priors, factor), factor

    @staticmethod
    def hypothesis(path: GraphPath, log_probs: NDArray[np.float32], factor: int) -> Hypothesis:
        """The hypothesis of the best path of some frames."""
        if not len(path.pdfs):
            return Hypothesis()
        places = np.arange(len(log_probs))
        confidence = float(np.exp(log_probs[places, path.pdfs[places * factor]]).mean())
        return Hypothesis(
            text=" ".join(path.words),
            score=-path.cost,
            confidence=min(max(confidence, 0.0), 1.0),
            word_frames=word_frames(path, factor),
        )

    @property
    def _ranks_again(self) -> bool:
        """Whether hypotheses are ranked by anything that the search does not know."""
        return self.cfg.ranks_again or (self._phrases is not None and self._phrases.several)

    @property
    def _asked(self) -> int:
        """Number of hypotheses that the search is asked for."""
        return max(self.cfg.hypotheses, self.cfg.rescore_nbest if self._ranks_again else 1)

    def _ranked(self, likelihoods: NDArray[np.float32], factor: int) -> Hypothesis:
        """The best of several hypotheses."""
        assert self._search is not None
        count = max(self._asked, _CONSIDERED)
        paths = [
            WordPath(path.words, tuple(word_frames(path, factor)), path.pdfs, -path.cost)
            for path in self._search.nbest(likelihoods, count, self.cfg.lattice_beam)
        ]
        if not paths:
            return Hypothesis()
        if self._ranks_again:
            paths = self._ranked_again(paths[: self._asked])
        shares = posteriors([path.score for path in paths])
        confidences = word_confidences(paths, shares)
        return Hypothesis(
            text=" ".join(paths[0].words),
            score=paths[0].score,
            confidence=float(np.mean(confidences)) if confidences else silence_posterior(paths, shares),
            word_confidences=confidences,
            nbest=alternatives(paths, shares, self.cfg.nbest),
            word_frames=list(paths[0].spans),
        )

    def _ranked_again(self, paths: list[WordPath]) -> list[WordPath]:
        """The hypotheses by the second language model, phrases, and the score of a word, the best first."""
        if self._rescorer is not None:
            paths = self._rescorer(paths, self.cfg.rescore_weight, math.log(10))
        scored = [replace(path, score=path.score + self.cfg.word_score * len(path.words)) for path in paths]
        if self._phrases is not None:
            scored = [replace(path, score=path.score + self._phrases.rest(path.words)) for path in scored]
        return sorted(scored, key=lambda path: -path.score)


class _GraphStream(DecoderStream):
    """The search in one utterance; several hypotheses, if they are needed, are those of the whole at its end."""

    def __init__(self, decoder: GraphDecoder) -> None:
        self._decoder, self._search = decoder, decoder.search.stream()
        self._log_probs: list[NDArray[np.float32]] = []

    @override
    def accept(self, log_probs: NDArray[np.float32]) -> None:
        self._search.accept(self._decoder.likelihoods(log_probs)[0])
        self._log_probs.append(log_probs)

    @override
    def best(self) -> Hypothesis:
        return self._hypothesis(last=False)

    @override
    def finish(self) -> Hypothesis:
        if self._decoder._asked > 1 and self._log_probs:
            return self._decoder._one(np.concatenate(self._log_probs))
        return self._hypothesis(last=True)

    def _hypothesis(self, last: bool) -> Hypothesis:
        if not self._log_probs:
            return Hypothesis()
        self._log_probs = [np.concatenate(self._log_probs)]
        assert self._decoder.states is not None
        return self._decoder.hypothesis(self._search.path(last), self._log_probs[0], self._decoder.states.frame_factor)


class GraphPhrases:
    """Hot words of a search in a graph, which knows what a word costs, but not what it follows.

    Args:
        hot: The hot words, by word.
        words: All words.

    Attributes:
        worth: What each word is cheaper by [words]: exactly, or, in a phrase of several words, its share.
        several: Whether there are phrases of several words.
    """

    def __init__(self, hot: HotWords, words: Sequence[str]) -> None:
        self._hot, self._numbers = hot, {word: number for number, word in enumerate(words)}
        self.several = any(" " in phrase.text for phrase in hot.phrases)
        alone, shares = np.zeros(len(words)), np.zeros(len(words))
        for phrase in hot.phrases:
            spoken, worth = phrase.text.split(), alone if " " not in phrase.text else shares
            for word in spoken:
                number = self._numbers[word]
                worth[number] = max(worth[number], phrase.score * len(word))
        self.worth = alone + shares

    def rest(self, words: Sequence[str]) -> float:
        """What a word sequence is worth that its words are not."""
        numbers = [self._numbers[word] for word in words]
        return self._hot.bonus(numbers) - float(self.worth[numbers].sum())


def word_frames(path: GraphPath, factor: int = 1) -> list[tuple[int, int]]:
    """First output frame of each word, and the one where the next begins; silence counts to the word before it."""
    bounds = [*(start // factor for start in path.starts.tolist()), -(-len(path.pdfs) // factor)]
    return [(first, max(first + 1, end)) for first, end in pairwise(bounds)]
