"""LSTMs over padded sequences, in which no direction sees the padding.

cuDNN takes packed sequences. On a CPU, a packed LSTM computes each frame by itself; one over a padded tensor is left to
oneDNN, which is up to seven times as fast (benchmarks/bench_lstm.py). There, each layer and direction runs alone: the
backward one over sequences that are reversed within their lengths, so that it begins at their last frames.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from devices.precision import lstm_dtype
from devices.transfers import beside, on_host, stays_on_device

Memory = tuple[Tensor, ...]
"""What a network remembers of a history, tensors [batch, ...]."""
Weights = Sequence[Sequence[Tensor]]
"""Weights and biases of each layer and direction, in the order of `nn.LSTM.all_weights`."""
Result = TypeVar("Result")


def open_forget_gates(lstm: nn.LSTM) -> None:
    """Initialize the forget gates nearly open, so that gradients pass through long utterances from the start."""
    with torch.no_grad():
        for name, bias in lstm.named_parameters():
            if "bias_ih" in name:
                cells = bias.shape[0] // 4
                bias[cells : 2 * cells].fill_(1.0)


def run_lstm(lstm: nn.LSTM, x_BTD: Tensor, lengths: Tensor | None) -> Tensor:
    """Run an LSTM, with `batch_first`; under autocast to bf16, in the type given by `lstm_dtype`.

    Args:
        lstm: The LSTM; its parameters stay as they are.
        x_BTD: Frames [B, T, D].
        lengths: Frames of each sequence [B]; a sequence may have none. None: all sequences have T frames.

    Returns:
        Float [B, T, H], zero beyond the lengths.
    """
    run = run_packed if x_BTD.device.type == "cuda" and not stays_on_device() else run_padded
    if lengths is None:
        run = run_whole
    return _in_lstm_dtype(lstm, x_BTD, lambda x_BTD, weights: run(lstm, x_BTD, lengths, weights))


def _in_lstm_dtype(lstm: nn.LSTM, x_BTD: Tensor, run: Callable[[Tensor, Weights], Result]) -> Result:
    """Run with frames and weights as they are, or, under autocast to bf16, in the type given by `lstm_dtype`."""
    device = x_BTD.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.bfloat16:
        return run(x_BTD, lstm.all_weights)
    dtype = lstm_dtype(x_BTD.device)
    with torch.autocast(device, enabled=False):
        weights = [[weight.to(dtype) for weight in part] for part in lstm.all_weights]  # differentiable casts
        return run(x_BTD.to(dtype), weights)


def run_window(
    lstm: nn.LSTM, x_BTD: Tensor, chunk: int, memory: Memory, lengths: Tensor | None = None
) -> tuple[Tensor, Memory]:
    """Run a bidirectional LSTM over a chunk of frames and some that follow it; types as for `run_lstm`.

    The forward direction goes on from the chunk before; the backward one begins at the last frame there is. This is the
    latency-controlled BLSTM of Zhang et al. 2016, "Highway long short-term memory RNNs for distant speech recognition",
    section 4.

    Args:
        lstm: The LSTM, with `batch_first`.
        x_BTD: The frames of the chunk, one at least, and those after it.
        chunk: Frames of the chunk.
        memory: States and cells of the forward direction before the chunk [B, layers, H].
        lengths: Frames of each sequence [B], at most T; None: all have T.

    Returns:
        [B, chunk, 2 H], of fewer frames if there are fewer, unspecified beyond the lengths; and states and cells of the
        forward direction after the chunk.
    """
    steps = torch.arange(x_BTD.shape[1] - 1, -1, -1, device=x_BTD.device)
    reversal = steps.expand(x_BTD.shape[0], -1) if lengths is None else _reversal(x_BTD, lengths)[0]
    return _in_lstm_dtype(lstm, x_BTD, lambda x_BTD, weights: _window(lstm, x_BTD, chunk, memory, reversal, weights))


def _window(
    lstm: nn.LSTM, x_BTD: Tensor, chunk: int, memory: Memory, reversal: Tensor, weights: Weights
) -> tuple[Tensor, Memory]:
    """What `run_window` does, given places of the reversed frames [B, T] and weights."""
    zeros, after = x_BTD.new_zeros(1, x_BTD.shape[0], lstm.hidden_size), []
    rest = lstm.bias, 1, 0.0, lstm.training, False, True
    x = x_BTD
    for layer in range(lstm.num_layers):
        forward, backward = weights[2 * layer : 2 * layer + 2]
        before = tuple(state[:, layer].unsqueeze(0).contiguous().to(x.dtype) for state in memory)
        hidden, *states = torch.lstm(x[:, :chunk], before, list(forward), *rest)
        if x.shape[1] > chunk:
            ahead = torch.lstm(x[:, chunk:], states, list(forward), *rest)[0]
            hidden = torch.cat((hidden, ahead), dim=1)
        back = torch.lstm(_rearranged(x, reversal), (zeros, zeros), list(backward), *rest)[0]
        x = torch.cat((hidden, _rearranged(back, reversal)), dim=2)
        if layer < lstm.num_layers - 1:
            x = F.dropout(x, lstm.dropout, lstm.training)
        after.append(states)
    return x[:, :chunk], tuple(torch.cat(states).transpose(0, 1) for states in zip(*after, strict=True))


def step_lstm(lstm: nn.LSTM, x_BD: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    """As `continue_lstm`, for one more frame of each sequence: [B, D] to [B, H]."""
    output, after = continue_lstm(lstm, x_BD.unsqueeze(1), memory)
    return output.squeeze(1), after


def continue_lstm(lstm: nn.LSTM, x_BTD: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    """Run an LSTM in one direction over the next frames of each sequence.

    Args:
        lstm: The LSTM, with `batch_first`.
        x_BTD: The frames, one at least.
        memory: States and cells of the frames before [B, layers, H].

    Returns:
        [B, T, H], and states and cells now.
    """
    # torch wants the layers first
    before = tuple(state.transpose(0, 1).contiguous() for state in memory)
    output, after = lstm(x_BTD, before)
    return output, tuple(state.transpose(0, 1) for state in after)


def run_whole(lstm: nn.LSTM, x_BTD: Tensor, lengths: Tensor | None, weights: Weights) -> Tensor:
    """All layers in one call, over sequences without padding."""
    layers = lstm.num_layers * (2 if lstm.bidirectional else 1)
    zeros = x_BTD.new_zeros(layers, len(x_BTD), lstm.hidden_size)
    flat = [weight for part in weights for weight in part]
    rest = lstm.bias, lstm.num_layers, lstm.dropout, lstm.training, lstm.bidirectional, True
    hidden: Tensor = torch.lstm(x_BTD, (zeros, zeros), flat, *rest)[0]
    return hidden


def run_packed(lstm: nn.LSTM, x_BTD: Tensor, lengths: Tensor | None, weights: Weights) -> Tensor:
    """All layers in one call, over packed sequences."""
    assert lengths is not None
    # a sequence without frames cannot be packed: it gets one, which its length of 0 masks afterwards
    counts = on_host("frames", lengths).clamp(min=1)
    # sorted here: torch waits for a GPU to copy the order there, and to copy it back for the lengths
    order = counts.argsort(descending=True, stable=True)
    there, back = beside(torch.stack([order, order.argsort()]), x_BTD)
    packed = pack_padded_sequence(x_BTD.index_select(0, there), counts[order], batch_first=True)
    layers = lstm.num_layers * (2 if lstm.bidirectional else 1)
    zeros = x_BTD.new_zeros(layers, int(packed.batch_sizes[0]), lstm.hidden_size)
    flat = [weight for part in weights for weight in part]
    rest = lstm.bias, lstm.num_layers, lstm.dropout, lstm.training, lstm.bidirectional
    hidden: Tensor = torch.lstm(packed.data, packed.batch_sizes, (zeros, zeros), flat, *rest)[0]
    x_BTH, _ = pad_packed_sequence(packed._replace(data=hidden), batch_first=True, total_length=x_BTD.shape[1])
    return x_BTH.index_select(0, back)


def run_padded(lstm: nn.LSTM, x_BTD: Tensor, lengths: Tensor | None, weights: Weights) -> Tensor:
    """One layer and direction after another, over the padded tensor."""
    assert lengths is not None
    directions = 2 if lstm.bidirectional else 1
    reversal, inside = _reversal(x_BTD, lengths)
    zeros = x_BTD.new_zeros(1, x_BTD.shape[0], lstm.hidden_size)
    rest = lstm.bias, 1, 0.0, lstm.training, False, True
    x = x_BTD
    for layer in range(lstm.num_layers):
        forward, *backward = weights[layer * directions : (layer + 1) * directions]
        hidden: list[Tensor] = [torch.lstm(x, (zeros, zeros), list(forward), *rest)[0]]
        for part in backward:
            outputs: Tensor = torch.lstm(_rearranged(x, reversal), (zeros, zeros), list(part), *rest)[0]
            hidden.append(_rearranged(outputs, reversal))
        x = torch.cat(hidden, dim=2)
        if layer < lstm.num_layers - 1:
            x = F.dropout(x, lstm.dropout, lstm.training)
    return x.masked_fill(~inside.unsqueeze(2), 0.0)


def _reversal(x_BTD: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Places [B, T] of the frames of sequences that are reversed within their lengths [B]; bool [B, T]: within them."""
    steps = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    ends = lengths.to(x_BTD.device).unsqueeze(1)
    inside = steps < ends
    return torch.where(inside, ends - 1 - steps, steps), inside


def _rearranged(x_BTD: Tensor, places_BT: Tensor) -> Tensor:
    """The frames of all sequences in another order."""
    size, length, _ = x_BTD.shape
    rows = places_BT + length * torch.arange(size, device=x_BTD.device)[:, None]
    return x_BTD.flatten(0, 1).index_select(0, rows.flatten()).view(x_BTD.shape)
