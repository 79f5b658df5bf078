"""A recognizer: features, encoder, decoder. All that turn audio into text use this one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speech.bundle import BundleSpec, load_bundle, own_decoder
from speech.decoding import DecodeConfig, Hypothesis, build_decoder
from speech.features.cmvn import CmvnStats
from speech.frontend import FrontEnd


class Scores(NamedTuple):
    """What an encoder says of several utterances, on the CPU."""

    log_probs: Tensor
    """Log posteriors [batch, frames, tokens]."""
    frames: Tensor
    """Frames of each utterance [batch]."""
    starts: Tensor
    """Seconds of each recording before its first frame [batch]."""


class Recognizer:
    """A bundle's model, ready to use.

    Args:
        spec: What the bundle says.
        model: The encoder.
        decode: Decoding parameters, instead of the bundle's own.
        device: Where the encoder runs, for example `cpu` or `cuda`.
        speakers: Statistics by speaker, for `cmvn: speaker`.
    """

    def __init__(
        self,
        spec: BundleSpec,
        model: nn.Module,
        decode: DecodeConfig | None = None,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        self.model = model.to(self.device)
        self.frontend: FrontEnd = spec.build_frontend(dict(speakers or {})).to(self.device)
        self.tokenizer = spec.build_tokenizer()
        self.decoder = build_decoder(decode or spec.decode, self.tokenizer)

    @classmethod
    def load(
        cls,
        folder: Path,
        decode: DecodeConfig | None = None,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> "Recognizer":
        """A recognizer from a bundle's folder; see the class for the arguments.

        Raises:
            BundleError: The folder is no bundle, or it is damaged.
        """
        spec, model = load_bundle(Path(folder))
        return cls(spec, model, decode or own_decoder(Path(folder)), device, speakers)

    @property
    def frame_seconds(self) -> float:
        """Seconds between two frames of the encoder's output."""
        return self.spec.model.subsampling * self.spec.features.stride * self.spec.features.hop_ms / 1000

    @torch.inference_mode()
    def scores(self, inputs: Tensor, lengths: Tensor, speakers: Sequence[str] | None = None) -> Scores:
        """What the encoder says of utterances, whose pauses at the edges are made equally long first.

        Args:
            inputs: Waveforms [batch, samples] in ±1, or stored features [batch, frames, F].
            lengths: Samples or frames of each [batch].
            speakers: Of each, for `cmvn: speaker`.
        """
        feats, num_frames, starts = self.frontend.trimmed(inputs.to(self.device), lengths.to(self.device), speakers)
        log_probs, frames = self.model(feats, num_frames)
        return Scores(log_probs.cpu(), frames.cpu(), starts.cpu())

    def decode(self, scores: Scores) -> list[Hypothesis]:
        """The best hypothesis of each utterance.

        Raises:
            DecodeError: Scores are not finite.
        """
        return self.decoder.decode(scores.log_probs, scores.frames)
