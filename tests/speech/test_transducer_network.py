"""Every acoustic model as the encoder of a transducer: outputs, memory in parts, training."""

from types import SimpleNamespace

import pytest
import torch
from support import load_beside
from torch import nn

from speech.models import PREDICTORS, StatelessPredictorConfig, build_model
from speech.models.networks.transducer import SimpleJoiner, Transducer
from speech.objectives import JointTransducer, TransducerConfig
from speech.objectives.attention import with_start
from speech.objectives.transducer import parted_lattice, transducer_losses

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
        network._pairs(encoded, predicted, torch.ones(2, 4, dtype=torch.long), None)
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


# --- a pruned training


def losses_and_gradients(network, prune_range):
    objective = JointTransducer(TransducerConfig(prune_range=prune_range))
    outputs, frames = network(*features(), READ)
    _, *lattices = parted_lattice(outputs, TARGETS, 2 if prune_range else 1)
    losses = transducer_losses(lattices[-1], frames, TARGETS.token_lengths)
    own = [value for name, value in network.named_parameters() if not name.startswith(("simple", "ctc"))]
    return losses, torch.autograd.grad(losses.sum(), own), objective.losses(outputs, frames, TARGETS)


@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
def test_band_as_wide_as_the_text_has_the_loss_and_gradient_of_all_pairs(kind, predictor):
    network = build(kind, predictor=predictor)
    losses, gradients, _ = losses_and_gradients(network, 0)
    network.prune(len(TOKENS[0]) + 1)
    for module in network.modules():  # dropout stays off
        module.training = module is network
    pruned, others, (both, unalignable) = losses_and_gradients(network, 4)
    torch.testing.assert_close(pruned, losses, atol=1e-5, rtol=1e-5)
    for one, other in zip(others, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert unalignable == 0
    assert (both > 0).all()


def test_simple_joiner_gives_the_probabilities_of_its_sums():
    joiner = SimpleJoiner(6, 5, VOCAB)
    encoded, predicted = 3 * torch.randn(2, 4, 6), 3 * torch.randn(2, 3, 5)
    following = torch.randint(0, VOCAB, (2, 3))
    lattice = joiner(encoded, predicted, following)
    log_probs = (joiner.encoder(encoded).unsqueeze(2) + joiner.predictor(predicted).unsqueeze(1)).log_softmax(-1)
    torch.testing.assert_close(lattice[..., 0], log_probs[..., 0])
    expected = log_probs.gather(3, following[:, None, :, None].expand(-1, 4, -1, -1)).squeeze(3)
    torch.testing.assert_close(lattice[..., 1], expected)


def test_simple_joiner_whose_parts_exclude_each_others_tokens_has_finite_losses():
    joiner = SimpleJoiner(1, 1, 2)
    with torch.no_grad():
        joiner.encoder.weight.copy_(torch.tensor([[200.0], [0.0]]))
        joiner.predictor.weight.copy_(torch.tensor([[0.0], [200.0]]))
    lattice = joiner(torch.ones(1, 2, 1), torch.ones(1, 2, 1), torch.ones(1, 2, dtype=torch.long))
    lattice.sum().backward()
    assert lattice.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in joiner.parameters())


def drawn_texts():
    """Texts of four tokens, each said for five frames: a transducer whose frames are given, and an optimizer."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.stack([torch.randperm(VOCAB - 1, generator=generator)[:4] + 1 for _ in range(8)])
    voices = 4 * torch.randn(VOCAB, 8, generator=generator)
    frames, lengths = torch.full((8,), 20), torch.full((8,), 4)
    read = voices[tokens].repeat_interleave(5, dim=1), frames, with_start(tokens, ((0,),))
    torch.manual_seed(0)
    encoder = nn.Module()
    encoder.output = nn.Linear(8, VOCAB)
    network = Transducer(encoder, StatelessPredictorConfig(dim=16, dropout=0.0), 32, VOCAB, ctc=False).train()
    return network, read, SimpleNamespace(tokens=tokens, token_lengths=lengths)


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.variants(1)
def test_pruned_training_lowers_the_loss_over_all_alignments(width):
    network, read, given = drawn_texts()
    network.prune(width)
    places, forward = [], network.joiner.forward
    network.joiner.forward = lambda one, other: places.append(other.shape[2]) or forward(one, other)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(100):
        losses, _ = JointTransducer(TransducerConfig(prune_range=width)).losses(network.outputs(*read), read[1], given)
        optimizer.zero_grad()
        losses.sum().backward()
        assert all(parameter.grad.any() for name, parameter in network.named_parameters() if "encoder.out" not in name)
        optimizer.step()
    assert set(places) == {width}
    losses, _ = JointTransducer(TransducerConfig()).losses(network.eval().outputs(*read), read[1], given)
    assert losses.mean().item() < 1.0  # of four tokens; 43 at the start


def test_parts_of_a_band_have_the_losses_and_gradients_of_the_whole():
    results = []
    for limit in (1 << 30, 1):
        network, read, given = drawn_texts()
        network.prune(3)
        network.joint_bytes = limit
        losses, _ = JointTransducer(TransducerConfig(prune_range=3)).losses(network.outputs(*read), read[1], given)
        losses.sum().backward()
        results.append([losses.detach(), *(parameter.grad for parameter in network.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
