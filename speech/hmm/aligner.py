"""Alignment of any utterances with a trained model: with fMLLR for each speaker if the model is speaker-adapted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from speech.hmm import steps
from speech.hmm.graphs import GraphOptions, Lexicon, UtteranceGraph
from speech.hmm.model import HmmModel
from speech.hmm.steps import AlignedShard, AlignOptions
from speech.hmm.train import Mapper
from speech.hmm.utterances import Shard

ADAPTATION_FRAMES = 40_000
"""Most frames of a speaker from which fMLLR is estimated: 400 s, since more take time and change few alignments."""


@dataclass(frozen=True)
class AlignedSet:
    """The alignments of a set.

    Attributes:
        aligned: Alignments, and utterances that failed with the reasons.
        adaptations: fMLLR transforms by speaker; empty for a model without adaptation.
    """

    aligned: AlignedShard
    adaptations: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Aligner:
    """Aligns utterances.

    Attributes:
        model: The model.
        lexicon: Pronunciations of words; others are spoken noise.
        graph: Probabilities of pronunciations and silence.
        options: Beams and scales.
        mapper: Applies a step to all shards.
        every: fMLLR uses every n-th frame.
    """

    model: HmmModel
    lexicon: Lexicon
    graph: GraphOptions = field(default_factory=GraphOptions)
    options: AlignOptions = field(default_factory=AlignOptions)
    mapper: Mapper[Any] = map
    every: int = 1

    def align(self, shards: Sequence[Shard], adaptations: Mapping[str, Tensor] | None = None) -> AlignedSet:
        """Align a set.

        Args:
            shards: Its utterances.
            adaptations: fMLLR transforms by speaker, as far as they are known. Those of other speakers are estimated
                from a first alignment without transforms, of at most about `ADAPTATION_FRAMES` frames of each.
        """
        graphs = self.graphs(shards)
        if self.model.unadapted is None:
            return AlignedSet(self._align(self.model, shards, graphs, {}))
        known = dict(adaptations or {})
        if some := _some_of_each_speaker(shards, known):
            plain = replace(self.model, gmm=self.model.unadapted)
            known |= self.estimate(some, self._align(plain, some, graphs, {}))
        return AlignedSet(self._align(self.model, shards, graphs, known), known)

    def graphs(self, shards: Sequence[Shard]) -> dict[str, UtteranceGraph]:
        """Graphs of the transcripts."""
        tree = self.model.tree
        used = {word for shard in shards for one in shard.utterances for word in one.words}
        lexicon = {word: self.lexicon[word] for word in sorted(used) if word in self.lexicon}
        known = self.graph.pronunciations or {}
        after = self.graph.silence_after and {w: p for w, p in self.graph.silence_after.items() if w in used}
        spoken = {key: p for key, p in known.items() if key[0] in lexicon}
        options = replace(self.graph, pronunciations=spoken, silence_after=after)
        step = partial(
            steps.make_graphs, phones=tree.phones, lexicon=lexicon, options=options, context=tree.context_dependent
        )
        return {name: graph for part in self.mapper(step, shards) for name, graph in part.items()}

    def estimate(self, shards: Sequence[Shard], aligned: AlignedShard) -> dict[str, Tensor]:
        """fMLLR transforms from alignments."""
        step = partial(
            steps.fmllr_statistics,
            self.model,
            alignments=aligned.alignments,
            adaptations={},
            every=self.every,
        )
        return steps.estimate_transforms(self.mapper(step, shards))

    def _align(
        self,
        model: HmmModel,
        shards: Sequence[Shard],
        graphs: Mapping[str, UtteranceGraph],
        adaptations: Mapping[str, Tensor],
    ) -> AlignedShard:
        step = partial(steps.align, model, graphs=graphs, options=self.options, adaptations=adaptations)
        return steps.merge_aligned(self.mapper(step, shards))


def _some_of_each_speaker(shards: Sequence[Shard], known: Container[str]) -> list[Shard]:
    """Evenly spaced utterances of each speaker who is not known, since recordings of a day may differ from others."""
    frames: Counter[str] = Counter()
    for shard in shards:
        for one in shard.utterances:
            frames[one.speaker] += one.num_frames
    seen: Counter[str] = Counter()
    found: list[Shard] = []
    for shard in shards:
        chosen = []
        for one in shard.utterances:
            if one.speaker not in known:
                every = max(1, -(-frames[one.speaker] // ADAPTATION_FRAMES))
                if seen[one.speaker] % every == 0:
                    chosen.append(one)
                seen[one.speaker] += 1
        if chosen:
            found.append(shard.part(chosen))
    return found
