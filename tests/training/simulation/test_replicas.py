"""Replicas of a model: updated as one flat parameter or as separate ones."""

import pytest
import torch
from regression import Regression
from torch import nn

from training.config import OPTIMIZERS
from training.simulation.model import ModelReplica


@pytest.mark.parametrize("optimizer", [{"kind": "sgd", "momentum": 0.9}, {"kind": "adamw"}])
def test_flat_parameter_is_updated_like_separate_parameters(optimizer):
    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    whole = ModelReplica(model(), OPTIMIZERS[optimizer["kind"]](weight_decay=0.0, **optimizer))
    parts = ModelReplica(model(), OPTIMIZERS[optimizer["kind"]](weight_decay=1e-30, **optimizer))
    for step in range(5):
        grads = torch.randn(whole.grads.shape, generator=torch.Generator().manual_seed(step))
        for replica in (whole, parts):
            replica.grads.copy_(grads)
            replica.set_rate(0.1)
            replica.update()
    torch.testing.assert_close(whole.weights, parts.weights)


def test_replicas_with_shared_weights_update_them_with_separate_optimizers():
    problem = Regression(momentum=0.5)
    first, second = problem.replica(), problem.replica()
    second.share(first)
    before = first.weights.clone()
    second.grads.fill_(1.0)
    second.set_rate(0.1)
    second.update()
    assert torch.equal(first.weights, second.weights)
    torch.testing.assert_close(first.weights, before - 0.1)
    assert first.updates == second.updates == 1


def test_copied_replica_continues_like_the_original():
    problem = Regression(momentum=0.9)
    first, second = problem.replica(), problem.replica()
    for replica in (first, second):
        replica.set_rate(0.1)
    first.grads.fill_(1.0)
    first.update()
    second.copy_from(first)
    for replica in (first, second):
        replica.grads.fill_(0.5)
        replica.update()
    assert torch.equal(first.weights, second.weights)
