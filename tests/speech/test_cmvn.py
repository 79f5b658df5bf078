"""Mean and variance normalization."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.features.cmvn import (
    STD_FLOOR,
    CmvnError,
    CmvnStats,
    frame_mask,
    normalize,
    normalize_frames,
    utterance_stats,
)


def batch(seed=0, lengths=(50, 20, 1, 0), dim=5):
    generator = torch.Generator().manual_seed(seed)
    feats = torch.randn(len(lengths), max(lengths), dim, generator=generator) * 3 + 10
    lengths = torch.tensor(lengths)
    feats[~frame_mask(lengths, feats.shape[1])] = math.nan  # padding must never be looked at
    return feats, lengths


def frames_of(feats, lengths):
    return torch.cat([row[:length] for row, length in zip(feats, lengths.tolist(), strict=True)])


def test_statistics_are_computed_over_all_frames():
    feats, lengths = batch()
    stats = CmvnStats(5).add(feats, lengths)
    frames = frames_of(feats, lengths)
    assert stats.count == len(frames) == 71
    torch.testing.assert_close(stats.mean, frames.mean(0))
    torch.testing.assert_close(stats.std, frames.std(0, correction=0))
    assert stats.mean.dtype == stats.std.dtype == torch.float32


@settings(max_examples=30)
@given(cut=st.integers(0, 71))
def test_statistics_of_parts_add_up(cut):
    frames = frames_of(*batch())
    parts = CmvnStats(5).add(frames[:cut]) + CmvnStats(5).add(frames[cut:])
    whole = CmvnStats(5).add(frames)
    assert parts.count == whole.count
    torch.testing.assert_close(parts.sum, whole.sum, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.sumsq, whole.sumsq, rtol=1e-12, atol=0)


def test_adding_statistics_does_not_change_the_parts():
    frames = frames_of(*batch())
    first, second = CmvnStats(5).add(frames), CmvnStats(5).add(frames)
    total = first + second
    total.add(frames)
    assert (first.count, second.count, total.count) == (71, 71, 213)
    torch.testing.assert_close(first.sum, second.sum)


def test_a_large_offset_does_not_lose_the_variance():
    frames = torch.randn(100_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1000.0
    torch.testing.assert_close(CmvnStats(2).add(frames).std, torch.ones(2), atol=0.01, rtol=0)


def test_json_round_trip_is_exact():
    stats = CmvnStats(5).add(*batch())
    copy = CmvnStats.from_dict(json.loads(json.dumps(stats.to_dict())))
    assert copy.count == stats.count
    assert torch.equal(copy.sum, stats.sum)
    assert torch.equal(copy.sumsq, stats.sumsq)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"count": 1, "sum": [1.0], "sumsq": [1.0, 2.0]},
        {"count": -1, "sum": [1.0], "sumsq": [1.0]},
        {"count": 1, "sum": [math.nan], "sumsq": [1.0]},
        {"count": "many", "sum": [1.0], "sumsq": [1.0]},
        {"count": 1, "sum": 3, "sumsq": [1.0]},
    ],
)
def test_damaged_statistics_are_refused(value):
    with pytest.raises(CmvnError, match=r"compute them again"):
        CmvnStats.from_dict(value)


def test_statistics_of_no_frames_are_refused():
    with pytest.raises(CmvnError, match=r"no frame"):
        _ = CmvnStats(3).mean
    with pytest.raises(CmvnError, match=r"no frame"):
        _ = CmvnStats(3).std


def test_mismatched_dimensions_are_refused():
    with pytest.raises(CmvnError, match=r"3 features.*5"):
        CmvnStats(3).add(*batch())
    with pytest.raises(CmvnError, match=r"3 and of 4"):
        _ = CmvnStats(3) + CmvnStats(4)
    with pytest.raises(CmvnError, match=r"3 features.*5"):
        normalize(*batch(), torch.zeros(3), torch.ones(3))


def test_normalized_frames_have_mean_0_and_deviation_1():
    feats, lengths = batch()
    stats = CmvnStats(5).add(feats, lengths)
    normalized = normalize(feats, lengths, stats.mean, stats.std)
    again = CmvnStats(5).add(normalized, lengths)
    torch.testing.assert_close(again.mean, torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(again.std, torch.ones(5), atol=1e-5, rtol=0)
    assert not normalized[~frame_mask(lengths, feats.shape[1])].any()
    assert normalized.dtype == feats.dtype


def test_each_utterance_is_normalized_by_itself():
    feats, lengths = batch()
    mean, std = utterance_stats(feats, lengths)
    for row, length in enumerate(lengths.tolist()):
        if length > 1:
            torch.testing.assert_close(mean[row], feats[row, :length].mean(0))
            torch.testing.assert_close(std[row], feats[row, :length].std(0, correction=0))
    assert mean[3].tolist() == [0.0] * 5
    assert std[3].tolist() == [1.0] * 5
    normalized = normalize(feats, lengths, mean, std)
    assert torch.isfinite(normalized).all()
    torch.testing.assert_close(normalized[0].mean(0), torch.zeros(5), atol=1e-5, rtol=0)


def test_constant_feature_is_not_amplified():
    feats, lengths = torch.full((1, 10, 2), 7.0), torch.tensor([10])
    stats = CmvnStats(2).add(feats, lengths)
    assert torch.equal(stats.std, torch.full((2,), STD_FLOOR))
    assert not normalize(feats, lengths, stats.mean, stats.std).any()
    assert not normalize(feats, lengths, *utterance_stats(feats, lengths)).any()
    assert torch.isfinite(normalize(feats, lengths, torch.zeros(2), torch.zeros(2))).all()


def test_frames_are_normalized_down_to_a_floor():
    frames = torch.tensor([[1.0, 10.0], [5.0, -90.0]])
    mean, std = torch.tensor([3.0, 10.0]), torch.tensor([2.0, 20.0])
    torch.testing.assert_close(normalize_frames(frames, mean, std, 0.0), torch.tensor([[-1.0, 0.0], [1.0, -5.0]]))
    torch.testing.assert_close(normalize_frames(frames, mean, std, 4.0), torch.tensor([[-1.0, 0.0], [1.0, -4.0]]))
