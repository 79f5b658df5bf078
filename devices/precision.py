"""Numerical precision: which devices support bf16, and in which type LSTMs run under autocast.

Under autocast to bf16, torch 2.11 runs cuDNN's LSTMs in fp16 (`_cudnn_rnn_cast_reflatten`), whose range is too small
for gradients without a scaler. LSTMs therefore run outside of autocast: in bf16 if cuDNN supports it, else in fp32, for
which cuDNN uses TF32 if the GPU supports it.
"""

from collections.abc import Iterator

import torch
from torch import nn

_CUDNN_BF16 = 91300
"""First version of cuDNN with bf16 LSTMs (9.13)."""
_AMPERE = 8
"""Major compute capability of the first GPUs with bf16 and TF32; older ones only emulate bf16."""


def has_bf16(device: torch.device) -> bool:
    """Whether a device computes in bf16 natively; True for a CPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= _AMPERE


def lstm_dtype(device: torch.device) -> torch.dtype:
    """The type in which LSTMs run under autocast to bf16."""
    if device.type != "cuda" or not has_bf16(device):
        return torch.float32
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return torch.bfloat16 if (version or 0) >= _CUDNN_BF16 else torch.float32


def bf16_parameters(module: nn.Module, device: torch.device) -> Iterator[str]:
    """Names of the parameters of a module, not of its parts, that a pass under autocast uses in bf16 only.

    These are the weights and biases of linear layers and convolutions, and those of LSTMs where they run in bf16. What
    a subclass or a parametrization does with its parameters is not known: it has none.
    """
    if type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d):
        yield from (name for name in ("weight", "bias") if module._parameters.get(name) is not None)
    elif type(module) is nn.LSTM and lstm_dtype(device) == torch.bfloat16:
        yield from module._parameters


def describe(device: torch.device, amp: bool, has_lstm: bool) -> str:
    """Describe the precision of a training run, for its record.

    Args:
        device: Device of the model.
        amp: Whether training uses autocast to bf16.
        has_lstm: Whether the model contains an LSTM.
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
