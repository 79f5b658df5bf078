"""Bidirectional LSTM encoder with an optional linear bottleneck, after the published Switchboard acoustic model.

The published model (arXiv:1904.04956) has 6 layers of 512 cells per direction and a bottleneck of 256 and predicts
context-dependent states frame by frame; this one predicts tokens with CTC, behind convolutional subsampling.

With `cfg.chunk`, it is latency-controlled (Zhang et al. 2016, arXiv:1510.08983): the backward direction begins a few
frames after each chunk, and not at the utterance's end.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from speech.models.blstm import BlstmConfig
from speech.models.networks.base import AcousticModel, ModelStage
from speech.models.networks.dropout import Dropout
from speech.models.networks.lstm import Memory, open_forget_gates, run_lstm, run_window


class Blstm(AcousticModel):
    """`cfg.layers` bidirectional LSTM layers of `cfg.dim` cells per direction.

    Attributes:
        offline_chunk: Output frames of a chunk when whole utterances are computed; 0: each utterance is one chunk.
    """

    cfg: BlstmConfig
    by_window = True

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
        open_forget_gates(self.lstm)
        self.offline_chunk = cfg.chunk.frames if cfg.chunk else 0

    @override
    def encode(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        run = self._run_in_chunks if self.offline_chunk else self._run_lstm
        return self._scores(run(x_BTD, lengths))

    def _scores(self, x_BTH: Tensor) -> Tensor:
        scores: Tensor = self.output(self.dropout(self.bottleneck(x_BTH)))
        return scores

    # torch.compile cannot trace LSTMs, and would unroll them over frames if it could
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_lstm(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        return run_lstm(self.lstm, x_BTD, lengths)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_in_chunks(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        parts, (memory,) = [], self.layers_before(len(x_BTD))
        for start in range(0, x_BTD.shape[1], self.offline_chunk):
            window_BTD = x_BTD[:, start : start + self.offline_chunk + self.cfg.ahead]
            frames = (lengths - start).clamp(0, window_BTD.shape[1])
            hidden, memory = run_window(self.lstm, window_BTD, self.offline_chunk, memory, frames)
            parts.append(hidden)
        return torch.cat(parts, dim=1)

    @override
    def layers_before(self, batch: int) -> tuple[Memory, ...]:
        states = next(self.parameters()).new_zeros(batch, self.cfg.layers, self.cfg.dim)
        return ((states, states),)

    @override
    def encode_chunk(self, x_BTD: Tensor, layers: tuple[Memory, ...], last: bool) -> tuple[Tensor, tuple[Memory, ...]]:
        assert not x_BTD.shape[1], "chunks are computed with the frames after them"
        return self._scores(x_BTD.new_zeros(len(x_BTD), 0, 2 * self.cfg.dim)), layers

    @override
    def encode_window(self, x_BTD: Tensor, chunk: int, layers: tuple[Memory, ...]) -> tuple[Tensor, tuple[Memory, ...]]:
        hidden, memory = run_window(self.lstm, x_BTD, chunk, layers[0])
        return self._scores(hidden), (memory,)

    @property
    @override
    def hidden_width(self) -> int:
        return 2 * self.cfg.dim

    @override
    def layer_of(self, parameter: str) -> int | None:
        part, _, rest = parameter.partition(".")
        return int(rest.split("_l")[1].removesuffix("_reverse")) if part == "lstm" else None

    @override
    def stage(self, layers: range) -> "BlstmStage":
        if self.cfg.unsplit:
            raise ValueError(self.cfg.unsplit)
        return BlstmStage(self, layers)


class LstmLayers(nn.Module):
    """Layers of a bidirectional LSTM, with its parameters under its names.

    Args:
        lstm: Whose parameters are taken over.
        layers: Numbers of the layers.

    Attributes:
        runs_lstms: True, as the class is none of torch's LSTMs, whose precision may differ from other layers'.
    """

    runs_lstms = True

    def __init__(self, lstm: nn.LSTM, layers: range) -> None:
        super().__init__()
        self.dropout = lstm.dropout if layers.stop < lstm.num_layers else 0.0
        part = nn.LSTM(
            input_size=2 * lstm.hidden_size if layers.start else lstm.input_size,
            hidden_size=lstm.hidden_size,
            num_layers=len(layers),
            dropout=lstm.dropout if len(layers) > 1 else 0.0,
            bidirectional=True,
            batch_first=True,
            device="meta",  # its own parameters are never used
        )
        for own, name in ((number - layers.start, number) for number in layers):
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                for end in ("", "_reverse"):
                    parameter = getattr(lstm, f"{kind}_l{name}{end}")
                    setattr(part, f"{kind}_l{own}{end}", parameter)
                    self.register_parameter(f"{kind}_l{name}{end}", parameter)
        # no submodule: the parameters must not appear a second time, under other numbers
        self._part = (part,)

    def forward(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        """[B, T, D] and [B] -> [B, T, 2 x hidden_size]; dropout follows as between layers of the whole."""
        (part,) = self._part
        return F.dropout(run_lstm(part.train(self.training), x_BTD, lengths), self.dropout, self.training)


class BlstmStage(ModelStage):
    """Layers of a BLSTM."""

    def __init__(self, model: Blstm, layers: range) -> None:
        super().__init__(model, layers)
        self.lstm = LstmLayers(model.lstm, layers)
        self.bottleneck = model.bottleneck if self.is_last else nn.Identity()
        self.dropout = model.dropout if self.is_last else nn.Identity()
        self.output = model.output if self.is_last else nn.Identity()

    @override
    def run(self, x: Tensor, frames: Tensor) -> Tensor:
        scores: Tensor = self.output(self.dropout(self.bottleneck(self.lstm(x, frames))))
        return scores
