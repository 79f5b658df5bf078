"""A transducer (Graves 2012, arXiv:1211.3711): an encoder, a predictor, and a joiner that scores every pair of both.

For each frame and beginning of a text, the joiner scores the next token and the blank, which goes on to the next frame.
Training needs that for all frames and all beginnings, [batch, frames, tokens + 1, vocabulary] values, of which the loss
reads two for each pair. These two are computed for some frames at a time, and again in the backward pass, so that
nothing larger than `joint_bytes` is ever there at once. A pruned training computes them in a band of places only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from devices.transfers import on_host
from speech.models.networks.base import AcousticModel
from speech.models.networks.encoder_decoder import EncoderWithCtc
from speech.models.predictors import PredictorConfig
from speech.objectives.transducer import band_starts, band_width, joint_lattice, spread_band


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


class SimpleJoiner(nn.Module):
    """Scores of the next token that are a sum of the frame's and of those of the tokens so far.

    So what normalizes them is one product of matrices for all pairs (the "trivial joiner" of Kuang et al. 2022). It
    chooses the band of a pruned training, and is of no use afterwards.

    Args:
        encoder_width: Width of the encoder's frames.
        predictor_width: Width of the predictor's vectors.
        vocab_size: Tokens, the blank included.
    """

    def __init__(self, encoder_width: int, predictor_width: int, vocab_size: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(encoder_width, vocab_size)
        self.predictor = nn.Linear(predictor_width, vocab_size, bias=False)

    def forward(self, encoded_BTD: Tensor, predicted_BLP: Tensor, next_BL: Tensor) -> Tensor:
        """Log probabilities of the blank and of the next token [batch, frames, tokens + 1, 2] in float32."""
        frames_BTV, places_BLV = self.encoder(encoded_BTD).float(), self.predictor(predicted_BLP).float()
        best_BT1, best_BL1 = (scores.detach().amax(2, keepdim=True) for scores in (frames_BTV, places_BLV))
        with torch.autocast(frames_BTV.device.type, enabled=False):
            sums_BTL = (frames_BTV - best_BT1).exp() @ (places_BLV - best_BL1).exp().transpose(1, 2)
        # both may prefer what the other one excludes
        log_BTL = sums_BTL.clamp(min=torch.finfo(torch.float32).tiny).log() + best_BT1 + best_BL1.transpose(1, 2)
        blank_BTL = frames_BTV[:, :, :1] + places_BLV[:, None, :, 0]
        spoken_BTL = frames_BTV.gather(2, next_BL.unsqueeze(1).expand(-1, frames_BTV.shape[1], -1))
        spoken_BTL = spoken_BTL + places_BLV.gather(2, next_BL.unsqueeze(2)).transpose(1, 2)
        return torch.stack((blank_BTL - log_BTL, spoken_BTL - log_BTL), dim=3)


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
        simple: Chooses the band of a pruned training; None if the joiner scores all pairs.
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
        self.simple: SimpleJoiner | None = None
        self._prune_range = 0

    def prune(self, prune_range: int) -> None:
        """Let training score `prune_range` places of the text in each frame, with a new simple joiner."""
        vocab_size = self.joiner.output.out_features
        self.simple, self._prune_range = SimpleJoiner(self.width, self.predictor.width, vocab_size), prune_range

    @override
    def outputs(self, encoded_BTD: Tensor, frames: Tensor, tokens_BL: Tensor) -> Tensor:
        """Log probabilities by CTC, and of the blank and the next token for each beginning of the text.

        The tokens are padded with blanks.

        Returns:
            See `joint_lattice`; the lattices of both joiners in a pruned training.
        """
        predicted_BLP = self.predictor(tokens_BL)
        given = self.joiner.encoder(encoded_BTD), self.joiner.predictor(predicted_BLP)
        next_BL = nn.functional.pad(tokens_BL[:, 1:], (0, 1))
        posteriors = self.posteriors(encoded_BTD)
        if self.simple is None or not self.training:
            return joint_lattice(posteriors, self._lattice(*given, next_BL))
        simple = self.simple(encoded_BTD, predicted_BLP, next_BL)
        return joint_lattice(posteriors, simple, self._pruned(*given, next_BL, simple, frames))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pruned(
        self, encoded_BTJ: Tensor, predicted_BLJ: Tensor, next_BL: Tensor, simple_BTL2: Tensor, frames: Tensor
    ) -> Tensor:
        """What `_lattice` gives, in the band that the simple joiner's lattice chooses."""
        lengths = on_host("frames", frames), on_host("token_lengths", (next_BL > 0).sum(1))
        width, num_places = band_width(self._prune_range, *lengths), next_BL.shape[1]
        if width >= num_places:
            whole: Tensor = self._lattice(encoded_BTJ, predicted_BLJ, next_BL)
            return whole
        starts_BT = band_starts(simple_BTL2, *lengths, width)
        places_BTS = starts_BT.unsqueeze(2) + torch.arange(width, device=starts_BT.device)
        band: Tensor = self._lattice(encoded_BTJ, predicted_BLJ, next_BL, places_BTS)
        return spread_band(band, places_BTS, num_places)

    # the number of parts depends on the sizes: each would need a program of its own
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _lattice(
        self, encoded_BTJ: Tensor, predicted_BLJ: Tensor, next_BL: Tensor, places_BTS: Tensor | None = None
    ) -> Tensor:
        """Log probabilities of the blank and of the next token [batch, frames, tokens + 1, 2].

        Args:
            encoded_BTJ: What the joiner's part for the encoder gave.
            predicted_BLJ: What its part for the predictor gave.
            next_BL: The next tokens.
            places_BTS: The places of the text in which they are computed in each frame, instead of all.
        """
        pairs_of_frame = (next_BL if places_BTS is None else places_BTS[:, 0]).numel()
        most = max(1, self.joint_bytes // (pairs_of_frame * self.joiner.bytes_of_pair()))
        if encoded_BTJ.shape[1] <= most:
            return self._pairs(encoded_BTJ, predicted_BLJ, next_BL, places_BTS)
        frames = torch.split(encoded_BTJ, most, dim=1)
        places = [None] * len(frames) if places_BTS is None else torch.split(places_BTS, most, dim=1)
        parts = [
            # nothing random is in it
            checkpoint(self._pairs, part, predicted_BLJ, next_BL, some, use_reentrant=False, preserve_rng_state=False)
            if torch.is_grad_enabled()
            else self._pairs(part, predicted_BLJ, next_BL, some)
            for part, some in zip(frames, places, strict=True)
        ]
        return torch.cat(parts, dim=1)

    def _pairs(self, encoded_BTJ: Tensor, predicted_BLJ: Tensor, next_BL: Tensor, places_BTS: Tensor | None) -> Tensor:
        """What `_lattice` gives, for some frames."""
        predicted_BTLJ, next_BTL = predicted_BLJ.unsqueeze(1), next_BL.unsqueeze(1)
        if places_BTS is not None:
            rows = torch.arange(len(next_BL), device=next_BL.device)[:, None, None]
            predicted_BTLJ, next_BTL = predicted_BLJ[rows, places_BTS], next_BL[rows, places_BTS]
        scores_BTLV = self.joiner(encoded_BTJ.unsqueeze(2), predicted_BTLJ)
        either = torch.stack((torch.zeros_like(next_BTL), next_BTL), dim=3)
        chosen = scores_BTLV.gather(3, either.expand(-1, scores_BTLV.shape[1], -1, -1))
        pairs: Tensor = chosen - scores_BTLV.logsumexp(dim=3, keepdim=True)
        return pairs
