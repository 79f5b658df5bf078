"""What every decoder network promises: log probabilities of the next token, for whole texts and step by step.

Training gives it whole texts. A search extends several hypotheses of each utterance at once:

    cache = network.start(encoded_BTD, frames)
    log_probs_BWV, cache = network.step(tokens_BW, cache)
    cache = cache.reordered(parents_BW)  # hypothesis w goes on from what was hypothesis parents[w]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speech.features.cmvn import frame_mask
from speech.models.decoder_networks import DecoderNetworkConfig

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DecoderCache:
    """What a network need not compute again for the hypotheses of a batch."""

    encoder: list[KeysValues]
    """Keys and values of the encoder's frames, for each layer [batch, heads, frames, width]; hypotheses share them."""
    frame_mask: Tensor
    """Which frames are no padding, bool [batch, 1, 1, frames]."""
    tokens: list[KeysValues]
    """Keys and values of the tokens so far, for each layer [batch, hypotheses, heads, tokens, width]."""
    length: int = 0
    """Number of tokens so far."""

    def reordered(self, parents_BW: Tensor) -> DecoderCache:
        """The cache of hypotheses that go on from others of the same utterance.

        Args:
            parents_BW: Number of the hypothesis that each goes on from; there may be more or fewer than before.
        """
        rows = torch.arange(len(parents_BW), device=parents_BW.device).unsqueeze(1)
        return DecoderCache(
            self.encoder,
            self.frame_mask,
            [(keys[rows, parents_BW], values[rows, parents_BW]) for keys, values in self.tokens],
            self.length,
        )

    def utterances(self, rows: Tensor) -> DecoderCache:
        """The cache of some of the utterances, by their numbers [utterances]."""
        encoder, tokens = (
            [(keys[rows], values[rows]) for keys, values in layers] for layers in (self.encoder, self.tokens)
        )
        return DecoderCache(encoder, self.frame_mask[rows], tokens, self.length)


class DecoderNetwork(nn.Module, ABC):
    """Tokens so far and an encoder's frames in, natural log probabilities of the next token out.

    An utterance's results depend neither on padding nor on the other utterances of the batch.

    Attributes:
        most_tokens: Tokens of a text at most, what precedes it and its end included; 0 for any number.
    """

    most_tokens: int = 0

    def __init__(self, cfg: DecoderNetworkConfig, encoder_width: int, vocab_size: int) -> None:
        super().__init__()
        self.cfg, self.encoder_width, self.vocab_size = cfg, encoder_width, vocab_size

    @abstractmethod
    def forward(self, tokens_BL: Tensor, encoded_BTD: Tensor, frames: Tensor) -> Tensor:
        """Log probabilities of the token after each token of a text, float32 [batch, tokens, vocab_size].

        A token's result depends on the tokens before it only, so what pads short texts needs no mask.

        Args:
            tokens_BL: What the texts are preceded by, and their tokens.
            encoded_BTD: The encoder's frames; what stands beyond an utterance's is ignored.
            frames: Frames of each utterance [batch].
        """

    @abstractmethod
    def start(self, encoded_BTD: Tensor, frames: Tensor) -> DecoderCache:
        """The cache before the first token, of one hypothesis for each utterance; arguments as for `forward`."""

    @abstractmethod
    def step(self, tokens_BW: Tensor, cache: DecoderCache) -> tuple[Tensor, DecoderCache]:
        """Log probabilities after one more token of each hypothesis, float32 [batch, hypotheses, vocab_size].

        Args:
            tokens_BW: The tokens.
            cache: Of what precedes them.

        Returns:
            Log probabilities, and the cache with the tokens.
        """

    @abstractmethod
    def attention(self, tokens_BL: Tensor, encoded_BTD: Tensor, frames: Tensor) -> Tensor:
        """How much each token's heads attend to each frame [batch, heads, tokens, frames]; arguments as for `forward`.

        The heads are those that follow the speech: chosen ones of a pretrained network, or those of the upper half of
        the layers. The weights of a head and a token have the sum 1.
        """


def heard_frames(encoded_BTD: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """An encoder's frames, zero where there is padding, and their mask, bool [batch, 1, 1, frames].

    A softmax over no frames would be NaN: an utterance without frames gets a zero one.
    """
    if encoded_BTD.shape[1] == 0:
        encoded_BTD = encoded_BTD.new_zeros(encoded_BTD.shape[0], 1, encoded_BTD.shape[2])
    inside = frame_mask(frames, encoded_BTD.shape[1], encoded_BTD.device)
    heard = frame_mask(frames.clamp(min=1), encoded_BTD.shape[1], encoded_BTD.device)
    # filled, not multiplied: the padding may be infinite
    return encoded_BTD.masked_fill(~inside.unsqueeze(2), 0.0), heard[:, None, None, :]
