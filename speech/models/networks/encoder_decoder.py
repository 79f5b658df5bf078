"""An acoustic model and a decoder network that attends to its frames, trained together."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from typing_extensions import override

from speech.models.decoder_networks import DecoderNetworkConfig
from speech.models.networks.base import AcousticModel, TrainableNetwork
from speech.objectives.attention import joint_outputs

SPARE_OUTPUTS = 2
"""Outputs of an acoustic model whose output layer is not used."""


class EncoderDecoder(TrainableNetwork):
    """An encoder, CTC's output layer if there is one, and a decoder network.

    Args:
        encoder: An acoustic model. Its output layer becomes CTC's, or goes: the decoder network attends to what that
            layer reads.
        decoder: The decoder network's configuration.
        vocab_size: Tokens, the one that ends a text included.
        num_start: How many tokens precede every text.
        ctc: Whether the encoder has CTC.
    """

    def __init__(
        self, encoder: AcousticModel, decoder: DecoderNetworkConfig, vocab_size: int, num_start: int, ctc: bool
    ) -> None:
        super().__init__()
        output = encoder.output
        assert isinstance(output, nn.Linear), "acoustic models end with a linear layer"
        self.encoder, self.ctc = encoder, output if ctc else None
        encoder.output = nn.Identity()
        self.decoder = decoder.build(output.in_features, vocab_size)
        self._num_start = num_start

    def encode(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The frames that are attended to [B, T', D], and their numbers [B]; arguments as for `AcousticModel`."""
        return self.encoder.outputs(feats_BTF, lengths)

    def posteriors(self, encoded_BTD: Tensor) -> Tensor | None:
        """Natural log posteriors of tokens by CTC [B, T', vocab_size] in float32; None without CTC."""
        return None if self.ctc is None else self.ctc(encoded_BTD).float().log_softmax(dim=-1)

    def outputs(self, encoded_BTD: Tensor, frames: Tensor, tokens_BL: Tensor) -> Tensor:
        """What `forward` gives, for what `encode` gave."""
        decoded = self.decoder(tokens_BL, encoded_BTD, frames)
        return joint_outputs(self.posteriors(encoded_BTD), decoded[:, self._num_start - 1 :])

    @override
    def forward(self, feats_BTF: Tensor, lengths: Tensor, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities of frames by CTC and of the tokens' places, see `joint_outputs`.

        Args:
            feats_BTF: Features, zero beyond each length.
            lengths: Feature frames of each utterance [batch].
            tokens_BL: What precedes the transcripts, and their tokens; what pads them may be any tokens.

        Returns:
            [batch, output frames + most tokens + 1, vocab_size], and the output frames of each utterance [batch].
        """
        encoded_BTD, frames = self.encode(feats_BTF, lengths)
        return self.outputs(encoded_BTD, frames, tokens_BL), frames

    @override
    def own_names(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if any(name.startswith("encoder.") for name in weights):
            return dict(weights)
        # an acoustic model's output layer is CTC's
        return {
            name if first == "decoder" else f"ctc.{rest}" if first == "output" else f"encoder.{name}": tensor
            for name, tensor in weights.items()
            for first, _, rest in (name.partition("."),)
        }

    @property
    @override
    def output_rows(self) -> tuple[str, ...]:
        ends = ("ctc.weight", "ctc.bias", "decoder.embed_tokens.weight", "decoder.output.weight", "decoder.output.bias")
        return tuple(name for name in self.state_dict() if name in ends)

    @override
    def num_frames(self, lengths: Tensor) -> Tensor:
        return self.encoder.num_frames(lengths)

    @override
    def constrain(self) -> None:
        self.encoder.constrain()
