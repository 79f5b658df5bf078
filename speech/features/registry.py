"""Which kinds of features there are: a new one is a file beside `logmel.py`, and a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from configurable.choices import OneOf
from speech.features.appended import AppendedConfig
from speech.features.config import FeatureConfig
from speech.features.fbank import FbankConfig
from speech.features.fber import FberConfig
from speech.features.fmllr import FmllrConfig
from speech.features.ivector import IvectorConfig
from speech.features.logmel import LogMelConfig
from speech.features.mfcc import MfccConfig
from speech.features.plp import PlpConfig
from speech.features.sherpa_logmel import SherpaLogMelConfig
from speech.features.waveform import WaveformConfig
from speech.features.whisper_logmel import WhisperLogMelConfig

if TYPE_CHECKING:
    from speech.features.kaldi import FilterBank

FEATURES: dict[str, type[FeatureConfig]] = {
    "logmel": LogMelConfig,
    "mfcc": MfccConfig,
    "plp": PlpConfig,
    "fbank": FbankConfig,
    "fber": FberConfig,
    "waveform": WaveformConfig,
    "whisper_logmel": WhisperLogMelConfig,
    "sherpa_logmel": SherpaLogMelConfig,
    "fmllr": FmllrConfig,
    "ivector": IvectorConfig,
    "appended": AppendedConfig,
}
PartChoice = Annotated[
    FeatureConfig, OneOf({kind: config for kind, config in FEATURES.items() if config is not AppendedConfig}, "logmel")
]
"""A field that takes the configuration of a part of `appended` features."""
AppendedConfig.model_rebuild(_types_namespace={"PartChoice": PartChoice})
FeatureChoice = Annotated[FeatureConfig, OneOf(FEATURES, "logmel")]
"""A field that takes the configuration of any kind."""


def build_features(config: FeatureConfig, sample_rate: int) -> FilterBank:
    """Make the extractor that a configuration describes.

    Raises:
        FeatureError: the sample rate does not fit, or options contradict each other.
    """
    from speech.features.kaldi import FilterBank

    return FilterBank(config, sample_rate)


def feature_dim(config: FeatureConfig, sample_rate: int) -> int:
    """Width of the frames that a model reads, deltas and splicing included.

    Raises:
        FeatureError: see `build_features`.
    """
    return build_features(config, sample_rate).dim * config.frame_factor
