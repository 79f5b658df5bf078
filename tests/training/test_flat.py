"""Flat parameters: views of one buffer that the model, the optimizer and the checkpoints all see."""

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from training.config import AdamWConfig
from training.learner.checkpoint import cpu_weights
from training.learner.flat import FlatParameters, share
from training.learner.optim import build_optimizer


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.LSTM(7, 3, batch_first=True))


def forward(model, x):
    return model(x)[0].square().mean()


def test_training_on_flat_parameters_equals_ordinary_training():
    plain, flat_model = network(), network()
    flat = FlatParameters(flat_model)
    optimizers = [build_optimizer(AdamWConfig(lr=0.05), model) for model in (plain, flat_model)]
    for step in range(5):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizers[0].zero_grad()
        flat.zero_grad()
        for model, optimizer in zip((plain, flat_model), optimizers, strict=True):
            forward(model, x).backward()
            optimizer.step()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, flat_model.state_dict()[name]), name


def test_flat_buffer_shares_memory_with_the_model():
    model = network()
    flat = FlatParameters(model)
    trainable = sum(p.numel() for p in model.parameters())
    assert flat.num_parameters == trainable == flat.grads.numel()
    assert flat.weights.numel() == trainable + 2 * 7  # running mean and variance; the counter of batches is no float
    flat.weights.fill_(3.0)
    assert all(bool((p == 3.0).all()) for p in model.parameters())
    assert bool((model[1].running_var == 3.0).all())
    assert sum(stop - start for start, stop in flat.spans) == trainable


def test_gradients_stay_views_through_backward_and_clearing():
    model = network()
    flat = FlatParameters(model)
    for _ in range(2):
        flat.zero_grad()
        forward(model, torch.ones(3, 5)).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert torch.equal(flat.grads, expected)
        assert float(flat.grad_norm()) == pytest.approx(float(expected.norm()))


def test_frozen_parameters_do_not_change():
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    flat = FlatParameters(model)
    flat.weights.zero_()
    assert torch.equal(model[0].weight, before)


def test_parameters_of_other_precision_are_refused_by_name():
    with pytest.raises(ValueError, match=r"0\.weight is not float32"):
        FlatParameters(nn.Sequential(nn.Linear(2, 2).to(torch.bfloat16)))


def test_weights_of_another_model_are_refused():
    with pytest.raises(ValueError, match="another model"):
        FlatParameters(network()).load(torch.zeros(3))


def test_a_saved_state_is_a_copy_and_loads_into_a_plain_model():
    model = network()
    flat = FlatParameters(model)
    data = save(cpu_weights(model))
    flat.weights.zero_()
    plain = network(seed=5)
    plain.load_state_dict(load(data))
    assert torch.equal(plain[0].weight, network()[0].weight)


@pytest.mark.parametrize(("total", "ranks"), [(10, 1), (10, 3), (10, 4), (2, 4), (0, 2), (12, 4)])
def test_shares_cover_everything_once(total, ranks):
    parts = [share(total, rank, ranks) for rank in range(ranks)]
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(total))


def test_gradients_are_views_again_after_an_optimizer_has_replaced_them():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    flat = FlatParameters(model)
    flat.grads.fill_(7.0)
    for parameter in model.parameters():
        parameter.grad = None  # as Optimizer.zero_grad does
    model[0](torch.ones(1, 2)).sum().backward()  # no gradient for the second layer
    flat.gather_grads()
    assert flat.grads.tolist() == [1.0] * 6 + [0.0] * 3
    flat.grads.fill_(2.0)
    assert all(bool((parameter.grad == 2).all()) for parameter in model.parameters())
