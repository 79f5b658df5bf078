"""Base classes of acoustic models and their configurations, and the convolutional subsampling."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from speech.choices import Choice
from speech.features.cmvn import frame_mask


class ModelConfig(Choice):
    """Configuration common to all acoustic models."""

    dim: int = Field(default=144, ge=8)
    """Width: model dimension of a Conformer, or cells per direction of a BLSTM."""
    layers: int = Field(default=8, ge=1)
    """Number of encoder layers."""
    subsampling: Literal[1, 2, 4, 8] = 4
    """Feature frames per output frame. An utterance needs at least as many output frames as tokens."""
    channels: int = Field(default=32, ge=1)
    """Channels of the subsampling convolutions."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout probability throughout the encoder."""


def halved(lengths: Tensor, times: int = 1) -> Tensor:
    """Numbers of output frames of `times` stride-2 convolutions."""
    for _ in range(times):
        lengths = torch.div(lengths + 1, 2, rounding_mode="floor")
    return lengths


class Subsampling(nn.Module):
    """Stride-2 convolutions over time and frequency, then a projection to the encoder's width.

    Padding is masked to zero before every convolution, so that an utterance's frames do not depend on the rest of the
    batch. Each stride-2 convolution maps T frames to ceil(T / 2).
    """

    def __init__(self, num_features: int, dim: int, factor: int, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        width, in_channels = num_features, 1
        for _ in range(factor.bit_length() - 1):
            self.convs.append(nn.Conv2d(in_channels, channels, kernel_size=3, stride=2, padding=1))
            width, in_channels = (width + 1) // 2, channels
        self.project = nn.Linear(width * in_channels, dim)

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Output frames for each number of feature frames."""
        return halved(lengths, len(self.convs))

    def forward(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, F] and [B] -> [B, T', dim] and [B]."""
        if feats_BTF.shape[1] == 0:  # a convolution needs a frame; the lengths of 0 mask it again
            feats_BTF = feats_BTF.new_zeros(feats_BTF.shape[0], 1, feats_BTF.shape[2])
        x = feats_BTF.unsqueeze(1)
        for conv in self.convs:
            x = x * frame_mask(lengths, x.shape[2])[:, None, :, None]
            x = torch.relu(conv(x))
            lengths = halved(lengths)
        x_BTD = self.project(x.transpose(1, 2).flatten(2))
        return x_BTD * frame_mask(lengths, x_BTD.shape[1])[..., None], lengths


class AcousticModel(nn.Module, ABC):
    """Feature frames in, natural log probabilities over tokens (index 0: CTC's blank) out.

    Attributes:
        config: Class of the model's configuration.
    """

    config: ClassVar[type[ModelConfig]]

    def __init__(self, cfg: ModelConfig, num_features: int, vocab_size: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.num_features = num_features
        self.vocab_size = vocab_size
        self.subsampling = Subsampling(num_features, self.encoder_input_dim(cfg), cfg.subsampling, cfg.channels)

    @staticmethod
    def encoder_input_dim(cfg: ModelConfig) -> int:
        """Width of the encoder's input, which the subsampling projects to."""
        return cfg.dim

    @abstractmethod
    def encode(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        """Subsampled frames [B, T', D] to unnormalized token scores [B, T', vocab_size]."""

    def forward(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities of the tokens for every output frame.

        Args:
            feats_BTF: Normalized features [batch, frames, num_features], zero beyond each length.
            lengths: Feature frames of each utterance [batch].

        Returns:
            Log probabilities [batch, output frames, vocab_size] in float32 and the output frames of each utterance
            [batch]. Values beyond a length are unspecified.
        """
        x_BTD, out_lengths = self.subsampling(feats_BTF, lengths)
        logits_BTV = self.encode(x_BTD, out_lengths)
        return logits_BTV.float().log_softmax(dim=-1), out_lengths

    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)
