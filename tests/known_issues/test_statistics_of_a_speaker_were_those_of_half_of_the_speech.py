"""With `cmvn_gate_db: 20`, only 30 % of the frames of a LibriSpeech speaker counted in the statistics, mostly vowels.

The GMM-HMM recognized this speaker (1737) poorly, and its fMLLR did not help the network: 40 % WER.
"""

from pathlib import Path

import pytest
import torch

from speech.audio import decode_audio
from speech.features import build_features
from tasks.config.pipeline import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["mini_librispeech_hybrid", "mini_librispeech_hybrid_gpu", "librispeech_100_hybrid"])
def test_statistics_of_a_speaker_count_most_of_the_speech(name, shared_data, monkeypatch):
    monkeypatch.setenv("STARLING_SHARED_DATA", str(shared_data))
    config = load_config(CONFIGS / f"{name}.yaml")
    extract = build_features(config.align.features, config.data.sample_rate)
    counted = total = 0
    for path in sorted((shared_data / "LibriSpeech" / "dev-clean-5" / "1737").rglob("*.flac"))[::3]:
        wave, _ = decode_audio(path.read_bytes())
        feats, frames = extract(wave[None], torch.tensor([len(wave)]))
        mask = extract.speech_mask(feats[0, : int(frames[0])])
        counted, total = counted + int(mask.sum()), total + len(mask)
    assert counted > 0.4 * total
