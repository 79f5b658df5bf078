"""Every acoustic model as the encoder of a transducer: outputs, memory in parts, training."""

from types import SimpleNamespace

import pytest
import torch
from support import load_beside

from speech.models import PREDICTORS, build_model
from speech.models.networks.transducer import Transducer
from speech.objectives import JointTransducer, TransducerConfig
from speech.objectives.attention import with_start
from speech.objectives.transducer import parted_lattice

beside = load_beside(__file__, "test_encoder_decoder.py")
MODELS, TARGETS, TOKENS, READ, features = beside.MODELS, beside.TARGETS, beside.TOKENS, beside.READ, beside.features
kind = beside.kind
FRAMES, LENGTHS, VOCAB = beside.FRAMES, beside.LENGTHS, beside.VOCAB


def build(kind, ctc=True, predictor="lstm"):
    torch.manual_seed(0)
    cls, cfg = MODELS[kind], PREDICTORS[predictor]
    encoder = build_model(cls(**cls.tiny), beside.FEATURES, VOCAB)
    return Transducer(encoder, cfg(**{**cfg.tiny, "dropout": 0.0}), 10, VOCAB, ctc).eval()


def test_outputs_are_those_of_ctc_and_of_all_pairs_of_frames_and_beginnings(kind):
    network = build(kind)
    feats, lengths = features()
    outputs, frames = network(feats, lengths, READ)
    ctc, lattice = parted_lattice(outputs, TARGETS)
    encoded, _ = network.encode(feats, lengths)
    torch.testing.assert_close(ctc, network.posteriors(encoded))
    assert lattice.shape == (3, encoded.shape[1], 4, 2)
    for row in range(3):
        for place in range(LENGTHS[row] + 1):
            vector = network.joiner.predictor(network.predictor(READ[row : row + 1, : place + 1])[0, -1])
            log_probs = network.joiner(network.joiner.encoder(encoded[row]), vector).log_softmax(-1)
            torch.testing.assert_close(lattice[row, :, place, 0], log_probs[:, 0])
            if place < LENGTHS[row]:
                torch.testing.assert_close(lattice[row, :, place, 1], log_probs[:, TOKENS[row, place]])
    assert frames.tolist() == network.num_frames(lengths).tolist()


@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
def test_training_reaches_all_weights_and_lowers_the_loss(kind, predictor):
    network, objective = build(kind, predictor=predictor).train(), JointTransducer(TransducerConfig())
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        outputs, frames = network(*features(), READ)
        loss = objective.losses(outputs, frames, TARGETS)[0].sum() / objective.items(TARGETS)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def counted(joiner):
    """The numbers of frames that a joiner gets from now on."""
    sizes, forward = [], joiner.forward
    joiner.forward = lambda encoded, predicted: sizes.append(encoded.shape[1]) or forward(encoded, predicted)
    return sizes


def test_parts_have_the_losses_and_gradients_of_the_whole():
    objective, results, sizes = JointTransducer(TransducerConfig()), [], []
    for limit in (1 << 30, 1):
        network = build("conformer")
        network.joint_bytes = limit
        sizes.append(counted(network.joiner))
        outputs, frames = network(*features(), READ)
        losses = objective.losses(outputs, frames, TARGETS)[0]
        losses.sum().backward()
        results.append((losses.detach(), [parameter.grad for parameter in network.parameters()]))
    (whole, gradients), (parts, others) = results
    torch.testing.assert_close(parts, whole)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    count = int(frames.max())
    assert sizes == [[count], 2 * count * [1]]  # the parts again in the backward pass


def test_a_frame_and_a_beginning_need_no_more_memory_than_is_said():
    """What autograd keeps and makes of them, counted while it does."""
    network = build("conformer", ctc=False)
    joiner = network.joiner
    encoded, predicted = torch.randn(2, 3, 10, requires_grad=True), torch.randn(2, 4, 10, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        network._pairs(encoded, predicted, torch.ones(2, 4, dtype=torch.long))
    own = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in kept if tensor.numel() > 100}
    assert 0 < sum(own.values()) <= 2 * 3 * 4 * joiner.bytes_of_pair()


def test_no_parts_are_computed_again_without_gradients(kind):
    network = build(kind)
    whole, _ = network(*features(), READ)
    network.joint_bytes = 1
    with torch.no_grad():
        parts, _ = network(*features(), READ)
    torch.testing.assert_close(parts, whole)


def test_encoder_without_ctc_has_no_output_layer(kind):
    network = build(kind, ctc=False)
    assert not any("ctc" in name or "encoder.output" in name for name in network.state_dict())
    ctc, lattice = parted_lattice(network(*features(), READ)[0], TARGETS)
    assert (ctc.shape[2], lattice.shape[2:]) == (0, (4, 2))


def test_utterance_does_not_depend_on_its_batch(kind):
    network = build(kind)
    together, frames = network(*features(), READ)
    ctc, lattice = parted_lattice(together, TARGETS)
    feats, lengths = features()
    for row, count in enumerate(FRAMES):
        tokens = TOKENS[row : row + 1, : LENGTHS[row]]
        alone, _ = network(feats[row : row + 1, :count], lengths[row : row + 1], with_start(tokens, ((0,),)))
        own, number, place = parted_lattice(alone, SimpleNamespace(tokens=tokens)), int(frames[row]), LENGTHS[row]
        torch.testing.assert_close(own[0][0], ctc[row, :number], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own[1][0, :, :place], lattice[row, :number, :place], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own[1][0, :, place, 0], lattice[row, :number, place, 0], atol=1e-5, rtol=1e-5)


def test_mixed_precision_gives_float32():
    network = build("conformer")
    expected, _ = network(*features(), READ)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, _ = network(*features(), READ)
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, expected, atol=0.1, rtol=0.1)


def test_rows_of_tokens_are_those_of_the_vocabulary():
    network = build("conformer")
    state = network.state_dict()
    assert set(network.output_rows) == {name for name, tensor in state.items() if tensor.shape[:1] == (VOCAB,)}
