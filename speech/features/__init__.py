"""Acoustic features: filter banks and MFCC, normalization, deltas and splicing, augmentation."""

from speech.features.augment import AUGMENTATIONS, AugmentConfig, SpecAugment, WaveAugment, perturb_waves
from speech.features.cmvn import CmvnError, CmvnStats, normalize, utterance_stats
from speech.features.config import FbankConfig, FberConfig, FeatureConfig, LogMelConfig, MfccConfig
from speech.features.expand import Expand
from speech.features.kaldi import FEATURES, FeatureChoice, LogMel, Mfcc, build_features, feature_dim
from speech.features.mel import FeatureError
from speech.features.sliding import sliding_normalize

__all__ = [
    "AUGMENTATIONS",
    "FEATURES",
    "AugmentConfig",
    "CmvnError",
    "CmvnStats",
    "Expand",
    "FbankConfig",
    "FberConfig",
    "FeatureChoice",
    "FeatureConfig",
    "FeatureError",
    "LogMel",
    "LogMelConfig",
    "Mfcc",
    "MfccConfig",
    "SpecAugment",
    "WaveAugment",
    "build_features",
    "feature_dim",
    "normalize",
    "perturb_waves",
    "sliding_normalize",
    "utterance_stats",
]
