"""Conformer encoder (Gulati et al. 2020, arXiv:2005.08100) for CTC.

Two deliberate differences from the paper. Positions are encoded by rotating queries and keys (RoPE: Su et al. 2021,
arXiv:2104.09864) instead of relative sinusoids: the same relative information without a second score matrix. The
convolution module uses LayerNorm instead of BatchNorm: batch statistics would leak padding and other utterances of the
batch into an utterance, and would have to be averaged between learners.
"""

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from speech.features.cmvn import frame_mask
from speech.models.conformer import ConformerConfig
from speech.models.networks.attention import FeedForward, SelfAttention, rotary_tables
from speech.models.networks.base import AcousticModel, ModelStage
from speech.models.networks.dropout import Dropout


class ConvModule(nn.Module):
    """Gated pointwise convolution, depthwise convolution over `kernel` frames, pointwise convolution."""

    def __init__(self, cfg: ConformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(cfg.dim)
        self.gate = nn.Linear(cfg.dim, 2 * cfg.dim)
        self.depthwise = nn.Conv1d(cfg.dim, cfg.dim, cfg.kernel, padding=cfg.kernel // 2, groups=cfg.dim)
        self.inner_norm = nn.LayerNorm(cfg.dim)
        self.out = nn.Linear(cfg.dim, cfg.dim)
        self.dropout = Dropout(cfg.dropout)

    def forward(self, x_BTD: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; `mask` [B, T, 1] is 0 in the padding."""
        x = F.glu(self.gate(self.norm(x_BTD)), dim=-1) * mask
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.dropout(self.out(F.silu(self.inner_norm(x))))
        return out


class ConformerLayer(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward, normalization."""

    def __init__(self, cfg: ConformerConfig) -> None:
        super().__init__()
        self.feed_forward_in = FeedForward(cfg.dim, cfg.feed_forward * cfg.dim, cfg.dropout)
        self.attention = SelfAttention(cfg.dim, cfg.heads, cfg.dropout)
        self.conv = ConvModule(cfg)
        self.feed_forward_out = FeedForward(cfg.dim, cfg.feed_forward * cfg.dim, cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim)

    def forward(self, x: Tensor, mask_BT: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x = x + 0.5 * self.feed_forward_in(x)
        x = x + self.attention(x, mask_BT[:, None, None, :], cos, sin)
        x = x + self.conv(x, mask_BT[..., None].to(x.dtype))
        x = x + 0.5 * self.feed_forward_out(x)
        out: Tensor = self.norm(x)
        return out


def run_layers(layers: Iterable[nn.Module], x_BTD: Tensor, lengths: Tensor, cfg: ConformerConfig) -> Tensor:
    """Run Conformer layers over subsampled frames [B, T, D] with `lengths` [B]."""
    # a length of 0 would mask every key, and the softmax would be NaN: such utterances get one (zero) frame
    mask_BT = frame_mask(lengths.clamp(min=1), x_BTD.shape[1])
    cos, sin = rotary_tables(x_BTD.shape[1], cfg.dim // cfg.heads, x_BTD.device)
    for layer in layers:
        x_BTD = layer(x_BTD, mask_BT, cos, sin)
    return x_BTD


class Conformer(AcousticModel):
    """`cfg.layers` Conformer layers of width `cfg.dim` and a linear output layer."""

    cfg: ConformerConfig
    stackable = True

    def __init__(self, cfg: ConformerConfig, num_features: int, vocab_size: int) -> None:
        super().__init__(cfg, num_features, vocab_size)
        self.dropout = Dropout(cfg.dropout)
        self.layers = nn.ModuleList(ConformerLayer(cfg) for _ in range(cfg.layers))
        self.output = nn.Linear(cfg.dim, vocab_size)

    @override
    def encode(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        x_BTD = run_layers(self.layers, self.dropout(x_BTD), lengths, self.cfg)
        scores: Tensor = self.output(x_BTD)
        return scores

    @override
    def layer_of(self, parameter: str) -> int | None:
        part, _, rest = parameter.partition(".")
        return int(rest.partition(".")[0]) if part == "layers" else None

    @override
    def stage(self, layers: range) -> "ConformerStage":
        return ConformerStage(self, layers)


class ConformerStage(ModelStage):
    """Layers of a Conformer."""

    cfg: ConformerConfig

    def __init__(self, model: Conformer, layers: range) -> None:
        super().__init__(model, layers)
        self.dropout = model.dropout if self.is_first else nn.Identity()
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in layers})
        self.output = model.output if self.is_last else nn.Identity()

    @override
    def run(self, x: Tensor, frames: Tensor) -> Tensor:
        scores: Tensor = self.output(run_layers(self.layers.values(), self.dropout(x), frames, self.cfg))
        return scores
