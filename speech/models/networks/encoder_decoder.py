"""An acoustic model and a network of tokens that reads its frames, trained together, and CTC beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from speech.models.decoder_networks import DecoderNetworkConfig
from speech.models.networks.base import AcousticModel, TrainableNetwork
from speech.objectives.attention import joint_outputs

SPARE_OUTPUTS = 2
"""Outputs of an acoustic model whose output layer is not used."""


class EncoderWithCtc(TrainableNetwork, ABC):
    """An encoder whose frames other parts read together with tokens, and CTC's output layer if there is one.

    Args:
        encoder: An acoustic model. Its output layer becomes CTC's, or goes: the other parts read what that layer reads.
        ctc: Whether the encoder has CTC.

    Attributes:
        parts: Names of the other parts.
        token_rows: Those of the other parts' parameters that have a row for each token.
        width: Width of the encoder's frames.
    """

    parts: ClassVar[tuple[str, ...]]
    token_rows: ClassVar[tuple[str, ...]]

    def __init__(self, encoder: AcousticModel, ctc: bool) -> None:
        super().__init__()
        output = encoder.output
        assert isinstance(output, nn.Linear), "acoustic models end with a linear layer"
        self.encoder, self.ctc, self.width = encoder, output if ctc else None, output.in_features
        encoder.output = nn.Identity()

    def encode(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The frames that the other parts read [B, T', D], and their numbers [B]; arguments as for `AcousticModel`."""
        return self.encoder.outputs(feats_BTF, lengths)

    def posteriors(self, encoded_BTD: Tensor) -> Tensor | None:
        """Natural log posteriors of tokens by CTC [B, T', vocab_size] in float32; None without CTC."""
        return None if self.ctc is None else self.ctc(encoded_BTD).float().log_softmax(dim=-1)

    @abstractmethod
    def outputs(self, encoded_BTD: Tensor, frames: Tensor, tokens_BL: Tensor) -> Tensor:
        """What `forward` gives, for what `encode` gave."""

    @override
    def forward(self, feats_BTF: Tensor, lengths: Tensor, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        """What the objective reads, and the output frames of each utterance [batch].

        Args:
            feats_BTF: Features, zero beyond each length.
            lengths: Feature frames of each utterance [batch].
            tokens_BL: What precedes the transcripts, and their tokens; what pads them may be any tokens.
        """
        encoded_BTD, frames = self.encode(feats_BTF, lengths)
        return self.outputs(encoded_BTD, frames, tokens_BL), frames

    @override
    def own_names(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if any(name.startswith("encoder.") for name in weights):
            return dict(weights)
        # an acoustic model's output layer is CTC's
        return {
            name if first in self.parts else f"ctc.{rest}" if first == "output" else f"encoder.{name}": tensor
            for name, tensor in weights.items()
            for first, _, rest in (name.partition("."),)
        }

    @property
    @override
    def output_rows(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name in ("ctc.weight", "ctc.bias", *self.token_rows))

    @override
    def num_frames(self, lengths: Tensor) -> Tensor:
        return self.encoder.num_frames(lengths)

    @override
    def constrain(self) -> None:
        self.encoder.constrain()


class EncoderDecoder(EncoderWithCtc):
    """An encoder, CTC's output layer if there is one, and a decoder network that attends to the encoder's frames.

    Args:
        encoder: An acoustic model.
        decoder: The decoder network's configuration.
        vocab_size: Tokens, the one that ends a text included.
        num_start: How many tokens precede every text.
        ctc: Whether the encoder has CTC.
        opening: Place of the token behind which the language is predicted, if it is.
    """

    parts = ("decoder",)
    token_rows = ("decoder.embed_tokens.weight", "decoder.output.weight", "decoder.output.bias")

    def __init__(
        self,
        encoder: AcousticModel,
        decoder: DecoderNetworkConfig,
        vocab_size: int,
        num_start: int,
        ctc: bool,
        opening: int | None = None,
    ) -> None:
        super().__init__(encoder, ctc)
        self.decoder = decoder.build(self.width, vocab_size)
        self._num_start, self._opening = num_start, opening

    @override
    def outputs(self, encoded_BTD: Tensor, frames: Tensor, tokens_BL: Tensor) -> Tensor:
        """Log probabilities of frames by CTC and of the tokens' places, see `joint_outputs`.

        Returns:
            [batch, output frames + most tokens + 1, vocab_size]; one place more if languages are predicted.
        """
        decoded = self.decoder(tokens_BL, encoded_BTD, frames)
        wanted = decoded[:, self._num_start - 1 :]
        if self._opening is not None:
            wanted = torch.cat((decoded[:, self._opening : self._opening + 1], wanted), dim=1)
        return joint_outputs(self.posteriors(encoded_BTD), wanted)
