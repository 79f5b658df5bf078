"""The contract of every model that streams: chunks give what the whole gives, with a bounded state."""

import pytest
import torch
from pydantic import ValidationError
from support import tiny_document

from speech.features import FEATURES, LogMelConfig
from speech.features.cmvn import frame_mask
from speech.models import (
    MODELS,
    BlstmConfig,
    ChunkConfig,
    ConformerConfig,
    LatencyConfig,
    LstmEncoderConfig,
    TdnnConfig,
    build_model,
)
from speech.models.networks.conformer import chunk_mask, drawn_chunk
from tasks.config.pipeline import PipelineConfig

NUM_FEATURES, VOCAB = 12, 7
HOP_MS = 10
CHUNKS_MS = (80, 160, 640)


def random_features(frames, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, frames, NUM_FEATURES, generator=generator)


def streamed(model, feats, chunk, sizes):
    """Log posteriors of features that come in pieces of some sizes, over and over, and bytes of the largest state."""
    state, parts, start, number, most = model.stream_state(len(feats), chunk), [], 0, 0, 0
    with torch.inference_mode():
        while start < feats.shape[1]:
            piece = feats[:, start : start + sizes[number % len(sizes)]]
            out, state = model.forward_chunk(piece, state)
            parts.append(out)
            start, number, most = start + piece.shape[1], number + 1, max(most, state.num_bytes)
        parts.append(model.forward_chunk(feats[:, :0], state, last=True)[0])
    return torch.cat(parts, dim=1), most


class StreamingModelContract:
    """Inherited by the tests of each kind; `config` is what differs."""

    config: ConformerConfig

    def build(self, **changes):
        torch.manual_seed(0)
        return build_model(self.config.model_copy(update=changes), NUM_FEATURES, VOCAB).eval()

    def whole(self, model, feats, chunk):
        """Log posteriors of whole utterances, with the same mask."""
        if hasattr(model, "offline_chunk"):
            model.offline_chunk = chunk
        with torch.inference_mode():
            return model(feats, torch.full((len(feats),), feats.shape[1]))[0]

    @pytest.mark.parametrize("factor", [1, 2, 4, 8])
    @pytest.mark.parametrize("ms", CHUNKS_MS)
    @pytest.mark.parametrize("sizes", [(8, 16), (1, 7, 3, 40), (1000,)], ids=["even", "odd", "all"])
    def test_chunks_give_what_the_whole_utterance_gives(self, factor, ms, sizes):
        chunk = max(1, ms // (HOP_MS * factor))
        model, feats = self.build(subsampling=factor), random_features(333, batch=2)
        torch.testing.assert_close(
            streamed(model, feats, chunk, sizes)[0], self.whole(model, feats, chunk), atol=1e-4, rtol=0
        )

    @pytest.mark.parametrize("frames", [0, 1, 2, 3, 5, 9])
    def test_short_streams_have_the_frames_of_short_utterances(self, frames):
        model, feats = self.build(), random_features(frames)
        outputs, _ = streamed(model, feats, 4, (1,))
        assert outputs.shape[1] == -(-frames // self.config.subsampling)
        if frames:
            torch.testing.assert_close(outputs, self.whole(model, feats, 4), atol=1e-4, rtol=0)

    def test_outputs_come_as_soon_as_their_chunk_is_complete(self):
        model = self.build()
        state = model.stream_state(1, 2)
        counts = []
        for _ in range(24):
            out, state = model.forward_chunk(random_features(1), state)
            counts.append(out.shape[1])
        # output frame t needs no later feature frame than 4t
        assert sum(counts) >= (6 - self.looks_ahead) // 2 * 2
        assert max(counts) == 2

    @pytest.mark.parametrize("factor", [1, 4])
    @pytest.mark.parametrize("chunk", [1, 3])
    def test_missing_frames_are_the_fewest_until_the_next_chunk(self, factor, chunk):
        model = self.build(subsampling=factor)
        state, read = model.stream_state(1, chunk), 0
        for _ in range(12):
            missing = model.frames_for_chunk(state, read) - read
            out, state = model.forward_chunk(random_features(missing - 1), state)
            assert out.shape[1] == 0
            waiting = state.waiting.shape[1]
            _, state = model.forward_chunk(random_features(1), state)
            assert state.waiting.shape[1] == waiting + 1 - chunk
            read += missing

    @pytest.mark.slow
    def test_state_after_a_minute_is_as_large_as_after_ten_seconds(self):
        model = self.build()
        feats = random_features(6000)
        sizes = [streamed(model, feats[:, :frames], 4, (160,))[1] for frames in (960, 6000)]
        assert sizes[0] == sizes[1] > 0

    def test_streams_that_are_computed_together_do_not_mix(self):
        model, feats = self.build(), random_features(90, batch=3)
        together, _ = streamed(model, feats, 4, (16,))
        alone, _ = streamed(model, feats[1:2], 4, (16,))
        torch.testing.assert_close(together[1:2], alone, atol=1e-5, rtol=0)

    def test_streams_at_different_places_are_computed_together(self):
        """Their states have equal shapes once as much has been read as the layers remember."""
        model, feats = self.build(), random_features(400, seed=3)
        begun = []
        for frames in (240, 320):
            begun.append(model.forward_chunk(feats[:, :frames], model.stream_state(1, 4))[1])
        part = torch.randn(2, 4 + (model.cfg.ahead if model.by_window else 0), model.cfg.dim)
        with torch.inference_mode():
            alone = [model.advance(part[i : i + 1], 4, state.layers) for i, state in enumerate(begun)]
            memories = zip(*(state.layers for state in begun), strict=True)
            stacked = tuple(tuple(map(torch.cat, zip(*parts, strict=True))) for parts in memories)
            scores, layers = model.advance(part, 4, stacked)
        assert scores.shape[1]
        for row, (expected, after) in enumerate(alone):
            torch.testing.assert_close(scores[row : row + 1], expected, atol=1e-5, rtol=1e-5)
            for memory, others in zip(layers, after, strict=True):
                for tensor, other in zip(memory, others, strict=True):
                    torch.testing.assert_close(tensor[row : row + 1], other, atol=1e-5, rtol=1e-5)

    def test_later_audio_does_not_change_what_was_put_out(self):
        model, feats = self.build(), random_features(160)
        other = feats.clone()
        other[:, 100:] = random_features(60, seed=1)
        first, second = (streamed(model, x, 4, (20,))[0] for x in (feats, other))
        same = (100 // self.config.subsampling - self.looks_ahead) // 4 * 4
        assert torch.equal(first[:, :same], second[:, :same])
        assert not torch.equal(first, second)

    looks_ahead = 0

    def test_chunk_without_frames_is_refused(self):
        with pytest.raises(ValueError, match="a chunk has 1 or more output frames, not 0"):
            self.build().stream_state(1, 0)


class TestConformer(StreamingModelContract):
    config = ConformerConfig(
        dim=16, layers=2, heads=2, kernel=5, feed_forward=2, subsampling=4, channels=3, chunk=ChunkConfig(left=6)
    )

    @pytest.mark.parametrize("left", [0, 1, 200])
    def test_any_left_context_gives_the_same_in_chunks(self, left):
        model, feats = self.build(chunk=ChunkConfig(left=left)), random_features(150)
        outputs, _ = streamed(model, feats, 3, (16,))
        torch.testing.assert_close(outputs, self.whole(model, feats, 3), atol=1e-4, rtol=0)

    def test_full_context_differs_and_is_the_default_outside_training(self):
        model, feats = self.build(), random_features(150)
        lengths = torch.tensor([150])
        full = model(feats, lengths)[0]
        torch.testing.assert_close(full, self.whole(model, feats, 1000), atol=1e-5, rtol=0)
        assert not torch.allclose(full, self.whole(model, feats, 4), atol=1e-3)
        configured = self.build(chunk=ChunkConfig(left=6, offline=4))
        assert torch.equal(configured(feats, lengths)[0], self.whole(model, feats, 4))

    def test_utterances_in_chunks_do_not_depend_on_their_batch_and_padding_is_finite(self):
        model = self.build(chunk=ChunkConfig(left=2, offline=2))
        lengths = torch.tensor([201, 80, 3, 0])
        feats = random_features(201, batch=4) * frame_mask(lengths, 201)[..., None]
        together, frames = model(feats, lengths)
        assert torch.isfinite(together).all()
        for row, length in enumerate(lengths.tolist()):
            if length:
                alone = model(feats[row : row + 1, :length], lengths[row : row + 1])[0][0]
                torch.testing.assert_close(together[row, : int(frames[row])], alone, atol=1e-5, rtol=0)

    def test_weights_and_outputs_without_chunks_are_what_they_were(self):
        """The option adds no weights, and their initial values are the same."""
        plain, chunked = self.build(chunk=None).state_dict(), self.build().state_dict()
        assert list(plain) == list(chunked)
        assert all(torch.equal(plain[name], chunked[name]) for name in plain)

    def test_same_seed_draws_the_same_chunk_and_others_another(self):
        model, feats = self.build(dropout=0.0).train(), random_features(300)
        lengths = torch.tensor([300])

        def loss(seed):
            torch.manual_seed(seed)
            return float(model(feats, lengths)[0][..., 1].sum().detach())

        losses = [loss(seed) for seed in range(12)]
        assert [loss(seed) for seed in range(12)] == losses
        assert len({round(value, 4) for value in losses}) > 4

    def test_chunks_are_drawn_as_published(self):
        torch.manual_seed(0)
        cfg = ChunkConfig(longest=25, whole=0.5)
        drawn = [int(drawn_chunk(500, cfg, torch.device("cpu"))) for _ in range(2000)]
        assert 0.45 < drawn.count(500) / 2000 < 0.55
        assert set(drawn) == {*range(1, 26), 500}
        assert all(int(drawn_chunk(9, ChunkConfig(whole=1), torch.device("cpu"))) == 9 for _ in range(20))

    def test_mask_lets_a_chunk_see_itself_and_the_left_context(self):
        mask = chunk_mask(6, 2, 1, torch.device("cpu")).int().tolist()
        assert mask == [
            [1, 1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [0, 1, 1, 1, 0, 0],
            [0, 1, 1, 1, 0, 0],
            [0, 0, 0, 1, 1, 1],
            [0, 0, 0, 1, 1, 1],
        ]

    def test_chunked_model_is_not_split_into_stages(self):
        with pytest.raises(ValueError, match="another strategy than pipeline"):
            self.build().stage(range(1))


class TestLstm(StreamingModelContract):
    config = LstmEncoderConfig(dim=16, layers=2, subsampling=4, channels=3, lookahead=3)
    looks_ahead = 3

    def test_lookahead_may_be_none(self):
        model, feats = self.build(lookahead=0), random_features(77)
        torch.testing.assert_close(streamed(model, feats, 4, (16,))[0], self.whole(model, feats, 4), atol=1e-4, rtol=0)

    def test_an_output_reads_the_configured_frames_ahead_and_no_more(self):
        model = self.build(subsampling=1)
        feats = random_features(30).requires_grad_()
        model(feats, torch.tensor([30]))[0][0, 10, 0].backward()
        seen = feats.grad[0].abs().sum(dim=1).nonzero().squeeze(1).tolist()
        assert seen == list(range(14))


class TestBlstm(StreamingModelContract):
    config = BlstmConfig(
        dim=12, layers=2, subsampling=4, channels=3, bottleneck=8, chunk=LatencyConfig(frames=4, ahead=3)
    )
    looks_ahead = 3

    @pytest.mark.parametrize("ahead", [0, 1, 40])
    def test_any_look_ahead_gives_the_same_in_chunks(self, ahead):
        model, feats = self.build(chunk=LatencyConfig(ahead=ahead)), random_features(150)
        outputs, _ = streamed(model, feats, 3, (16,))
        torch.testing.assert_close(outputs, self.whole(model, feats, 3), atol=1e-4, rtol=0)

    def test_an_output_reads_its_chunk_and_the_frames_ahead_and_all_before(self):
        model = self.build(subsampling=1)
        feats = random_features(30).requires_grad_()
        model(feats, torch.tensor([30]))[0][0, 9, 0].backward()  # of the chunk 8 to 11
        seen = feats.grad[0].abs().sum(dim=1).nonzero().squeeze(1).tolist()
        assert seen == list(range(12 + 3))

    def test_one_chunk_is_the_bidirectional_lstm(self):
        model, feats = self.build(), random_features(77, batch=2)
        plain = self.build(chunk=None)
        plain.subsampling = model.subsampling  # whose convolutions read no later frames
        lengths = torch.tensor([77, 50])
        feats = feats * frame_mask(lengths, 77)[..., None]
        model.offline_chunk = 100
        expected, frames = plain(feats, lengths)
        for row, count in enumerate(frames.tolist()):
            torch.testing.assert_close(model(feats, lengths)[0][row, :count], expected[row, :count])

    def test_utterances_do_not_depend_on_their_batch(self):
        model, lengths = self.build(), torch.tensor([201, 80, 3, 0])
        feats = random_features(201, batch=4) * frame_mask(lengths, 201)[..., None]
        together, frames = model(feats, lengths)
        assert torch.isfinite(together).all()
        for row, length in enumerate(lengths.tolist()[:3]):
            alone = model(feats[row : row + 1, :length], lengths[row : row + 1])[0][0]
            torch.testing.assert_close(together[row, : int(frames[row])], alone, atol=1e-5, rtol=0)

    def test_gradients_cross_the_borders_of_chunks_and_training_is_reproducible(self):
        model, feats = self.build(dropout=0.3).train(), random_features(100).requires_grad_()
        torch.manual_seed(1)
        loss = model(feats, torch.tensor([100]))[0][0, -1].square().sum()
        loss.backward()
        assert feats.grad[0, 0].abs().sum() > 0
        torch.manual_seed(1)
        assert torch.equal(model(feats, torch.tensor([100]))[0][0, -1].square().sum(), loss)

    def test_it_is_not_split_into_stages(self):
        with pytest.raises(ValueError, match="another strategy than pipeline"):
            self.build().stage(range(1))


class TestTdnn(StreamingModelContract):
    config = TdnnConfig(
        dim=16, layers=3, subsampling=4, channels=3, bottleneck=6, narrow_layers=2, time_stride=2, prefinal=8
    )
    looks_ahead = 4

    def test_utterances_may_have_any_features(self):
        """It was not trained for streams: features of whole utterances are refused when it is to stream."""
        self.config.check_inputs(LogMelConfig(cmvn="utterance"), 8000)


STREAMING = [cls.config.kind for cls in StreamingModelContract.__subclasses__()]


@pytest.mark.parametrize("contract", StreamingModelContract.__subclasses__(), ids=lambda cls: cls.config.kind)
def test_windows_of_a_fixed_size_give_what_chunks_give_from_a_state_of_zeros(contract):
    """What exported graphs compute: the state has the same shapes from the start."""
    model, chunk = contract().build(), 3
    shift, window = (count * model.cfg.subsampling for count in (chunk, chunk + model.cfg.ahead))
    feats = random_features(8 * shift + window, batch=2)
    expected, _ = streamed(model, feats, chunk, (1000,))
    state, parts = model.stream_state(2, chunk), []
    shapes = [tensor.shape for memory in state.layers for tensor in memory]
    with torch.inference_mode():
        for start in range(0, 8 * shift, shift):
            scores, state = model.window_outputs(feats[:, start : start + window], state)
            parts.append(scores.log_softmax(-1))
            assert [tensor.shape for memory in state.layers for tensor in memory] == shapes
    torch.testing.assert_close(torch.cat(parts, dim=1), expected[:, : 8 * chunk], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_models_that_stream_have_the_contract_tests_and_others_are_refused_with_a_remedy(kind):
    config = MODELS[kind].model_validate(MODELS[kind].tiny)
    fields = config.streaming
    assert (fields is not None) == (kind in STREAMING)
    assert fields is None or MODELS[kind].model_validate(config.tiny | fields).streams
    if not config.streams and not config.packages:
        model = build_model(config, NUM_FEATURES, VOCAB)
        with pytest.raises(ValueError, match=rf"model {kind} .*: train (a conformer with model.chunk|one with)"):
            model.stream_state(1, 4)


def test_blstm_is_refused():
    assert not BlstmConfig().streams


@pytest.mark.parametrize(
    ("features", "remedy"),
    [
        ({"cmvn": "utterance"}, "set features.cmvn=global"),
        ({"cmvn": "speaker"}, "set features.cmvn=global"),
        ({"cmvn": "sliding"}, "features.cmvn_center=false"),
        ({"trim_db": 25}, "set features.trim_db=0"),
        ({"level_db": -20}, "set features.level_db=0"),
    ],
)
def test_features_of_whole_utterances_are_refused_for_models_that_stream(features, remedy):
    document = tiny_document(features={"num_mels": 16, **features})
    assert PipelineConfig.model_validate(document)
    document["model"] |= {"chunk": {}}
    with pytest.raises(ValidationError, match=f"recognize speech as it comes, but features.*{remedy}"):
        PipelineConfig.model_validate(document)
    # the remedy works
    (name,) = features
    fixed = {"cmvn": "global", "trim_db": 0, "level_db": 0}[name]
    document["features"] = {"num_mels": 16, name: fixed}
    PipelineConfig.model_validate(document)


def test_every_kind_of_features_says_whether_it_can_be_read_as_it_comes():
    reasons = {kind: config.model_validate({}).whole_utterance for kind, config in FEATURES.items()}
    assert {kind for kind, reason in reasons.items() if not reason} == {
        "logmel",
        "mfcc",
        "plp",
        "fbank",
        "fber",
        "waveform",
        "sherpa_logmel",
    }
    assert not LogMelConfig(cmvn="sliding", cmvn_center=False).whole_utterance


def test_training_may_begin_with_a_model_of_other_chunks_but_not_with_one_of_whole_utterances():
    chunked = ConformerConfig(chunk=ChunkConfig())
    assert "chunk" in chunked.free_beside(ConformerConfig(chunk=ChunkConfig(longest=6)))
    assert "chunk" not in chunked.free_beside(ConformerConfig())
    assert "chunk" not in ConformerConfig().free_beside(chunked)
    assert "layers" in chunked.free_beside(ConformerConfig())
