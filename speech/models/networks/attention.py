"""Self-attention and what goes with it: the parts of encoders that attend to all frames of an utterance.

Positions are encoded by rotating queries and keys (RoPE: Su et al. 2021, arXiv:2104.09864).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speech.models.networks.dropout import Dropout
from speech.models.networks.lstm import Memory


class FeedForward(nn.Module):
    """Pre-normalized two-layer perceptron with SiLU; the caller adds its output.

    Args:
        dim: Width of a frame.
        hidden: Width of the hidden layer.
        dropout: Dropout probability of the hidden layer and of the output.
    """

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden),
            nn.SiLU(),
            Dropout(dropout),
            nn.Linear(hidden, dim),
            Dropout(dropout),
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


def attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, key_mask: Tensor | None, multiple: int = 0) -> Tensor:
    """Scaled dot-product attention, with heads zero-padded to a width that fused kernels support.

    On a GPU, other widths are computed unfused, with all T x T weights in memory. Padding does not change the result.

    Args:
        q_BHTK: Queries.
        k_BHTK: Keys.
        v_BHTK: Values.
        key_mask: [B, 1, 1, T], or [B, 1, T, T] by query and key: True where a frame may be attended to; None: all.
        multiple: The width is padded to a multiple of this; 0 means 8 on a GPU and no padding on a CPU.
    """
    width = q_BHTK.shape[-1]
    if extra := -width % (multiple or (8 if q_BHTK.is_cuda else 1)):
        q_BHTK, k_BHTK, v_BHTK = (F.pad(x, (0, extra)) for x in (q_BHTK, k_BHTK, v_BHTK))
    mixed = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=key_mask, scale=width**-0.5)
    return mixed[..., :width]


class SelfAttention(nn.Module):
    """Pre-normalized multi-head self-attention over the utterance's own frames; the caller adds its output.

    Args:
        dim: Width of a frame, a multiple of twice the number of heads.
        heads: Attention heads.
        dropout: Dropout probability of the output.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = Dropout(dropout)
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTD: Tensor, key_mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; `key_mask` as for `attend`."""
        q, k, v = self._heads(x_BTD)
        # no dropout on the T x T weights: its masks took a quarter of a training step on a CPU and rule out fused
        # kernels; dropout of the output regularizes the same path
        return self._joined(attend(rotate(q, cos, sin), rotate(k, cos, sin), v, key_mask))

    def forward_chunk(self, x_BTD: Tensor, memory: Memory, key_mask: Tensor) -> tuple[Tensor, Memory]:
        """As `forward`, for a chunk whose frames attend to each other and to those before that are remembered.

        Keys are remembered as they are before the rotation, and positions are counted from the first of them: only
        their differences matter, and angles stay small however long the stream is.

        Args:
            x_BTD: The frames of the chunk.
            memory: Keys and values of the frames before it [B, H, frames, K]; after it, as many frames are remembered.
            key_mask: As for `attend`, of the frames that are remembered and those of the chunk.
        """
        q, k, v = self._heads(x_BTD)
        k, v = (torch.cat(both, dim=2) for both in zip(memory, (k, v), strict=True))
        cos, sin = rotary_tables(k.shape[2], k.shape[3], k.device)
        own = slice(k.shape[2] - q.shape[2], None)
        mixed = attend(rotate(q, cos[own], sin[own]), rotate(k, cos, sin), v, key_mask)
        kept = slice(x_BTD.shape[1], None)
        # copies: a view would keep all frames
        return self._joined(mixed), (k[:, :, kept].clone(), v[:, :, kept].clone())

    def _heads(self, x_BTD: Tensor) -> Iterator[Tensor]:
        """Queries, keys and values [B, H, T, K]."""
        parts = self.qkv(self.norm(x_BTD)).chunk(3, dim=-1)
        return (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)

    def _joined(self, mixed_BHTK: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.out(mixed_BHTK.transpose(1, 2).flatten(2)))
        return out
