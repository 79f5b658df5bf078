"""Searches in several processes: they hold Python's interpreter lock, so threads would take turns.

Each process reads the decoder's files itself. A KenLM binary is mapped into memory and shared between them; an ARPA
file is not.
"""

import json
import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from devices.worker_processes import starting_workers, worker_pool
from recognition.recognizer import Scores
from speech.decoding import DecodeChoice, Decoder, Hypothesis, build_decoder
from speech.hmm.priors import StateOutputs
from speech.tokens import tokenizer_from_dict

log = logging.getLogger(__name__)
_SHARE = 64
"""Utterances that make another process worth its start of a few seconds."""
_AHEAD = 2
"""Batches that are searched while the next one is computed."""

T = TypeVar("T")


def useful_processes(decoder: Decoder, wanted: int, utterances: int) -> int:
    """How many processes are worth their start: none for decoders that are fast without."""
    return min(wanted, utterances // _SHARE) if decoder.slow else 0


class DecodingPool(Generic[T]):
    """Decodes batches in the background, and gives them back in order.

    Args:
        decoder: The decoder; with fewer than two processes it decodes here, at once.
        processes: Number of processes.
    """

    def __init__(self, decoder: Decoder, processes: int) -> None:
        self._decoder = decoder
        self._waiting: deque[tuple[T, Scores, list[Future[Hypothesis]]]] = deque()
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            self._description = _describe(decoder)
            self._pool = worker_pool(processes)

    def __enter__(self) -> "DecodingPool[T]":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def use(self, decoder: Decoder) -> None:
        """Decode the next batches with another decoder; those before must have been taken (`rest`)."""
        assert not self._waiting
        self._decoder = decoder
        if self._pool is not None:
            self._description = _describe(decoder)

    def add(self, what: T, scores: Scores) -> Iterator[tuple[T, list[Hypothesis]]]:
        """Add a batch; yields finished ones: the item that was added with the scores, and the hypotheses."""
        self._waiting.append((what, scores, self._submit(scores)))
        while len(self._waiting) > (_AHEAD if self._pool else 0):
            yield self._next()

    def rest(self) -> Iterator[tuple[T, list[Hypothesis]]]:
        """Wait for all batches."""
        while self._waiting:
            yield self._next()

    def _submit(self, scores: Scores) -> list[Future[Hypothesis]]:
        if self._pool is None:
            return []
        rows = zip(scores.log_probs, scores.frames.tolist(), strict=True)
        try:
            with starting_workers():
                return [self._pool.submit(_decode_one, self._description, one[:count].numpy()) for one, count in rows]
        except BrokenProcessPool:
            return []

    def _next(self) -> tuple[T, list[Hypothesis]]:
        what, scores, futures = self._waiting[0]
        try:
            found = [future.result() for future in futures]
        except (BrokenProcessPool, CancelledError):
            found = []
        if len(found) < len(scores.frames):
            if self._pool is not None:
                log.warning("a process that decodes was killed, perhaps for want of memory: this one goes on alone")
                self._pool.shutdown(cancel_futures=True)
                self._pool = None
            found = self._decoder.decode(scores.log_probs, scores.frames)
        self._waiting.popleft()
        return what, found


def _describe(decoder: Decoder) -> str:
    cfg, tokenizer = decoder.cfg.model_dump(mode="json"), decoder.tokenizer.to_dict()
    return json.dumps({"decode": cfg, "tokenizer": tokenizer, "states": decoder.states})


def _decode_one(description: str, log_probs: NDArray[np.float32]) -> Hypothesis:
    """One utterance [frames, tokens], in a process of the pool."""
    batch = torch.from_numpy(log_probs)[None]
    return _decoder(description).decode(batch, torch.tensor([len(log_probs)]))[0]


_held: dict[str, Decoder] = {}
"""This process's decoder by its description."""


def _decoder(description: str) -> Decoder:
    """The decoder of a description; it shares what the one before has read, if only parameters differ."""
    if description not in _held:
        torch.set_num_threads(1)
        value = json.loads(description)
        cfg = TypeAdapter(DecodeChoice).validate_python(value["decode"])
        before = next(iter(_held.values()), None)
        if (
            before is not None
            and isinstance(cfg, type(before.cfg))
            and before.tokenizer.to_dict() == value["tokenizer"]
        ):
            made = before.with_config(cfg)
        else:
            states = StateOutputs(tuple(value["states"][0]), value["states"][1]) if value["states"] else None
            made = build_decoder(cfg, tokenizer_from_dict(value["tokenizer"]), states)
        _held.clear()
        _held[description] = made
    return _held[description]
