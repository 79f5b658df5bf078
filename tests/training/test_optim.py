"""Optimizers: groups, the textbook update, and state as plain tensors."""

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from training.config import AdamWConfig, SgdConfig
from training.learner.flat import FlatParameters
from training.learner.moments import Moments
from training.learner.optim import (
    build_optimizer,
    load_optimizer_tensors,
    num_moments,
    optimizer_tensors,
    set_learning_rate,
)

KINDS = [
    AdamWConfig(lr=0.01),
    SgdConfig(lr=0.1),
    SgdConfig(lr=0.1, momentum=0.0),
]
ids = ["adamw", "momentum", "plain"]


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def steps(model, optimizer, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("cfg", KINDS, ids=ids)
def test_state_is_restored_exactly_from_safetensors(cfg):
    model = small_model()
    optimizer = build_optimizer(cfg, model)
    steps(model, optimizer, 3, seed=1)
    stored, saved = save(optimizer_tensors(optimizer)), [p.detach().clone() for p in model.parameters()]
    steps(model, optimizer, 3, seed=2)
    other = small_model(seed=9)
    resumed = build_optimizer(cfg, other)
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), saved, strict=True):
            parameter.copy_(value)
    load_optimizer_tensors(resumed, load(stored))
    steps(other, resumed, 3, seed=2)
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("cfg", KINDS, ids=ids)
def test_state_is_restored_exactly_from_flat_shares(cfg):
    model, other = small_model(), small_model(seed=9)
    flats = [FlatParameters(network) for network in (model, other)]
    optimizers = [build_optimizer(cfg, network) for network in (model, other)]
    giving, taking = [Moments(*both) for both in zip(optimizers, flats, strict=True)]
    total = flats[0].weights.numel()
    assert giving.write(torch.ones(len(giving.names), total), 0, total) == 0
    update(flats[0], optimizers[0], range(3))
    parts = [torch.full((len(giving.names), stop - start), 7.0) for start, stop in ((0, 8), (8, total))]
    steps = [giving.write(part, *at) for part, at in zip(parts, ((0, 8), (8, total)), strict=True)]
    assert steps == ([3.0] * 2 if cfg.kind == "adamw" else [float(bool(cfg.momentum))] * 2)
    flats[1].load(flats[0].weights)
    taking.load(torch.cat(parts, 1), steps[0])
    for flat, optimizer in zip(flats, optimizers, strict=True):
        update(flat, optimizer, range(3, 6))
    assert torch.equal(flats[0].weights, flats[1].weights)


@pytest.mark.parametrize("cfg", KINDS, ids=ids)
def test_existing_optimizer_state_is_kept(cfg):
    model, other = small_model(), small_model()
    optimizers = [build_optimizer(cfg, network) for network in (model, other)]
    steps(model, optimizers[0], 2, seed=1)
    steps(other, optimizers[1], 2, seed=1)
    moments = Moments(optimizers[0], FlatParameters(model))
    assert len(moments.names) == num_moments(cfg)
    steps(model, optimizers[0], 2, seed=2)
    steps(other, optimizers[1], 2, seed=2)
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
        lambda model: torch.optim.Rprop(model.parameters()),
    ],
)
def test_unknown_optimizer_has_no_moments_and_is_unchanged(make):
    model = small_model()
    optimizer = make(model)
    assert Moments(optimizer, FlatParameters(model)).names == ()
    assert not optimizer.state


def update(flat, optimizer, numbers):
    """Steps that follow from their numbers."""
    for number in numbers:
        flat.grads.copy_(torch.randn(flat.grads.shape, generator=torch.Generator().manual_seed(number)))
        optimizer.step()


def test_weight_decay_applies_only_to_matrices():
    model = small_model()
    optimizer = build_optimizer(AdamWConfig(weight_decay=0.5), model)
    decayed, plain = optimizer.param_groups
    assert decayed["weight_decay"] == 0.5
    assert plain["weight_decay"] == 0
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_not_optimized():
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(AdamWConfig(), model)
    assert all(p is not model[0].weight for group in optimizer.param_groups for p in group["params"])


def test_momentum_follows_the_textbook_formula():
    """v = 0.9 v + g; w -= lr v, with gradient 1 throughout: w = -0.1 (1 + 1.9 + 2.71)."""
    weight = nn.Parameter(torch.zeros(1, 1))
    module = nn.Module()
    module.weight = weight
    optimizer = build_optimizer(SgdConfig(lr=0.1, weight_decay=0.0), module)
    for _ in range(3):
        weight.grad = torch.ones(1, 1)
        optimizer.step()
    assert weight.item() == pytest.approx(-0.561)


def test_learning_rate_applies_to_every_group_also_after_a_resume():
    model = small_model()
    optimizer = build_optimizer(AdamWConfig(), model)
    steps(model, optimizer, 1, seed=1)
    set_learning_rate(optimizer, 0.123)
    assert {group["lr"] for group in optimizer.param_groups} == {0.123}
    load_optimizer_tensors(optimizer, optimizer_tensors(optimizer))
    assert {group["lr"] for group in optimizer.param_groups} == {0.123}
