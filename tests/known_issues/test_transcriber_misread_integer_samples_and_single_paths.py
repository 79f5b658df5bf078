"""The transcriber treated integer PCM as samples in ±1, and a single path as a list of its letters."""

import numpy as np
import torch

from recognition.bundle import BundleSpec, save_bundle
from recognition.transcriber import Transcriber
from speech.features import LogMelConfig
from speech.models import ConformerConfig
from speech.tokens import TokenConfig, train_tokenizer


def transcriber(folder):
    torch.manual_seed(1)
    spec = BundleSpec(
        sample_rate=8000,
        features=LogMelConfig(num_mels=16, cmvn="none"),
        stats=None,
        tokenizer=train_tokenizer(TokenConfig(), ["abc"]).to_dict(),
        model=ConformerConfig(dim=16, layers=1, heads=2, channels=4),
    )
    save_bundle(folder, spec, spec.build_model().state_dict())
    return Transcriber(folder)


def test_integer_samples_are_scaled_like_floats(tmp_path):
    rng = np.random.default_rng(0)
    pcm = rng.integers(-8000, 8000, 8000, dtype=np.int16)
    first, second = transcriber(tmp_path).transcribe([pcm, (pcm / 32768).astype(np.float32)])
    assert first == second
    assert not first.error


def test_single_path_is_one_recording(tmp_path):
    transcripts = transcriber(tmp_path).transcribe("missing.wav")
    assert len(transcripts) == 1
    assert "missing.wav" in transcripts[0].error


def test_invalid_input_gets_an_error_and_others_are_transcribed(tmp_path):
    transcripts = transcriber(tmp_path).transcribe([{"a": 1}, np.zeros(4000, np.float32)])
    assert "dict is not audio" in transcripts[0].error
    assert not transcripts[1].error
