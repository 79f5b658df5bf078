"""Phones, HMM topologies and transition probabilities.

A phone is a short left-to-right hidden Markov model: three states for speech; five for silence and noise, whose three
middle states follow each other in any order (the topology of Kaldi's recipes). States emit frames, a transition ends
each frame. A *transition state* is what shares transition probabilities: a phone's state with one tied density (pdf).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

SILENCE = "SIL"
NOISE = "SPN"
_POSITIONS = ("B", "I", "E", "S")


class PhoneError(ValueError):
    """A phone is not in the phone set."""


@dataclass(frozen=True)
class Topology:
    """The states of a phone and where each may go.

    Attributes:
        moves: For each state the next states and their initial probabilities; the number of states stands for the end
            of the phone. Every state may stay; a phone begins in state 0 and ends from its last state.
    """

    moves: tuple[tuple[tuple[int, float], ...], ...]

    @property
    def num_states(self) -> int:
        """Number of emitting states."""
        return len(self.moves)


# Kaldi's topologies and initial probabilities (utils/gen_topo.pl): speech goes from left to right through 3 states;
# silence has 5, of which the first leads to the first four, and each of the middle three to all but the first
SPEECH_TOPOLOGY = Topology(tuple(((i, 0.75), (i + 1, 0.25)) for i in range(3)))
SILENCE_TOPOLOGY = Topology(
    (
        tuple((j, 0.25) for j in (0, 1, 2, 3)),
        *(tuple((j, 0.25) for j in (1, 2, 3, 4)) for _ in range(3)),
        ((4, 0.75), (5, 0.25)),
    )
)
_MOST_PHONES = 4095  # 12 bits of a context's code, in `ContextStatistics`
MAX_STATES = max(SPEECH_TOPOLOGY.num_states, SILENCE_TOPOLOGY.num_states)


@dataclass(frozen=True)
class PhoneSet:
    """Phones by number; 0 stands for the boundary of an utterance.

    Attributes:
        names: The name of phone i is `names[i - 1]`.
        noises: How many phones, the first ones, are silence or noise: five states, independent of their context.
        positions: Whether names end in `_B`, `_I`, `_E` or `_S`, the phone's place in its word.
    """

    names: tuple[str, ...]
    noises: int = 2
    positions: bool = False

    @classmethod
    def of(cls, pronunciations: Iterable[Sequence[str]], positions: bool = False) -> PhoneSet:
        """The phones of a lexicon's pronunciations, after silence and spoken noise.

        Example:
            >>> PhoneSet.of([("HH", "AY1")]).names
            ('SIL', 'SPN', 'AY1', 'HH')
        """
        spoken = sorted({phone for phones in pronunciations for phone in phones} - {SILENCE, NOISE})
        names = [f"{name}_{place}" for name in spoken for place in _POSITIONS] if positions else spoken
        return cls((SILENCE, NOISE, *names), 2, positions)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def silence(self) -> int:
        """Number of the silence phone."""
        return self.number(SILENCE)

    def number(self, name: str) -> int:
        """Number of a phone.

        Raises:
            PhoneError: There is none of that name.
        """
        if name not in self._index:
            raise PhoneError(f"phone {name} is not in the model's phone set: use the lexicon that it was trained with")
        return self._index[name]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i + 1 for i, name in enumerate(self.names)}

    def base(self, phone: int) -> str:
        """The lexicon's name of a phone, without its place in the word."""
        name = self.names[phone - 1]
        return name.rpartition("_")[0] if self.positions and phone > self.noises else name

    def numbers(self, pronunciation: Sequence[str]) -> tuple[int, ...]:
        """Numbers of a word's phones, with their places in the word if this set has them."""
        if not self.positions:
            return tuple(self.number(phone) for phone in pronunciation)
        last = len(pronunciation) - 1
        places = ["S"] if last == 0 else ["B", *"I" * (last - 1), "E"]
        marked = zip(pronunciation, places, strict=True)
        return tuple(self.number(p if p in self.names[: self.noises] else f"{p}_{place}") for p, place in marked)

    def topology(self, phone: int) -> Topology:
        """The states of a phone."""
        return SILENCE_TOPOLOGY if phone <= self.noises else SPEECH_TOPOLOGY

    def families(self) -> list[list[int]]:
        """Phones that differ in stress (`AH0`, `AH1`) or place only share a tree; noises stand alone."""
        families: dict[str, list[int]] = {}
        for phone in range(1, len(self) + 1):
            name = self.names[phone - 1]
            base = name if phone <= self.noises else name.split("_")[0].rstrip("0123456789")
            families.setdefault(base, []).append(phone)
        return list(families.values())

    def to_dict(self) -> dict[str, Any]:
        """A value for JSON."""
        return {"names": list(self.names), "noises": self.noises, "positions": self.positions}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> PhoneSet:
        """The inverse of `to_dict`.

        Raises:
            ValueError: There are too many phones, or a number is out of range.
        """
        phones = cls(tuple(map(str, value["names"])), int(value["noises"]), bool(value["positions"]))
        if not 0 <= phones.noises <= len(phones) or not 1 <= len(phones) <= _MOST_PHONES:
            raise ValueError(f"{len(phones)} phones, {phones.noises} of them noises: there may be 1 to {_MOST_PHONES}")
        return phones


@dataclass(frozen=True)
class Scales:
    """Weights of transition probabilities relative to the densities.

    Attributes:
        transition: Weight of the log probabilities of the ways through a phone.
        loop: Weight of those of staying and of leaving: small, as frames are more dependent than the model believes.
    """

    transition: float = 1.0
    loop: float = 0.1


class TransitionModel:
    """Transition probabilities, shared by the places where a phone's state has the same density.

    Args:
        phones: The phone set.
        keys: int32 `[N, 3]`, the phone, state and pdf of each transition state, sorted, each once.
        log_probs: float64 `[number of transitions]` or None for the topologies' own: transition states in order, and
            for each the moves of its topology in order.

    Attributes:
        num_states: int32 `[N]`, how many states the phone of each transition state has.
        offsets: int32 `[N + 1]`, the first transition of each transition state.
        destinations: int32, the state that each transition leads to; the number of states is the end of the phone.
    """

    def __init__(self, phones: PhoneSet, keys: Ints, log_probs: Floats | None = None) -> None:
        self.phones = phones
        self.keys = np.asarray(keys, dtype=np.int32).reshape(-1, 3)
        if (
            not len(self.keys)
            or self.keys.min() < 0
            or not 1 <= self.keys[:, 0].min() <= self.keys[:, 0].max() <= len(phones)
        ):
            raise ValueError("the transition model has no keys, or some of phones that there are not")
        moves = [phones.topology(int(phone)).moves[int(state)] for phone, state, _ in self.keys]
        self.num_states = np.array(
            [phones.topology(int(phone)).num_states for phone in self.keys[:, 0]], dtype=np.int32
        )
        self.offsets = np.concatenate([[0], np.cumsum([len(row) for row in moves])]).astype(np.int32)
        self.destinations = np.array([to for row in moves for to, _ in row], dtype=np.int32)
        self.owners = np.repeat(np.arange(len(moves), dtype=np.int32), np.diff(self.offsets))
        initial = np.log([probability for row in moves for _, probability in row])
        self.log_probs = initial if log_probs is None else np.asarray(log_probs, dtype=np.float64)
        self._codes = self._encode(self.keys[:, 0], self.keys[:, 1], self.keys[:, 2])
        if len(self.log_probs) != len(self.destinations) or (np.diff(self._codes) <= 0).any():
            raise ValueError("the transition model's keys must be sorted, and its probabilities fit its topologies")
        table = np.full((len(moves), MAX_STATES + 1), -1, dtype=np.int32)
        table[self.owners, self.destinations] = np.arange(len(self.destinations), dtype=np.int32)
        self._table = table

    @staticmethod
    def _encode(phone: Ints, state: Ints, pdf: Ints) -> NDArray[np.int64]:
        return (phone.astype(np.int64) * 64 + state) * (1 << 32) + pdf

    def states_of(self, phone: Ints, state: Ints, pdf: Ints) -> Ints:
        """Transition states of phones' states with their pdfs, elementwise.

        Raises:
            ValueError: There is none.
        """
        codes = self._encode(np.asarray(phone), np.asarray(state), np.asarray(pdf))
        places = np.searchsorted(self._codes, codes).clip(max=len(self._codes) - 1)
        if not (self._codes[places] == codes).all():
            raise ValueError("the transition model lacks a state of the tree: it belongs to another model")
        return places.astype(np.int32)

    def transition(self, transition_state: Ints, destination: Ints) -> Ints:
        """Transitions to states of the same phone (or to its end), elementwise; -1 where the topology has none."""
        return self._table[transition_state, destination]

    @property
    def loops(self) -> Ints:
        """The transition of each transition state to itself: `[N]`."""
        return self._table[np.arange(len(self.keys)), self.keys[:, 1]]

    def weights(self, scales: Scales) -> Floats:
        """Scaled log probabilities: `[number of transitions]`.

        With p the probability of staying, staying weighs s_loop log p; a transition of probability q that leaves
        weighs s_loop log(1 - p) + s_transition log(q / (1 - p)): time and the way through a phone are scaled apart (as
        in Kaldi's `GetScaledTransitionLogProb`).
        """
        stay = self.log_probs[self.loops]
        leave = np.log1p(-np.exp(stay))[self.owners]
        weights: Floats = scales.loop * leave + scales.transition * (self.log_probs - leave)
        weights[self.loops] = scales.loop * stay
        return weights

    def updated(self, counts: Floats, minimum: float = 5.0, floor: float = 0.01) -> TransitionModel:
        """Maximum-likelihood probabilities from counts of transitions.

        Args:
            counts: `[number of transitions]`.
            minimum: Transition states that were left less often keep their probabilities.
            floor: Smallest probability (as in Kaldi's `TransitionModel::MleUpdate`).

        Returns:
            A new model.
        """
        totals = np.bincount(self.owners, counts, len(self.keys))[self.owners]
        shares = np.maximum(counts / np.maximum(totals, 1.0), floor)
        shares /= np.bincount(self.owners, shares, len(self.keys))[self.owners]
        log_probs = np.where(totals >= minimum, np.log(shares), self.log_probs)
        return TransitionModel(self.phones, self.keys, log_probs)
