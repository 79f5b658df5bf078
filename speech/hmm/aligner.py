"""Alignment of any utterances with a trained GMM-HMM, with fMLLR for each speaker if the model is speaker-adapted.

Confidences of frames, from which those of words and phones follow, are posteriors of the aligned phones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speech.alignments import AlignedUtterance
from speech.hmm import steps
from speech.hmm.graphs import GraphOptions, Lexicon, UtteranceGraph
from speech.hmm.model import HmmModel
from speech.hmm.steps import AlignedShard
from speech.hmm.topology import Ints
from speech.hmm.utterances import Adaptations, Mapper, Shard
from speech.hmm.viterbi import AlignOptions, StatePath

ADAPTATION_FRAMES = 40_000
"""Most frames of a speaker from which fMLLR is estimated: 400 s, since more take time and change few alignments."""


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

    def align(
        self, shards: Sequence[Shard], adaptations: Adaptations | None = None
    ) -> tuple[AlignedShard, Adaptations]:
        """Align a set.

        Args:
            shards: Its utterances.
            adaptations: fMLLR transforms by speaker, as far as they are known. Those of other speakers are estimated
                from a first alignment without transforms, of at most about `ADAPTATION_FRAMES` frames of each.

        Returns:
            Alignments, with the reasons for utterances without one; and the transforms of all speakers, none for a
            model without adaptation.
        """
        graphs = self.graphs(shards)
        if self.model.unadapted is None:
            return self._align(self.model, shards, graphs, {}), {}
        known = dict(adaptations or {})
        if some := _some_of_each_speaker(shards, known):
            plain = replace(self.model, gmm=self.model.unadapted)
            known |= self.estimate(some, self._align(plain, some, graphs, {}))
        return self._align(self.model, shards, graphs, known), known

    def aligned_utterances(self, shards: Sequence[Shard], frame_seconds: float) -> Iterator[AlignedUtterance]:
        """Align a set, with confidences and unscaled scores.

        Args:
            shards: Its utterances.
            frame_seconds: Frame shift in seconds.
        """
        aligned, adaptations = self.align(shards)
        for shard in shards:
            model = self.model.to(shard.device)
            for utterance, frames in zip(shard.utterances, shard.features(model.chain, adaptations), strict=True):
                text, path = " ".join(utterance.words), aligned.alignments.get(utterance.id)
                if path is None:
                    yield AlignedUtterance(utterance.id, text, None, aligned.failures[utterance.id])
                    continue
                confidences = frame_confidences(model, frames, path)
                alignment = path.alignment(utterance.id, utterance.words, model.tree, confidences, frame_seconds)
                alignment = replace(alignment, score=path.score / self.options.acoustic_scale)
                yield AlignedUtterance(utterance.id, text, alignment)

    def graphs(self, shards: Sequence[Shard]) -> dict[str, UtteranceGraph]:
        """Graphs of the transcripts."""
        tree = self.model.tree
        used = {word for shard in shards for utterance in shard.utterances for word in utterance.words}
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
        for utterance in shard.utterances:
            frames[utterance.speaker] += utterance.num_frames
    seen: Counter[str] = Counter()
    parts: list[Shard] = []
    for shard in shards:
        chosen = []
        for utterance in shard.utterances:
            speaker = utterance.speaker
            if speaker not in known:
                every = max(1, -(-frames[speaker] // ADAPTATION_FRAMES))
                if seen[speaker] % every == 0:
                    chosen.append(utterance)
                seen[speaker] += 1
        if chosen:
            parts.append(shard.part(chosen))
    return parts


def phone_families(model: HmmModel) -> tuple[Ints, Ints]:
    """The family of each phone `[phones + 1]`, and the family of each pdf `[P]`; families are numbered from 0."""
    phones = model.tree.phones
    of_phone = np.zeros(len(phones) + 1, dtype=np.int32)
    for number, family in enumerate(phones.families()):
        of_phone[family] = number
    of_pdf = np.zeros(model.gmm.num_pdfs, dtype=np.int32)
    keys = model.transitions.keys
    of_pdf[keys[:, 2]] = of_phone[keys[:, 0]]
    return of_phone, of_pdf


def frame_confidences(model: HmmModel, frames: Tensor, path: StatePath) -> NDArray[np.float64]:
    """Posterior of the aligned phone at each frame, after "goodness of pronunciation" (Witt & Young 2000).

    All tied states are equally probable a priori. Phones that differ only in stress or position count as one.

    Args:
        model: The model.
        frames: Transformed features `[T, D]`.
        path: The alignment of the utterance.

    Returns:
        `[T]`, 0 to 1.
    """
    _, families = phone_families(model)
    return pdf_confidences(model.gmm.log_likelihoods(frames), path.pdfs(model.tree), families)


def pdf_confidences(log_likelihoods: Tensor, pdfs: Ints, families: Ints) -> NDArray[np.float64]:
    """Posterior of each frame's phone.

    Args:
        log_likelihoods: Of all pdfs, `[T, P]`.
        pdfs: int32 `[T]`, the pdf of each frame.
        families: int32 `[P]`, the phone of each pdf, from `phone_families`.

    Returns:
        `[T]`, 0 to 1.
    """
    device = log_likelihoods.device
    family = torch.from_numpy(families.astype(np.int64)).to(device)
    summed = log_likelihoods.new_zeros(len(log_likelihoods), int(families.max()) + 1)
    summed.index_add_(1, family, log_likelihoods.softmax(dim=1))
    chosen = family[torch.from_numpy(pdfs.astype(np.int64)).to(device)]
    return np.asarray(summed.gather(1, chosen[:, None])[:, 0].double().cpu().numpy(), dtype=np.float64)
