"""Which precision a device computes in: bf16 where it has units for it, and what an LSTM makes of it.

Autocast to bf16 runs cuDNN's LSTMs in fp16 (torch 2.11, `_cudnn_rnn_cast_reflatten`), whose range is too small for
gradients without a scaler. They are therefore run outside of autocast: in bf16 where cuDNN has it, else in fp32, for
which cuDNN takes TF32 where the GPU has that.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_CUDNN_BF16 = 91300
"""cuDNN's first version with LSTMs in bf16 (9.13)."""
_AMPERE = 8
"""Major compute capability of the first GPUs with bf16 and TF32; older ones only emulate bf16."""


def has_bf16(device: torch.device) -> bool:
    """Whether a device has arithmetic in bf16, not an emulation of it; a CPU counts as one."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= _AMPERE


def lstm_dtype(device: torch.device) -> torch.dtype:
    """What LSTMs are computed in where the rest is autocast to bf16."""
    if device.type != "cuda" or not has_bf16(device):
        return torch.float32
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return torch.bfloat16 if (version or 0) >= _CUDNN_BF16 else torch.float32


def describe(device: torch.device, amp: bool, has_lstm: bool) -> str:
    """A training's precision, for its record.

    Args:
        device: Where it runs.
        amp: Whether it is autocast to bf16.
        has_lstm: Whether the model has an LSTM.
    """
    full = "fp32"
    if device.type == "cuda" and has_bf16(device) and torch.backends.cudnn.allow_tf32:
        full = "fp32, convolutions and LSTM in tf32"
    if not amp:
        return full
    if not has_lstm:
        return "bf16"
    inner = {torch.bfloat16: "bf16", torch.float32: "tf32" if "tf32" in full else "fp32"}[lstm_dtype(device)]
    return f"bf16, LSTM in {inner}"


def run_packed(lstm: nn.LSTM, packed: PackedSequence) -> PackedSequence:
    """An LSTM over packed frames; under autocast to bf16 in the precision that `lstm_dtype` says."""
    device = packed.data.device
    if not torch.is_autocast_enabled(device.type) or torch.get_autocast_dtype(device.type) != torch.bfloat16:
        return lstm(packed)[0]  # type: ignore[no-any-return]
    dtype = lstm_dtype(device)
    with torch.autocast(device.type, enabled=False):
        return packed._replace(data=_in_dtype(lstm, packed, dtype))


def _in_dtype(lstm: nn.LSTM, packed: PackedSequence, dtype: torch.dtype) -> Tensor:
    """As `nn.LSTM.forward`, with a cast of weights and frames that gradients pass; the weights stay fp32."""
    weights = [weight.to(dtype) for layer in lstm.all_weights for weight in layer]
    frames = packed.data.to(dtype)
    layers = lstm.num_layers * (2 if lstm.bidirectional else 1)
    zeros = frames.new_zeros(layers, int(packed.batch_sizes[0]), lstm.hidden_size)
    rest = lstm.bias, lstm.num_layers, lstm.dropout, lstm.training, lstm.bidirectional
    hidden: Tensor = torch.lstm(frames, packed.batch_sizes, (zeros, zeros), weights, *rest)[0]
    return hidden
