"""Cross-entropy of each word of a text with the word that follows: what trains language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

from typing_extensions import override

from configurable.lazy import torch
from devices.transfers import beside
from speech.lm.vocabulary import END_ID
from speech.objectives.base import Objective, ObjectiveConfig, Targets

if TYPE_CHECKING:
    from torch import Tensor


class NextWordConfig(ObjectiveConfig):
    """Cross-entropy with the following word, for language models."""

    kind: Literal["next_word"] = "next_word"
    outputs: ClassVar[str] = "words"
    needs: ClassVar[Literal["tokens", "states", "inputs"]] = "inputs"

    @override
    def build(self) -> Objective:
        return NextWord(self)


@runtime_checkable
class TextTargets(Protocol):
    """Blocks of text, which objectives get that need `inputs`.

    Attributes:
        inputs: Numbers of words [batch, longest block, 1], sentences from `<s>` to `</s>` one after the other.
        lengths: Words of each block [batch], the special ones included.
    """

    inputs: Tensor
    lengths: Tensor


class NextWord(Objective):
    """The negative log probability of each word and of the sentences' ends, given the words before."""

    @override
    def losses(self, outputs: Tensor, frames: Tensor, targets: Targets) -> tuple[Tensor, int]:
        following, counted = (beside(one, outputs) for one in _following(targets))
        # the last position has no successor, and a GPU's batches are padded further
        chosen = outputs[:, : following.shape[1]].gather(2, following.unsqueeze(2)).squeeze(2)
        return -chosen.masked_fill(~counted, 0.0).sum(dim=1), 0

    @override
    def items(self, targets: Targets) -> int:
        return int(_following(targets)[1].sum())


def _following(targets: Targets) -> tuple[Tensor, Tensor]:
    """The word after each word but a block's last one [batch, longest block - 1], and which of them count."""
    assert isinstance(targets, TextTargets)
    words = targets.inputs.squeeze(2).long()
    inside = torch.arange(1, words.shape[1]) < targets.lengths.cpu().unsqueeze(1)
    return words[:, 1:], inside.to(words.device) & (words[:, :-1] != END_ID)
