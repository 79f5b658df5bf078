"""Conformer encoder (Gulati et al. 2020, arXiv:2005.08100) for CTC.

Two deliberate differences from the paper. Positions are encoded by rotating queries and keys (RoPE: Su et al. 2021,
arXiv:2104.09864) instead of relative sinusoids: the same relative information without a second score matrix. The
convolution module uses LayerNorm instead of BatchNorm: batch statistics would leak padding and other utterances of the
batch into an utterance, and would have to be averaged between learners.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from speech.features.cmvn import frame_mask
from speech.models.conformer import ConformerConfig
from speech.models.networks.base import AcousticModel, ModelStage
from speech.models.networks.dropout import Dropout


class FeedForward(nn.Module):
    """Pre-normalized two-layer perceptron with SiLU; the caller adds half of its output (a macaron half-step)."""

    def __init__(self, cfg: ConformerConfig) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(cfg.dim),
            nn.Linear(cfg.dim, cfg.feed_forward * cfg.dim),
            nn.SiLU(),
            Dropout(cfg.dropout),
            nn.Linear(cfg.feed_forward * cfg.dim, cfg.dim),
            Dropout(cfg.dropout),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        out: Tensor = self.net(x_BTD)
        return out


def rotary_tables(num_frames: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_frames, head_dim / 2] of each position's rotation angles (arXiv:2104.09864, eq. 15)."""
    rates = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(num_frames, device=device, dtype=torch.float32)[:, None] * rates[None, :]
    return angles.cos(), angles.sin()


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of a head's coordinates (first half, second half) by the angle of its position."""
    a, b = x_BHTK.chunk(2, dim=-1)
    cos, sin = cos.to(x_BHTK.dtype), sin.to(x_BHTK.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, key_mask: Tensor, multiple: int = 0) -> Tensor:
    """Scaled dot-product attention, with heads zero-padded to a width that fused kernels support.

    On a GPU, other widths are computed unfused, with all T x T weights in memory. Padding does not change the result.

    Args:
        q_BHTK: Queries.
        k_BHTK: Keys.
        v_BHTK: Values.
        key_mask: [B, 1, 1, T], True where a frame may be attended to.
        multiple: The width is padded to a multiple of this; 0 means 8 on a GPU and no padding on a CPU.
    """
    width = q_BHTK.shape[-1]
    if extra := -width % (multiple or (8 if q_BHTK.is_cuda else 1)):
        q_BHTK, k_BHTK, v_BHTK = (F.pad(x, (0, extra)) for x in (q_BHTK, k_BHTK, v_BHTK))
    mixed = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=key_mask, scale=width**-0.5)
    return mixed[..., :width]


class SelfAttention(nn.Module):
    """Pre-normalized multi-head self-attention over the utterance's own frames."""

    def __init__(self, cfg: ConformerConfig) -> None:
        super().__init__()
        self.heads = cfg.heads
        self.dropout = Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.out = nn.Linear(cfg.dim, cfg.dim)

    def forward(self, x_BTD: Tensor, key_mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; `key_mask` [B, 1, 1, T] is True where a frame may be attended to."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x_BTD)).chunk(3, dim=-1)
        )
        # no dropout on the T x T weights: its masks took a quarter of a training step on a CPU and rule out fused
        # kernels; dropout of the output regularizes the same path
        mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, key_mask)
        out: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return out


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
        self.feed_forward_in = FeedForward(cfg)
        self.attention = SelfAttention(cfg)
        self.conv = ConvModule(cfg)
        self.feed_forward_out = FeedForward(cfg)
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
