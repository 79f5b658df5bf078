"""Pretrained encoders compute what the library `transformers` computes, in a batch as alone; sizes come from it."""

import pytest
import torch

from speech.features import FbankConfig, LogMelConfig, WaveformConfig, WhisperLogMelConfig
from speech.features.cmvn import frame_mask
from speech.features.whisper_logmel import followed_by_silence
from speech.models import MODELS, Wav2Vec2Config, WhisperConfig, build_model
from speech.models.networks.stages import split_model

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 40}
CONVOLUTIONS = {"conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
WHISPER = {"d_model": 24, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 40} | {
    "max_source_positions": 50,
    "decoder_layers": 1,
}
KINDS = {f"{kind} {norm}": (kind, norm) for kind in Wav2Vec2Config.model_types for norm in ("group", "layer")}
del KINDS["data2vec-audio group"]  # they always normalize layers


def library_model(kind, norm="layer"):
    """A tiny model with random weights, as the library builds it."""
    torch.manual_seed(0)
    name = Wav2Vec2Config.model_types[kind]
    values = {**SIZES, **CONVOLUTIONS, "feat_extract_norm": norm, "do_stable_layer_norm": norm == "layer"}
    if kind == "data2vec-audio":
        values |= {"do_stable_layer_norm": False, "num_conv_pos_embeddings": 3, "conv_pos_kernel_size": 5}
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**values)).eval()


def library_whisper(**changes):
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**{**WHISPER, **changes})
    return transformers.models.whisper.modeling_whisper.WhisperEncoder(config).eval()


def with_weights(config, num_features, model, prefix=""):
    """Our network with the library's weights."""
    network = build_model(config, num_features, 5).eval()
    named = {config.own_name(prefix + name): tensor for name, tensor in model.state_dict().items()}
    named = {name: tensor for name, tensor in named.items() if name and name not in network.fixed_tensors()}
    result = network.load_state_dict(named, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys == ["output.weight", "output.bias"]
    return network


def encoded(network, feats, lengths):
    """Outputs of the encoder, without the output layer."""
    x, frames = network.subsampling(feats, lengths)
    return network.norm(network.run_layers(network.layers, x, frames)), frames


@pytest.mark.parametrize(("kind", "norm"), KINDS.values(), ids=KINDS)
def test_wav2vec2_and_its_kin_equal_the_library_in_a_batch_of_utterances(kind, norm):
    model = library_model(kind, norm)
    network = with_weights(Wav2Vec2Config(source="x").with_encoder(model.config.to_dict()), 160, model)
    waves = [torch.randn(160 * blocks) for blocks in (60, 33, 9)]
    batch = torch.full((3, 160 * 70), 7.0)  # what stands in the padding must not matter
    for row, wave in zip(batch, waves, strict=True):
        row[: len(wave)] = wave
    lengths = torch.tensor([60, 33, 9])
    hidden, frames = encoded(network, batch.unflatten(1, (70, 160)), lengths)
    assert torch.equal(network.num_frames(lengths), frames)
    for row, (wave, count) in enumerate(zip(waves, frames.tolist(), strict=True)):
        wanted = model(wave[None]).last_hidden_state[0]
        torch.testing.assert_close(hidden[row, :count], wanted, atol=2e-5, rtol=1e-5)


def test_whisper_equals_the_library_where_the_library_pads_nothing():
    model = library_whisper()
    network = with_weights(WhisperConfig(source="x").with_encoder(model.config.to_dict()), 80, model, "model.encoder.")
    feats = torch.randn(2, 100, 80)
    hidden, frames = encoded(network, feats, torch.tensor([100, 100]))
    assert frames.tolist() == [50, 50]
    torch.testing.assert_close(hidden, model(feats.transpose(1, 2)).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_gradients_equal_those_of_the_library():
    model = library_whisper()
    network = with_weights(WhisperConfig(source="x").with_encoder(model.config.to_dict()), 80, model, "model.encoder.")
    feats, weights = torch.randn(1, 100, 80), torch.randn(1, 50, 24)
    (encoded(network, feats, torch.tensor([100]))[0] * weights).sum().backward()
    (model(feats.transpose(1, 2)).last_hidden_state * weights).sum().backward()
    for number in (0, 2):
        gradient, wanted = network.layers[number].fc1.weight.grad, model.layers[number].fc1.weight.grad
        torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(network.subsampling.conv1.weight.grad, model.conv1.weight.grad, atol=1e-4, rtol=1e-4)


def test_whispers_positions_are_the_librarys():
    """All 1,500: a formula that rounds differently is off by 1e-4 at the last ones."""
    theirs = library_whisper(d_model=64, max_source_positions=1500)
    network = build_model(WhisperConfig(source="x").with_encoder(theirs.config.to_dict()), 80, 5)
    (positions,) = network.fixed_tensors().values()
    torch.testing.assert_close(positions, theirs.embed_positions.weight, atol=1e-6, rtol=0)


def test_whisper_has_no_frames_for_an_utterance_beyond_its_positions():
    network = build_model(WhisperConfig(source="x").with_encoder(library_whisper().config.to_dict()), 80, 5).eval()
    feats, lengths = torch.randn(3, 140, 80), torch.tensor([140, 100, 101])
    log_probs, frames = network(feats, lengths)
    assert frames.tolist() == network.num_frames(lengths).tolist() == [0, 50, 0]
    alone, _ = network(feats[1:2, :100], lengths[1:2])
    torch.testing.assert_close(log_probs[1, :50], alone[0], atol=1e-5, rtol=1e-5)


def silent(silence):
    """A tiny Whisper that hears silence, ours and the library's."""
    model = library_whisper()
    config = WhisperConfig(source="x", silence=silence).with_encoder(model.config.to_dict())
    return with_weights(config, 80, model, "model.encoder."), model


@pytest.mark.parametrize("silence", ["encoder", "all"])
def test_whisper_that_hears_silence_equals_the_library_in_a_batch_of_utterances(silence):
    network, model = silent(silence)
    feats, lengths = torch.randn(4, 70, 80), torch.tensor([61, 70, 5, 0])
    network.output = torch.nn.Identity()
    hidden, frames = network.outputs(feats, lengths)
    assert frames.tolist() == network.num_frames(lengths).tolist()
    assert frames.tolist() == ([31, 35, 3, 0] if silence == "encoder" else [50, 50, 50, 0])
    for row, count in enumerate(frames.tolist()[:3]):
        floor = feats[row, : lengths[row]].max() - 2
        padded = torch.full((1, 80, 100), float(floor))
        padded[0, :, : lengths[row]] = feats[row, : lengths[row]].T
        wanted = model(padded).last_hidden_state[0, :count]
        torch.testing.assert_close(hidden[row, :count], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("silence", ["encoder", "all"])
def test_whisper_that_hears_silence_has_no_frames_for_an_utterance_beyond_its_positions(silence):
    network, _ = silent(silence)
    feats, lengths = torch.randn(3, 140, 80), torch.tensor([140, 100, 101])
    log_probs, frames = network(feats, lengths)
    assert frames.tolist() == network.num_frames(lengths).tolist() == [0, 50, 0]
    alone, _ = network(feats[1:2, :100], lengths[1:2])
    torch.testing.assert_close(log_probs[1, :50], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("silence", ["encoder", "all"])
def test_some_seconds_of_silence_are_frames_of_the_utterance_to_the_encoder(silence):
    model = library_whisper(max_source_positions=110)
    config = WhisperConfig(source="x", silence=silence, silence_s=1.0).with_encoder(model.config.to_dict())
    network = with_weights(config, 80, model, "model.encoder.")
    plain = with_weights(WhisperConfig(source="x").with_encoder(model.config.to_dict()), 80, model, "model.encoder.")
    plain.output = network.output
    feats, lengths = torch.randn(5, 230, 80), torch.tensor([61, 70, 150, 230, 0])
    log_probs, frames = network(feats, lengths)
    heard = torch.tensor([161, 170, 220, 0, 0])  # 100 frames more, up to the last of 220
    assert frames.tolist() == network.num_frames(lengths).tolist()
    assert frames.tolist() == ([31, 35, 75, 0, 0] if silence == "encoder" else [81, 85, 110, 0, 0])
    for row, count in enumerate(frames.tolist()[:3]):
        own = followed_by_silence(feats[row : row + 1, : heard[row]], lengths[row : row + 1], int(heard[row]))
        wanted, _ = plain(own, heard[row : row + 1])
        torch.testing.assert_close(log_probs[row, :count], wanted[0, :count], atol=1e-5, rtol=1e-5)
    assert config.min_frames == 100


def test_whisper_that_hears_silence_wants_the_frames_that_reach_into_it():
    config = WhisperConfig(source="x", silence="all").with_encoder(library_whisper().config.to_dict())
    config.check_inputs(WhisperLogMelConfig(tail=True), 16000)
    with pytest.raises(ValueError, match=r"set features\.tail=true"):
        config.check_inputs(WhisperLogMelConfig(), 16000)


def test_whisper_that_hears_silence_computes_all_positions():
    sizes = library_whisper().config.to_dict()
    frames = {kind: WhisperConfig(source="x", silence=kind).with_encoder(sizes).min_frames for kind in ("none", "all")}
    assert frames == {"none": 0, "all": 100}


def test_whisper_that_hears_silence_cannot_be_split():
    with pytest.raises(ValueError, match=r"set model\.silence=none"):
        split_model(silent("encoder")[0], 2)


def test_nothing_is_masked_or_skipped_at_random_in_training():
    """The library skips layers and masks frames in training, as its configurations say."""
    torch.manual_seed(0)
    kind = transformers.Wav2Vec2Config(
        **SIZES, **CONVOLUTIONS, layerdrop=0.9, mask_time_prob=0.9, mask_feature_prob=0.9
    )
    cases = [(Wav2Vec2Config(source="x", dropout=0.0).with_encoder(kind.to_dict()), 160)]
    whisper = library_whisper(encoder_layerdrop=0.9, attention_dropout=0.5, activation_dropout=0.5)
    cases.append((WhisperConfig(source="x").with_encoder(whisper.config.to_dict()), 80))
    for config, width in cases:
        network = build_model(config, width, 5)
        feats, lengths = torch.randn(2, 60, width), torch.tensor([60, 40])
        torch.testing.assert_close(network.train()(feats, lengths)[0], network.eval()(feats, lengths)[0])


@pytest.mark.parametrize("kind", ["wav2vec2", "wavlm", "data2vec-audio"])
def test_mixed_precision_gives_about_the_same(kind):
    model = library_model(kind)
    network = with_weights(Wav2Vec2Config(source="x", dropout=0.0).with_encoder(model.config.to_dict()), 160, model)
    feats, lengths = torch.randn(2, 40, 160), torch.tensor([40, 22])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, frames = network.train()(feats, lengths)
    hidden.sum().backward()
    inside = frame_mask(frames, hidden.shape[1])
    torch.testing.assert_close(hidden[inside], network(feats, lengths)[0][inside], atol=0.3, rtol=0.1)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("whisper", {}), ("whisper", {"silence": "encoder"}), ("wav2vec2", {}), ("whisper", {"silence": "all"})],
    ids=str,
)
@pytest.mark.variants(2)
def test_compiled_networks_are_one_program_for_batches_of_all_shapes(kind, more):
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = MODELS[kind].model_validate({**MODELS[kind].tiny, "dropout": 0.0, **more})
    network, programs = build_model(config, 16, 7), []
    compiled = torch.compile(network, dynamic=True, backend=lambda graph, _: programs.append(graph) or graph)
    for count, frames in ((4, 64), (3, 128), (5, 192)):
        feats, lengths = torch.randn(count, frames, 16), torch.randint(10, frames + 1, (count,))
        wanted, hidden = network(feats, lengths)[0], compiled(feats, lengths)[0]
        inside = frame_mask(network.num_frames(lengths), wanted.shape[1])
        torch.testing.assert_close(hidden[inside], wanted[inside], atol=1e-5, rtol=1e-5)
    assert len(programs) == 1


@pytest.mark.parametrize(("kind", "norm"), [("wav2vec2", "group"), ("hubert", "layer"), ("data2vec-audio", "layer")])
def test_stages_of_a_split_encoder_compute_what_the_whole_one_does(kind, norm):
    model = library_model(kind, norm)
    network = with_weights(Wav2Vec2Config(source="x").with_encoder(model.config.to_dict()), 160, model)
    feats, lengths = torch.randn(2, 40, 160), torch.tensor([40, 31])
    wanted, frames = network(feats, lengths)
    first, last = split_model(network, 2)
    hidden = last(first(feats, lengths), lengths)
    assert torch.equal(last.num_frames(lengths), frames)
    mask = frame_mask(frames, wanted.shape[1])
    torch.testing.assert_close(hidden[mask], wanted[mask], atol=1e-5, rtol=1e-5)


def test_wavlm_cannot_be_split():
    config = Wav2Vec2Config(source="x").with_encoder(library_model("wavlm").config.to_dict())
    with pytest.raises(ValueError, match="WavLM cannot be split"):
        split_model(build_model(config, 160, 5), 2)


def test_layers_are_in_order_and_know_their_parameters():
    for config, width in (
        (WhisperConfig(source="x").with_encoder(library_whisper().config.to_dict()), 80),
        (Wav2Vec2Config(source="x").with_encoder(library_model("hubert").config.to_dict()), 160),
    ):
        network = build_model(config, width, 5)
        assert len(network.layers) == config.layers == 3
        for name, _ in network.named_parameters():
            number = network.layer_of(name)
            assert (number is not None) == name.startswith("layers."), name
            assert number is None or name.startswith(f"layers.{number}.")


@pytest.mark.parametrize(
    ("config", "features", "rate", "message"),
    [
        (WhisperConfig, WhisperLogMelConfig(), 8000, r"data\.sample_rate is 8000.* 16000"),
        (WhisperConfig, LogMelConfig(), 16000, "features.kind is logmel.*whisper_logmel"),
        (WhisperConfig, WhisperLogMelConfig(num_mels=128), 16000, "features.num_mels is 128.*num_mels=80"),
        (WhisperConfig, WhisperLogMelConfig(cmvn="global"), 16000, "features.cmvn is global.*cmvn=none"),
        (WhisperConfig, WhisperLogMelConfig(hop_ms=20), 16000, "features.hop_ms must be 10"),
        (Wav2Vec2Config, FbankConfig(), 16000, "features.kind is fbank.*waveform"),
        (Wav2Vec2Config, WaveformConfig(cmvn="none", stride=2), 16000, "features.stride is 2"),
        (Wav2Vec2Config, WaveformConfig(cmvn="none", frame_ms=20, hop_ms=20, samples=320), 16000, "samples=160"),
    ],
)
def test_features_that_an_encoder_was_not_trained_on_are_refused(config, features, rate, message):
    model = library_whisper() if config is WhisperConfig else library_model("wav2vec2")
    with pytest.raises(ValueError, match=message):
        config(source="x").with_encoder(model.config.to_dict()).check_inputs(features, rate)


def test_features_that_an_encoder_was_trained_on_are_accepted():
    whisper, wav2vec2 = library_whisper().config.to_dict(), library_model("wav2vec2").config.to_dict()
    WhisperConfig(source="x").with_encoder(whisper).check_inputs(WhisperLogMelConfig(), 16000)
    Wav2Vec2Config(source="x").with_encoder(wav2vec2).check_inputs(WaveformConfig(cmvn="none"), 16000)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (WhisperConfig, {"model_type": "bert"}, "model_type is bert.*supports whisper: choose another"),
        (WhisperConfig, {}, "model_type is not stated"),
        (WhisperConfig, {"model_type": "hubert"}, r"use model\.kind=wav2vec2"),
        (WhisperConfig, {"model_type": "whisper"}, "lacks the size 'd_model'"),
        (Wav2Vec2Config, {"model_type": "whisper"}, r"use model\.kind=whisper"),
        (Wav2Vec2Config, {"model_type": "wav2vec2", "add_adapter": True}, "add_adapter: True, which is not supported"),
    ],
)
def test_unsupported_architectures_are_named(config, values, message):
    with pytest.raises(ValueError, match=message):
        config(source="x").with_encoder(values)


def test_another_number_of_features_or_samples_is_an_error():
    for config, width in (
        (WhisperConfig(source="x").with_encoder(library_whisper().config.to_dict()), 40),
        (Wav2Vec2Config(source="x").with_encoder(library_model("wav2vec2").config.to_dict()), 80),
    ):
        with pytest.raises(ValueError, match="the encoder "):
            build_model(config, width, 5)
