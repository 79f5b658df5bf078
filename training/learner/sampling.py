"""Sampling: how often an epoch draws each utterance, to balance corpora, domains, languages or speakers.

An epoch has as many draws as the training set has utterances. `proportional` draws every utterance exactly once.
`temperature` gives a group of n utterances the share n^(1/T) / Σ n^(1/T) (Conneau et al. 2020, arXiv:1911.02116,
section 3.1, with α = 1/T): T = 1 is proportional, a large T gives all groups equal shares. `weights` sets the shares.

A draw is a position in 0 … N−1. A position always belongs to the same shard; the utterance of that shard that it draws
changes from epoch to epoch. So leases, checkpoints and "exactly once" refer to positions, with any sampling, and:

- the utterance of a position is a pure function of (seed, epoch, position);
- no utterance of a shard and group is drawn again before all of them have been drawn.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from configurable.configuration import Configuration
from configurable.wording import similar
from storage.batching import derive_seed

if TYPE_CHECKING:
    from storage.index import ShardIndex

Rows = NDArray[np.int64]
_LISTED = 20
"""Maximum number of values that a message lists."""


class SamplingError(ValueError):
    """The configured weights do not fit the training set."""


class SamplingConfig(Configuration):
    """Shares of corpora, domains, languages or speakers in an epoch."""

    kind: Literal["proportional", "temperature", "weights"] = "proportional"
    """`proportional`: every utterance once an epoch; `temperature`: smaller groups are drawn more often; `weights`:
    shares by name. An epoch always has as many draws as the training set has utterances."""
    by: Literal["corpus", "domain", "language", "speaker"] = "corpus"
    """What utterances are grouped by."""
    temperature: float = Field(default=2.0, ge=1)
    """For `temperature`: 1 is proportional; larger values draw small groups more often, up to equal shares."""
    weights: dict[str, float] = Field(default={})
    """For `weights`: weight of each group; shares are weights divided by their sum. Every group needs one; 0 excludes
    it."""

    @model_validator(mode="after")
    def _check(self) -> "SamplingConfig":
        if (self.kind == "weights") != bool(self.weights):
            raise ValueError("weights and kind: weights need each other; an example is {librispeech: 3, fsdd: 1}")
        if any(not (0 <= weight < float("inf")) for weight in self.weights.values()):
            raise ValueError("weights must be finite and not negative")
        if self.weights and not sum(self.weights.values()) > 0:
            raise ValueError("at least one weight must be above 0")
        return self


@dataclass(frozen=True, eq=False)
class _Cell:
    """One group's utterances in one shard, and the positions that draw from them."""

    rows: Rows
    draws: int


class Draws:
    """Maps each position of an epoch to an utterance.

    Args:
        index: The training set's index.
        cfg: Groups and their shares.
        seed: The run's seed.

    Attributes:
        shard: Shard of each position [N].

    Raises:
        SamplingError: If a group has no weight, or a weight no group.
    """

    def __init__(self, index: "ShardIndex", cfg: SamplingConfig, seed: int) -> None:
        self._seed = seed
        self._cells: list[_Cell] | None = None
        self._epochs: dict[int, Rows] = {}
        self.shard: NDArray[Any] = np.asarray(index.column("shard"))
        if cfg.kind != "proportional" and len(index):
            groups, names = index.codes(cfg.by)
            quota = _quota(np.bincount(groups, minlength=len(names)), names, cfg)
            self._cells = _cells(self.shard, groups, quota)
            self.shard = np.repeat(
                np.array([self.shard[cell.rows[0]] for cell in self._cells]), [cell.draws for cell in self._cells]
            )

    def __len__(self) -> int:
        return len(self.shard)

    def rows(self, epoch: int, positions: Rows) -> Rows:
        """Rows of the index that positions of an epoch draw."""
        if self._cells is None:
            return positions
        order = self._epochs.get(epoch)
        if order is None:
            order = np.concatenate([self._draw(cell, epoch) for cell in self._cells])
            # at most two epochs are in use at a time; another thread may compute the same order at the same time
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: order}
        rows: Rows = order[positions]
        return rows

    def _draw(self, cell: _Cell, epoch: int) -> Rows:
        """Draw from an endless sequence of shuffles of the cell's utterances, from where the previous epoch stopped."""
        start, stop, size = epoch * cell.draws, (epoch + 1) * cell.draws, len(cell.rows)
        passes = range(start // size, -(-stop // size))
        order = np.concatenate([self._shuffle(cell, number) for number in passes])
        return order[start - passes.start * size : stop - passes.start * size]

    def _shuffle(self, cell: _Cell, number: int) -> Rows:
        rng = np.random.Generator(np.random.PCG64(derive_seed("draws", self._seed, int(cell.rows[0]), number)))
        return rng.permutation(cell.rows)


def _quota(sizes: Rows, names: list[str], cfg: SamplingConfig) -> Rows:
    """Draws of each group in an epoch; their sum is the number of utterances."""
    if cfg.kind == "temperature":
        shares = (sizes / sizes.sum()) ** (1.0 / cfg.temperature)
    else:
        check_weights(cfg, names)
        shares = np.array([cfg.weights[name] for name in names])
    return apportion(shares, int(sizes.sum()))


def check_weights(cfg: SamplingConfig, names: Collection[str]) -> None:
    """Check that there is a weight for each group, and a group for each weight.

    Raises:
        SamplingError: If not.
    """
    known = sorted(names)
    values = f"the values of {cfg.by} are {', '.join(map(repr, known[:_LISTED]))}{', …' * (len(known) > _LISTED)}"
    for name in sorted(cfg.weights.keys() - set(names)):
        hint = f"; did you mean {near!r}?" if (near := similar(name, known)) else ""
        raise SamplingError(f"train.sampling has a weight for {name!r}: {values}{hint}")
    for name in known:
        if name not in cfg.weights:
            raise SamplingError(f"train.sampling has no weight for {name!r}: {values}")


def apportion(shares: NDArray[np.float64], total: int) -> Rows:
    """Divide an integer in given proportions by largest remainders (Hamilton's method)."""
    exact = shares / shares.sum() * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    result: Rows = counts
    return result


def _cells(shard: NDArray[Any], groups: Rows, quota: Rows) -> list[_Cell]:
    """Divide each group's draws among the shards, in proportion to the group's utterances in each."""
    cells: list[tuple[int, int, Rows, int]] = []
    for group, wanted in enumerate(quota):
        rows = np.flatnonzero(groups == group)
        rows = rows[np.argsort(shard[rows], kind="stable")]
        parts = np.split(rows, np.flatnonzero(np.diff(shard[rows])) + 1)
        draws = apportion(np.array([len(part) for part in parts], dtype=np.float64), int(wanted))
        cells += [(int(shard[part[0]]), group, part, int(n)) for part, n in zip(parts, draws, strict=True) if n]
    return [_Cell(rows, count) for _, _, rows, count in sorted(cells, key=lambda cell: cell[:2])]
