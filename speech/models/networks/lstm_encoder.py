"""LSTM encoder in one direction, with a convolution over a few later frames, which recognizes speech as it comes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from speech.models.lstm import LstmEncoderConfig
from speech.models.networks.base import AcousticModel
from speech.models.networks.dropout import Dropout
from speech.models.networks.lstm import Memory, continue_lstm, open_forget_gates, run_lstm


class LstmEncoder(AcousticModel):
    """`cfg.layers` LSTM layers of `cfg.dim` cells, and a row convolution.

    The row convolution (Deep Speech 2: Amodei et al. 2016, arXiv:1512.02595, section 3.7) adds for each cell its values
    of a frame and of the `cfg.lookahead` frames after it, with weights of its own.
    """

    cfg: LstmEncoderConfig

    def __init__(self, cfg: LstmEncoderConfig, num_features: int, vocab_size: int) -> None:
        super().__init__(cfg, num_features, vocab_size)
        dropout = cfg.dropout if cfg.layers > 1 else 0.0
        self.lstm = nn.LSTM(cfg.dim, cfg.dim, cfg.layers, dropout=dropout, batch_first=True)
        self.row = nn.Conv1d(cfg.dim, cfg.dim, cfg.lookahead + 1, groups=cfg.dim) if cfg.lookahead else nn.Identity()
        self.dropout = Dropout(cfg.dropout)
        self.output = nn.Linear(cfg.dim, vocab_size)
        open_forget_gates(self.lstm)

    @override
    def encode(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        return self._scores(F.pad(self._run_lstm(x_BTD, lengths), (0, 0, 0, self.cfg.lookahead)))

    # torch.compile cannot trace LSTMs, and would unroll them over frames if it could
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_lstm(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        return run_lstm(self.lstm, x_BTD, lengths)

    def _scores(self, hidden_BTD: Tensor) -> Tensor:
        """Scores of all frames but the last `lookahead` ones."""
        rows: Tensor = self.row(hidden_BTD.transpose(1, 2)).transpose(1, 2)
        scores: Tensor = self.output(self.dropout(rows))
        return scores

    @override
    def layer_of(self, parameter: str) -> int | None:
        part, _, rest = parameter.partition(".")
        return int(rest.split("_l")[1]) if part == "lstm" else None

    @override
    def layers_before(self, batch: int) -> tuple[Memory, ...]:
        cfg, weight = self.cfg, next(self.parameters())
        states = weight.new_zeros(batch, cfg.layers, cfg.dim)
        return (states, states), (weight.new_zeros(batch, 0, cfg.dim),)

    @override
    def encode_chunk(self, x_BTD: Tensor, layers: tuple[Memory, ...], last: bool) -> tuple[Tensor, tuple[Memory, ...]]:
        states, (waiting,) = layers
        if x_BTD.shape[1]:
            x_BTD, states = continue_lstm(self.lstm, x_BTD, states)
        hidden = torch.cat((waiting, x_BTD), dim=1)
        ahead = self.cfg.lookahead
        count = hidden.shape[1] if last else max(0, hidden.shape[1] - ahead)
        if not count:
            return self.output(hidden[:, :0]), (states, (hidden,))
        scores = self._scores(F.pad(hidden, (0, 0, 0, ahead)) if last else hidden)
        return scores, (states, (hidden[:, count:].clone(),))

    @override
    def encode_window(self, x_BTD: Tensor, chunk: int, layers: tuple[Memory, ...]) -> tuple[Tensor, tuple[Memory, ...]]:
        before, none = layers
        hidden, states = continue_lstm(self.lstm, x_BTD[:, :chunk], before)
        if self.cfg.lookahead:
            ahead, _ = continue_lstm(self.lstm, x_BTD[:, chunk:], states)
            hidden = torch.cat((hidden, ahead), dim=1)
        return self._scores(hidden), (states, none)
