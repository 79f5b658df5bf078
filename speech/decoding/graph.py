"""Decoding of tied states with a graph of lexicon and language model (HCLG), by kaldi-decoder's beam search.

What is searched are likelihoods: posteriors minus priors of the states (Bourlard and Morgan 1994). The graph is made
from the HMMs that the training data were aligned with, a lexicon and an n-gram, or is given as a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from speech.decoding.base import DecodeConfig, Decoder, Hypothesis
from speech.hmm.priors import StateOutputs, scaled_likelihoods
from speech.tokens import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from speech.hmm.decode import GraphSearch
    from speech.hmm.decode import Hypothesis as GraphPath

_SOURCES = ("hmm", "lexicon", "lm")


class GraphConfig(DecodeConfig):
    """The best word sequence of a decoding graph, for models of tied states."""

    kind: Literal["graph"] = "graph"
    hmm: str = ""
    """The `model.json` of the HMMs that aligned the training data, with `model.safetensors` beside it."""
    lexicon: str = ""
    """Pronunciations in the HMMs' phones: a file in one of the formats of section `lexicon`."""
    lm: str = ""
    """Language model of words: an ARPA file. Words without a pronunciation are left out."""
    graph: str = ""
    """The graph, instead of `hmm`, `lexicon` and `lm`: a constant OpenFst transducer from states + 1 to words."""
    words: str = ""
    """The words of `graph`: a text file whose line n is word n."""
    silence_probability: float = Field(default=0.5, gt=0, lt=1)
    """Probability of silence between two words, in a graph that is made."""
    beam: float = Field(default=12.0, gt=0)
    """Partial hypotheses are dropped if their scaled score is this much below the best one's."""
    max_active: int = Field(default=7000, ge=1)
    """Most states of the graph that are kept after each frame."""
    acoustic_scale: float = Field(default=0.1, gt=0)
    """Weight of the log likelihoods beside the graph's probabilities."""

    file_fields: ClassVar[dict[str, str]] = {
        "hmm": "hmm",
        "lexicon": "lexicon",
        "lm": "lm",
        "graph": "graph",
        "words": "graph-words",
    }

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        given = [name for name in _SOURCES if getattr(self, name)]
        if bool(self.graph) != bool(self.words):
            raise ValueError("kind graph needs graph and words together: one is what the other's numbers mean")
        if not self.graph and len(given) < len(_SOURCES):
            raise ValueError("kind graph needs hmm, lexicon and lm to make a graph from; or graph and words")
        if self.graph and given:
            raise ValueError(f"graph is given, so nothing is made from {', '.join(given)}: leave out one or the other")
        return self

    @override
    def prepared(self, folder: Path) -> Self:
        if self.graph:
            return self
        from speech.hmm.graph_files import write_graph

        graph, words = folder / "graph.fst", folder / "graph-words.txt"
        write_graph(Path(self.hmm), Path(self.lexicon), Path(self.lm), graph, words, self.silence_probability)
        made = {"graph": str(graph), "words": str(words)}
        return self.model_copy(update={**dict.fromkeys(_SOURCES, ""), **made})


class GraphDecoder(Decoder):
    """Viterbi beam search in a graph; a graph is read or made before the first utterance."""

    config = GraphConfig
    reads = "states"
    slow = True
    packages = ("kaldifst", "kaldi-decoder", "kaldilm")
    cfg: GraphConfig

    def __init__(self, cfg: DecodeConfig, tokenizer: Tokenizer, states: StateOutputs | None = None) -> None:
        super().__init__(cfg, tokenizer, states)
        self._search: GraphSearch | None = None

    @override
    def prepare(self) -> None:
        if self._search is None:
            from speech.hmm.graph_files import open_search

            self._search = open_search(self.cfg, self.num_outputs)

    def _decode(self, log_probs: Tensor, lengths: Sequence[int]) -> list[Hypothesis]:
        self.prepare()
        batch = log_probs.cpu().numpy()
        return [self._one(batch[row, :count]) for row, count in enumerate(lengths)]

    def _one(self, log_probs: NDArray[np.float32]) -> Hypothesis:
        assert self._search is not None
        assert self.states is not None
        if len(log_probs) == 0:
            return Hypothesis()
        factor = self.states.frame_factor
        found = self._search(scaled_likelihoods(log_probs, self.states.log_priors, factor))
        if not len(found.pdfs):
            return Hypothesis()
        places = np.arange(len(log_probs))
        confidence = float(np.exp(log_probs[places, found.pdfs[places * factor]]).mean())
        return Hypothesis(
            text=" ".join(found.words),
            score=-found.cost,
            confidence=min(max(confidence, 0.0), 1.0),
            word_frames=_word_frames(found, factor),
        )


def _word_frames(found: GraphPath, factor: int) -> list[tuple[int, int]]:
    """First output frame of each word, and the one where the next begins; silence counts to the word before it."""
    bounds = [*(start // factor for start in found.starts.tolist()), -(-len(found.pdfs) // factor)]
    return [(first, max(first + 1, end)) for first, end in pairwise(bounds)]
