"""A recording of a broken input, a constant with faint noise, had a level of -10 dB and was trained on."""

import numpy as np
import soundfile

from speech.text import TextNormalizer
from storage.corpora import Utterance
from tasks.config.data import DataConfig
from tasks.stages.prepare import Refused, check

RATE = 16000
NOISE = 1e-5 * np.random.default_rng(1).standard_normal(RATE)
TONE = 0.1 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)


def checked(folder, samples):
    path = folder / "a.flac"
    soundfile.write(path, samples, RATE, subtype="PCM_24")
    data = DataConfig.model_validate({"sources": [{"kind": "table", "path": "t.csv"}]})
    return check(Utterance("a", str(path), "some words", "speaker", "corpus"), data, TextNormalizer(data.normalizer))


def test_an_offset_without_sound_is_silent_and_one_with_sound_is_not(tmp_path):
    refused = checked(tmp_path, 0.3 + NOISE)
    assert isinstance(refused, Refused)
    assert refused.reason == "silent"
    assert refused.detail.startswith("-100.0 dB")
    assert not isinstance(checked(tmp_path, 0.3 + TONE), Refused)
