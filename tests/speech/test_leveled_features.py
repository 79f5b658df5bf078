"""Features of utterances that are scaled to one level (`level_db`)."""

import pytest
import torch
from pydantic import ValidationError

from speech.features import FmllrConfig, LogMelConfig, MfccConfig, build_features
from speech.frontend import FrontEnd

RATE = 8000
GAINS = (0.01, 0.1, 3.0)


def voice(samples=8000, seed=0):
    wave = torch.randn(samples, generator=torch.Generator().manual_seed(seed))
    return 0.1 * wave * (0.1 + torch.sin(torch.arange(samples) / 900).square())


def features(config, *waves):
    lengths = torch.tensor([len(wave) for wave in waves])
    batch = torch.nn.utils.rnn.pad_sequence(list(waves), batch_first=True, padding_value=float("nan"))
    feats, frames = build_features(config, RATE)(batch, lengths)
    return [row[: int(count)] for row, count in zip(feats, frames, strict=True)]


@pytest.mark.parametrize("config", [LogMelConfig, MfccConfig])
def test_gain_and_offset_do_not_change_features(config):
    config = config(num_mels=20, level_db=-20)
    expected = features(config, voice())[0]
    for gain in GAINS:
        torch.testing.assert_close(features(config, gain * voice())[0], expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(features(config, voice() + 0.2)[0], expected, atol=1e-2, rtol=0)


def test_level_is_that_of_the_loud_frames():
    plain, leveled = LogMelConfig(num_mels=20), LogMelConfig(num_mels=20, level_db=-20)
    steady = 0.1 * torch.randn(8000, generator=torch.Generator().manual_seed(1))  # -20 dB
    torch.testing.assert_close(features(leveled, steady)[0], features(plain, steady)[0], atol=0.2, rtol=0)
    quiet = torch.cat([torch.zeros(20_000), 0.01 * steady, torch.zeros(20_000)])
    torch.testing.assert_close(
        features(leveled, quiet)[0][250:340], features(leveled, steady)[0][:90], atol=0.2, rtol=0
    )


def test_utterances_of_a_batch_are_leveled_by_themselves():
    config = LogMelConfig(num_mels=20, level_db=-20)
    waves = [voice(), 0.01 * voice(3000, 1), voice(250, 2), voice(100, 3), torch.zeros(900), voice(0)]
    for wave, leveled in zip(waves, features(config, *waves), strict=True):
        torch.testing.assert_close(leveled, features(config, wave)[0], atol=1e-4, rtol=0)
        assert torch.isfinite(leveled).all()


def test_trimmed_recordings_are_leveled_alike():
    frontend = FrontEnd(LogMelConfig(num_mels=20, level_db=-20, trim_db=30, cmvn="none"), RATE)
    wave = voice()
    expected = frontend.trimmed(wave[None], torch.tensor([len(wave)]))[0]
    padded = torch.cat([torch.zeros(4000), 0.02 * wave, torch.zeros(2000)])
    trimmed = frontend.trimmed(padded[None], torch.tensor([len(padded)]))[0]
    assert trimmed.shape == expected.shape
    torch.testing.assert_close(trimmed[:, 6:-6], expected[:, 6:-6], atol=0.1, rtol=0.01)


def test_levels_that_cannot_be_known_are_refused():
    with pytest.raises(ValidationError, match="level_db needs the loudest frames of the whole utterance"):
        LogMelConfig(level_db=-20, cmvn="sliding", cmvn_center=False)
    with pytest.raises(ValidationError, match="level_db belongs to"):
        FmllrConfig(level_db=-20)
