"""Voice activity detection: where there is speech in a recording.

    detector = build_vad(SileroConfig())
    for piece in cut(detector, blocks, max_seconds=30.0): ...

To add a detector, add a file with the detector and its configuration, and a line in `DETECTORS`.
"""

import logging
from functools import cache

from speech.vad.base import Vad, VadConfig
from speech.vad.cutting import PAUSE_S, SpeechSegment, cut, cut_whole, cut_windows
from speech.vad.energy import EnergyConfig, EnergyVad
from speech.vad.everything import EverythingConfig, EverythingVad
from speech.vad.silero import SileroConfig, SileroVad, is_installed

__all__ = [
    "DETECTORS",
    "PAUSE_S",
    "EnergyConfig",
    "EnergyVad",
    "EverythingConfig",
    "EverythingVad",
    "SileroConfig",
    "SileroVad",
    "SpeechSegment",
    "Vad",
    "VadConfig",
    "build_vad",
    "cut",
    "cut_whole",
    "cut_windows",
    "default_vad",
]

log = logging.getLogger(__name__)
DETECTORS: dict[str, type[VadConfig]] = {"silero": SileroConfig, "energy": EnergyConfig, "none": EverythingConfig}


def build_vad(cfg: VadConfig) -> Vad:
    """Builds the configured detector."""
    return cfg.build()


@cache
def default_vad() -> VadConfig:
    """Silero, or energy where Silero's package is missing, as beside a model registered without it; warns once."""
    if is_installed():
        return SileroConfig()
    log.warning(
        "the package silero-vad is not installed, so speech is found by energy, which errs more in noise: `pip install "
        "silero-vad`"
    )
    return EnergyConfig()
