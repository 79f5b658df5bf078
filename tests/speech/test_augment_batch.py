"""Properties of every augmentation and every kind of features: a batch gives the same as its utterances one by one."""

import math

import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from configurable.configuration import descriptions
from speech.features import FEATURES, CmvnStats, LogMelConfig, build_features
from speech.features.augment import (
    AUGMENTATIONS,
    AugmentConfig,
    FeatureAugmentation,
    GainConfig,
    MaskConfig,
    NoiseConfig,
    PauseConfig,
    ReverbConfig,
    SpecAugment,
    SpeedConfig,
    TimeWarpConfig,
    WaveAugment,
    WaveAugmentation,
    utterance_seeds,
)
from speech.frontend import FrontEnd

RATE = 8000
CONFIGS = {
    "speed": [SpeedConfig(factors=(0.8, 1.0, 1.25))],
    "reverb": [ReverbConfig(probability=0.7, rooms=5), ReverbConfig(kind="image", rt60_s=(0.1, 0.2), rooms=5)],
    "noise": [NoiseConfig(probability=0.8), NoiseConfig(generated=("pink",), snr_db=(0.0, 0.0))],
    "gain": [GainConfig(db=10.0)],
    "pauses": [PauseConfig(probability=0.8), PauseConfig(probability=1.0, edge_s=(0.1, 0.1), kinds=("room",))],
    "time_warp": [TimeWarpConfig(frames=5), TimeWarpConfig(frames=80)],
    "masks": [MaskConfig(), MaskConfig(time_masks=5, time_mask_share=1.0, freq_masks=0)],
}
"""Every registered augmentation has at least one configuration here."""

EVERYTHING = {
    "speed_factors": (0.9, 1.1),
    "reverb": ReverbConfig(),
    "noise": NoiseConfig(),
    "gain_db": 6.0,
    "pauses": PauseConfig(probability=1.0),
    "time_warp_frames": 10,
}
OF_BASE = {
    base: [
        (name, config)
        for name, configs in CONFIGS.items()
        for config in configs
        if issubclass(AUGMENTATIONS[name].build, base)
    ]
    for base in (WaveAugmentation, FeatureAugmentation)
}
property_test = settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def randoms(length, *shape, seed=0):
    return torch.randn(length, *shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def padded(rows, value=math.nan):
    """A batch with padding that must never be looked at."""
    total = max(len(row) for row in rows) + 3
    batch = torch.full((len(rows), total, *rows[0].shape[1:]), value)
    for row, item in zip(batch, rows, strict=True):
        row[: len(item)] = item
    return batch, torch.tensor([len(row) for row in rows])


def seeds_for(count, seed=1):
    return utterance_seeds(seed, 0, [f"u{number}" for number in range(count)])


def test_every_registered_augmentation_is_tested_here():
    assert CONFIGS.keys() == AUGMENTATIONS.keys()
    for name, configs in CONFIGS.items():
        assert all(type(config) is AUGMENTATIONS[name].config for config in configs)
        assert issubclass(AUGMENTATIONS[name].config, BaseModel)
        assert descriptions(AUGMENTATIONS[name].config).keys() == AUGMENTATIONS[name].config.model_fields.keys()
    assert descriptions(AugmentConfig).keys() == AugmentConfig.model_fields.keys()
    assert AugmentConfig(**EVERYTHING).parts().keys() == AUGMENTATIONS.keys()
    assert list(AugmentConfig(**EVERYTHING).parts()) == list(AUGMENTATIONS)


@pytest.mark.parametrize(("name", "config"), OF_BASE[WaveAugmentation])
@property_test
@given(lengths=st.lists(st.integers(0, 3000), min_size=2, max_size=5), seed=st.integers(0, 1 << 40))
def test_a_batch_of_waves_equals_its_utterances(name, config, lengths, seed):
    augment = AUGMENTATIONS[name].build(config, RATE)
    rows, seeds = [randoms(length, seed=n) for n, length in enumerate(lengths)], seeds_for(len(lengths), seed)
    waves, counts = padded(rows, value=0.0)
    before = waves.clone()
    changed, new_counts = augment(waves, counts, seeds)
    assert torch.equal(waves, before)
    for number, row in enumerate(rows):
        alone, count = augment(row[None], torch.tensor([len(row)]), seeds[number : number + 1])
        assert count.tolist() == [new_counts[number]]
        torch.testing.assert_close(changed[number, : int(count)], alone[0, : int(count)], atol=1e-5, rtol=1e-4)
        assert not changed[number, int(count) :].any()
    assert torch.equal(augment.lengths(counts, seeds), new_counts)
    again, _ = augment(waves, counts, seeds)
    assert torch.equal(again, changed)


@pytest.mark.parametrize(("name", "config"), OF_BASE[FeatureAugmentation])
@property_test
@given(lengths=st.lists(st.integers(0, 90), min_size=3, max_size=6), seed=st.integers(0, 1 << 40))
def test_a_batch_of_features_equals_its_utterances(name, config, lengths, seed):
    augment = AUGMENTATIONS[name].build(config, 0)
    rows, seeds = [randoms(length, 20, seed=n) for n, length in enumerate(lengths)], seeds_for(len(lengths), seed)
    feats, counts = padded(rows)
    before = feats.clone()
    changed = augment(feats, counts, seeds)
    torch.testing.assert_close(feats, before, equal_nan=True, atol=0, rtol=0)
    for number, row in enumerate(rows):
        alone = augment(row[None], torch.tensor([len(row)]), seeds[number : number + 1])
        torch.testing.assert_close(changed[number, : len(row)], alone[0], atol=1e-6, rtol=1e-5)
        assert torch.isnan(changed[number, len(row) :]).all()


def test_combined_augmentation_is_independent_of_the_batch():
    """In any batch and order, only an utterance's id, the epoch and the run's seed matter."""
    config = AugmentConfig(**EVERYTHING)
    waves, spec = WaveAugment(config, RATE), SpecAugment(config)
    ids = ["a", "b", "c", "d"]
    rows = {name: randoms(1000 + 700 * n, seed=n) for n, name in enumerate(ids)}

    def changed(names, epoch=0, seed=1):
        batch, counts = padded([rows[name] for name in names])
        seeds = utterance_seeds(seed, epoch, names)
        augmented, counts = waves(batch, counts, seeds)
        feats, frames = build_features(LogMelConfig(num_mels=20), RATE)(augmented, counts)
        feats = spec(feats, frames, seeds)
        return {name: feats[n, : int(frames[n])] for n, name in enumerate(names)}

    together = changed(ids)
    for names in (["d", "b"], ["c"], ["a"]):
        for name, feats in changed(names).items():
            torch.testing.assert_close(feats, together[name], atol=2e-3, rtol=1e-4)
    for other in (changed(ids, epoch=1), changed(ids, seed=2)):
        assert all(f.shape != together[n].shape or not torch.allclose(f, together[n]) for n, f in other.items())


def test_an_augmentation_does_not_change_the_draws_of_another():
    rows, counts = padded([randoms(4000, seed=n) for n in range(8)])
    seeds = seeds_for(8)
    alone, lengths = WaveAugment(AugmentConfig(speed_factors=(0.9, 1.1)), RATE)(rows, counts, seeds)
    config = AugmentConfig(speed_factors=(0.9, 1.1), gain_db=6.0, reverb=ReverbConfig(probability=0.0))
    louder, same = WaveAugment(config, RATE)(rows, counts, seeds)
    assert torch.equal(lengths, same)
    ratio = louder[:, :3000] / alone[:, :3000]
    torch.testing.assert_close(ratio.std(1), torch.zeros(8), atol=1e-4, rtol=0)


def test_waveform_augmentation_refuses_stored_features():
    with pytest.raises(ValueError, match=r"need waves \[B, N\]"):
        WaveAugment(AugmentConfig(gain_db=3.0), RATE)(torch.zeros(1, 10, 4), torch.tensor([10]), [1])
    with pytest.raises(ValueError, match="1 seeds for 2 utterances"):
        WaveAugment(AugmentConfig(gain_db=3.0), RATE)(torch.zeros(2, 10), torch.tensor([10, 10]), [1])


# --- every kind of features through the whole front end

EXPANSIONS = [{}, {"delta_order": 2}, {"splice_left": 2, "splice_right": 1, "stride": 2}]
NORMALIZATIONS = ["none", "global", "speaker", "utterance", "sliding"]
GATED = {"cmvn_gate_db": 10.0, "cmvn_floor": 2.0}


@pytest.mark.parametrize("kind", sorted(kind for kind, config in FEATURES.items() if not config.adapted))
@pytest.mark.parametrize("cmvn", NORMALIZATIONS)
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 4000), min_size=2, max_size=4),
    expansion=st.sampled_from(EXPANSIONS),
    variance=st.booleans(),
    gated=st.booleans(),
)
def test_a_batch_through_the_front_end_equals_its_utterances(kind, cmvn, lengths, expansion, variance, gated):
    gate = GATED if gated and cmvn != "none" and FEATURES[kind].has_levels else {}
    own = FEATURES[kind].tiny
    cfg = FEATURES[kind](cmvn=cmvn, cmvn_variance=variance, cmvn_window=20, **own, **expansion, **gate)
    known = randoms(9000, seed=99)[None]
    stats = CmvnStats(build_features(cfg, RATE).dim).add(build_features(cfg, RATE)(known, torch.tensor([9000]))[0])
    frontend = FrontEnd(cfg, RATE, stats, {"ann": stats})
    rows, speakers = [randoms(length, seed=n) for n, length in enumerate(lengths)], ["ann", "bob", "cy", "ann"]
    waves, counts = padded(rows)
    feats, frames = frontend(waves, counts, speakers[: len(rows)])
    assert feats.shape[2] == frontend.dim
    for number, row in enumerate(rows):
        alone, count = frontend(row[None], torch.tensor([len(row)]), [speakers[number]])
        assert count.tolist() == [frames[number]]
        torch.testing.assert_close(feats[number, : int(count)], alone[0], atol=1e-3, rtol=1e-3)
        assert not feats[number, int(count) :].any()


# --- on a GPU


@pytest.mark.gpu
def test_gpu_equals_cpu(tmp_path):
    soundfile.write(tmp_path / "noise.wav", randoms(4000).numpy(), RATE)
    noise = NoiseConfig(files=(str(tmp_path),), file_share=0.5)
    config = AugmentConfig(**EVERYTHING | {"noise": noise})
    waves, counts = padded([randoms(2000 + 500 * n, seed=n) for n in range(6)])
    seeds = seeds_for(6)
    expected, lengths = WaveAugment(config, RATE)(waves, counts, seeds)
    augmented, on_gpu = WaveAugment(config, RATE)(waves.cuda(), counts.cuda(), seeds)
    assert on_gpu.tolist() == lengths.tolist()
    torch.testing.assert_close(augmented.cpu(), expected, atol=1e-4, rtol=0)
    feats, frames = padded([randoms(60 + 9 * n, 20, seed=n) for n in range(6)], value=0.0)
    expected = SpecAugment(config)(feats, frames, seeds)
    masked = SpecAugment(config)(feats.cuda(), frames.cuda(), seeds)
    torch.testing.assert_close(masked.cpu(), expected, atol=1e-5, rtol=0)
