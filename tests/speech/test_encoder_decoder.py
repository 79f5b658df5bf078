"""Every acoustic model as the encoder of a decoder network."""

from types import SimpleNamespace

import pytest
import torch

from speech.features.cmvn import frame_mask
from speech.models import MODELS, TransformerDecoderConfig, build_model
from speech.models.networks.encoder_decoder import EncoderDecoder
from speech.objectives.attention import AttentionConfig, JointAttention, parted_outputs, with_start

FEATURES, VOCAB, LENGTHS, FRAMES = 8, 6, [3, 1, 0], (30, 17, 6)
TOKENS = torch.tensor([[1, 2, 2], [5, 0, 0], [0, 0, 0]])
READ = with_start(TOKENS, [(0,)])
TARGETS = SimpleNamespace(tokens=TOKENS, token_lengths=torch.tensor(LENGTHS))


def build(kind, ctc=True, start=(0,)):
    torch.manual_seed(0)
    cls = MODELS[kind]
    encoder = build_model(cls(**cls.tiny), FEATURES, VOCAB)
    decoder = TransformerDecoderConfig(**TransformerDecoderConfig.tiny, dropout=0)
    return EncoderDecoder(encoder, decoder, VOCAB, len(start), ctc).eval()


def features(frames=FRAMES):
    feats = torch.randn(len(frames), max(frames), FEATURES, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor(frames)
    return feats * frame_mask(lengths, feats.shape[1])[..., None], lengths


@pytest.fixture(params=sorted(kind for kind, config in MODELS.items() if not getattr(config, "packages", ())))
def kind(request):
    return request.param


@pytest.mark.parametrize("start", [(0,), (4, 3, 0)])
def test_outputs_are_those_of_ctc_and_of_the_decoder_network(kind, start):
    network = build(kind, start=start)
    feats, lengths = features()
    tokens = with_start(TOKENS, [start])
    outputs, frames = network(feats, lengths, tokens)
    encoded, decoded = parted_outputs(outputs, TARGETS)
    hidden, _ = network.encode(feats, lengths)
    torch.testing.assert_close(encoded, network.posteriors(hidden))
    torch.testing.assert_close(decoded, network.decoder(tokens, hidden, frames)[:, len(start) - 1 :])
    assert decoded.shape == (3, 4, VOCAB)
    assert frames.tolist() == network.num_frames(lengths).tolist()


def test_ctc_part_is_the_acoustic_models_own_output(kind):
    cls = MODELS[kind]
    torch.manual_seed(0)
    alone = build_model(cls(**cls.tiny), FEATURES, VOCAB).eval()
    outputs, _ = build(kind)(*features(), READ)
    torch.testing.assert_close(parted_outputs(outputs, TARGETS)[0], alone(*features())[0])


def test_training_reaches_all_weights_and_lowers_the_loss(kind):
    network, objective = build(kind).train(), JointAttention(AttentionConfig())
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        outputs, frames = network(*features(), READ)
        loss = objective.losses(outputs, frames, TARGETS)[0].sum() / objective.items(TARGETS)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_encoder_without_ctc_has_no_output_layer(kind):
    network = build(kind, ctc=False)
    assert not any("ctc" in name or "encoder.output" in name for name in network.state_dict())
    outputs, _ = network(*features(), READ)
    assert outputs.shape == (3, 4, VOCAB)
    assert network.posteriors(network.encode(*features())[0]) is None


def test_utterance_does_not_depend_on_its_batch(kind):
    network = build(kind)
    together, frames = network(*features(), READ)
    encoded, decoded = parted_outputs(together, TARGETS)
    feats, lengths = features()
    for row, count in enumerate(FRAMES):
        tokens = TOKENS[row : row + 1, : LENGTHS[row]]
        alone, _ = network(feats[row : row + 1, :count], lengths[row : row + 1], with_start(tokens, [(0,)]))
        own = parted_outputs(alone, SimpleNamespace(tokens=tokens))
        torch.testing.assert_close(own[0][0], encoded[row, : int(frames[row])], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own[1][0], decoded[row, : LENGTHS[row] + 1], atol=1e-5, rtol=1e-5)
