"""Under autocast to bf16 cuDNN's LSTMs ran in fp16, without a scaler; GPUs that only emulate bf16 took it for `auto`.

Without a GPU, the tests check what is requested of torch, and try the cast itself on the CPU.
"""

import pytest
import torch
from torch import nn

from devices.precision import describe, has_bf16, lstm_dtype
from speech.models.networks import lstm as lstms
from speech.models.networks.lstm import run_lstm
from training.learner.compute import Learner, mixed_precision, open_set

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def set_gpu(monkeypatch):
    """Sets the GPU's compute capability and cuDNN's version."""

    def pretend(capability, cudnn=91900):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

    return pretend


@pytest.mark.parametrize(
    ("capability", "cudnn", "dtype"),
    [
        ((9, 0), 91900, torch.bfloat16),
        ((8, 0), 91300, torch.bfloat16),
        ((8, 0), 91200, torch.float32),
        ((7, 5), 91900, torch.float32),
        ((9, 0), None, torch.float32),
    ],
)
def test_lstm_runs_in_bf16_if_cudnn_supports_it(set_gpu, capability, cudnn, dtype):
    set_gpu(capability, cudnn)
    assert lstm_dtype(GPU) == dtype
    assert lstm_dtype(CPU) == torch.float32


def test_auto_precision_does_not_choose_emulated_bf16(set_gpu, caplog):
    set_gpu((7, 5))
    assert not has_bf16(GPU)
    assert not mixed_precision("auto", GPU)
    assert not caplog.text
    assert mixed_precision("bf16", GPU)
    assert "only emulates" in caplog.text
    set_gpu((8, 0))
    assert mixed_precision("auto", GPU)
    assert not mixed_precision("off", GPU)
    assert not mixed_precision("auto", CPU)
    assert mixed_precision("bf16", CPU)


def test_record_names_the_precision_used(set_gpu, monkeypatch):
    set_gpu((8, 0))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True, raising=False)
    assert describe(GPU, True, True) == "bf16, LSTM in bf16"
    assert describe(GPU, True, False) == "bf16"
    assert describe(GPU, False, True) == "fp32, convolutions and LSTM in tf32"
    set_gpu((8, 0), 91000)
    assert describe(GPU, True, True) == "bf16, LSTM in tf32"
    set_gpu((7, 5))
    assert describe(GPU, True, True) == "bf16, LSTM in fp32"
    assert describe(CPU, False, True) == "fp32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_lstm_uses_chosen_type_with_fp32_gradients(monkeypatch, dtype):
    torch.manual_seed(0)
    lstm = nn.LSTM(12, 10, 2, bidirectional=True, batch_first=True)
    x, lengths = torch.randn(3, 9, 12), torch.tensor([9, 2, 5])
    wanted = run_lstm(lstm, x, lengths)
    wanted.sum().backward()
    grads = [p.grad.clone() for p in lstm.parameters()]
    lstm.zero_grad()
    kinds, real = [], torch.lstm

    def spy(frames, hidden, weights, *rest):
        kinds.append({frames.dtype, hidden[0].dtype, *(weight.dtype for weight in weights)})
        assert not torch.is_autocast_enabled("cpu")
        return real(frames, hidden, weights, *rest)

    monkeypatch.setattr(torch, "lstm", spy)
    monkeypatch.setattr(lstms, "lstm_dtype", lambda device: dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = run_lstm(lstm, x, lengths)
        assert torch.is_autocast_enabled("cpu")
    outputs.float().sum().backward()
    assert kinds == [{dtype}] * 4  # two layers in two directions
    tolerance = 0.05 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(outputs.float(), wanted, rtol=tolerance, atol=tolerance)
    for parameter, grad in zip(lstm.parameters(), grads, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - grad).norm() <= 2 * tolerance * grad.norm()


def test_lstm_without_autocast_keeps_its_type(monkeypatch):
    monkeypatch.setattr(lstms, "lstm_dtype", lambda device: pytest.fail("it was cast"))
    lstm = nn.LSTM(4, 4, batch_first=True).double()
    assert run_lstm(lstm, torch.randn(1, 3, 4).double(), torch.tensor([3])).dtype == torch.float64


def test_training_records_its_device_and_precision(corpus, tmp_path, tones):
    run = tones.train_here(corpus.job(tmp_path, epochs=1))
    assert (run.result["device"], run.result["precision"]) == ("cpu", "fp32")
    mixed = Learner(corpus.job(tmp_path / "bf16", "blstm", amp="bf16"), CPU)
    assert mixed.describe() == {"device": "cpu", "precision": "bf16, LSTM in fp32"}
    data = open_set(mixed.job, "train")
    assert mixed.gradient(mixed.task.drawn(data.batch(range(3)), 0), 1).loss > 0


@pytest.mark.gpu
def test_lstm_on_gpu_runs_in_bf16_close_to_fp32():
    torch.manual_seed(0)
    lstm = nn.LSTM(64, 64, 2, bidirectional=True, batch_first=True).to(GPU)
    x, lengths = torch.randn(4, 50, 64, device=GPU), torch.tensor([50, 40, 3, 1])
    wanted = run_lstm(lstm, x, lengths)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        outputs = run_lstm(lstm, x, lengths)
    assert outputs.dtype == lstm_dtype(GPU)
    assert outputs.dtype != torch.float16
    torch.testing.assert_close(outputs.float(), wanted, rtol=0.05, atol=0.05)
    # a gradient that fp16 could not hold
    (outputs.float().sum() * 1e6).backward()
    assert all(torch.isfinite(p.grad).all() for p in lstm.parameters())
