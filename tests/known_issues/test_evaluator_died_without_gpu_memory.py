"""The evaluator ended a training of `device: cuda` on a machine without a GPU, or when learners had filled its memory.

It was restarted three times with the same error, and the supervisor gave up: the learners' work was lost.
"""

import logging
import math

import pytest
import torch

from training.learner.checkpoint import cpu_weights
from training.node import evaluator as module
from training.node.evaluator import Evaluator


@pytest.fixture
def weights(corpus, tmp_path):
    return cpu_weights(corpus.job(tmp_path, "conformer").task.spec.build_model())


def test_evaluator_without_gpu_validates_on_cpu(corpus, tmp_path, weights, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    evaluator = Evaluator(corpus.job(tmp_path, "conformer", device="cuda"))
    assert evaluator.device == torch.device("cpu")
    assert "this machine has no GPU" in caplog.text
    assert math.isfinite(evaluator.validate(weights)["loss"])


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")],
)
def test_validation_continues_on_cpu_if_gpu_memory_is_full(corpus, tmp_path, weights, monkeypatch, caplog, error):
    expected = Evaluator(corpus.job(tmp_path / "cpu", "conformer")).validate(weights)
    evaluator, devices = Evaluator(corpus.job(tmp_path / "gpu", "conformer")), []
    real = evaluator.task.validate

    def full(model, dataset, limits, device, loss_only):
        devices.append(device.type)
        if device.type == "cuda":
            raise error
        return real(model, dataset, limits, device, loss_only)

    monkeypatch.setattr(evaluator.task, "validate", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    evaluator.device = torch.device("cuda", 0)  # the model stays where it is: there may be no GPU here
    with caplog.at_level(logging.WARNING):
        assert evaluator.validate(weights) == expected
    assert "out of memory: validation continues on the CPU" in caplog.text
    assert evaluator.validate(weights) == expected
    assert devices == ["cuda", "cpu", "cpu"]  # it stays there


def test_validation_starts_on_cpu_if_model_does_not_fit_gpu(corpus, tmp_path, weights, monkeypatch):
    monkeypatch.setattr(module, "spare_device", lambda wanted, learners: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def claim(device):
        if device.type == "cuda":
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(module, "claim", claim)
    evaluator = Evaluator(corpus.job(tmp_path, "conformer"))
    assert evaluator.device == torch.device("cpu")
    assert math.isfinite(evaluator.validate(weights)["loss"])


def test_other_errors_are_raised(corpus, tmp_path, weights, monkeypatch):
    evaluator = Evaluator(corpus.job(tmp_path, "conformer"))
    evaluator.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(evaluator.task, "validate", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        evaluator.validate(weights)
