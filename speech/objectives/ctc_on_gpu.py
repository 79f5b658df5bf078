"""CTC on a GPU with one wait of the host instead of two.

`torch.nn.functional.ctc_loss` copies the lengths to the GPU by itself, from memory that is not page-locked, and so
waits until everything that was launched before is done; its backward pass does so again (torch 2.11, LossCTC.cu). Here
the gradient is computed together with the losses, and the rest of the backward pass is launched without waiting.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from devices.transfers import expected_wait


class CtcWithGradient(torch.autograd.Function):
    """Losses [B] of log probabilities [T, B, V], whose gradient is computed in the forward pass.

    The other arguments are those of torch's `ctc_loss`: token numbers on the device, both kinds of lengths on the host.
    """

    @staticmethod
    @override
    def forward(ctx: Any, outputs_TBV: Tensor, tokens: Tensor, frames: Tensor, token_lengths: Tensor) -> Tensor:
        leaf = outputs_TBV.detach().requires_grad_()
        with torch.enable_grad(), expected_wait(leaf.device):
            losses = torch.nn.functional.ctc_loss(
                leaf, tokens, frames, token_lengths, reduction="none", zero_infinity=True
            )
            # an utterance's loss depends on its own outputs only, so this is the gradient of each
            (grad,) = torch.autograd.grad(losses.sum(), leaf)
        ctx.save_for_backward(grad)
        return losses.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_TBV,) = ctx.saved_tensors
        return grad_TBV * grads[0].unsqueeze(1), None, None, None
