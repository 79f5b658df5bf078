"""Random draws of augmentation.

Each utterance has a seed of its own, and each augmentation a stream of its own from it: what happens to an utterance
does not depend on the batch, the worker or the device that it meets, nor on which other augmentations are on. Numbers
are drawn on the CPU, also for tensors on a GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from configurable.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


Draws: TypeAlias = "torch.Generator | Sequence[int]"
"""A seed for each utterance, or a CPU generator to draw these from."""
Drawn: TypeAlias = "dict[str, Tensor]"
"""What an augmentation has drawn for a batch: tensors on the CPU, each with a row for every utterance, by name."""


def utterance_seeds(seed: int, epoch: int, ids: Sequence[str]) -> list[int]:
    """Seeds of utterances: a pure function of the run's seed, the epoch and each utterance's id.

    Example:
        >>> utterance_seeds(1, 0, ["a", "b"])[1] == utterance_seeds(1, 0, ["b"])[0]
        True
    """
    return [_digest(f"{seed}/{epoch}/{name}") for name in ids]


def seeds_of(draws: Draws, count: int) -> list[int]:
    """A seed for each of `count` utterances.

    Raises:
        ValueError: there is another number of seeds.
    """
    if isinstance(draws, torch.Generator):
        seeds: list[int] = torch.randint(1 << 62, (count,), generator=draws).tolist()
        return seeds
    if len(draws) != count:
        raise ValueError(f"there are {len(draws)} seeds for {count} utterances: give one for each")
    return list(draws)


def stream(seed: int, name: str) -> torch.Generator:
    """An utterance's generator for one augmentation."""
    return torch.Generator().manual_seed(_digest(f"{seed}/{name}"))


def uniforms(seeds: Sequence[int], name: str, count: int) -> Tensor:
    """For each utterance, `count` numbers that are uniform in [0, 1): float64 `[B, count]`."""
    rows = [torch.rand(count, generator=stream(seed, name), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows) if rows else torch.empty(0, count, dtype=torch.float64)


def _digest(text: str) -> int:
    # Not the seeds themselves: torch's generator takes 32 bits of them, and neighbouring seeds give related streams.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
