"""What every predictor promises: a vector for the tokens so far, for whole texts and step by step.

Training gives it whole texts, a search one more token of some hypotheses:

    memory = predictor.nothing(count)
    vectors, memory = predictor.step(tokens, memory)
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from typing_extensions import override

from speech.models.networks.dropout import Dropout
from speech.models.networks.lstm import Memory, run_lstm, step_lstm
from speech.models.predictors import LstmPredictorConfig, PredictorConfig, StatelessPredictorConfig


class Predictor(nn.Module, ABC):
    """Tokens so far in, a vector out; the vector after a token depends on it and those before it only.

    Args:
        cfg: Its configuration.
        vocab_size: Tokens, the blank included, which stands for the beginning of a text.

    Attributes:
        width: Width of the vectors.
    """

    def __init__(self, cfg: PredictorConfig, vocab_size: int) -> None:
        super().__init__()
        self.width = cfg.dim
        self.embedding = nn.Embedding(vocab_size, cfg.dim)
        self.dropout = Dropout(cfg.dropout)

    @abstractmethod
    def forward(self, tokens_BL: Tensor) -> Tensor:
        """The vector after each token of texts that begin with a blank [batch, tokens, width]."""

    @abstractmethod
    def nothing(self, count: int) -> Memory:
        """What is remembered before the blank that begins a text, for some hypotheses: tensors [count, ...]."""

    @abstractmethod
    def step(self, tokens: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The vectors after one more token.

        Args:
            tokens: One of each hypothesis [count].
            memory: What is remembered of those before.

        Returns:
            Vectors [count, width], and what is remembered now.
        """


class StatelessPredictor(Predictor):
    """Vectors of the last `cfg.context` tokens, weighted for each element by their distance, and a rectifier."""

    def __init__(self, cfg: StatelessPredictorConfig, vocab_size: int) -> None:
        super().__init__(cfg, vocab_size)
        self.context = cfg.context
        self.weights = nn.Parameter(torch.empty(cfg.context, cfg.dim))
        nn.init.normal_(self.weights, mean=cfg.context**-0.5, std=0.1)

    @override
    def forward(self, tokens_BL: Tensor) -> Tensor:
        # blanks precede a text
        return self._vectors(nn.functional.pad(tokens_BL, (self.context - 1, 0)).unfold(1, self.context, 1))

    def _vectors(self, windows: Tensor) -> Tensor:
        """The vectors after windows of the last tokens [..., context]."""
        vectors: Tensor = (self.dropout(self.embedding(windows)) * self.weights).sum(dim=-2).relu()
        return vectors

    @override
    def nothing(self, count: int) -> Memory:
        return (torch.zeros(count, self.context, dtype=torch.long, device=self.weights.device),)

    @override
    def step(self, tokens: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        window = torch.cat((memory[0][:, 1:], tokens.unsqueeze(1)), dim=1)
        return self._vectors(window), (window,)


class LstmPredictor(Predictor):
    """Vectors of tokens, and `cfg.layers` LSTM layers of `cfg.dim` cells."""

    def __init__(self, cfg: LstmPredictorConfig, vocab_size: int) -> None:
        super().__init__(cfg, vocab_size)
        between = cfg.dropout if cfg.layers > 1 else 0.0
        self.lstm = nn.LSTM(cfg.dim, cfg.dim, num_layers=cfg.layers, dropout=between, batch_first=True)

    # torch.compile cannot trace LSTMs
    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, tokens_BL: Tensor) -> Tensor:
        # what pads a text stands behind it
        vectors: Tensor = self.dropout(run_lstm(self.lstm, self.dropout(self.embedding(tokens_BL)), None))
        return vectors

    @override
    def nothing(self, count: int) -> Memory:
        zeros = self.embedding.weight.new_zeros(count, self.lstm.num_layers, self.lstm.hidden_size)
        return zeros, zeros

    @override
    def step(self, tokens: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return step_lstm(self.lstm, self.embedding(tokens), memory)
