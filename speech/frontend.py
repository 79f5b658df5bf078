"""From waveforms (or stored features) to the normalized features that an acoustic model reads."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from speech.features import FeatureConfig, build_features
from speech.features.cmvn import CmvnStats, normalize, utterance_stats
from speech.features.expand import Expand
from speech.features.sliding import sliding_normalize

Augment = Callable[[Tensor, Tensor], Tensor]
"""Changes normalized features [batch, frames, F] of given numbers of frames [batch]."""


class FrontEnd(nn.Module):
    """Features, mean and variance normalization, deltas, splicing and stride, on the device of the input.

    Args:
        cfg: Which features and which normalization.
        sample_rate: Of the waveforms, Hz.
        stats: Statistics of the training set; needed for `cmvn: global`.
        speakers: Statistics by speaker, for `cmvn: speaker`.
    """

    def __init__(
        self,
        cfg: FeatureConfig,
        sample_rate: int,
        stats: CmvnStats | None = None,
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> None:
        super().__init__()
        if cfg.cmvn == "global" and stats is None:
            raise ValueError("features.cmvn is 'global' but there are no statistics: run the features stage first")
        self.cfg = cfg
        self.sample_rate = sample_rate
        self.extract = build_features(cfg, sample_rate)
        self.expand = Expand(cfg)
        self.stats = stats
        self.speakers = dict(speakers or {})

    @property
    def dim(self) -> int:
        """Width of the frames that the model reads."""
        return int(self.extract.dim) * self.cfg.frame_factor

    def forward(
        self, inputs: Tensor, lengths: Tensor, speakers: Sequence[str] | None = None, augment: Augment | None = None
    ) -> tuple[Tensor, Tensor]:
        """Normalized features, zero in the padding.

        Args:
            inputs: Waveforms [batch, samples] in ±1, or features [batch, frames, F] extracted before.
            lengths: Samples or frames of each utterance [batch].
            speakers: Speaker of each utterance, for `cmvn: speaker`.
            augment: Changes the normalized features before deltas and splicing, which would else carry a masked
                frame's neighbours into it.

        Returns:
            Features [batch, frames, dim] and frames [batch].
        """
        feats, frames = (inputs, lengths) if inputs.ndim == 3 else self.extract(inputs, lengths)
        feats = self._normalize(feats, frames, speakers)
        if augment is not None:
            feats = augment(feats, frames)
        expanded: tuple[Tensor, Tensor] = self.expand(feats, frames)
        return expanded

    def _normalize(self, feats: Tensor, frames: Tensor, speakers: Sequence[str] | None) -> Tensor:
        cfg = self.cfg
        if cfg.cmvn == "none":
            return feats
        if cfg.cmvn == "sliding":
            return sliding_normalize(
                feats,
                frames,
                window=cfg.cmvn_window,
                min_window=cfg.cmvn_min_window,
                center=cfg.cmvn_center,
                variance=cfg.cmvn_variance,
                counted=self.extract.speech_frames(feats, frames),
                floor=cfg.cmvn_floor,
            )
        mean, std = self._statistics(feats, frames, speakers)
        if cfg.cmvn_floor:
            lowest = mean - cfg.cmvn_floor * std
            feats = feats.maximum(lowest if lowest.ndim == 1 else lowest.unsqueeze(1))
        return normalize(feats, frames, mean, std if cfg.cmvn_variance else torch.ones_like(std))

    def _statistics(self, feats: Tensor, frames: Tensor, speakers: Sequence[str] | None) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation for the set [F] or for each utterance [batch, F]."""
        if self.cfg.cmvn == "global" and self.stats is not None:
            mean, std = self._vectors([self.stats], feats)
            return mean[0], std[0]
        mean, std = utterance_stats(feats, frames, self.extract.speech_frames(feats, frames))
        if self.cfg.cmvn == "speaker" and speakers is not None:
            # a speaker without statistics (a new recording) is normalized by the utterance itself
            for i, name in enumerate(speakers):
                if name in self.speakers:
                    one_mean, one_std = self._vectors([self.speakers[name]], feats)
                    mean[i], std[i] = one_mean[0], one_std[0]
        return mean, std

    @staticmethod
    def _vectors(stats: Sequence[CmvnStats], like: Tensor) -> tuple[Tensor, Tensor]:
        mean = torch.stack([torch.as_tensor(s.mean) for s in stats]).to(like)
        std = torch.stack([torch.as_tensor(s.std) for s in stats]).to(like)
        return mean, std
