"""Configuration of GMM-HMM training; the defaults suit about five hours of speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field, field_validator

from configurable.configuration import Configuration
from configurable.former_fields import former_fields
from speech.features import FeatureChoice, FeatureConfig, MfccConfig

StageName = Literal["mono", "tri", "lda", "sat"]


class StageConfig(Configuration):
    """One training stage: a tree, then EM iterations with growing mixtures."""

    leaves: int = Field(default=2500, ge=1)
    """Number of tied states to aim at; not used for monophones."""
    gaussians: int = Field(default=15_000, ge=1)
    """Components of all mixtures at the end."""
    iterations: int = Field(default=16, ge=1)
    """EM iterations."""
    growing: int = Field(default=11, ge=1)
    """Iterations over which the mixtures grow."""
    realign: tuple[int, ...] = (5, 10)
    """Iterations before which the utterances are realigned."""
    estimate: tuple[int, ...] = (2, 4, 6, 10)
    """Iterations before which MLLT (`lda`) or the speakers' fMLLR (`sat`) are estimated."""


class HmmConfig(Configuration):
    """GMM-HMM training: monophones, triphones on deltas, LDA with MLLT, speaker-adaptive training."""

    # beams, acoustic scale and power are those of Kaldi's steps/train_*.sh, the weight of silence is decode_fmllr.sh's,
    # leaves and Gaussians of lda and sat are those of the recipe for Mini LibriSpeech; Kaldi iterates 35 to 40 times

    mono: StageConfig = StageConfig(gaussians=1000, iterations=14, growing=10, realign=(2, 3, 4, 5, 6, 8, 10, 12))
    """Monophones, from a flat start."""
    tri: StageConfig = StageConfig(leaves=1800, gaussians=9_000, iterations=10, growing=7, realign=(5,))
    """Triphones on features with deltas."""
    lda: StageConfig = StageConfig()
    """Triphones on LDA and MLLT."""
    sat: StageConfig = StageConfig()
    """Triphones on LDA, MLLT and fMLLR by speaker."""
    mono_utterances: int = Field(default=300, ge=1)
    """Monophones are trained on this many of the shortest utterances."""
    lda_context: int = Field(default=4, ge=1)
    """Frames to either side that are spliced for LDA."""
    lda_dim: int = Field(default=40, ge=1)
    """Features after LDA."""
    beam: float = Field(default=10.0, ge=0)
    """Beam of alignment, at the scale of the scaled log-likelihoods; 0 disables it."""
    retry_beam: float = Field(default=40.0, ge=0)
    """Beam of the second attempt for utterances that fail."""
    acoustic_scale: float = Field(default=0.1, gt=0)
    """Weight of the log-likelihoods in alignment."""
    silence_probability: float = Field(default=0.5, gt=0, lt=1)
    """Probability of silence between words."""
    minimum_occupancy: float = Field(default=10.0, ge=0)
    """Components with fewer frames are removed."""
    leaf_frames: float = Field(default=80.0, ge=0)
    """Minimum number of frames of a leaf of the tree."""
    positions: bool = False
    """Whether phones depend on their position in the word; for larger corpora."""

    _former = former_fields(power=0.25, variance_floor=0.01, silence_weight=0.01, every=2, shard_frames=200_000, seed=0)


class GraphSearchConfig(Configuration):
    """Recognition with the GMM-HMM: a decoding graph of lexicon and n-gram, searched with a beam."""

    arpa: str = ""
    """An n-gram language model in ARPA format, plain or gzip. Its words are recognized, as far as the lexicon has them.
    Empty: the language model of the stage `lm`."""
    beam: float = Field(default=12.0, gt=0)
    """Width of the beam, at the scale of the scaled log-likelihoods."""
    max_active: int = Field(default=7000, ge=1)
    """Maximum number of active states per frame."""
    acoustic_scale: float = Field(default=0.0625, gt=0)
    """Weight of the log-likelihoods beside the costs of the graph."""
    passes: int = Field(default=2, ge=0)
    """How often fMLLR is estimated from the hypotheses, and the speech decoded again; only for `stage: sat`."""

    _former = former_fields(first_beam=10.0, first_max_active=2000)


class AdaptationConfig(Configuration):
    """What a recognizer needs, beside the GMM-HMM, to adapt features to a speaker."""

    features: FeatureChoice
    """Static features of the Gaussians, normalized by speaker."""
    search: GraphSearchConfig = GraphSearchConfig()
    """How the first passes decode; the graph is the network's."""


class AlignConfig(HmmConfig):
    """Training of a GMM-HMM and alignment with it."""

    stage: StageName = "sat"
    """The last training stage: `mono`, `tri`, `lda` or `sat`."""
    features: FeatureChoice = MfccConfig(num_mels=23, cmvn="speaker")
    """Static features of the Gaussians, normalized by speaker. Training adds deltas or LDA itself."""
    copies: bool = False
    """Train the Gaussians on the copies of `data.speeds`, too. They are aligned in any case."""
    word_silence: bool = False
    """Whether the estimated probability of silence depends on the word before it."""
    device: str = "cpu"
    """Device for the computation on frames: `cpu`, `cuda` or `cuda:1`; search and updates run on the CPU."""

    recognize: GraphSearchConfig = GraphSearchConfig()
    """How `recognizer: gmm` decodes; does not affect training."""

    def with_files(self, change: Callable[[str], str]) -> AlignConfig:
        """This configuration with other paths of files."""
        if not self.recognize.arpa:
            return self
        search = self.recognize.model_copy(update={"arpa": change(self.recognize.arpa)})
        return self.model_copy(update={"recognize": search})

    @field_validator("features")
    @classmethod
    def _check_features(cls, features: FeatureConfig) -> FeatureConfig:
        if features.adapted:
            raise ValueError(f"kind {features.kind} is made from these features: use another kind, such as mfcc")
        for name in ("delta_order", "splice_left", "splice_right"):
            if getattr(features, name):
                raise ValueError(f"{name} is set, but training adds deltas or neighbouring frames itself: remove it")
        if features.cmvn != "speaker":
            raise ValueError(f"cmvn is {features.cmvn}, but Gaussians need features normalized by speaker: set speaker")
        if features.stride != 1:
            raise ValueError("stride is not 1: states need every frame")
        return features
