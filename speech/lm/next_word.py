"""Cross-entropy of each word of a text with the word that follows: what trains language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configurable.lazy import torch
from devices.transfers import beside
from speech.lm.vocabulary import END_ID

if TYPE_CHECKING:
    from torch import Tensor


def next_word_losses(outputs: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
    """The negative log probability of each word and of the sentences' ends, given the words before, by block.

    Args:
        outputs: Natural log probabilities of the following words [batch, at least longest block - 1, vocabulary].
        words: Numbers of words on the host [batch, longest block, 1], sentences from `<s>` to `</s>` one after the
            other.
        lengths: Words of each block on the host [batch], the special ones included.

    Returns:
        Sums over each block in nats [batch], on the outputs' device.
    """
    following, counted = (beside(mask, outputs) for mask in _following(words, lengths))
    # the last position has no successor, and a GPU's batches are padded further
    chosen = outputs[:, : following.shape[1]].gather(2, following.unsqueeze(2)).squeeze(2)
    return -chosen.masked_fill(~counted, 0.0).sum(dim=1)


def predicted_words(words: Tensor, lengths: Tensor) -> int:
    """How many words of blocks are predicted: those of `next_word_losses`, ends included and starts not."""
    return int(_following(words, lengths)[1].sum())


def _following(words: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The word after each word but a block's last one [batch, longest block - 1], and which of them count."""
    numbers = words.squeeze(2).long()
    inside = torch.arange(1, numbers.shape[1]) < lengths.unsqueeze(1)
    return numbers[:, 1:], inside & (numbers[:, :-1] != END_ID)
