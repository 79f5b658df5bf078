"""Duration-bucketed batches whose order is a pure function of (seed, epoch)."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class BatchError(ValueError):
    """The durations do not allow a batch plan."""


class BatchLimits(Protocol):
    """How large batches are."""

    @property
    def batch_seconds(self) -> float:
        """Maximum seconds of audio, padding included."""

    @property
    def max_batch(self) -> int:
        """Maximum number of utterances."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any parts, the same on every machine and in every process.

    Python's own hash is salted per process and sums of seeds collide, hence SHA-256.
    """
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def plan_epoch(
    durations: Sequence[float] | NDArray[np.float64],
    *,
    batch_seconds: float,
    max_batch: int,
    bucket_batches: int = 16,
    seed: int = 0,
    epoch: int | None = None,
) -> list[NDArray[np.int64]]:
    """Divide utterances into batches; each utterance is in exactly one.

    Utterances are shuffled, cut into buckets of about `bucket_batches` batches, sorted by duration inside a bucket,
    batched greedily, and the batches shuffled. Without an epoch (validation, test) they are sorted by duration only.

    Args:
        durations: Seconds of each utterance.
        batch_seconds: Longest utterance x number of utterances stays within this, unless a single one exceeds it.
        max_batch: Maximum number of utterances in a batch.
        bucket_batches: Size of a bucket, in batches.
        seed: Run seed.
        epoch: Epoch number, or None for the fixed order.

    Returns:
        Indexes into `durations`, one array per batch.

    Raises:
        BatchError: If there is no utterance or a duration is not a positive finite number.
    """
    seconds = np.asarray(durations, dtype=np.float64)
    if len(seconds) == 0:
        raise BatchError("there is no utterance to batch: the set is empty (look at its quarantine table)")
    if not np.isfinite(seconds).all() or (seconds <= 0).any():
        bad = int(np.flatnonzero(~(np.isfinite(seconds) & (seconds > 0)))[0])
        raise BatchError(f"utterance number {bad} has duration {seconds[bad]}: it must be a positive number of seconds")
    if epoch is None:
        return _pack(np.argsort(seconds, kind="stable"), seconds, batch_seconds, max_batch)
    rng = np.random.Generator(np.random.PCG64(derive_seed("batches", seed, epoch)))
    order = rng.permutation(len(seconds))
    per_batch = min(max_batch, max(1, int(batch_seconds / float(np.median(seconds)))))
    bucket = per_batch * bucket_batches
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(order), bucket):
        chunk = order[start : start + bucket]
        batches += _pack(chunk[np.argsort(seconds[chunk], kind="stable")], seconds, batch_seconds, max_batch)
    return [batches[i] for i in rng.permutation(len(batches))]


def _pack(
    order: NDArray[np.int64], seconds: NDArray[np.float64], batch_seconds: float, max_batch: int
) -> list[NDArray[np.int64]]:
    """Cut a list sorted by ascending duration into batches: the last member is always the longest."""
    batches: list[NDArray[np.int64]] = []
    start = 0
    for stop in range(1, len(order) + 1):
        full = stop == len(order) or stop - start == max_batch
        if full or seconds[order[stop]] * (stop - start + 1) > batch_seconds:
            batches.append(order[start:stop])
            start = stop
    return batches
