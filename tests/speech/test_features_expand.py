"""Deltas, splicing, stride and sliding normalization against their definitions, written out frame by frame."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.audio import decode_audio
from speech.features import LogMelConfig, build_features, sliding_normalize
from speech.features.cmvn import STD_FLOOR
from speech.features.expand import Expand, add_deltas, delta_filters, splice, thin


def batch(lengths, dim=4, seed=0):
    """Random features whose padding must never be looked at."""
    feats = torch.full((len(lengths), max(lengths, default=0) + 2, dim), math.nan)
    for row, length in enumerate(lengths):
        feats[row, :length] = torch.randn(length, dim, generator=torch.Generator().manual_seed(seed + row)) * 3 + 5
    return feats, torch.tensor(lengths)


def nearest(frames, t):
    return frames[min(max(t, 0), len(frames) - 1)]


def deltas_written_out(frames, order, window):
    """Deltas of the utterance, then of those, over an utterance whose ends are repeated far enough."""
    reach = order * window
    long = torch.stack([nearest(frames, t) for t in range(-reach, len(frames) + reach)]).double()
    blocks, norm = [long], sum(j * j for j in range(-window, window + 1))
    for _ in range(order):
        last = blocks[-1]
        blocks.append(
            torch.stack(
                [sum(j * nearest(last, t + j) for j in range(-window, window + 1)) / norm for t in range(len(last))]
            )
        )
    return torch.cat([block[reach : reach + len(frames)] for block in blocks], dim=1).float()


def splice_written_out(frames, left, right):
    rows = [torch.cat([nearest(frames, t + j) for j in range(-left, right + 1)]) for t in range(len(frames))]
    return torch.stack(rows)


def sliding_written_out(frames, window, min_window, center, variance):
    rows, total = [], len(frames)
    for t in range(total):
        start, end = (t - window // 2, t - window // 2 + window) if center else (t - window, t + 1)
        if start < 0:
            start, end = 0, end - start
        if not center:
            end = max(t + 1, min_window)
        if end > total:
            start, end = max(0, start - (end - total)), total
        part = frames[start:end].double()
        row = frames[t].double() - part.mean(0)
        if variance:
            row = row / part.std(0, correction=0).clamp(min=STD_FLOOR) if len(part) > 1 else row * 0
        rows.append(row)
    return torch.stack(rows).float()


LENGTHS = st.lists(st.integers(0, 40), min_size=2, max_size=5)


@settings(max_examples=40)
@given(lengths=LENGTHS, order=st.integers(1, 3), window=st.integers(1, 3))
def test_deltas_equal_the_definition(lengths, order, window):
    feats, counts = batch(lengths)
    expanded = add_deltas(feats, counts, order, window)
    assert expanded.shape == (*feats.shape[:2], (order + 1) * 4)
    for row, length in enumerate(lengths):
        if length:
            expected = deltas_written_out(feats[row, :length], order, window)
            torch.testing.assert_close(expanded[row, :length], expected, atol=1e-4, rtol=1e-4)
        assert not expanded[row, length:].any()


def test_delta_filters_are_slopes():
    filters = delta_filters(2, 2)
    torch.testing.assert_close(filters[1], torch.tensor([-0.2, -0.1, 0, 0.1, 0.2]).double(), atol=1e-7, rtol=0)
    assert [len(weights) for weights in filters] == [1, 5, 9]
    ramp = torch.arange(20.0).view(1, 20, 1)
    expanded = add_deltas(ramp, torch.tensor([20]), 2, 2)[0]
    torch.testing.assert_close(expanded[4:16, 1], torch.ones(12))
    torch.testing.assert_close(expanded[4:16, 2], torch.zeros(12), atol=1e-6, rtol=0)


@settings(max_examples=40)
@given(lengths=LENGTHS, left=st.integers(0, 6), right=st.integers(0, 6))
def test_splicing_equals_the_definition(lengths, left, right):
    feats, counts = batch(lengths)
    spliced = splice(feats, counts, left, right)
    for row, length in enumerate(lengths):
        if length:
            assert torch.equal(spliced[row, :length], splice_written_out(feats[row, :length], left, right))
        assert not spliced[row, length:].any()


@settings(max_examples=20)
@given(lengths=LENGTHS, stride=st.integers(1, 5))
def test_stride_keeps_every_nth_frame(lengths, stride):
    feats, counts = batch(lengths)
    thinned, kept = thin(feats, counts, stride)
    for row, length in enumerate(lengths):
        assert torch.equal(thinned[row, : kept[row]], feats[row, :length][::stride])


@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    window=st.integers(2, 50),
    min_window=st.integers(1, 30),
    center=st.booleans(),
    variance=st.booleans(),
)
def test_sliding_normalization_equals_the_definition(lengths, window, min_window, center, variance):
    feats, counts = batch(lengths)
    options = {"window": window, "min_window": min_window, "center": center, "variance": variance}
    normalized = sliding_normalize(feats, counts, **options)
    for row, length in enumerate(lengths):
        if length:
            expected = sliding_written_out(feats[row, :length], **options)
            torch.testing.assert_close(normalized[row, :length], expected, atol=1e-4, rtol=1e-3)
        assert not normalized[row, length:].any()


@pytest.mark.parametrize("center", [True, False])
def test_sliding_normalization_of_real_speech_equals_the_definition(shared_data, center):
    path = min((shared_data / "LibriSpeech" / "dev-clean-5").rglob("*.flac"))
    wave, rate = decode_audio(path)
    feats, frames = build_features(LogMelConfig(num_mels=23), rate)(wave[None], torch.tensor([len(wave)]))
    normalized = sliding_normalize(feats, frames, window=300, center=center)
    expected = sliding_written_out(feats[0], 300, 100, center, True)
    torch.testing.assert_close(normalized[0], expected, atol=1e-3, rtol=0)
    deltas = add_deltas(feats, frames)[0]
    torch.testing.assert_close(deltas, deltas_written_out(feats[0], 2, 2), atol=1e-3, rtol=0)
    assert torch.equal(splice(feats, frames, 3, 3)[0], splice_written_out(feats[0], 3, 3))


def test_large_offset_keeps_the_variance():
    feats = torch.randn(1, 400, 3, generator=torch.Generator().manual_seed(0)) * 0.01 + 1000
    normalized = sliding_normalize(feats, torch.tensor([400]), window=100)
    expected = sliding_written_out(feats[0], 100, 100, True, True)
    torch.testing.assert_close(normalized[0], expected, atol=2e-2, rtol=1e-2)


def test_all_expansions_are_applied_in_order():
    config = LogMelConfig(delta_order=1, splice_left=1, splice_right=2, stride=3)
    feats, counts = batch([20, 7, 0])
    expanded, kept = Expand(config)(feats, counts)
    expected, _ = thin(splice(add_deltas(feats, counts, 1, 2), counts, 1, 2), counts, 3)
    assert torch.equal(expanded, expected)
    assert kept.tolist() == [7, 3, 0]
    assert expanded.shape[2] == 4 * config.frame_factor


def test_no_options_change_nothing():
    feats, counts = batch([5, 3])
    expanded, kept = Expand(LogMelConfig())(feats, counts)
    assert expanded is feats
    assert kept is counts


@pytest.mark.gpu
def test_gpu_equals_cpu():
    config = LogMelConfig(delta_order=2, splice_left=2, splice_right=2, stride=2)
    feats, counts = batch([30, 20, 0])
    expected, kept = Expand(config)(feats, counts)
    expanded, on_gpu = Expand(config).cuda()(feats.cuda(), counts.cuda())
    torch.testing.assert_close(expanded.cpu(), expected, atol=1e-5, rtol=0)
    assert on_gpu.tolist() == kept.tolist()
    normalized = sliding_normalize(feats.cuda(), counts.cuda(), window=9)
    torch.testing.assert_close(normalized.cpu(), sliding_normalize(feats, counts, window=9), atol=1e-5, rtol=0)
