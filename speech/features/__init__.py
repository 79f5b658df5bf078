"""Acoustic features: filter banks and MFCC, normalization, deltas and splicing, augmentation."""

from speech.features.appended import AppendedConfig
from speech.features.augment import AUGMENTATIONS, AugmentConfig, SpecAugment, WaveAugment, perturb_waves
from speech.features.cmvn import CmvnError, CmvnStats, normalize, utterance_stats
from speech.features.config import FeatureConfig
from speech.features.fbank import FbankConfig
from speech.features.fber import FberConfig
from speech.features.fmllr import FmllrConfig
from speech.features.ivector import IvectorConfig
from speech.features.logmel import LogMelConfig
from speech.features.mel import FeatureError
from speech.features.mfcc import MfccConfig
from speech.features.plp import PlpConfig
from speech.features.registry import FEATURES, FeatureChoice, build_features, feature_dim
from speech.features.sherpa_logmel import SherpaLogMelConfig
from speech.features.sliding import sliding_normalize
from speech.features.waveform import WaveformConfig
from speech.features.whisper_logmel import WhisperLogMelConfig

__all__ = [
    "AUGMENTATIONS",
    "FEATURES",
    "AppendedConfig",
    "AugmentConfig",
    "CmvnError",
    "CmvnStats",
    "FbankConfig",
    "FberConfig",
    "FeatureChoice",
    "FeatureConfig",
    "FeatureError",
    "FmllrConfig",
    "IvectorConfig",
    "LogMelConfig",
    "MfccConfig",
    "PlpConfig",
    "SherpaLogMelConfig",
    "SpecAugment",
    "WaveAugment",
    "WaveformConfig",
    "WhisperLogMelConfig",
    "build_features",
    "feature_dim",
    "normalize",
    "perturb_waves",
    "sliding_normalize",
    "utterance_stats",
]
