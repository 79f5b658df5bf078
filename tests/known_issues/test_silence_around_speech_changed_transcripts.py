"""0.4 s of silence around a recording changed every transcript of the demo's model.

Means and variances were computed over pauses as well as speech, so that a pause changed the features of all speech;
and no recipe trained with pauses.
"""

import re
from pathlib import Path

import pytest
import torch

from recognition.transcriber import Transcriber
from speech.audio import decode_audio
from speech.features import LogMelConfig
from speech.frontend import FrontEnd
from speech.models import PretrainedConfig
from tasks.config.pipeline import load_config
from tasks.stages.base import stages_of

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
LEVELS = (None, -60.0, -50.0)


def pause(num_samples, level_db, seed=0):
    noise = torch.randn(num_samples, generator=torch.Generator().manual_seed(seed))
    return noise * (0.0 if level_db is None else 10 ** (level_db / 20))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_trains_on_pauses_and_normalizes_by_speech(path, monkeypatch):
    for variable in re.findall(r"\$\{?([A-Z][A-Z0-9_]*)", path.read_text()):
        monkeypatch.setenv(variable, "/data")
    config = load_config(path)
    if "train" not in stages_of(config):
        pytest.skip("it trains no network")
    if config.name == "starling-switchboard":
        pytest.skip("it is the published recipe, on calls with pauses of their own")
    if getattr(config.model, "silence", "none") == "all":
        pytest.skip("it begins with a model that was trained with silence, and keeps it")
    if config.system.targets == "states":  # aligned with the pauses, which are in the shards
        features, pauses = config.align.features, config.data.pauses
    else:
        features, pauses = config.features, config.train.augment.parts()["pauses"]
        # what is recognized as it comes cannot be trimmed
        assert isinstance(config.model, PretrainedConfig) or config.model.streams or 20 < features.trim_db <= 30
    if not isinstance(config.model, PretrainedConfig):  # these read features as they were trained on them
        assert features.cmvn_gate_db in (20, 30)
        assert 3 <= features.cmvn_floor <= 4
    assert pauses.probability >= 0.1
    assert pauses.edge_s[1] >= 0.4
    assert set(pauses.kinds) == {"zeros", "noise", "room"}


def test_pause_does_not_change_features_of_speech(corpus, tones):
    features = LogMelConfig(num_mels=16, cmvn="utterance", cmvn_gate_db=20, cmvn_floor=4)
    frontend = FrontEnd(features, tones.RATE)
    wave, _ = decode_audio(corpus.valid[0].members["flac"])
    alone, _ = frontend(wave[None], torch.tensor([len(wave)]))
    for level in LEVELS:
        padded = torch.cat([pause(3200, level), wave, pause(3200, level, 1)])
        feats, _ = frontend(padded[None], torch.tensor([len(padded)]))
        torch.testing.assert_close(feats[0, 40 : 40 + alone.shape[1]], alone[0], atol=1e-3, rtol=1e-3)
        assert feats.min() >= -4.001


@pytest.mark.slow
def test_trained_model_gives_same_transcript_with_added_pauses(corpus, tones, tmp_path, tones_are_speech):
    features = LogMelConfig(num_mels=16, cmvn="utterance", cmvn_gate_db=20, cmvn_floor=3, trim_db=21)
    spec = corpus.spec("conformer", model=tones.bare("conformer"), features=features, stats=None)
    augment = {"time_masks": 0, "freq_masks": 0, "pauses": {"probability": 0.3}}
    settings = tones.LEARNS | {"augment": augment, "optimizer": {"lr": 1e-2}}
    trained = tones.train_here(corpus.job(tmp_path, spec=spec, epochs=70, average=2, **settings))
    transcriber = Transcriber(trained.bundle)
    waves = [decode_audio(sample.members["flac"])[0] for sample in corpus.valid]
    clean = [transcript.text for transcript in transcriber.transcribe([wave.numpy() for wave in waves])]
    assert sum(text == sample.row["text"] for text, sample in zip(clean, corpus.valid, strict=True)) >= 11
    for level in LEVELS:
        clips = [torch.cat([pause(3200, level, n), wave, pause(3200, level, n)]) for n, wave in enumerate(waves)]
        texts = [transcript.text for transcript in transcriber.transcribe([clip.numpy() for clip in clips])]
        assert sum(text != before for text, before in zip(texts, clean, strict=True)) <= 1
