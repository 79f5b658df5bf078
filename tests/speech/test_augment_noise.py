"""Recorded noise, reverberation, time warping, and the files that they come from."""

import json
import math

import numpy as np
import pytest
import soundfile
import torch
from pydantic import ValidationError
from support import write_tone

from speech.audio import decode_audio, level_db
from speech.features.augment import AugmentConfig, NoiseConfig, ReverbConfig, SpecAugment, WaveAugment, utterance_seeds
from speech.features.augment.bank import Bank, BankError
from speech.features.augment.base import fft_size
from speech.features.augment.draws import uniforms
from speech.features.augment.reverb import convolve
from speech.features.augment.rooms import decay_response, image_response, simulate

RATE = 16000


def sine(frequency, seconds, rate=RATE):
    return 0.3 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)


def names(count):
    return [f"u{number}" for number in range(count)]


@pytest.fixture
def noises(tmp_path):
    """Two recordings at different rates: a tone of 500 Hz, shorter than an utterance, and one of 3,000 Hz, longer."""
    soundfile.write(tmp_path / "short.wav", sine(500, 0.3), RATE)
    (tmp_path / "deeper").mkdir()
    soundfile.write(tmp_path / "deeper" / "long.flac", sine(3000, 5.0, 22050), 22050)
    return tmp_path


def test_recorded_noise_has_the_requested_level(noises):
    config = AugmentConfig(noise=NoiseConfig(files=(str(noises),), snr_db=(7.0, 7.0)))
    waves = torch.randn(12, RATE, generator=torch.Generator().manual_seed(0)) * 0.05
    lengths = torch.tensor([RATE, RATE // 2] * 6)
    noisy, same = WaveAugment(config, RATE)(waves, lengths, utterance_seeds(1, 0, names(12)))
    assert torch.equal(same, lengths)
    pitches = set()
    for clean, mixed, length in zip(waves, noisy, lengths.tolist(), strict=True):
        noise = (mixed - clean)[:length]
        assert level_db(clean[:length]) - level_db(noise) == pytest.approx(7.0, abs=0.05)
        assert not mixed[length:].any()
        spectrum = torch.fft.rfft(noise * torch.hann_window(length)).abs()
        pitches.add(round(int(spectrum.argmax()) * RATE / length, -1))
    assert pitches == {500.0, 3000.0}


def test_noise_is_recorded_or_generated_by_share(noises):
    augment = WaveAugment(AugmentConfig(noise=NoiseConfig(files=(str(noises),), file_share=0.5, probability=0.8)), RATE)
    waves = torch.randn(400, 800, generator=torch.Generator().manual_seed(0)) * 0.05
    noisy, _ = augment(waves, torch.full((400,), 800), utterance_seeds(1, 0, names(400)))
    noise = noisy - waves
    spectrum = torch.fft.rfft(noise * torch.hann_window(800)).abs().square()
    tonal = spectrum.amax(1) > 0.5 * spectrum.sum(1)
    silent = noise.abs().amax(1) == 0
    assert 50 < silent.sum() < 115
    assert 120 < (tonal & ~silent).sum() < 200


def test_long_noise_is_cut_and_short_noise_is_repeated(noises):
    bank = Bank([str(noises)], RATE)
    assert [item.path.name for item in bank.recordings] == ["long.flac", "short.wav"]
    assert len(bank.segment(0.0, 0.99, 8000)) == 8000
    short, _ = decode_audio(noises / "short.wav")
    looped = bank.segment(0.9, 0.5, 12000)
    torch.testing.assert_close(looped, short[(2400 + torch.arange(12000)) % 4800])
    starts = torch.stack([bank.segment(0.0, place, 400) for place in (0.0, 0.3, 0.6)])
    assert len({tuple(row.tolist()) for row in starts}) == 3


def test_tables_of_recordings_are_read(noises):
    rows = [{"audio_filepath": "deeper/long.flac", "offset": 1.0, "duration": 0.5}, {"audio_filepath": "short.wav"}]
    (noises / "rows.jsonl").write_text("\n \n".join(map(json.dumps, rows)) + "\n")
    (noises / "rows.csv").write_text("path,speaker\nshort.wav,x\ndeeper/long.flac,y\n")
    (noises / "rows.tsv").write_text("audio\toffset\tduration\nshort.wav\t\t\n")
    (noises / "rows.txt").write_text("short.wav\n\n")
    bank = Bank([str(noises / "rows.jsonl")], RATE)
    assert [(item.path.name, item.start, item.seconds) for item in bank.recordings] == [
        ("long.flac", 1.0, 0.5),
        ("short.wav", 0.0, None),
    ]
    assert len(bank.whole(0.0, 10.0)) == 8000
    for name, count in (("rows.csv", 2), ("rows.tsv", 1), ("rows.txt", 1)):
        assert len(Bank([str(noises / name)], RATE)) == count


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"audio": "x.wav", "offset": -1}\n', "row 1"),
        ("rows.jsonl", '{"text": "hello"}\n', "row 1: no noise recording"),
        ("rows.jsonl", "[1]\n", "row 1|no table"),
        ("rows.jsonl", "{torn\n", "no table of noise"),
        ("rows.csv", "speaker\nx\n", "row 1"),
        ("empty.txt", "\n", "no noise recording in"),
    ],
)
def test_invalid_tables_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(BankError, match=message):
        Bank([str(tmp_path / name)], RATE)


def test_missing_and_broken_files_are_reported(noises, caplog):
    with pytest.raises(BankError, match="correct the path"):
        Bank([str(noises / "none.wav")], RATE)
    (noises / "empty").mkdir()
    with pytest.raises(BankError, match="name audio files"):
        Bank([str(noises / "empty")], RATE)
    (noises / "broken.wav").write_bytes(b"RIFF....")
    bank = Bank([str(noises / "broken.wav"), str(noises / "short.wav")], RATE)
    for _ in range(2):
        assert len(bank.segment(0.0, 0.0, 100)) == 100  # the next one is taken
    assert [item.path.name for item in bank.bad] == ["broken.wav"]
    assert len([record for record in caplog.records if "broken.wav" in record.message]) == 1
    with pytest.raises(BankError, match="cannot be read"):
        Bank([str(noises / "broken.wav")], RATE).segment(0.0, 0.0, 100)


def test_real_speech_can_be_noise(shared_data):
    folder = shared_data / "speechocean762" / "valid"
    config = AugmentConfig(noise=NoiseConfig(files=(str(shared_data / "fsdd" / "recordings"),), snr_db=(3, 3)))
    assert folder.is_dir()
    waves = torch.randn(4, RATE, generator=torch.Generator().manual_seed(0)) * 0.05
    noisy, _ = WaveAugment(config, RATE)(waves, torch.full((4,), RATE), utterance_seeds(1, 0, names(4)))
    for clean, mixed in zip(waves, noisy, strict=True):
        assert level_db(clean) - level_db(mixed - clean) == pytest.approx(3.0, abs=0.05)


# --- reverberation


def decay_time(response, rate=RATE):
    """Reverberation time by Schroeder's backward integration, from the decay between -5 and -25 dB of the tail."""
    energy = response[1:].square().flip(0).cumsum(0).flip(0)
    level = 10 * torch.log10(energy / energy[0])
    first, last = int((level < -5).nonzero()[0]), int((level < -25).nonzero()[0])
    return 3 * (last - first) / rate


@pytest.mark.parametrize("rt60", [0.2, 0.5, 1.0])
def test_decay_has_its_reverberation_time_and_direct_sound(rt60):
    response = decay_response(rt60, 6.0, RATE, torch.Generator().manual_seed(1))
    assert len(response) == rt60 * RATE
    assert response[0] == 1.0
    assert decay_time(response) == pytest.approx(rt60, rel=0.1)
    assert -10 * math.log10(float(response[1:].square().sum())) == pytest.approx(6.0, abs=0.01)


def test_first_images_have_the_delay_and_level_of_the_geometry():
    room, source, microphone = (np.array(place) for place in ([6.0, 5.0, 3.0], [2.0, 2.0, 1.5], [4.0, 2.0, 1.5]))
    response = image_response(room, source, microphone, 0.3, RATE)
    assert response[0] == pytest.approx(1.0)
    # Floor and ceiling, 1.5 m away: both images are sqrt(2² + 3²) m away.
    reflection = math.exp(-0.0805 * 90 / (126 * 0.3))
    late = round((math.hypot(2, 3) - 2) * RATE / 343)
    assert response[late] == pytest.approx(-2 * reflection * 2 / math.hypot(2, 3), rel=1e-3)
    assert not response[1:late].any()


def test_simulated_rooms_have_about_the_requested_decay():
    for number in range(4):
        config = ReverbConfig(kind="image", rt60_s=(0.4, 0.4))
        response = simulate(config, number, RATE)
        assert 0.25 < decay_time(response) < 0.7  # Eyring's formula is for diffuse fields
        assert torch.equal(response, simulate(config, number, RATE))
        assert not torch.equal(response[:100], simulate(config, number + 1, RATE)[:100])


def test_reverberation_equals_the_convolution_at_equal_power():
    waves, lengths = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)), torch.tensor([500, 300])
    waves[1, 300:] = 0
    responses = torch.randn(2, 80, generator=torch.Generator().manual_seed(1))
    wet = convolve(waves, lengths, responses)
    for row, length in enumerate(lengths.tolist()):
        expected = torch.from_numpy(np.convolve(waves[row, :length], responses[row])[:length])
        expected *= (waves[row].square().sum() / expected.square().sum()).sqrt()
        torch.testing.assert_close(wet[row, :length], expected, atol=1e-4, rtol=0)
        assert not wet[row, length:].any()


def test_measured_responses_start_at_their_direct_sound(tmp_path):
    measured = np.zeros(2000)
    measured[700], measured[900] = 0.8, 0.4
    soundfile.write(tmp_path / "hall.wav", measured, RATE, subtype="FLOAT")
    config = AugmentConfig(reverb=ReverbConfig(files=(str(tmp_path),), probability=1.0))
    click = torch.zeros(1, 1000)
    click[0, 100] = 0.5
    wet, _ = WaveAugment(config, RATE)(click, torch.tensor([1000]), [7])
    assert wet[0].abs().nonzero().squeeze().tolist()[0] == 100 or wet[0, :100].abs().max() < 1e-6
    assert wet[0, 300] / wet[0, 100] == pytest.approx(0.5, abs=1e-4)
    assert wet.square().sum() == pytest.approx(0.25, rel=1e-4)


def test_only_the_requested_share_is_reverberated():
    waves = torch.randn(200, 400, generator=torch.Generator().manual_seed(0))
    config = AugmentConfig(reverb=ReverbConfig(probability=0.3, rooms=3, rt60_s=(0.05, 0.1)))
    wet, _ = WaveAugment(config, RATE)(waves, torch.full((200,), 400), utterance_seeds(1, 0, names(200)))
    changed = (wet != waves).any(1).sum()
    assert 40 < changed < 80


def test_fourier_transforms_have_a_fast_size():
    for least in (1, 5, 7, 100, 129, 161, 200, 4097, 300_000):
        size = fft_size(least)
        assert least <= size < 2 * least or size <= 8


# --- time warping


def test_time_warping_keeps_order_ends_and_values():
    ramp = torch.arange(100.0).view(1, 100, 1).repeat(50, 1, 2)
    config = AugmentConfig(time_masks=0, freq_masks=0, time_warp_frames=20)
    lengths = torch.full((50,), 100)
    lengths[0] = 2
    warped = SpecAugment(config)(ramp, lengths, utterance_seeds(1, 0, names(50)))
    assert torch.equal(warped[0], ramp[0])  # too short
    moves = []
    for row in warped[1:, :, 0]:
        assert row[0] == 0
        assert row[-1] == 99
        assert (row.diff() > 0).all()
        moves.append(float((row - torch.arange(100.0)).abs().max()))
    assert max(moves) <= 20 + 1e-3
    assert max(moves) > 15
    assert min(moves) < 5


# --- configuration


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"noise": {"snr_db": (9, 3)}}, "snr_db"),
        ({"noise": {"generated": ()}}, "generated"),
        ({"reverb": {"rt60_s": (0.5, 9.0)}}, "rt60_s"),
        ({"reverb": {"direct_db": (5.0, 0.0)}}, "direct_db"),
        ({"reverb": {"kind": "hall"}}, "kind"),
        ({"time_warp_frames": -1}, "time_warp_frames"),
    ],
)
def test_impossible_configurations_name_their_field(given, message):
    with pytest.raises(ValidationError, match=message):
        AugmentConfig(**given)


def test_configuration_survives_a_round_trip():
    config = AugmentConfig(reverb=ReverbConfig(), time_warp_frames=3)
    assert AugmentConfig.model_validate_json(config.model_dump_json()) == config


def test_configuration_lists_its_fields_and_files(tmp_path):
    write_tone(tmp_path / "a.wav")
    config = AugmentConfig(gain_db=3.0, noise=NoiseConfig(files=("a.wav",)), reverb=ReverbConfig(files=("b",)))
    assert config.wave_fields() == ["reverb", "noise", "gain_db"]
    assert config.file_lists() == ["a.wav", "b"]
    off = config.model_copy(update={"enabled": False})
    assert (off.wave_fields(), off.file_lists(), off.parts()) == ([], [], {})
    assert uniforms([], "x", 3).shape == (0, 3)
