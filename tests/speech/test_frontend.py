"""The front end: features and their normalization in one step."""

import pytest
import torch

from speech.features import FEATURES, CmvnStats, LogMelConfig, build_features, feature_dim
from speech.features.cmvn import frame_mask
from speech.features.expand import Expand
from speech.features.waveform import WaveformConfig
from speech.frontend import FeatureStream, FrontEnd

RATE = 8000


def config(cmvn, kind="logmel", **options):
    return FEATURES[kind](num_mels=10, cmvn=cmvn, **options)


def waves(lengths=(4000, 2500, 900)):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(len(lengths), max(lengths), generator=generator) * 0.1
    lengths = torch.tensor(lengths)
    return inputs * frame_mask(lengths, inputs.shape[1]), lengths


def stats_of(inputs, lengths):
    return CmvnStats(10).add(*build_features(config("none"), RATE)(inputs, lengths))


def test_global_normalization_centres_the_set():
    inputs, lengths = waves()
    frontend = FrontEnd(config("global"), RATE, stats_of(inputs, lengths))
    feats, frames = frontend(inputs, lengths)
    inside = feats[frame_mask(frames, feats.shape[1])]
    torch.testing.assert_close(inside.mean(0), torch.zeros(10), atol=1e-4, rtol=0)
    torch.testing.assert_close(inside.std(0, correction=0), torch.ones(10), atol=1e-3, rtol=0)
    assert frontend.dim == 10


def test_global_normalization_needs_statistics():
    with pytest.raises(ValueError, match="run the features stage first"):
        FrontEnd(config("global"), RATE)


def test_without_normalization_features_pass_through():
    inputs, lengths = waves()
    feats, frames = FrontEnd(config("none"), RATE)(inputs, lengths)
    expected, expected_frames = build_features(config("none"), RATE)(inputs, lengths)
    assert torch.equal(feats, expected)
    assert torch.equal(frames, expected_frames)


def test_each_utterance_may_be_normalized_by_itself():
    feats, frames = FrontEnd(config("utterance"), RATE)(*waves())
    for row, count in zip(feats, frames.tolist(), strict=True):
        torch.testing.assert_close(row[:count].mean(0), torch.zeros(10), atol=1e-4, rtol=0)


def test_known_speakers_have_their_statistics_others_the_utterances():
    inputs, lengths = waves()
    known = stats_of(inputs[:1] * 3, lengths[:1])
    by_speaker = FrontEnd(config("speaker"), RATE, speakers={"ann": known})
    feats, _ = by_speaker(inputs, lengths, ["ann", "unknown", "ann"])
    as_ann, _ = FrontEnd(config("global"), RATE, known)(inputs, lengths)
    by_itself, _ = FrontEnd(config("utterance"), RATE)(inputs, lengths)
    for row, expected in enumerate([as_ann, by_itself, as_ann]):
        torch.testing.assert_close(feats[row], expected[row])
    torch.testing.assert_close(by_speaker(inputs, lengths)[0], by_itself)  # no names: all speakers are unknown


@pytest.mark.parametrize("cmvn", ["none", "global", "speaker", "utterance"])
@pytest.mark.parametrize("kind", ["logmel", "mfcc"])
def test_result_is_independent_of_batch_and_padding(cmvn, kind):
    cfg = config(cmvn, kind=kind, **({"num_ceps": 10} if kind == "mfcc" else {}))
    inputs, lengths = waves((4000, 2500, 100, 0))
    stats = CmvnStats(10).add(*build_features(cfg, RATE)(inputs, lengths))
    frontend = FrontEnd(cfg, RATE, stats, {"ann": stats})
    speakers = ["ann", "bob", "ann", "bob"]
    feats, frames = frontend(inputs, lengths, speakers)
    assert frames.tolist()[2:] == [0, 0]
    assert torch.isfinite(feats).all()
    for row, (length, count) in enumerate(zip(lengths.tolist(), frames.tolist(), strict=True)):
        alone, _ = frontend(inputs[row : row + 1, :length], lengths[row : row + 1], speakers[row : row + 1])
        torch.testing.assert_close(feats[row, :count], alone[0], atol=1e-4, rtol=1e-4)
        assert not feats[row, count:].any()


@pytest.mark.parametrize("cmvn", ["global", "speaker"])
def test_statistics_become_tensors_once(monkeypatch, cmvn):
    """On a GPU each time costs a copy for each utterance, which waits for all work that is queued there."""
    inputs, lengths = waves()
    stats, asked, real = stats_of(inputs, lengths), [], CmvnStats.std
    monkeypatch.setattr(CmvnStats, "std", property(lambda self: (asked.append(1), real.fget(self))[1]))
    frontend = FrontEnd(config(cmvn), RATE, stats, {"ann": stats, "bob": stats})
    with torch.inference_mode():
        first, _ = frontend(inputs, lengths, ["ann", "bob", "ann"])
    second, _ = frontend(inputs, lengths, ["ann", "bob", "ann"])
    assert torch.equal(first, second)
    assert len(asked) == (1 if cmvn == "global" else 2)
    # for another type of numbers there is another table
    frontend.normalized(torch.zeros(3, 5, 10, dtype=torch.float64), torch.tensor([5, 5, 5]), ["ann", "bob", "ann"])
    assert len(asked) == (2 if cmvn == "global" else 4)


@pytest.mark.parametrize("cmvn", ["global", "speaker"])
def test_statistics_used_in_inference_can_be_used_in_training(cmvn):
    inputs, lengths = waves()
    stats = stats_of(inputs, lengths)
    frontend = FrontEnd(config(cmvn), RATE, stats, {"ann": stats})
    with torch.inference_mode():
        frontend(inputs, lengths, ["ann"] * 3)
    feats, frames = build_features(config("none"), RATE)(inputs, lengths)
    feats.requires_grad_()
    frontend(feats, frames, ["ann"] * 3)[0].sum().backward()
    assert feats.grad is not None
    assert feats.grad.isfinite().all()


def test_the_mean_alone_may_be_normalized():
    inputs, lengths = waves()
    stats = stats_of(inputs, lengths)
    for cmvn in ("global", "utterance", "sliding"):
        feats, frames = FrontEnd(config(cmvn, cmvn_variance=False), RATE, stats)(inputs, lengths)
        plain, _ = FrontEnd(config("none"), RATE)(inputs, lengths)
        offset = (plain - feats)[0, : frames[0]]
        if cmvn == "global":
            torch.testing.assert_close(offset, stats.mean.expand_as(offset))
        else:  # these are shorter than the window
            torch.testing.assert_close(offset, plain[0, : frames[0]].mean(0).expand_as(offset), atol=1e-4, rtol=0)


def test_deltas_splicing_and_stride_come_after_normalization():
    inputs, lengths = waves()
    stats = stats_of(inputs, lengths)
    normal, frames = FrontEnd(config("global"), RATE, stats)(inputs, lengths)
    options = {"delta_order": 2, "splice_left": 1, "splice_right": 2, "stride": 2}
    frontend = FrontEnd(config("global", **options), RATE, stats)
    feats, kept = frontend(inputs, lengths)
    expected, expected_frames = Expand(config("global", **options))(normal, frames)
    assert torch.equal(feats, expected)
    assert torch.equal(kept, expected_frames)
    assert frontend.dim == feats.shape[2] == 10 * 3 * 4 == feature_dim(config("global", **options), RATE)


def test_masks_come_before_deltas_and_splicing():
    inputs, lengths = waves()
    frontend = FrontEnd(config("utterance", splice_left=1, delta_order=1), RATE)
    seen = []

    def mask(feats, frames):
        seen.append((feats.shape[2], frames.tolist()))
        return torch.zeros_like(feats)

    feats, frames = frontend(inputs, lengths, augment=mask)
    assert seen == [(10, frames.tolist())]
    assert feats.shape[2] == 40
    assert not feats.any()


@pytest.mark.parametrize("cmvn", ["none", "global", "utterance"])
def test_stored_features_are_processed_alike(cmvn):
    inputs, lengths = waves()
    frontend = FrontEnd(config(cmvn), RATE, stats_of(inputs, lengths))
    extracted, frames = build_features(config("none"), RATE)(inputs, lengths)
    feats, same = frontend(extracted, frames)
    assert torch.equal(feats, frontend(inputs, lengths)[0])
    assert torch.equal(same, frames)


def test_front_end_state_is_not_in_the_models_state():
    """Statistics are stored in the bundle's JSON: weights files contain nothing of the front end."""
    assert FrontEnd(config("none"), RATE).state_dict() == {}


STREAMED = [
    LogMelConfig(num_mels=10),
    LogMelConfig(num_mels=10, cmvn="none", hop_ms=40, frame_ms=20),
    LogMelConfig(num_mels=10, cmvn_floor=2, delta_order=2, splice_left=2, splice_right=1, stride=3),
    LogMelConfig(num_mels=10, cmvn="sliding", cmvn_center=False, cmvn_window=150),
    LogMelConfig(num_mels=10, cmvn="sliding", cmvn_center=False, cmvn_window=20, delta_order=1),
    WaveformConfig(samples=80, cmvn="none"),
    # a kind that is added to the registry is tested, too
    *(
        cfg.model_validate(cfg.tiny)
        for kind, cfg in sorted(FEATURES.items())
        if kind not in ("logmel", "waveform") and not cfg.model_validate({}).whole_utterance
    ),
]


@pytest.mark.parametrize("cfg", STREAMED, ids=lambda cfg: f"{cfg.kind}-{cfg.cmvn}-{cfg.stride}-{cfg.cmvn_window}")
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.3, 4.0])
def test_features_of_a_stream_are_those_of_the_whole_utterance(cfg, seconds):
    generator = torch.Generator().manual_seed(0)
    wave = torch.randn(int(seconds * 8000), generator=generator) / 10
    stats = CmvnStats(cfg.width).add(torch.randn(50, cfg.width, generator=generator))
    frontend = FrontEnd(cfg, 8000, stats)
    expected, frames = frontend(wave[None], torch.tensor([len(wave)]))
    for sizes in ((80,), (1, 700, 33), (40000,)):
        stream, parts, start, number = FeatureStream(frontend), [], 0, 0
        while start < len(wave):
            parts.append(stream.accept(wave[start : start + sizes[number % len(sizes)]]))
            start, number = min(len(wave), start + sizes[number % len(sizes)]), number + 1
            given = sum(map(len, parts))
            assert given == 0 or stream.samples_for(given) <= start
            assert start < stream.samples_for(given + 1)
        streamed = torch.cat([*parts, stream.finish()])
        assert streamed.shape == (int(frames), frontend.dim)
        torch.testing.assert_close(streamed, expected[0, : int(frames)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cfg", STREAMED, ids=lambda cfg: f"{cfg.kind}-{cfg.cmvn}-{cfg.stride}-{cfg.cmvn_window}")
@pytest.mark.variants(4)
def test_stream_of_a_minute_keeps_as_much_as_one_of_ten_seconds(cfg):
    frontend = FrontEnd(cfg, 8000, CmvnStats(cfg.width).add(torch.zeros(2, cfg.width)))
    stream, sizes = FeatureStream(frontend), []
    for _ in range(6):
        for _ in range(100):
            stream.accept(torch.zeros(800))
        sizes.append(stream.num_bytes)
    assert sizes[0] == sizes[-1]


@pytest.mark.parametrize("cfg", STREAMED, ids=lambda cfg: f"{cfg.kind}-{cfg.cmvn}-{cfg.stride}-{cfg.cmvn_window}")
@pytest.mark.parametrize("frames", [1, 5])
def test_missing_samples_are_the_fewest_until_so_many_frames_have_come(cfg, frames):
    stream = FeatureStream(FrontEnd(cfg, 8000, CmvnStats(cfg.width).add(torch.zeros(2, cfg.width))))
    heard = given = 0
    for _ in range(4):
        missing = stream.samples_for(given + frames) - heard
        short, whole = (len(stream.accept(torch.zeros(size))) for size in (missing - 1, 1))
        assert short < frames <= short + whole
        heard, given = heard + missing, given + short + whole


def test_features_that_need_the_whole_utterance_are_refused_for_streams():
    with pytest.raises(ValueError, match=r"as it comes: features\.cmvn=utterance .*: set features\.cmvn=global"):
        FeatureStream(FrontEnd(LogMelConfig(cmvn="utterance"), 16000))
