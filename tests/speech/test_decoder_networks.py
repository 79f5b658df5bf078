"""The contract of every decoder network: one suite for each kind of `DECODER_NETWORKS`."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from speech.features.cmvn import frame_mask
from speech.models import DECODER_NETWORKS, DecoderNetworkChoice

WIDTH, VOCAB = 12, 9
FRAMES, LENGTHS = (11, 5, 1, 0), (7, 3, 5, 2)


@pytest.fixture(params=sorted(DECODER_NETWORKS))
def kind(request):
    return request.param


def build(kind, seed=0, **changes):
    torch.manual_seed(seed)
    cls = DECODER_NETWORKS[kind]
    return cls(**{**cls.tiny, **changes}).build(WIDTH, VOCAB).eval()


def inputs(frames=FRAMES, lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    encoded = torch.randn(len(frames), max(frames), WIDTH, generator=generator)
    tokens = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=generator)
    return tokens, encoded, torch.tensor(frames)


def close(outputs, expected, tolerance=1e-5):
    torch.testing.assert_close(outputs, expected, atol=tolerance, rtol=tolerance)


def test_outputs_are_log_probabilities_in_float32(kind):
    outputs = build(kind)(*inputs())
    assert outputs.dtype == torch.float32
    assert outputs.shape == (4, 7, VOCAB)
    close(outputs.exp().sum(-1), torch.ones(4, 7))


def test_steps_give_what_whole_texts_give(kind):
    network = build(kind)
    tokens, encoded, frames = inputs()
    expected, cache = network(tokens, encoded, frames), network.start(encoded, frames)
    for place in range(tokens.shape[1]):
        outputs, cache = network.step(tokens[:, place : place + 1], cache)
        close(outputs[:, 0], expected[:, place])


def test_hypotheses_go_on_from_those_that_they_are_reordered_to(kind):
    network = build(kind)
    _, encoded, frames = inputs()
    first = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0], [3, 1, 2]])
    parents = torch.tensor([[2, 2, 0, 1], [1, 0, 0, 2], [0, 1, 2, 2], [0, 0, 0, 0]])
    last = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4], [1, 1, 1, 2], [8, 7, 6, 5]])
    _, cache = network.step(first, network.start(encoded, frames).reordered(torch.zeros(4, 3, dtype=torch.long)))
    outputs, after = network.step(last, cache.reordered(parents))
    for hypothesis in range(4):
        texts = torch.stack((first.gather(1, parents)[:, hypothesis], last[:, hypothesis]), dim=1)
        close(outputs[:, hypothesis], network(texts, encoded, frames)[:, 1])
    rows = torch.tensor([2, 0])
    again, _ = network.step(first[rows][:, [0, 1, 2, 0]], after.utterances(rows))
    close(again, network.step(first[:, [0, 1, 2, 0]], after)[0][rows])


def test_utterance_depends_neither_on_its_batch_nor_on_padding(kind):
    network = build(kind)
    tokens, encoded, frames = inputs()
    together = network(tokens, encoded, frames)
    noise = torch.full_like(encoded, float("nan"))
    noisy = torch.where(frame_mask(frames, encoded.shape[1])[..., None], encoded, noise)
    close(network(tokens, noisy, frames), together)
    for row, (length, count) in enumerate(zip(LENGTHS, FRAMES, strict=True)):
        alone = network(tokens[row : row + 1, :length], encoded[row : row + 1, :count], frames[row : row + 1])
        close(together[row, :length], alone[0])


def test_token_does_not_depend_on_later_ones(kind):
    network = build(kind)
    tokens, encoded, frames = inputs()
    expected = network(tokens, encoded, frames)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % VOCAB
    outputs = network(changed, encoded, frames)
    close(outputs[:, :4], expected[:, :4])
    assert not torch.allclose(outputs[:, 4:], expected[:, 4:])


def test_equal_tokens_at_other_places_give_other_results(kind):
    tokens, encoded, frames = inputs()
    outputs = build(kind)(torch.ones_like(tokens), encoded, frames)
    assert not torch.allclose(outputs[0, 0], outputs[0, 1], atol=1e-3)


def test_speech_changes_the_result(kind):
    network = build(kind)
    tokens, encoded, frames = inputs()
    assert not torch.allclose(network(tokens, encoded, frames)[0], network(tokens, -encoded, frames)[0], atol=1e-3)


def test_attention_weights_are_shares_of_an_utterance_and_zero_beyond(kind):
    tokens, encoded, frames = inputs()
    weights = build(kind).attention(tokens, encoded, frames)
    assert weights.shape[0] == 4
    assert weights.shape[2:] == (7, 11)
    close(weights.sum(-1), torch.ones(weights.shape[:3]))
    for row, count in enumerate(FRAMES):
        assert not weights[row, :, :, max(1, count) :].any()


def test_gradients_reach_all_weights_and_the_speech(kind):
    network = build(kind).train()
    tokens, encoded, frames = inputs((9, 4), (VOCAB, VOCAB))
    tokens[0] = torch.randperm(VOCAB)
    encoded.requires_grad_()
    outputs = network(tokens, encoded, frames)
    (outputs * torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    for name, parameter in network.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name
    assert encoded.grad[0].any()
    assert not encoded.grad[1, 4:].any()


def test_dropout_is_active_only_in_training(kind):
    network, batch = build(kind, dropout=0.1), inputs()
    assert torch.equal(network(*batch), network(*batch))
    network.train()
    assert not torch.equal(network(*batch), network(*batch))


def test_mixed_precision_gives_float32(kind):
    network, batch = build(kind), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = network(*batch)
    assert outputs.dtype == torch.float32
    close(outputs, network(*batch), 0.1)


def test_batch_without_frames_is_accepted(kind):
    tokens, encoded, _ = inputs()
    assert torch.isfinite(build(kind)(tokens, encoded[:, :0], torch.zeros(4, dtype=torch.long))).all()


def test_sizes_are_described_without_memory(kind):
    with torch.device("meta"):
        described = build(kind).state_dict()
    expected = {name: tensor.shape for name, tensor in build(kind).state_dict().items()}
    assert {name: tensor.shape for name, tensor in described.items()} == expected


def test_width_that_heads_do_not_divide_is_refused(kind):
    with pytest.raises(ValidationError, match="must be a multiple of 2 x heads=6"):
        TypeAdapter(DecoderNetworkChoice).validate_python({"kind": kind, "dim": 16, "heads": 3})
