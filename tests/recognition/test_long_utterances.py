"""Utterances beyond an encoder's positions: cut in pauses, and their scores joined."""

import pytest
import torch

from recognition.bundle import BundleSpec
from recognition.data.dataset import SpeechDataset
from recognition.long_utterances import pieces_of
from recognition.systems.acoustic import FrameRecognizer
from speech.features import LogMelConfig, WhisperLogMelConfig
from speech.frontend import FrontEnd
from speech.models import BlstmConfig, WhisperConfig
from speech.tokens import TokenConfig, train_tokenizer
from speech.vad import EverythingConfig, build_vad, cut_whole

RATE = 16000


def spec(**changes):
    encoder = {"model_type": "whisper", "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "max_source_positions": 50}
    values = {
        "sample_rate": RATE,
        "features": WhisperLogMelConfig(num_mels=20),
        "stats": None,
        "tokenizer": train_tokenizer(TokenConfig(), ["a b"]).to_dict(),
        "model": WhisperConfig(dim=16, layers=1, encoder=encoder),
    }
    return BundleSpec(**{**values, **changes})


def bursts(pauses, seconds):
    """Noise with half a second of faint noise from each of some times."""
    wave = torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(0)) * 0.1
    for start in pauses:
        wave[int(start * RATE) : int((start + 0.5) * RATE)] *= 1e-3
    return wave


def test_waveforms_are_cut_at_the_quietest_place_and_nothing_is_lost():
    wave = bursts((0.8, 1.7, 2.6), 3.4)
    pieces = cut_whole(build_vad(EverythingConfig()), wave, RATE, RATE)
    assert torch.equal(torch.cat(pieces), wave)
    assert all(0 < len(piece) <= RATE for piece in pieces)
    end = len(pieces[0]) / RATE
    assert 0.8 <= end <= 1.0


def test_stored_features_are_cut_at_the_softest_frame_and_nothing_is_lost():
    frontend = FrontEnd(LogMelConfig(num_mels=20, cmvn="none"), RATE)
    feats, frames = frontend(bursts((0.8,), 2.5)[None], torch.tensor([int(2.5 * RATE)]))
    pieces = pieces_of(feats[0], 100, frontend)
    assert torch.equal(torch.cat(pieces), feats[0])
    assert all(0 < len(piece) <= 100 for piece in pieces)
    assert 78 <= len(pieces[0]) <= 100
    assert sum(map(len, pieces)) == int(frames)


@pytest.mark.parametrize("stored", [False, True])
def test_scores_of_long_utterances_are_those_of_their_pieces(stored):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    described = spec()
    recognizer = FrameRecognizer(described, described.build_model().eval())
    waves = [bursts((0.8, 1.6), 2.6), bursts((), 0.7)]
    inputs = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True)
    lengths = torch.tensor([len(wave) for wave in waves])
    if stored:
        inputs, lengths = recognizer.frontend.extract(inputs, lengths)
    log_probs, frames, starts, places = recognizer.encode(inputs, lengths)
    short = recognizer.encode(inputs[1:, : int(lengths[1])], lengths[1:])
    torch.testing.assert_close(log_probs[1, : int(frames[1])], short.log_probs[0], atol=1e-5, rtol=1e-5)
    most = described.max_inputs(stored)
    pieces = pieces_of(inputs[0, : int(lengths[0])], most, recognizer.frontend)
    assert len(pieces) >= 3
    wanted = [recognizer.encode(piece[None], torch.tensor([len(piece)])).log_probs[0] for piece in pieces]
    torch.testing.assert_close(log_probs[0, : int(frames[0])], torch.cat(wanted), atol=1e-5, rtol=1e-5)
    assert abs(int(frames[0]) - 130) <= len(pieces)
    assert starts.tolist() == [0.0, 0.0]
    assert list(places) == [0]
    firsts = torch.tensor([len(scores) for scores in wanted[:-1]]).cumsum(0).tolist()
    passed = torch.tensor([len(piece) for piece in pieces[:-1]]).cumsum(0) / (100 if stored else RATE)
    assert [piece.first for piece in places[0]] == firsts
    assert [piece.begin for piece in places[0]] == pytest.approx(passed.tolist(), abs=1e-6)


def test_limits_are_those_of_the_encoders_positions():
    described = spec()
    assert (described.max_inputs(), described.max_inputs(stored=True), described.max_seconds) == (RATE, 100, 1.0)
    trimmed = spec(features=WhisperLogMelConfig(num_mels=20, trim_db=30))
    assert 0.8 < trimmed.max_seconds < 0.9
    unlimited = spec(model=BlstmConfig())
    assert (unlimited.max_inputs(), unlimited.max_seconds) == (0, float("inf"))


def test_batches_leave_out_what_is_too_long(tmp_path):
    import numpy as np

    from speech.audio import encode_flac
    from storage.objects import ObjectStore
    from storage.reading import ShardReader
    from storage.shards import Sample, build_index, write_shard

    store = ObjectStore(str(tmp_path))
    samples = [
        Sample(
            name, {"flac": encode_flac(bursts((), seconds), RATE)}, {"duration": seconds, "text": "a", "speaker": "s"}
        )
        for name, seconds in (("short", 0.5), ("long", 1.5))
    ]
    for sample in samples:
        sample.row.update(num_frames=int(sample.row["duration"] * RATE), sample_rate=RATE, speaker="s", domain="d")
    index = build_index([write_shard(store, "0.tar", samples, "flac")], {})
    data = SpeechDataset(index, ShardReader(store, index, tmp_path / "cache"), max_seconds=1.0)
    batch = data.batch(np.arange(2))
    assert (batch.ids, batch.unreadable) == (["short"], 0)
    assert data.batch(np.array([1])).ids == []
