"""Weights that are converted to bf16 at once give the numbers of autocast, which converts them one by one."""

from contextlib import nullcontext

import pytest
import torch
from recordings import HostRecording
from tones import TINY, bare
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.operations import CONVERSION, Operations, count
from benchmarks.published_model import Bench, Options
from devices import precision
from speech.lm.lstm import LstmConfig
from speech.models import ConformerConfig, build_model
from speech.models.networks import lstm
from training.config import TrainConfig
from training.learner import bf16_weights, compute
from training.learner.bf16_weights import Bf16Weights
from training.learner.compute import Learner, open_set
from training.learner.flat import FlatParameters
from training.learner.graphs import GraphedForward
from training.learner.prefetch import Loader

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROWS = (range(9), range(5, 17), range(3), range(9))


def learners(corpus, folder, kind, device=CPU, model=None, **fields):
    """A learner that leaves the weights to autocast, and one that converts them at once."""
    spec = corpus.spec(kind, model=model or TINY[kind])
    jobs = [
        corpus.job(folder, spec=spec, device=device.type, **{"amp": "bf16", "flat_bf16": flat, **fields})
        for flat in (False, True)
    ]
    return [Learner(job, device) for job in jobs]


def batches(learner):
    load = Loader(open_set(learner.job, "train"), learner.task, learner.device)
    return [load(list(rows), 0) for rows in ROWS]


def assert_same_steps(plain, flat):
    """All steps of both have the same losses, gradients and weights, bit for bit."""
    for number, batch in enumerate(batches(plain)):
        assert flat.gradient(batch, number) == plain.gradient(batch, number)
        assert plain.flat.grads.any()
        assert torch.equal(flat.flat.grads, plain.flat.grads)
        for learner in (plain, flat):
            learner.scale_gradient(10.0)
            learner.update(1e-2)
        assert torch.equal(flat.flat.weights, plain.flat.weights)


@pytest.mark.parametrize("kind", list(TINY))
def test_steps_are_those_of_autocast_bit_for_bit(corpus, tmp_path, kind):
    assert_same_steps(*learners(corpus, tmp_path, kind))


@pytest.mark.parametrize("kind", list(TINY))
@pytest.mark.variants(2)
def test_steps_of_divided_batches_are_those_of_autocast_bit_for_bit(corpus, tmp_path, kind):
    both = learners(corpus, tmp_path, kind)
    size = min(batch.inputs.numel() // len(batch.ids) for batch in batches(both[0]))
    for learner in both:
        learner._portions._too_much = 4 * size
    assert [both[1].gradient(batch, 0).divided for batch in batches(both[1])] == [1, 1, 0, 1]
    assert_same_steps(*both)


def operations(learner, batch):
    with Operations() as counted:
        learner.gradient(batch, 0)
    return counted.counts


def test_steps_in_fp32_do_not_change(corpus, tmp_path):
    both = learners(corpus, tmp_path, "conformer", amp="off")
    assert_same_steps(*both)
    batch = batches(both[0])[0]
    assert operations(both[0], batch) == operations(both[1], batch)


def test_replayed_passes_see_the_weights_of_each_step(corpus, tmp_path):
    both = learners(corpus, tmp_path, "conformer", model=bare("conformer"))
    for learner in both:
        learner._forward = GraphedForward(learner._scores, learner.flat, HostRecording)
    assert_same_steps(*both)
    assert all(learner._forward.recordings for learner in both)


@pytest.mark.slow  # seconds of tracing
def test_compiled_models_take_converted_weights(corpus, tmp_path, monkeypatch):
    whole, programs = torch.compile, []
    monkeypatch.setattr(compute.torch, "compile", lambda model, **how: whole(model, backend="eager", **how))
    both = learners(corpus, tmp_path, "conformer", model=bare("conformer"), compile=True)
    loaded = batches(both[0])
    for learner in both:
        torch._dynamo.reset()
        counters.clear()
        seen = []
        for number, batch in enumerate(loaded):
            learner.gradient(batch, number)
            seen.append(learner.flat.grads.clone())
            learner.update(1e-2)
        programs.append((counters["stats"]["unique_graphs"], seen))
    torch._dynamo.reset()
    (count_plain, plain), (count_flat, flat) = programs
    assert count_plain == count_flat > 0
    assert all(torch.equal(*pair) for pair in zip(plain, flat, strict=True))


def test_lstms_that_run_in_bf16_are_converted_as_well(corpus, tmp_path, monkeypatch):
    for module in (lstm, precision):
        monkeypatch.setattr(module, "lstm_dtype", lambda device: torch.bfloat16)
    both = learners(corpus, tmp_path, "blstm")
    assert_same_steps(*both)
    batch = batches(both[0])[0]
    plain, flat = (operations(learner, batch)[CONVERSION] for learner in both)
    assert plain - flat == 2 * len(both[0].flat.parameters) - 1  # there is no normalization


def test_a_conformer_takes_far_fewer_operations():
    config = ConformerConfig(dim=16, layers=12, heads=4, channels=8, subsampling=4, dropout=0.0)
    plain, flat = (count(build_model(config, 16, 20), 16, flat) for flat in (False, True))
    # per layer four linear layers of the two feed-forward parts, two of the attention, three of the convolution
    converted = 2 * (12 * (4 + 2 + 3) + 2 + 1 + 1)
    assert plain[CONVERSION] - flat[CONVERSION] == 2 * converted - 1
    assert plain["aten::add_.Tensor"] - flat["aten::add_.Tensor"] == converted - 1
    assert plain.total() - flat.total() >= 3 * converted - 10


class Tied(nn.Module):
    """A linear layer that is used three times, one that shares the embeddings' weights, and one without use."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.inner, self.again, self.idle = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.again.weight = self.inner.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.output = nn.Linear(8, 11)
        self.output.weight = self.embedding.weight

    def forward(self, words, lengths):
        x = self.again(self.inner(self.inner(self.embedding(words))).relu())
        return self.output(self.frozen(x)).float().log_softmax(-1), lengths


def tied_gradients(weights_of):
    torch.manual_seed(3)
    model = Tied()
    flat = FlatParameters(model)
    flat.grads.fill_(0.25)  # gradients add to earlier ones
    words = torch.randint(11, (4, 7))
    with weights_of(flat)(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores, _ = model(words, None)
    (scores * torch.randn(scores.shape)).sum().backward()
    return scores.detach(), flat.grads


@pytest.mark.parametrize("gap", [0, 10, bf16_weights.GAP])
def test_shared_and_unused_weights_get_the_gradients_of_autocast(monkeypatch, gap):
    monkeypatch.setattr(bf16_weights, "GAP", gap)
    wanted = tied_gradients(lambda flat: nullcontext)
    got = tied_gradients(lambda flat: Bf16Weights(flat).in_use)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


def test_only_what_autocast_converts_is_in_bf16_and_only_in_a_pass():
    model = Tied()
    model.norm = nn.LayerNorm(8)
    weights = Bf16Weights(FlatParameters(model))
    before = dict(model.named_parameters(remove_duplicate=False))
    types = {}
    with pytest.raises(torch.OutOfMemoryError):
        out_of_memory(model, weights, types)
    assert {name for name, dtype in types.items() if dtype == torch.bfloat16} == {
        *("inner.weight", "inner.bias", "again.weight", "idle.weight", "idle.bias", "output.bias")
    }
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())


def out_of_memory(model, weights, types):
    with weights.in_use():
        types |= {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
        raise torch.OutOfMemoryError


def test_a_network_without_such_weights_is_left_to_autocast():
    network = LstmConfig(dim=4, layers=1).build_network(7)
    weights = Bf16Weights(FlatParameters(network))
    with Operations() as counted, weights.in_use():
        assert all(parameter.dtype == torch.float32 for parameter in network.parameters())
    assert not counted.counts


def test_moved_weights_are_used():
    model = nn.Linear(3, 2)
    flat = FlatParameters(model)
    weights = Bf16Weights(flat)
    flat.move(torch.full((8,), 5.0))
    with weights.in_use(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (model(torch.ones(1, 3)) == 20).all()


def test_the_published_benchmark_converts_at_once():
    options = {"layers": 1, "cells": 8, "outputs": 40, "batch": 4, "device": "cpu", "precision": "bf16"}
    plain, flat = (Bench(0, Options(**options, flat_bf16=flat)) for flat in (False, True))
    for _ in range(3):
        plain.step()
        with Operations() as counted:
            flat.step()
    assert torch.equal(flat.flat.weights, plain.flat.weights)
    with Operations() as before:
        plain.step()
    assert counted.counts[CONVERSION] < before.counts[CONVERSION]


def test_conversion_at_once_is_for_nodes_of_one_learner():
    with pytest.raises(ValueError, match=r"learners_per_node is 2.*use flat_bf16=false"):
        TrainConfig.model_validate({"strategy": "scpsgd", "learners_per_node": 2, "flat_bf16": True})
    assert not TrainConfig().flat_bf16  # until it has been measured on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["conformer", "blstm", "tdnn"])
def test_conversion_at_once_gives_the_gradients_of_autocast(corpus, tmp_path, kind, graphs, caplog):
    model = bare(kind)
    plain = learners(corpus, tmp_path, kind, GPU, model=model)[0]
    flat = learners(corpus, tmp_path, kind, GPU, model=model, cuda_graphs=graphs)[1]
    for number, batch in enumerate(3 * batches(plain)):
        wanted, got = plain.gradient(batch, number), flat.gradient(batch, number)
        assert got.loss == pytest.approx(wanted.loss, rel=0.05)
        assert (flat.flat.grads - plain.flat.grads).norm() < 0.05 * plain.flat.grads.norm()
        for learner in (plain, flat):
            learner.flat.weights.add_(learner.flat.grads, alpha=-1e-4)  # graphs convert the weights of each step
    assert not graphs or flat._forward.recordings
    assert not caplog.text
