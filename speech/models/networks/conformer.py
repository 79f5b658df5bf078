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
from speech.models.conformer import ChunkConfig, ConformerConfig
from speech.models.networks.attention import FeedForward, SelfAttention, rotary_tables
from speech.models.networks.base import AcousticModel, ModelStage
from speech.models.networks.dropout import Dropout
from speech.models.networks.lstm import Memory


class ConvModule(nn.Module):
    """Gated pointwise convolution, depthwise convolution over `kernel` frames, pointwise convolution.

    If the network streams, the depthwise convolution reads a frame and the `kernel` - 1 before it.
    """

    def __init__(self, cfg: ConformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(cfg.dim)
        self.gate = nn.Linear(cfg.dim, 2 * cfg.dim)
        self.before = cfg.kernel - 1 if cfg.streams else 0
        padding = 0 if cfg.streams else cfg.kernel // 2
        self.depthwise = nn.Conv1d(cfg.dim, cfg.dim, cfg.kernel, padding=padding, groups=cfg.dim)
        self.inner_norm = nn.LayerNorm(cfg.dim)
        self.out = nn.Linear(cfg.dim, cfg.dim)
        self.dropout = Dropout(cfg.dropout)

    def forward(self, x_BTD: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; `mask` [B, T, 1] is 0 in the padding."""
        x = F.glu(self.gate(self.norm(x_BTD)), dim=-1) * mask
        return self._convolved(F.pad(x, (0, 0, self.before, 0)) if self.before else x)

    def forward_chunk(self, x_BTD: Tensor, before_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, for frames that follow others, of which the `before` last gated ones are remembered."""
        x = torch.cat((before_BTD, F.glu(self.gate(self.norm(x_BTD)), dim=-1)), dim=1)
        return self._convolved(x), x[:, x.shape[1] - self.before :].clone()

    def _convolved(self, x_BTD: Tensor) -> Tensor:
        x = self.depthwise(x_BTD.transpose(1, 2)).transpose(1, 2)
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

    def forward(self, x: Tensor, mask_BT: Tensor, seen: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; `mask_BT` is False in the padding, `seen` is what `attend` reads."""
        x = x + 0.5 * self.feed_forward_in(x)
        x = x + self.attention(x, seen, cos, sin)
        x = x + self.conv(x, mask_BT[..., None].to(x.dtype))
        return self._finished(x)

    def forward_chunk(self, x: Tensor, memory: Memory, seen: Tensor) -> tuple[Tensor, Memory]:
        """As `forward`, for a chunk that follows others, of which keys, values and gated frames are remembered."""
        x = x + 0.5 * self.feed_forward_in(x)
        attended, keys_values = self.attention.forward_chunk(x, memory[:2], seen)
        x = x + attended
        convolved, gated = self.conv.forward_chunk(x, memory[2])
        return self._finished(x + convolved), (*keys_values, gated)

    def _finished(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feed_forward_out(x)
        out: Tensor = self.norm(x)
        return out


def chunk_mask(num_frames: int, chunk: int | Tensor, left: int, device: torch.device) -> Tensor:
    """Which frames may attend to which, if a chunk's attend to each other and to `left` before it: bool [T, T].

    Frame t is in the chunk that begins at s = C floor(t / C), and attends to frames s - `left` to s + C - 1.

    Args:
        num_frames: T.
        chunk: Frames of a chunk; a tensor if it was drawn on a device that nobody should wait for.
        left: Frames before the chunk.
        device: Where.
    """
    places = torch.arange(num_frames, device=device)
    starts = (torch.div(places, chunk, rounding_mode="floor") * chunk).unsqueeze(1)
    return (places < starts + chunk) & (places >= starts - left)


def drawn_chunk(num_frames: int, cfg: ChunkConfig, device: torch.device) -> Tensor:
    """Frames of a chunk for a batch of training, by torch's generator of the device, which the engine seeds.

    Dynamic chunk training (Zhang et al. 2020, arXiv:2012.05481): C = T, all frames, with probability `whole`, otherwise
    C ~ U{1, ..., `longest`}; WeNet has 0.5 and 25.

    Args:
        num_frames: Output frames of the longest utterance.
        cfg: Of the model.
        device: Where it is needed: the host does not wait for it, and CUDA graphs draw again in each replay.
    """
    whole = torch.rand((), device=device) < cfg.whole
    some = torch.randint(1, cfg.longest + 1, (), device=device)
    return torch.where(whole, max(1, num_frames), some)


def run_layers(
    layers: Iterable[nn.Module], x_BTD: Tensor, lengths: Tensor, cfg: ConformerConfig, chunk: int | Tensor = 0
) -> Tensor:
    """Run Conformer layers over subsampled frames [B, T, D] with `lengths` [B].

    Args:
        layers: The layers.
        x_BTD: The frames.
        lengths: Of each utterance.
        cfg: Of the model.
        chunk: Frames of a chunk; 0 if all frames attend to all.
    """
    # a length of 0 would mask every key, and the softmax would be NaN: such utterances get one (zero) frame
    mask_BT = frame_mask(lengths.clamp(min=1), x_BTD.shape[1])
    seen = mask_BT[:, None, None, :]
    if cfg.chunk is not None and (isinstance(chunk, Tensor) or chunk):
        chunks_TT = chunk_mask(x_BTD.shape[1], chunk, cfg.chunk.left, x_BTD.device)
        # padding attends to itself: with every key masked, the softmax would be NaN
        seen = (seen & chunks_TT) | torch.eye(x_BTD.shape[1], dtype=torch.bool, device=x_BTD.device)
    cos, sin = rotary_tables(x_BTD.shape[1], cfg.dim // cfg.heads, x_BTD.device)
    for layer in layers:
        x_BTD = layer(x_BTD, mask_BT, seen, cos, sin)
    return x_BTD


class Conformer(AcousticModel):
    """`cfg.layers` Conformer layers of width `cfg.dim` and a linear output layer.

    Attributes:
        offline_chunk: Output frames of a chunk when whole utterances are computed outside training; 0: all frames
            attend to all.
    """

    cfg: ConformerConfig
    stackable = True

    def __init__(self, cfg: ConformerConfig, num_features: int, vocab_size: int) -> None:
        super().__init__(cfg, num_features, vocab_size)
        self.dropout = Dropout(cfg.dropout)
        self.layers = nn.ModuleList(ConformerLayer(cfg) for _ in range(cfg.layers))
        self.output = nn.Linear(cfg.dim, vocab_size)
        self.offline_chunk = cfg.chunk.offline if cfg.chunk else 0

    @override
    def encode(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        chunk: int | Tensor = self.offline_chunk
        if self.training and self.cfg.chunk:
            chunk = drawn_chunk(x_BTD.shape[1], self.cfg.chunk, x_BTD.device)
        x_BTD = run_layers(self.layers, self.dropout(x_BTD), lengths, self.cfg, chunk)
        scores: Tensor = self.output(x_BTD)
        return scores

    @override
    def layers_before(self, batch: int) -> tuple[Memory, ...]:
        cfg, weight = self.cfg, next(self.parameters())
        assert cfg.chunk is not None
        keys = weight.new_zeros(batch, cfg.heads, cfg.chunk.left, cfg.dim // cfg.heads)
        gated = weight.new_zeros(batch, cfg.kernel - 1, cfg.dim)
        # the last one says how many of the keys are those of a frame
        return (*((keys, keys, gated) for _ in range(cfg.layers)), (weight.new_zeros(batch, 1),))

    @override
    def encode_chunk(self, x_BTD: Tensor, layers: tuple[Memory, ...], last: bool) -> tuple[Tensor, tuple[Memory, ...]]:
        assert self.cfg.chunk is not None
        left, frames = self.cfg.chunk.left, x_BTD.shape[1]
        *memories, (filled,) = layers
        if frames:
            places = torch.arange(-left, frames, device=x_BTD.device)
            seen = (places >= -filled)[:, None, None, :]
            for number, layer in enumerate(self.layers):
                assert isinstance(layer, ConformerLayer)
                x_BTD, memories[number] = layer.forward_chunk(x_BTD, memories[number], seen)
        scores: Tensor = self.output(x_BTD)
        return scores, (*memories, ((filled + frames).clamp(max=left),))

    @override
    def layer_of(self, parameter: str) -> int | None:
        part, _, rest = parameter.partition(".")
        return int(rest.partition(".")[0]) if part == "layers" else None

    @override
    def stage(self, layers: range) -> "ConformerStage":
        if self.cfg.unsplit:
            raise ValueError(self.cfg.unsplit)
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
