"""Networks that predict words, and the language model that asks them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from devices.transfers import beside, on_host
from speech.lm.base import LanguageModel, States
from speech.lm.lstm import LstmConfig
from speech.lm.ngram import LOWEST
from speech.lm.vocabulary import START_ID, Vocabulary
from speech.models.networks.base import TrainableNetwork
from speech.models.networks.dropout import Dropout
from speech.models.networks.lstm import Memory, run_lstm, step_lstm

_LOG10 = float(np.log(10.0))
_CHUNK = 256
"""States that are scored at once: their probabilities are rows as long as the vocabulary."""


class WordNetwork(TrainableNetwork):
    """A network that predicts words from left to right."""

    @abstractmethod
    def step(self, words: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Natural log probabilities of the next word after one more word.

        Args:
            words: The words [batch].
            memory: What is remembered of the words before.

        Returns:
            Log probabilities [batch, words], and what is remembered now.
        """

    @abstractmethod
    def nothing(self) -> Memory:
        """What is remembered before the first word, without the batch's dimension."""


class LstmNetwork(WordNetwork):
    """Embeddings, `cfg.layers` LSTM layers of `cfg.dim` cells, and a softmax that shares the embeddings' weights."""

    def __init__(self, cfg: LstmConfig, num_words: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.embedding = nn.Embedding(num_words, cfg.dim)
        nn.init.normal_(self.embedding.weight, std=cfg.dim**-0.5)
        between = cfg.dropout if cfg.layers > 1 else 0.0
        self.lstm = nn.LSTM(cfg.dim, cfg.dim, num_layers=cfg.layers, dropout=between, batch_first=True)
        self.dropout = Dropout(cfg.dropout)
        self.bias = nn.Parameter(torch.zeros(num_words))

    @override
    def forward(self, words_BT1: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities of the following words [B, T, words], and `lengths`; sentences do not share a state."""
        size, width, _ = words_BT1.shape
        hidden, places = self._hidden(words_BT1, lengths)
        log_probs = self._log_probs(self.dropout(hidden))
        out = log_probs.new_zeros(size * width, log_probs.shape[1]).index_copy(0, places, log_probs)
        return out.view(size, width, -1), lengths

    # every batch has other sentences, and torch.compile cannot trace LSTMs
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _hidden(self, words_BT1: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What the LSTM says after each word [words that are no padding, D], and where these are among all B x T."""
        # found on the host, which knows them: a GPU's host would have to wait
        words = on_host("inputs", words_BT1).squeeze(2).long()
        inside = torch.arange(words.shape[1]) < on_host("frames", lengths).unsqueeze(1)
        places = torch.arange(len(words)).unsqueeze(1) * words_BT1.shape[1] + torch.arange(words.shape[1])
        # the sentences of all blocks side by side: what stands before one must not affect it
        flat = words[inside]
        first = torch.nonzero(flat == START_ID).flatten().tolist()
        sizes = [end - start for start, end in zip(first, [*first[1:], len(flat)], strict=True)]
        sentences = nn.utils.rnn.pad_sequence(list(torch.split(flat, sizes)), batch_first=True)
        counts = torch.tensor(sizes)
        spoken = (torch.arange(sentences.shape[1]) < counts.unsqueeze(1)).flatten().nonzero().flatten()
        hidden = run_lstm(self.lstm, self.dropout(self.embedding(beside(sentences, words_BT1))), counts)
        return hidden.flatten(0, 1).index_select(0, beside(spoken, hidden)), beside(places[inside], hidden)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """Log probabilities of words; `<s>` never follows."""
        scores = nn.functional.linear(hidden, self.embedding.weight, self.bias).float()
        never = torch.zeros_like(self.bias)
        never[START_ID] = -torch.inf
        return (scores + never).log_softmax(dim=-1)

    @override
    def step(self, words: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        output, after = step_lstm(self.lstm, self.embedding(words), memory)
        return self._log_probs(output), after

    @override
    def nothing(self) -> Memory:
        zeros = torch.zeros(self.cfg.layers, self.cfg.dim)
        return zeros, zeros


@dataclass(frozen=True)
class _State:
    """A history; equal ones are equal states."""

    words: tuple[int, ...]
    """All words from `<s>` on; the network has not seen the last one yet."""
    memory: Memory = field(compare=False, repr=False)
    """What it remembers of the others."""


class NetworkModel(LanguageModel):
    """A language model that asks a network; on a CPU.

    Args:
        words: The words, by the network's numbers.
        network: The network.
    """

    start: _State

    def __init__(self, words: Vocabulary, network: TrainableNetwork) -> None:
        assert isinstance(network, WordNetwork)
        self.words, self._network = words, network
        self.start = _State((START_ID,), network.nothing())

    @property
    def num_parameters(self) -> int:
        """Weights of the network."""
        return self._network.num_parameters()

    @override
    def score(self, state: _State, word: int) -> tuple[_State, float]:
        states, log_probs = self.score_batch([state], np.array([word]))
        return states[0], float(log_probs[0])

    @override
    def score_batch(self, states: States, words: NDArray[np.int64]) -> tuple[list[_State], NDArray[np.float64]]:
        parts = [slice(start, start + _CHUNK) for start in range(0, len(words), _CHUNK)]
        done = [self._scored_part(list(states[part]), words[part]) for part in parts]
        next_states = [state for after, _ in done for state in after]
        return next_states, np.concatenate([np.zeros(0), *(log_probs for _, log_probs in done)])

    @override
    @torch.inference_mode()
    def score_next(self, states: States, words: NDArray[np.int64]) -> NDArray[np.float64]:
        parts = [slice(start, start + _CHUNK) for start in range(0, len(words), _CHUNK)]
        log_probs = [
            self._step(list(states[part]))[0].gather(1, torch.from_numpy(words[part].astype(np.int64))).double().numpy()
            for part in parts
        ]
        return np.maximum(np.concatenate(log_probs) / _LOG10, LOWEST) if log_probs else np.zeros(words.shape)

    def _step(self, states: Sequence[_State]) -> tuple[Tensor, Memory]:
        """Natural log probabilities of the next word [states, words], and what is remembered of the words so far."""
        last = torch.tensor([state.words[-1] for state in states])
        memory = tuple(torch.stack(column) for column in zip(*(state.memory for state in states), strict=True))
        return self._network.step(last, memory)

    @torch.inference_mode()
    def _scored_part(
        self, states: Sequence[_State], words: NDArray[np.int64]
    ) -> tuple[list[_State], NDArray[np.float64]]:
        log_probs, memory = self._step(states)
        chosen = log_probs.gather(1, torch.from_numpy(words.astype(np.int64)).unsqueeze(1)).squeeze(1).double().numpy()
        after = [
            _State((*state.words, int(word)), rows)
            for state, word, rows in zip(states, words, zip(*memory, strict=True), strict=True)
        ]
        return after, np.maximum(chosen / _LOG10, LOWEST)
