"""A transducer (Graves 2012, arXiv:1211.3711): an encoder, a predictor, and a joiner that scores every pair of both.

For each frame and beginning of a text, the joiner scores the next token and the blank, which goes on to the next frame.
Training needs that for all frames and all beginnings, [batch, frames, tokens + 1, vocabulary] values, of which the loss
reads two for each pair. These two are computed for some frames at a time, and again in the backward pass, so that
nothing larger than `joint_bytes` is ever there at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from speech.models.networks.base import AcousticModel
from speech.models.networks.encoder_decoder import EncoderWithCtc
from speech.models.predictors import PredictorConfig
from speech.objectives.transducer import joint_lattice


class Joiner(nn.Module):
    """Scores of the next token, given a frame and the tokens so far: an output layer over tanh of the sum of both.

    Args:
        encoder_width: Width of the encoder's frames.
        predictor_width: Width of the predictor's vectors.
        dim: Width of the sum.
        vocab_size: Tokens, the blank included.
    """

    def __init__(self, encoder_width: int, predictor_width: int, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(encoder_width, dim)
        self.predictor = nn.Linear(predictor_width, dim, bias=False)
        self.output = nn.Linear(dim, vocab_size)

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Unnormalized scores in float32 [..., vocab_size] of what `encoder` and `predictor` gave [..., dim]."""
        scores: Tensor = self.output(torch.tanh(encoded + predicted))
        return scores.float()

    def bytes_of_pair(self) -> int:
        """Memory that a frame and a beginning of the text need at once in the backward pass, at most."""
        vocab, dim = self.output.weight.shape
        return 4 * (4 * vocab + 3 * dim)


class Transducer(EncoderWithCtc):
    """An encoder, CTC's output layer if there is one, a predictor, and a joiner.

    Args:
        encoder: An acoustic model.
        predictor: The predictor's configuration.
        joint_dim: Width of the joiner.
        vocab_size: Tokens, the blank included.
        ctc: Whether the encoder has CTC.

    Attributes:
        joint_bytes: Memory for the joiner's values in a training step.
    """

    parts = ("predictor", "joiner")
    token_rows = ("predictor.embedding.weight", "joiner.output.weight", "joiner.output.bias")
    joint_bytes = 1 << 30

    def __init__(
        self, encoder: AcousticModel, predictor: PredictorConfig, joint_dim: int, vocab_size: int, ctc: bool
    ) -> None:
        super().__init__(encoder, ctc)
        self.predictor = predictor.build(vocab_size)
        self.joiner = Joiner(self.width, self.predictor.width, joint_dim, vocab_size)

    @override
    def outputs(self, encoded_BTD: Tensor, frames: Tensor, tokens_BL: Tensor) -> Tensor:
        """Log probabilities by CTC, and of the blank and the next token for each beginning of the text.

        Returns:
            See `joint_lattice`.
        """
        predicted_BLJ = self.joiner.predictor(self.predictor(tokens_BL))
        lattice = self._lattice(self.joiner.encoder(encoded_BTD), predicted_BLJ, tokens_BL)
        return joint_lattice(self.posteriors(encoded_BTD), lattice)

    # the number of parts depends on the sizes: each would need a program of its own
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _lattice(self, encoded_BTJ: Tensor, predicted_BLJ: Tensor, tokens_BL: Tensor) -> Tensor:
        """Log probabilities of the blank and of the next token [batch, frames, tokens + 1, 2]."""
        most = max(1, self.joint_bytes // (tokens_BL.numel() * self.joiner.bytes_of_pair()))
        given = predicted_BLJ, nn.functional.pad(tokens_BL[:, 1:], (0, 1))
        if encoded_BTJ.shape[1] <= most:
            return self._pairs(encoded_BTJ, *given)
        parts = [
            # nothing random is in it
            checkpoint(self._pairs, part, *given, use_reentrant=False, preserve_rng_state=False)
            if torch.is_grad_enabled()
            else self._pairs(part, *given)
            for part in torch.split(encoded_BTJ, most, dim=1)
        ]
        return torch.cat(parts, dim=1)

    def _pairs(self, encoded_BTJ: Tensor, predicted_BLJ: Tensor, next_BL: Tensor) -> Tensor:
        """What `_lattice` gives, for some frames; `next_BL` are the next tokens."""
        scores_BTLV = self.joiner(encoded_BTJ.unsqueeze(2), predicted_BLJ.unsqueeze(1))
        either = torch.stack((torch.zeros_like(next_BL), next_BL), dim=2).unsqueeze(1)
        chosen = scores_BTLV.gather(3, either.expand(-1, scores_BTLV.shape[1], -1, -1))
        pairs: Tensor = chosen - scores_BTLV.logsumexp(dim=3, keepdim=True)
        return pairs
