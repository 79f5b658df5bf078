"""Frames that networks read beside or in place of those of the Gaussians: fMLLR, i-vectors and features of other kinds.

Training (the stage `adapt`) and recognition (`recognition.adaptation`) make them here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speech.features import FeatureConfig, FmllrConfig, IvectorConfig
from speech.features.expand import Expand
from speech.hmm.ivector import BaumWelch, IvectorExtractor, statistics
from speech.hmm.model import FeatureChain


@dataclass(frozen=True)
class AdaptedFeatures:
    """Makes the frames of utterances from those of their parts.

    Attributes:
        cfg: The features.
        chain: LDA and MLLT of the GMM-HMM.
        extractor: Of i-vectors, if the features have some.
    """

    cfg: FeatureConfig
    chain: FeatureChain
    extractor: IvectorExtractor | None = None

    @staticmethod
    def ivector_part(cfg: FeatureConfig) -> IvectorConfig | None:
        """The configuration of the i-vectors among some features, if there are any."""
        return next((part for part in cfg.components if isinstance(part, IvectorConfig)), None)

    @property
    def others(self) -> dict[int, FeatureConfig]:
        """Parts that one waveform determines, by position."""
        return {place: part for place, part in enumerate(self.cfg.components) if not part.adapted}

    def ivectors(self, static: Sequence[Tensor]) -> list[Tensor | None]:
        """The i-vector of each frame of a speaker's utterances.

        Args:
            static: All utterances of the speaker [T, F], normalized as the GMM-HMM needs it.

        Returns:
            float32 `[T, R]` for each utterance; None for each without i-vectors among the features.
        """
        part = self.ivector_part(self.cfg)
        if part is None:
            return [None] * len(static)
        assert self.extractor is not None
        plain = [self.chain(frames) for frames in static]
        if part.extraction == "online":
            return [self.extractor.prefix_ivectors(frames) for frames in plain]
        stats = [statistics(self.extractor.model, frames) for frames in plain]
        if part.extraction == "speaker" and stats:
            stats = [sum(stats[1:], stats[0])] * len(stats)
        return [self.of_statistics(own).expand(len(frames), -1) for own, frames in zip(stats, plain, strict=True)]

    def of_statistics(self, stats: BaumWelch) -> Tensor:
        """The i-vector float32 `[R]` of some speech."""
        assert self.extractor is not None
        return self.extractor.posterior(stats).means.float()

    def __call__(
        self, static: Tensor, transform: Tensor | None, ivectors: Tensor | None, others: Mapping[int, Tensor]
    ) -> Tensor:
        """Frames of an utterance.

        Args:
            static: `[T, F]`, normalized as the GMM-HMM needs it.
            transform: The speaker's fMLLR `[D, D + 1]`, if there is one.
            ivectors: `[T, R]`, if the features have i-vectors.
            others: `[T, F]` of each of `others`, without deltas and splicing.

        Returns:
            float32 `[T, width]`.
        """
        parts = []
        for place, part in enumerate(self.cfg.components):
            if isinstance(part, FmllrConfig):
                frames = self.chain(static, transform)
            elif isinstance(part, IvectorConfig):
                assert ivectors is not None
                frames = ivectors
            else:
                frames = others[place]
            parts.append(frames if part is self.cfg else _expanded(part, frames))
        return torch.cat(parts, dim=1)


def _expanded(part: FeatureConfig, frames: Tensor) -> Tensor:
    """Frames `[T, F]` of a part with its deltas and splicing."""
    wide: Tensor = Expand(part)(frames[None], torch.tensor([len(frames)]))[0]
    return wide[0]
