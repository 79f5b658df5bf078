"""The recognizer: features, encoder and decoder. Everything that turns audio into text uses it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from devices.padding import frame_multiple, rounded_up
from recognition.bundle import BundleSpec, load_bundle, own_decoder
from recognition.long_utterances import scores_in_pieces
from speech.decoding import DecodeConfig, Decoder, GraphDecoder, Hypothesis, build_decoder
from speech.features.cmvn import CmvnStats
from speech.frontend import FrontEnd

if TYPE_CHECKING:
    from recognition.adaptation import SpeakerAdapter
    from speech.hmm.ivector import IvectorExtractor
    from speech.hmm.model import HmmModel


class Scores(NamedTuple):
    """Encoder outputs of a batch of utterances, on the CPU."""

    log_probs: Tensor
    """Log posteriors [batch, frames, tokens or states]."""
    frames: Tensor
    """Frames of each utterance [batch]."""
    starts: Tensor
    """Start time of each utterance's first frame within its recording, in seconds [batch]."""


class Recognizer:
    """A bundle's model, ready to use.

    Args:
        spec: The bundle's contents without the weights.
        model: The acoustic model.
        decode: Decoding parameters; the bundle's own by default.
        device: Device of the model, for example `cpu` or `cuda`.
        speakers: Statistics by speaker, for `cmvn: speaker`.
        hmm: The GMM-HMM that makes the features, if they are adapted to speakers.
        extractor: Of the i-vectors among the features, if there are any.
    """

    def __init__(
        self,
        spec: BundleSpec,
        model: nn.Module,
        decode: DecodeConfig | None = None,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
        hmm: "HmmModel | None" = None,
        extractor: "IvectorExtractor | None" = None,
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        self.model = model.to(self.device)
        self.frontend: FrontEnd = spec.build_frontend(dict(speakers or {})).to(self.device)
        self.tokenizer = spec.build_tokenizer()
        self._decode, self._hmm, self._extractor = decode or spec.decode, hmm, extractor

    @classmethod
    def load(
        cls,
        folder: Path,
        decode: DecodeConfig | None = None,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> "Recognizer":
        """Load a recognizer from a bundle's folder; arguments as for the class.

        Raises:
            BundleError: The folder is not a bundle, the bundle is damaged, or it lacks the GMM-HMM that it needs.
        """
        spec, model = load_bundle(Path(folder))
        hmm, extractor = None, None
        if spec.features.adapted:
            from recognition.adaptation import load_extractor, load_hmm

            hmm, extractor = load_hmm(Path(folder), spec), load_extractor(Path(folder), spec)
        return cls(spec, model, decode or own_decoder(Path(folder)), device, speakers, hmm, extractor)

    @property
    def adapts(self) -> bool:
        """Whether the model reads features that are adapted to speakers: `scores` then takes what `adapted` gives."""
        return self.spec.features.adapted

    def adapted(self, waves: Sequence[Tensor]) -> list[Tensor]:
        """Features of one speaker's utterances, adapted to this speaker.

        Args:
            waves: Waveforms [samples] in ±1: the more, the better the adaptation.

        Returns:
            Features [frames, F] of each, as they are stored for training.
        """
        return self._adapter(waves)

    @cached_property
    def _adapter(self) -> "SpeakerAdapter":
        from recognition.adaptation import SpeakerAdapter

        assert self._hmm is not None
        spec = self.spec
        assert spec.adaptation is not None
        assert isinstance(self.decoder, GraphDecoder), "states are decoded with a graph"
        search = self.decoder.search
        return SpeakerAdapter(self._hmm, spec.adaptation, spec.sample_rate, search, spec.features, self._extractor)

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder, built when it is first used: some uses need only the model's output.

        Raises:
            DecodeError: It cannot read the model's outputs.
        """
        return build_decoder(self._decode, self.tokenizer, self.spec.state_outputs)

    @property
    def frame_seconds(self) -> float:
        """Frame shift of the model's output in seconds."""
        return self.spec.frame_ms / 1000

    @torch.inference_mode()
    def scores(self, inputs: Tensor, lengths: Tensor, speakers: Sequence[str] | None = None) -> Scores:
        """Run the model on utterances, after trimming or padding the silence at their ends to the same length.

        What is longer than the model can read is cut in pauses; the scores of the pieces are joined.

        Args:
            inputs: Waveforms [batch, samples] in ±1, or stored or adapted features [batch, frames, F].
            lengths: Samples or frames of each utterance [batch].
            speakers: Speaker of each utterance, for `cmvn: speaker`.
        """
        most = self.spec.max_inputs(stored=inputs.ndim == 3)
        if most and len(lengths) and int(lengths.max()) > most:
            given = inputs, lengths, speakers
            return Scores(*scores_in_pieces(self.scores, self.frontend, *given, most))
        feats, num_frames, starts = self.frontend.trimmed(inputs.to(self.device), lengths.to(self.device), speakers)
        padded = rounded_up(feats, frame_multiple(self.device))
        log_probs, frames = self.model(padded, num_frames)
        frames = frames.cpu()
        if padded is not feats:
            log_probs = log_probs[:, : max(1, int(frames.max()))]
        return Scores(log_probs.cpu(), frames, starts.cpu())

    def decode(self, scores: Scores) -> list[Hypothesis]:
        """The best hypothesis of each utterance.

        Raises:
            DecodeError: The scores contain NaN, or their shapes do not match.
        """
        return self.decoder.decode(scores.log_probs, scores.frames)
