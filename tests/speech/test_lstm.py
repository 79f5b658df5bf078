"""LSTMs over padded sequences: what runs on a CPU is what a packed LSTM computes."""

import pytest
import torch
from torch import nn

from speech.models.networks.lstm import run_lstm, run_packed

LENGTHS = ([7, 3, 5, 1], [4, 4], [1], [6, 0, 2])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_padded_sequences_give_what_packed_ones_do(lengths, layers, bidirectional, bias):
    torch.manual_seed(1)
    lstm = nn.LSTM(5, 4, layers, bias=bias, bidirectional=bidirectional, batch_first=True)
    counts = torch.tensor(lengths)
    x = torch.randn(len(lengths), max(lengths) + 2, 5, requires_grad=True)
    outer = torch.randn(len(lengths), max(lengths) + 2, 8 if bidirectional else 4)
    results = []
    for run in (run_lstm, lambda *given: run_packed(*given, lstm.all_weights)):
        outputs = run(lstm, x, counts)
        inside = torch.arange(x.shape[1]) < counts.unsqueeze(1)
        outputs = torch.where(inside.unsqueeze(2), outputs, 0.0)
        results.append([outputs, *torch.autograd.grad((outputs * outer).sum(), [x, *lstm.parameters()])])
    for tensor, other in zip(*results, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-6)


def test_padding_reaches_neither_outputs_nor_gradients():
    torch.manual_seed(1)
    lstm = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)
    x = torch.randn(2, 6, 3)
    counts = torch.tensor([6, 2])
    clean = run_lstm(lstm, x, counts)
    x[1, 2:] = 1e6
    x.requires_grad_()
    outputs = run_lstm(lstm, x, counts)
    assert torch.equal(outputs, clean)
    assert not outputs[1, 2:].any()
    outputs.sum().backward()
    assert not x.grad[1, 2:].any()


def test_dropout_is_between_layers_and_in_training_only():
    torch.manual_seed(1)
    x, counts = torch.randn(2, 6, 3), torch.tensor([6, 4])
    for layers, differs in ((1, False), (2, True)):
        with_dropout = nn.LSTM(3, 4, layers, dropout=0.5 if layers > 1 else 0.0, batch_first=True)
        first, second = (run_lstm(with_dropout, x, counts) for _ in range(2))
        assert torch.equal(first, second) != differs
        with_dropout.eval()
        first, second = (run_lstm(with_dropout, x, counts) for _ in range(2))
        assert torch.equal(first, second)
