"""Bidirectional LSTM encoder with an optional linear bottleneck, after the published Switchboard acoustic model.

The published model (arXiv:1904.04956) has 6 layers of 512 cells per direction and a bottleneck of 256 and predicts
context-dependent states frame by frame; this one predicts tokens with CTC, behind convolutional subsampling.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from speech.models.base import AcousticModel, ModelConfig
from speech.models.dropout import Dropout
from speech.models.precision import run_packed


def run_lstm(lstm: nn.LSTM, x_BTD: Tensor, lengths: Tensor) -> Tensor:
    """Run an LSTM over frames [B, T, D] with `lengths` [B]; returns [B, T, H], zero beyond the lengths."""
    # utterances without frames cannot be packed: they get one frame, which their length of 0 masks afterwards
    packed = pack_padded_sequence(x_BTD, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
    x_BTH, _ = pad_packed_sequence(run_packed(lstm, packed), batch_first=True, total_length=x_BTD.shape[1])
    return x_BTH


class BlstmConfig(ModelConfig):
    """Bidirectional LSTM, as in the published recipe."""

    kind: Literal["blstm"] = "blstm"
    bottleneck: int = Field(default=0, ge=0)
    """Width of the linear bottleneck before the output layer (published: 256); 0 for none."""


class Blstm(AcousticModel):
    """`cfg.layers` bidirectional LSTM layers of `cfg.dim` cells per direction."""

    config = BlstmConfig

    def __init__(self, cfg: BlstmConfig, num_features: int, vocab_size: int) -> None:
        super().__init__(cfg, num_features, vocab_size)
        self.lstm = nn.LSTM(
            input_size=cfg.dim,
            hidden_size=cfg.dim,
            num_layers=cfg.layers,
            dropout=cfg.dropout if cfg.layers > 1 else 0.0,
            bidirectional=True,
            batch_first=True,
        )
        width = 2 * cfg.dim
        self.bottleneck = nn.Linear(width, cfg.bottleneck) if cfg.bottleneck else nn.Identity()
        self.dropout = Dropout(cfg.dropout)
        self.output = nn.Linear(cfg.bottleneck or width, vocab_size)
        self._open_forget_gates()

    def _open_forget_gates(self) -> None:
        """Initialize the forget gates nearly open, so that gradients pass through long utterances from the start."""
        with torch.no_grad():
            for name, bias in self.lstm.named_parameters():
                if "bias_ih" in name:
                    cells = bias.shape[0] // 4
                    bias[cells : 2 * cells].fill_(1.0)

    def encode(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        """See the base class; packing keeps the backward direction from starting in the padding."""
        x_BTH = run_lstm(self.lstm, x_BTD, lengths)
        scores: Tensor = self.output(self.dropout(self.bottleneck(x_BTH)))
        return scores
