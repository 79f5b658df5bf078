"""Statistics for normalization are those of speech: a pause around a recording or inside it does not move them."""

import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from speech.features import CmvnStats, FberConfig, FeatureChoice, build_features, sliding_normalize
from speech.features.cmvn import loud_frames, utterance_stats
from speech.frontend import FrontEnd

CHOICE = TypeAdapter(FeatureChoice)

RATE, HOP, FRAME = 8000, 80, 200
KINDS = {
    "logmel": {},
    "mfcc": {"kind": "mfcc", "num_ceps": 10},
    "mfcc with energy": {"kind": "mfcc", "num_ceps": 10, "use_energy": True},
    "fbank with energy": {"kind": "fbank", "use_energy": True},
    "linear fbank": {"kind": "fbank", "log_energies": False},
}
NORMALIZATIONS = {
    "utterance": {"cmvn": "utterance"},
    "mean of the utterance": {"cmvn": "utterance", "cmvn_variance": False},
    "sliding": {"cmvn": "sliding", "cmvn_window": 60},
    "mean of a window": {"cmvn": "sliding", "cmvn_window": 60, "cmvn_variance": False},
    "speaker": {"cmvn": "speaker"},
    "global": {"cmvn": "global"},
}


def gated(**options):
    return CHOICE.validate_python({"num_mels": 20, "cmvn": "utterance", "cmvn_gate_db": 12, "cmvn_floor": 4} | options)


def speech(seconds=1.3, seed=0):
    """Syllables of a hoarse voice, loud and soft in turn: `[num_samples]`."""
    time = torch.arange(int(seconds * RATE)) / RATE
    pitch = 2 * math.pi * (120 * time + 3 * torch.sin(2 * math.pi * 1.1 * time))
    voice = sum(torch.sin(n * pitch) / n for n in range(1, 30))
    noise = torch.randn(len(time), generator=torch.Generator().manual_seed(seed))
    envelope = torch.sin(math.pi * time / seconds * 4).square()
    return 0.45 * envelope * (voice + 0.1 * noise)


def pause(num_frames, level_db, seed=1):
    noise = torch.randn(num_frames * HOP, generator=torch.Generator().manual_seed(seed))
    return noise * (0.0 if level_db is None else 10 ** (level_db / 20))


def front_end(**options):
    cfg, other = gated(**options), speech(seed=9)
    extract = build_features(cfg, RATE)
    feats, frames = extract(other[None], torch.tensor([len(other)]))
    stats = CmvnStats(extract.dim).add(feats[extract.speech_frames(feats, frames)])
    return FrontEnd(cfg, RATE, stats)


def features(frontend, wave):
    return frontend(wave[None], torch.tensor([len(wave)]))[0][0]


PAUSES = [(40, None, 40), (0, None, 500), (10, -60.0, 3), (40, -50.0, 40), (123, -40.0, 0), (500, -30.0, 61)]
"""Frames before, level, frames after."""


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_pause_around_a_recording_does_not_change_its_features(kind, normalization):
    frontend, wave = front_end(**KINDS[kind], **NORMALIZATIONS[normalization]), speech()
    alone = features(frontend, wave)
    rows = [torch.cat([pause(before, db), wave, pause(after, db, seed=2)]) for before, db, after in PAUSES]
    feats, _ = frontend(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(r) for r in rows]))
    for row, (before, _, _) in zip(feats, PAUSES, strict=True):
        torch.testing.assert_close(row[before : before + len(alone)], alone, atol=2e-3, rtol=2e-3)


def test_pause_changes_features_without_the_gate():
    """Shows that the tests above can fail."""
    for options in ({"cmvn": "utterance"}, {"cmvn": "sliding"}):
        frontend = FrontEnd(CHOICE.validate_python({"num_mels": 20} | options), RATE)
        alone, padded = (features(frontend, torch.cat([pause(n, None), speech()]))[n:] for n in (0, 40))
        assert (alone - padded).abs().mean() > 0.5


@pytest.mark.parametrize(("num_frames", "level_db"), [(7, None), (40, -50.0), (500, None), (200, -30.0)])
def test_pause_inside_does_not_change_windowed_features_elsewhere(num_frames, level_db):
    frontend, wave = front_end(cmvn="sliding", cmvn_window=40), speech()
    cut = len(wave) // 2 // HOP * HOP  # between two syllables
    alone = features(frontend, wave)
    feats = features(frontend, torch.cat([wave[:cut], pause(num_frames, level_db), wave[cut:]]))
    before = cut // HOP - FRAME // HOP  # frames that end before the cut
    torch.testing.assert_close(feats[:before], alone[:before], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(feats[cut // HOP + num_frames :], alone[cut // HOP :], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_zeros_and_faint_noise_are_at_the_floor(normalization):
    options = NORMALIZATIONS[normalization]
    frontend = front_end(**options)
    feats = [features(frontend, torch.cat([pause(100, db), speech()]))[:97] for db in (None, -75.0)]
    torch.testing.assert_close(feats[0], feats[1])
    if options.get("cmvn_variance", True):
        torch.testing.assert_close(feats[0], torch.full_like(feats[0], -4.0))


def test_the_floor_changes_nothing_above_it():
    low, without = (features(front_end(cmvn_floor=floor), speech()) for floor in (2.0, 0.0))
    torch.testing.assert_close(low, without.clamp(min=-2.0))
    assert (without < -2.0).any()


@pytest.mark.parametrize("cmvn", ["utterance", "sliding", "speaker"])
def test_stored_features_are_normalized_alike(cmvn):
    frontend, wave = front_end(cmvn=cmvn), torch.cat([pause(50, -50.0), speech()])
    stored, frames = build_features(gated(cmvn=cmvn), RATE)(wave[None], torch.tensor([len(wave)]))
    torch.testing.assert_close(frontend(stored, frames)[0][0], features(frontend, wave))


def test_click_does_not_set_the_reference_level():
    wave = speech()
    clicked = torch.cat([pause(30, None), wave])
    clicked[800] = 1.0
    frontend = front_end()
    assert (features(frontend, clicked)[30:] - features(frontend, wave)).abs().mean() < 0.1


def test_loud_frames_depend_on_the_utterance_alone():
    levels = torch.full((4, 30), math.nan)
    levels[0, :30] = torch.linspace(0.0, 29.0, 30)
    levels[1, :12] = 5.0
    levels[2, :2] = torch.tensor([0.0, 100.0])
    loud = loud_frames(levels, torch.tensor([30, 12, 2, 0]), range_db=10.0)
    # the tenth loudest is the reference: 20, and 10 dB below it is 2.3 less
    assert loud[0].tolist() == [False] * 18 + [True] * 12
    assert loud[1].tolist() == [True] * 12 + [False] * 18
    assert loud[2].tolist() == [True] * 2 + [False] * 28  # a short one's softest is its reference
    assert not loud[3].any()
    assert loud_frames(torch.zeros(2, 0), torch.tensor([0, 0]), 10.0).shape == (2, 0)


def test_statistics_include_only_the_selected_frames():
    feats = torch.arange(12.0).view(1, 6, 2)
    counted = torch.tensor([[False, True, True, False, True, False]])
    mean, std = utterance_stats(feats, torch.tensor([6]), counted)
    torch.testing.assert_close(mean[0], feats[0, [1, 2, 4]].mean(0))
    torch.testing.assert_close(std[0], feats[0, [1, 2, 4]].std(0, correction=0))
    none = utterance_stats(feats, torch.tensor([6]), torch.zeros(1, 6, dtype=torch.bool))
    assert none[0].tolist() == [[0.0, 0.0]]
    assert none[1].tolist() == [[1.0, 1.0]]


def test_windows_over_all_frames_equal_the_ungated_ones():
    feats, lengths = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([50, 20, 0])
    every = torch.arange(50) < lengths[:, None]
    for variance in (True, False):
        plain = sliding_normalize(feats, lengths, window=10, variance=variance)
        torch.testing.assert_close(
            sliding_normalize(feats, lengths, window=10, variance=variance, counted=every), plain
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cmvn": "none", "cmvn_gate_db": 20}, "cmvn_gate_db needs CMVN statistics"),
        ({"cmvn": "none", "cmvn_floor": 4}, "cmvn_floor needs CMVN statistics"),
        ({"cmvn": "sliding", "cmvn_center": False, "cmvn_gate_db": 20}, "remove one of them"),
    ],
)
def test_gate_is_refused_where_it_cannot_apply(options, message):
    with pytest.raises(ValidationError, match=message):
        CHOICE.validate_python(options)


def test_energy_ratios_cannot_be_gated():
    with pytest.raises(ValidationError, match="cmvn_gate_db needs the level of frames, and features fber have none"):
        FberConfig(cmvn_gate_db=20)


def test_older_configurations_keep_their_meaning():
    written = {"kind": "logmel", "num_mels": 40, "cmvn": "utterance"}
    config = TypeAdapter(FeatureChoice).validate_python(written)
    assert (config.cmvn_gate_db, config.cmvn_floor) == (0.0, 0.0)
