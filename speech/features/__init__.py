"""Acoustic features: log-mel and MFCC, normalization, augmentation."""

from speech.features.augment import AugmentConfig, SpecAugment, perturb_waves
from speech.features.cmvn import CmvnError, CmvnStats, normalize, utterance_stats
from speech.features.config import FeatureConfig
from speech.features.kaldi import FEATURES, LogMel, Mfcc, build_features
from speech.features.mel import FeatureError

__all__ = [
    "FEATURES",
    "AugmentConfig",
    "CmvnError",
    "CmvnStats",
    "FeatureConfig",
    "FeatureError",
    "LogMel",
    "Mfcc",
    "SpecAugment",
    "build_features",
    "normalize",
    "perturb_waves",
    "utterance_stats",
]
