"""The Transformer decoder (Vaswani et al. 2017, arXiv:1706.03762), ours and Whisper's.

Normalization comes before each module (Xiong et al. 2020, arXiv:2002.04745), which trains without a long warm-up. Keys
have no bias: it would add the same number to all scores of a query. Modules have the names of Hugging Face's Whisper,
whose weights load as they are.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from speech.models.decoder_networks import DecoderNetworkConfig
from speech.models.networks.attention import attend
from speech.models.networks.decoder import DecoderCache, DecoderNetwork, KeysValues, heard_frames
from speech.models.networks.dropout import Dropout


class HeadAttention(nn.Module):
    """Multi-head attention from tokens to a sequence: the tokens themselves, or an encoder's frames.

    Args:
        dim: Width of a token.
        heads: Attention heads.
        source_dim: Width of the sequence that is attended to.
    """

    def __init__(self, dim: int, heads: int, source_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(source_dim, dim, bias=False)
        self.v_proj = nn.Linear(source_dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def _split(self, x: Tensor) -> Tensor:
        """[..., T, D] -> [..., heads, T, width]."""
        return x.reshape(*x.shape[:-1], self.heads, -1).transpose(-3, -2)

    def keys_values(self, source: Tensor) -> KeysValues:
        """What can be attended to in a sequence [..., T, source_dim]: keys and values [..., heads, T, width]."""
        return self._split(self.k_proj(source)), self._split(self.v_proj(source))

    def forward(self, x: Tensor, source: KeysValues, mask: Tensor) -> Tensor:
        """[..., L, D] -> [..., L, D]; `mask` is True where a token may attend to an element."""
        mixed = attend(self._split(self.q_proj(x)), *source, mask)
        out: Tensor = self.out_proj(mixed.transpose(-3, -2).flatten(-2))
        return out

    def weights(self, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """How much each token attends to each element [..., heads, L, T]."""
        queries = self._split(self.q_proj(x))
        scores = queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5
        shares: Tensor = scores.float().masked_fill(~mask, -torch.inf).softmax(dim=-1)
        return shares


class TransformerDecoderLayer(nn.Module):
    """Attention to the tokens before, attention to the encoder's frames, and a feed-forward module.

    Args:
        cfg: Sizes.
        encoder_width: Width of the encoder's frames.
    """

    def __init__(self, cfg: DecoderNetworkConfig, encoder_width: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(cfg.dim, cfg.heads, cfg.dim)
        self.self_attn_layer_norm = nn.LayerNorm(cfg.dim)
        self.encoder_attn = HeadAttention(cfg.dim, cfg.heads, encoder_width)
        self.encoder_attn_layer_norm = nn.LayerNorm(cfg.dim)
        self.fc1 = nn.Linear(cfg.dim, cfg.feed_forward * cfg.dim)
        self.fc2 = nn.Linear(cfg.feed_forward * cfg.dim, cfg.dim)
        self.final_layer_norm = nn.LayerNorm(cfg.dim)
        self.dropout = Dropout(cfg.dropout)

    def attend_to_tokens(self, x: Tensor, own: KeysValues, own_mask: Tensor) -> Tensor:
        """Tokens [..., L, D] with what they take from the tokens up to themselves."""
        mixed: Tensor = self.dropout(self.self_attn(self.self_attn_layer_norm(x), own, own_mask))
        return x + mixed

    def own(self, x: Tensor) -> KeysValues:
        """What later tokens can attend to in tokens [..., L, D]."""
        return self.self_attn.keys_values(self.self_attn_layer_norm(x))

    def attend_to_frames(self, x: Tensor, encoder: KeysValues, frame_mask: Tensor) -> Tensor:
        """Tokens [B, L, D] with what they take from the encoder's frames, through the feed-forward module."""
        x = x + self.dropout(self.encoder_attn(self.encoder_attn_layer_norm(x), encoder, frame_mask))
        hidden = self.dropout(F.gelu(self.fc1(self.final_layer_norm(x))))
        out: Tensor = x + self.dropout(self.fc2(hidden))
        return out


class TransformerDecoder(DecoderNetwork):
    """`cfg.layers` layers between embeddings with sinusoidal positions and a linear output layer."""

    def __init__(self, cfg: DecoderNetworkConfig, encoder_width: int, vocab_size: int) -> None:
        super().__init__(cfg, encoder_width, vocab_size)
        self.embed_tokens = nn.Embedding(vocab_size, cfg.dim)
        nn.init.normal_(self.embed_tokens.weight, std=cfg.dim**-0.5)
        self.layers = nn.ModuleList(TransformerDecoderLayer(cfg, encoder_width) for _ in range(cfg.layers))
        self.layer_norm = nn.LayerNorm(cfg.dim)
        self.dropout = Dropout(cfg.dropout)
        self._add_ends()

    def _add_ends(self) -> None:
        """Make what maps positions to vectors and vectors to scores."""
        self.output = nn.Linear(self.cfg.dim, self.vocab_size)

    @property
    def _layers(self) -> list[TransformerDecoderLayer]:
        return cast(list[TransformerDecoderLayer], list(self.layers))

    def positions(self, first: int, count: int) -> Tensor:
        """Vectors [count, D] of consecutive positions."""
        dim, weight = self.cfg.dim, self.embed_tokens.weight
        rates = torch.exp(torch.arange(0, dim, 2, device=weight.device) * (-math.log(10000.0) / dim))
        angles = torch.arange(first, first + count, device=weight.device).unsqueeze(1) * rates
        return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1).to(weight.dtype)

    def _embedded(self, tokens: Tensor, first: int) -> Tensor:
        """Tokens [..., L] with their positions from `first` on, as vectors [..., L, D]."""
        vectors = self.embed_tokens(tokens) * math.sqrt(self.cfg.dim)
        out: Tensor = self.dropout(vectors + self.positions(first, tokens.shape[-1]))
        return out

    def scores(self, x: Tensor) -> Tensor:
        """Unnormalized scores of tokens [..., V] for normalized vectors [..., D]."""
        out: Tensor = self.output(x)
        return out

    def _log_probs(self, x: Tensor) -> Tensor:
        return self.scores(self.layer_norm(x)).float().log_softmax(dim=-1)

    @override
    def forward(self, tokens_BL: Tensor, encoded_BTD: Tensor, frames: Tensor) -> Tensor:
        cache = self.start(encoded_BTD, frames)
        x, causal = self._embedded(tokens_BL, 0), _causal(tokens_BL)
        for layer, encoder in zip(self._layers, cache.encoder, strict=True):
            x = layer.attend_to_frames(layer.attend_to_tokens(x, layer.own(x), causal), encoder, cache.frame_mask)
        return self._log_probs(x)

    @override
    def start(self, encoded_BTD: Tensor, frames: Tensor) -> DecoderCache:
        encoded_BTD, mask = heard_frames(encoded_BTD, frames)
        encoder = [layer.encoder_attn.keys_values(encoded_BTD) for layer in self._layers]
        keys, values = encoder[0]
        nothing = (x.new_zeros(len(x), 1, *x.shape[1:])[:, :, :, :0] for x in (keys, values))
        return DecoderCache(encoder, mask, [tuple(nothing)] * len(self._layers))  # type: ignore[list-item]

    @override
    def step(self, tokens_BW: Tensor, cache: DecoderCache) -> tuple[Tensor, DecoderCache]:
        x = self._embedded(tokens_BW.unsqueeze(2), cache.length)  # [B, W, 1, D]
        everything = torch.ones(1, dtype=torch.bool, device=x.device)
        tokens: list[KeysValues] = []
        for layer, encoder, before in zip(self._layers, cache.encoder, cache.tokens, strict=True):
            keys, values = (torch.cat(pair, dim=3) for pair in zip(before, layer.own(x), strict=True))
            tokens.append((keys, values))
            x = layer.attend_to_tokens(x, (keys, values), everything)
            # an utterance's hypotheses are queries of the same frames, whose keys are stored once
            x = layer.attend_to_frames(x.squeeze(2), encoder, cache.frame_mask).unsqueeze(2)
        return self._log_probs(x.squeeze(2)), DecoderCache(cache.encoder, cache.frame_mask, tokens, cache.length + 1)

    @property
    def timing_heads(self) -> list[tuple[int, int]]:
        """Layer and number of each head that follows the speech."""
        return [
            (layer, head) for layer in range(self.cfg.layers // 2, self.cfg.layers) for head in range(self.cfg.heads)
        ]

    @override
    def attention(self, tokens_BL: Tensor, encoded_BTD: Tensor, frames: Tensor) -> Tensor:
        cache = self.start(encoded_BTD, frames)
        x, causal = self._embedded(tokens_BL, 0), _causal(tokens_BL)
        heads = self.timing_heads
        by_head: dict[tuple[int, int], Tensor] = {}
        for number, (layer, encoder) in enumerate(zip(self._layers, cache.encoder, strict=True)):
            x = layer.attend_to_tokens(x, layer.own(x), causal)
            weights = layer.encoder_attn.weights(layer.encoder_attn_layer_norm(x), encoder[0], cache.frame_mask)
            by_head |= {(number, head): weights[:, head] for at, head in heads if at == number}
            x = layer.attend_to_frames(x, encoder, cache.frame_mask)
        return torch.stack([by_head[place] for place in heads], dim=1)


def _causal(tokens_BL: Tensor) -> Tensor:
    """Which tokens each token may attend to: itself and those before, bool [L, L]."""
    count = tokens_BL.shape[1]
    return torch.ones(count, count, dtype=torch.bool, device=tokens_BL.device).tril()
