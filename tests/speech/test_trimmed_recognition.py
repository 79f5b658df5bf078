"""What recognition reads: the same silence around the speech of every recording, whatever pause was there."""

import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from speech.features import CmvnStats, FberConfig, FeatureChoice, build_features
from speech.frontend import FrontEnd

CHOICE = TypeAdapter(FeatureChoice)

RATE, HOP = 8000, 80
OPTIONS = {"num_mels": 20, "cmvn_gate_db": 20, "cmvn_floor": 4, "trim_db": 25}
NORMALIZATIONS = ["utterance", "sliding", "speaker", "global"]


def speech(seconds=0.8, seed=0):
    time = torch.arange(int(seconds * RATE)) / RATE
    noise = torch.randn(len(time), generator=torch.Generator().manual_seed(seed))
    voice = sum(torch.sin(2 * math.pi * 150 * n * time) / n for n in range(1, 20))
    return 0.3 * (voice + 0.1 * noise) * (0.6 + 0.4 * torch.sin(2 * math.pi * 3 * time))


def front_end(cmvn="utterance", **options):
    cfg = CHOICE.validate_python(OPTIONS | {"cmvn": cmvn} | options)
    extract = build_features(cfg, RATE)
    other = speech(seed=5)
    return FrontEnd(cfg, RATE, CmvnStats(extract.dim).add(extract(other[None], torch.tensor([len(other)]))[0]))


def trimmed(frontend, *waves):
    lengths = torch.tensor([len(wave) for wave in waves])
    batch = torch.nn.utils.rnn.pad_sequence(list(waves), batch_first=True, padding_value=math.nan)
    feats, frames, starts = frontend.trimmed(batch, lengths)
    assert not any(row[int(count) :].any() for row, count in zip(feats, frames, strict=True))
    return [row[: int(count)] for row, count in zip(feats, frames, strict=True)], starts.tolist()


def with_pauses(before, wave, after, level_db=None):
    """A recording with frames of a pause before and after it."""
    gain = 0.0 if level_db is None else 10 ** (level_db / 20)
    generator = torch.Generator().manual_seed(3)
    return torch.cat(
        [torch.randn(n * HOP, generator=generator) * gain for n in (before,)]
        + [wave]
        + [torch.randn(after * HOP, generator=generator) * gain]
    )


@pytest.mark.parametrize("cmvn", NORMALIZATIONS)
def test_zeros_around_a_recording_make_no_difference(cmvn):
    frontend, wave = front_end(cmvn), speech()
    pauses = [(0, 0), (1, 0), (0, 5), (7, 3), (40, 40), (500, 100)]
    rows, starts = trimmed(frontend, *(with_pauses(before, wave, after) for before, after in pauses))
    for feats, start, (before, _) in zip(rows, starts, pauses, strict=True):
        torch.testing.assert_close(feats, rows[0], atol=1e-3, rtol=1e-3)
        assert start - starts[0] == pytest.approx(before * 0.01)


def test_faint_noise_makes_a_difference_at_the_edges_only():
    frontend, wave = front_end(), speech()
    (alone, padded), _ = trimmed(frontend, wave, with_pauses(40, wave, 40, level_db=-60.0))
    assert alone.shape == padded.shape
    torch.testing.assert_close(padded[8:-8], alone[8:-8], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(padded[:1], alone[:1])
    torch.testing.assert_close(padded[-1:], alone[-1:])


def test_batch_is_trimmed_like_its_recordings():
    frontend = front_end()
    waves = [
        with_pauses(30, speech(), 0),
        speech(0.3, seed=1),
        torch.zeros(900),
        torch.zeros(0),
        with_pauses(0, speech(1.1), 90),
    ]
    together, starts = trimmed(frontend, *waves)
    for wave, feats, start in zip(waves, together, starts, strict=True):
        (alone,), (begin,) = trimmed(frontend, wave)
        torch.testing.assert_close(feats, alone, atol=1e-3, rtol=1e-3)
        assert start == begin
        assert torch.isfinite(feats).all()


@pytest.mark.parametrize("cmvn", NORMALIZATIONS)
def test_features_of_speech_equal_the_plain_front_ends(cmvn):
    frontend, wave = front_end(cmvn), with_pauses(20, speech(), 30)
    (feats,), (start,) = trimmed(frontend, wave)
    plain, frames = frontend(wave[None], torch.tensor([len(wave)]))
    assert 0.12 < start < 0.16  # 50 ms before the first frame that reaches into speech
    shift = round(start / 0.01)
    torch.testing.assert_close(feats[1:-1], plain[0, shift + 1 : shift + len(feats) - 1], atol=1e-3, rtol=1e-3)
    assert len(feats) < int(frames)


def test_pause_inside_is_kept():
    frontend, wave = front_end(), speech()
    (feats,), _ = trimmed(frontend, torch.cat([wave, torch.zeros(100 * HOP), wave]))
    (alone,), _ = trimmed(frontend, wave)
    assert len(feats) > 2 * len(alone) + 70


def test_stored_features_are_trimmed_too():
    frontend, wave = front_end(), with_pauses(20, speech(), 30)
    raw, frames = build_features(frontend.cfg, RATE)(wave[None], torch.tensor([len(wave)]))
    feats, counts, starts = frontend.trimmed(raw, frames)
    (expected,), (start,) = trimmed(frontend, wave)
    assert counts.tolist() == [len(expected)]
    assert starts.tolist() == [start]
    torch.testing.assert_close(feats[0], expected, atol=1e-3, rtol=1e-3)


def test_nothing_is_trimmed_by_default():
    frontend, wave = front_end(trim_db=0.0), with_pauses(20, speech(), 30)
    (feats,), (start,) = trimmed(frontend, wave)
    assert start == 0.0
    assert torch.equal(feats, frontend(wave[None], torch.tensor([len(wave)]))[0][0])


def test_deltas_and_stride_apply_to_the_trimmed_recording():
    frontend, wave = front_end(delta_order=1, splice_left=1, stride=2), speech()
    (feats, padded), _ = trimmed(frontend, wave, with_pauses(40, wave, 40))
    assert feats.shape[1] == 20 * 2 * 2
    torch.testing.assert_close(feats, padded, atol=1e-3, rtol=1e-3)


def test_energy_ratios_cannot_be_trimmed():
    with pytest.raises(ValidationError, match="trim_db needs the level of frames, and features fber have none"):
        FberConfig(trim_db=30)
