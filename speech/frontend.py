"""From waveforms (or stored features) to the normalized features that an acoustic model reads."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from speech.features import FeatureConfig, build_features
from speech.features.cmvn import CmvnStats, normalize, utterance_stats


class FrontEnd(nn.Module):
    """Feature extraction and mean and variance normalization, on the device of the input.

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
        self.stats = stats
        self.speakers = dict(speakers or {})

    @property
    def dim(self) -> int:
        """Width of a feature frame."""
        return int(self.extract.dim)

    def forward(self, inputs: Tensor, lengths: Tensor, speakers: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
        """Normalized features, zero in the padding.

        Args:
            inputs: Waveforms [batch, samples] in ±1, or features [batch, frames, F] extracted before.
            lengths: Samples or frames of each utterance [batch].
            speakers: Speaker of each utterance, for `cmvn: speaker`.

        Returns:
            Features [batch, frames, F] and frames [batch].
        """
        feats, frames = (inputs, lengths) if inputs.ndim == 3 else self.extract(inputs, lengths)
        return self._normalize(feats, frames, speakers), frames

    def _normalize(self, feats: Tensor, frames: Tensor, speakers: Sequence[str] | None) -> Tensor:
        if self.cfg.cmvn == "none":
            return feats
        if self.cfg.cmvn == "global" and self.stats is not None:
            mean, std = self._vectors([self.stats], feats)
            return normalize(feats, frames, mean[0], std[0])
        mean, std = utterance_stats(feats, frames)
        if self.cfg.cmvn == "speaker" and speakers is not None:
            # a speaker without statistics (a new recording) is normalized by the utterance itself
            for i, name in enumerate(speakers):
                if name in self.speakers:
                    one_mean, one_std = self._vectors([self.speakers[name]], feats)
                    mean[i], std[i] = one_mean[0], one_std[0]
        return normalize(feats, frames, mean, std)

    @staticmethod
    def _vectors(stats: Sequence[CmvnStats], like: Tensor) -> tuple[Tensor, Tensor]:
        mean = torch.stack([torch.as_tensor(s.mean) for s in stats]).to(like)
        std = torch.stack([torch.as_tensor(s.std) for s in stats]).to(like)
        return mean, std
