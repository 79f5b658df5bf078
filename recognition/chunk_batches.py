"""Chunks of several streams that wait at the same time, computed together.

A small network spends more time on calling its operations than in them: eight chunks of a Conformer of a million
weights take three times as long as one, not eight times.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from devices.compute_threads import usable_cores
from speech.models.networks.base import AcousticModel
from speech.models.networks.lstm import Memory

_MOST = 32
"""Chunks of a batch: more gain nothing, and the first of them would wait for the last."""
Advanced = tuple[Tensor, tuple[Memory, ...]]


@dataclass(eq=False)
class _Waiting:
    part: Tensor
    chunk: int
    layers: tuple[Memory, ...]
    done: threading.Event = field(default_factory=threading.Event)
    advanced: Advanced | None = None
    error: BaseException | None = None

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What those of a batch have in common."""
        memories = (tuple(tensor.shape[1:] for tensor in memory) for memory in self.layers)
        return self.chunk, self.part.shape[1:], *memories


class ChunkBatches:
    """Takes a chunk's turn in the thread that has it, together with those that other threads wait for.

    Nothing waits for a batch to fill: a chunk is computed at once if a core is free.

    Args:
        model: The network of all streams.
        at_once: Batches that are computed at the same time; by default one for each core, on a GPU one.
    """

    def __init__(self, model: AcousticModel, at_once: int | None = None) -> None:
        self._model = model
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._free = threading.Semaphore(at_once or (usable_cores() if on_cpu else 1))
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []

    def advance(self, part_BTD: Tensor, chunk: int, layers: tuple[Memory, ...]) -> Advanced:
        """As `AcousticModel.advance`, for one stream; several threads may call it.

        Raises:
            Exception: What the network raises, in every thread whose chunk was in the batch.
        """
        own = _Waiting(part_BTD, chunk, layers)
        with self._lock:
            self._waiting.append(own)
        with self._free:
            while batch := self._with(own):
                self._compute(batch)
        own.done.wait()  # another thread may compute it
        if own.error is not None:
            raise own.error
        assert own.advanced is not None
        return own.advanced

    def _with(self, own: _Waiting) -> list[_Waiting]:
        """The first of those that can be computed with a chunk; nothing if another thread has taken it."""
        with self._lock:
            if own not in self._waiting:
                return []
            batch = [one for one in self._waiting if one is own or one.shapes == own.shapes][:_MOST]
            self._waiting = [one for one in self._waiting if one not in batch]
            return batch

    def _compute(self, batch: list[_Waiting]) -> None:
        try:
            if len(batch) == 1:
                (own,) = batch
                own.advanced = self._model.advance(own.part, own.chunk, own.layers)
                return
            layers = tuple(
                tuple(torch.cat(tensors) for tensors in zip(*memories, strict=True))
                for memories in zip(*(one.layers for one in batch), strict=True)
            )
            parts_BTD = torch.cat([one.part for one in batch])
            scores_BTV, layers = self._model.advance(parts_BTD, batch[0].chunk, layers)
            for row, one in enumerate(batch):
                own_row = slice(row, row + 1)
                # copies: a view would keep what all streams remember
                own_layers = (tuple(tensor[own_row].clone() for tensor in memory) for memory in layers)
                one.advanced = scores_BTV[own_row], tuple(own_layers)
        except BaseException as error:
            for one in batch:
                one.error = error
        finally:
            for one in batch:
                one.done.set()
