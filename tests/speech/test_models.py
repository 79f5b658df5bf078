"""The contract of every acoustic model: one suite, inherited by each kind."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from speech.features.cmvn import frame_mask
from speech.models import (
    MODELS,
    BlstmConfig,
    ConformerConfig,
    ModelChoice,
    ModelConfig,
    TdnnConfig,
    Wav2Vec2Config,
    WhisperConfig,
    build_model,
)
from speech.models.networks.attention import rotary_tables, rotate
from speech.models.networks.base import AcousticModel, Subsampling
from speech.models.networks.tdnn import semi_orthogonal_step
from training.simulation.model import Stack

NUM_FEATURES, VOCAB = 12, 7
LENGTHS = (61, 40, 17, 8, 3, 1)


def features(lengths=LENGTHS, seed=0, extra=0):
    """Random normalized features, zero in the padding."""
    generator = torch.Generator().manual_seed(seed)
    feats = torch.randn(len(lengths), max(lengths) + extra, NUM_FEATURES, generator=generator)
    lengths = torch.tensor(lengths)
    return feats * frame_mask(lengths, feats.shape[1])[..., None], lengths


class AcousticModelContract:
    """Inherited by the tests of each kind; `config` is what differs."""

    config: ModelConfig

    def build(self, seed=0, **changes) -> AcousticModel:
        for package in self.config.packages:
            pytest.importorskip(package)
        if (factor := changes.get("subsampling", self.config.subsampling)) not in self.config.subsamplings:
            pytest.skip(f"{self.config.kind} has no subsampling by {factor}")
        torch.manual_seed(seed)
        return build_model(self.config.model_copy(update=changes), NUM_FEATURES, VOCAB).eval()

    @pytest.fixture
    def model(self):
        return self.build()

    @pytest.mark.parametrize("factor", [1, 2, 4, 8])
    def test_output_has_expected_shape_and_lengths(self, factor):
        log_probs, lengths = self.build(subsampling=factor)(*features())
        assert lengths.tolist() == [-(-length // factor) for length in LENGTHS]  # each halving rounds up
        assert log_probs.shape == (len(LENGTHS), -(-LENGTHS[0] // factor), VOCAB)
        assert log_probs.dtype == torch.float32

    @pytest.mark.parametrize("factor", [1, 2, 4, 8])
    def test_each_halving_rounds_lengths_up(self, factor):
        counts = range(1, 34)
        lengths = self.build(subsampling=factor)(*features(counts))[1]
        assert lengths.tolist() == [-(-count // factor) for count in counts]

    def test_outputs_are_log_probabilities(self, model):
        log_probs, lengths = model(*features())
        inside = log_probs[frame_mask(lengths, log_probs.shape[1])]
        torch.testing.assert_close(inside.exp().sum(-1), torch.ones(len(inside)))

    @pytest.mark.parametrize("factor", [1, 2, 4, 8])
    def test_utterance_does_not_depend_on_its_batch(self, factor):
        model = self.build(subsampling=factor)
        feats, lengths = features(extra=13)
        together, out_lengths = model(feats, lengths)
        for row, (length, out_length) in enumerate(zip(lengths.tolist(), out_lengths.tolist(), strict=True)):
            alone, _ = model(feats[row : row + 1, :length], lengths[row : row + 1])
            torch.testing.assert_close(together[row, :out_length], alone[0], atol=1e-5, rtol=1e-5)

    def test_padding_is_ignored(self, model):
        feats, lengths = features()
        expected, out_lengths = model(feats, lengths)
        noise = torch.randn(feats.shape) * 100
        noisy = torch.where(frame_mask(lengths, feats.shape[1])[..., None], feats, noise)
        outputs, _ = model(noisy, lengths)
        mask = frame_mask(out_lengths, expected.shape[1])
        torch.testing.assert_close(outputs[mask], expected[mask], atol=1e-5, rtol=1e-5)

    def test_gradients_reach_neither_padding_nor_other_utterances(self, model):
        feats, lengths = features((40, 21))
        feats.requires_grad_()
        log_probs, out_lengths = model(feats, lengths)
        log_probs[1, : int(out_lengths[1]), 2].sum().backward()
        assert not feats.grad[0].any()
        assert not feats.grad[1, 21:].any()
        assert feats.grad[1, :21].any()

    @pytest.mark.parametrize("factor", [1, 4])
    def test_empty_utterance_does_not_affect_the_batch(self, factor):
        model = self.build(subsampling=factor)
        feats, lengths = features((20, 0, 9))
        log_probs, out_lengths = model(feats, lengths)
        assert out_lengths.tolist()[1] == 0
        assert torch.isfinite(log_probs).all()
        torch.testing.assert_close(log_probs[:1], model(feats[:1], lengths[:1])[0], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("factor", [1, 4])
    @pytest.mark.parametrize("frames", [0, 3])
    def test_batch_of_empty_utterances_is_accepted(self, factor, frames):
        model = self.build(subsampling=factor)
        log_probs, lengths = model(torch.zeros(2, frames, NUM_FEATURES), torch.tensor([0, 0]))
        assert lengths.tolist() == [0, 0]
        assert log_probs.shape[0] == 2
        assert torch.isfinite(log_probs).all()

    @pytest.mark.parametrize("factor", [1, 2, 8])
    def test_gradients_reach_all_parameters(self, factor):
        model = self.build(subsampling=factor).train()
        log_probs, lengths = model(*features((33, 0, 20)))
        weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(1))
        (log_probs * weights * frame_mask(lengths, log_probs.shape[1])[..., None]).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.any(), name

    def test_dropout_is_active_only_in_training(self, model):
        batch = features()
        assert torch.equal(model(*batch)[0], model(*batch)[0])
        model.train()
        assert not torch.equal(model(*batch)[0], model(*batch)[0])
        torch.manual_seed(3)
        first = model(*batch)[0]
        torch.manual_seed(3)
        assert torch.equal(model(*batch)[0], first)

    def test_weights_depend_on_the_seed(self):
        weights, same, other = (self.build(seed).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(weights[name], same[name]) for name in weights)
        assert any(not torch.equal(weights[name], other[name]) for name in weights)

    def test_mixed_precision_gives_float32(self, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log_probs, _ = model(*features())
        assert log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs[:1], model(*features())[0][:1], atol=0.1, rtol=0.1)

    def test_weights_can_be_loaded_into_another_model(self, model):
        other = self.build(seed=5)
        other.load_state_dict(model.state_dict())
        batch = features()
        assert torch.equal(other(*batch)[0], model(*batch)[0])

    def test_number_of_parameters_is_as_expected(self, model):
        assert model.num_parameters() == sum(tensor.numel() for tensor in model.state_dict().values())

    def test_replicas_are_computed_at_once_if_the_model_says_so(self, model):
        feats, lengths = features((21, 21))
        weights = torch.stack([torch.cat([p.detach().flatten() * by for p in model.parameters()]) for by in (1.0, 0.5)])
        try:
            outputs, _ = Stack(model)(weights, torch.stack([feats, feats]), torch.stack([lengths, lengths]))
        except RuntimeError:  # no rule of vmap, or one that depends on the data
            assert not model.stackable
            return
        if model.stackable:
            torch.testing.assert_close(outputs[0], model(feats, lengths)[0], atol=1e-5, rtol=1e-5)
            assert not torch.allclose(outputs[0], outputs[1])

    def test_it_can_be_split_if_its_configuration_says_so(self, model):
        assert self.config.can_be_split == (type(model).stage is not AcousticModel.stage)

    @pytest.mark.gpu
    @pytest.mark.parametrize(("tf32", "allowed"), [(False, 1e-3), (True, 2e-2)])
    def test_gpu_gives_the_same_output(self, model, monkeypatch, tf32, allowed):
        """In TF32, cuDNN's default for convolutions and LSTMs, each factor has 10 bits of mantissa."""
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
        feats, lengths = features()
        expected, out_lengths = model(feats, lengths)
        outputs, _ = model.cuda()(feats.cuda(), lengths.cuda())
        mask = frame_mask(out_lengths, expected.shape[1])
        torch.testing.assert_close(outputs.cpu()[mask], expected[mask], atol=allowed, rtol=allowed)


class HearsEverything:
    """Of models in both directions, or with attention."""

    def test_output_depends_on_the_whole_input(self, model):
        """The first output frame depends on the last input frame."""
        feats, lengths = features((40,))
        feats.requires_grad_()
        model(feats, lengths)[0][0, 0, 1].backward()
        assert feats.grad[0, -1].any()


class TestBlstm(HearsEverything, AcousticModelContract):
    config = BlstmConfig(dim=10, layers=2, bottleneck=6, subsampling=4, channels=3, dropout=0.2)

    def test_number_of_parameters_is_the_published_one(self):
        """Six layers of 512 cells a direction and a bottleneck of 256 (arXiv:1904.04956), input and output aside."""
        cfg = BlstmConfig(dim=512, layers=6, bottleneck=256, subsampling=1)
        model = build_model(cfg, 260, 100)
        assert model.lstm.num_layers == 6
        assert model.lstm.hidden_size == 512
        assert model.bottleneck.weight.shape == (256, 1024)
        assert model.output.weight.shape == (100, 256)

    def test_bottleneck_can_be_omitted(self):
        model = self.build(bottleneck=0)
        assert model.output.weight.shape == (VOCAB, 2 * 10)

    def test_forget_gates_start_open(self, model):
        """PyTorch orders the gates input, forget, cell, output."""
        assert (model.lstm.bias_ih_l0[10:20] == 1).all()
        assert (model.lstm.bias_ih_l1_reverse[10:20] == 1).all()
        assert (model.lstm.bias_ih_l0[:10].abs() < 1).all()


class TestConformer(HearsEverything, AcousticModelContract):
    config = ConformerConfig(
        dim=16, layers=2, heads=2, kernel=5, feed_forward=2, subsampling=4, channels=3, dropout=0.2
    )

    def test_attention_depends_on_relative_positions_only(self):
        cos, sin = rotary_tables(20, 8, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        query, key = (torch.randn(1, 1, 1, 8, generator=generator).expand(1, 1, 20, 8) for _ in range(2))
        scores = (rotate(query, cos, sin) @ rotate(key, cos, sin).transpose(2, 3))[0, 0]
        for offset in (-7, 0, 3):
            diagonal = scores.diagonal(offset)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)
        assert (scores.diagonal(0)[0] - scores.diagonal(5)[0]).abs() > 1e-3

    def test_rotation_keeps_lengths(self):
        vectors = torch.randn(2, 3, 11, 8, generator=torch.Generator().manual_seed(0))
        turned = rotate(vectors, *rotary_tables(11, 8, torch.device("cpu")))
        torch.testing.assert_close(turned.norm(dim=-1), vectors.norm(dim=-1))

    def test_default_has_about_four_million_parameters(self):
        assert 3.5e6 < build_model(ConformerConfig(), 80, 30).num_parameters() < 4.5e6


class TestTdnn(AcousticModelContract):
    config = TdnnConfig(
        dim=16,
        layers=4,
        narrow_layers=1,
        time_stride=9,
        bottleneck=6,
        prefinal=8,
        subsampling=2,
        channels=3,
        dropout=0.2,
    )

    def test_default_has_about_two_and_a_half_million_parameters(self):
        assert 2e6 < build_model(TdnnConfig(), 40, 2500).num_parameters() < 3e6

    def test_frame_depends_on_the_frames_within_the_strides(self):
        model = self.build(subsampling=1, layers=3, narrow_layers=1, time_stride=3)
        feats = torch.randn(1, 31, NUM_FEATURES, generator=torch.Generator().manual_seed(0)).requires_grad_()
        model(feats, torch.tensor([31]))[0][0, 15, 0].backward()
        seen = feats.grad[0].abs().sum(dim=1).nonzero().squeeze(1).tolist()
        # strides 1, 3 and 3 to either side, in any combination
        assert seen == sorted({15 + a + b + c for a in (-1, 0, 1) for b in (-3, 0, 3) for c in (-3, 0, 3)})

    def test_bottlenecks_start_and_stay_semi_orthogonal(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        feats, lengths = features()
        for _ in range(20):
            optimizer.zero_grad()
            (-model(feats, lengths)[0][:, :, 0].mean()).backward()
            optimizer.step()
            model.constrain()
        for layer in model.layers:
            product = layer.linear.weight @ layer.linear.weight.T
            scale = product.diagonal().mean()
            torch.testing.assert_close(product / scale, torch.eye(6), atol=0.05, rtol=0)

    def test_semi_orthogonal_step_converges_at_any_scale(self):
        matrix = torch.randn(6, 20, generator=torch.Generator().manual_seed(3)) * 7
        for _ in range(40):
            matrix = semi_orthogonal_step(matrix)
        product = matrix @ matrix.T
        torch.testing.assert_close(product / product.diagonal().mean(), torch.eye(6), atol=1e-4, rtol=0)
        assert product.diagonal().mean() > 100
        torch.testing.assert_close(semi_orthogonal_step(matrix), matrix, atol=1e-3, rtol=1e-4)

    def test_bottleneck_wider_than_the_layer_is_refused(self):
        with pytest.raises(ValidationError, match=r"model\.bottleneck=20 must not exceed dim=16"):
            TdnnConfig(dim=16, bottleneck=20)


class TestWhisper(HearsEverything, AcousticModelContract):
    config = WhisperConfig.model_validate({**WhisperConfig.tiny, "layers": 2, "dropout": 0.2})


class TestWhisperThatHearsSilence(HearsEverything, AcousticModelContract):
    config = TestWhisper.config.model_copy(
        update={"silence": "encoder", "encoder": {**TestWhisper.config.encoder, "max_source_positions": 40}}
    )


class TestWav2Vec2(AcousticModelContract):
    config = Wav2Vec2Config.model_validate({**Wav2Vec2Config.tiny, "layers": 2, "dropout": 0.2})


def contract_of(kind):
    """The contract's tests for a kind that has none of its own."""
    config = MODELS[kind].model_validate({**MODELS[kind].tiny, "layers": 2, "dropout": 0.2})
    return type(f"Test{kind.title()}", (AcousticModelContract,), {"config": config})


_TESTED = {cls.config.kind for cls in AcousticModelContract.__subclasses__()}
globals().update({f"Test{kind.title()}": contract_of(kind) for kind in sorted(set(MODELS) - _TESTED)})


def test_every_registered_model_has_the_contract_tests():
    assert {cls.config.kind for cls in AcousticModelContract.__subclasses__()} == set(MODELS)


@pytest.mark.parametrize("length", range(1, 20))
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_subsampled_lengths_equal_those_of_the_convolutions(factor, length):
    layer = Subsampling(NUM_FEATURES, 8, factor, 2)
    out, lengths = layer(torch.randn(1, length, NUM_FEATURES), torch.tensor([length]))
    assert out.shape == (1, int(lengths), 8)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"dim": 144, "heads": 5}, r"model\.dim=144"),
        ({"kernel": 14}, r"model\.kernel=14"),
        ({"subsampling": 3}, "subsampling"),
        ({"kind": "transducer"}, "kind"),
        ({"layer": 3}, "layer"),
    ],
)
def test_impossible_sizes_are_refused(values, name):
    with pytest.raises(ValidationError, match=name):
        TypeAdapter(ModelChoice).validate_python(values)
