"""How often an epoch draws each utterance when corpora, domains or languages are to be balanced.

An epoch has as many draws as the training set has utterances. `proportional` draws every utterance exactly once.
`temperature` gives a group of n utterances the share n^(1/T) / Σ n^(1/T) (Conneau et al. 2020, arXiv:1911.02116,
section 3.1, with α = 1/T): T = 1 is proportional, a large T gives all groups alike. `weights` names the shares.

A draw is a position in 0 … N−1 that belongs to one shard for ever; which of the shard's utterances it is changes from
epoch to epoch. So leases, checkpoints and "exactly once" deal with positions, whatever the sampling, and:

- which utterance a position is, is a pure function of (seed, epoch, position);
- no utterance of a shard and group is drawn again before all of them have been drawn.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.index import ShardIndex
from training.learner.batching import derive_seed

Rows = NDArray[np.int64]


class SamplingError(ValueError):
    """Weights that do not fit the training set."""


class SamplingConfig(BaseModel):
    """How much of each corpus, domain or language an epoch has."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    kind: Literal["proportional", "temperature", "weights"] = "proportional"
    """`proportional`: every utterance once an epoch; `temperature`: smaller groups are drawn more often; `weights`:
    shares by name. An epoch always has as many draws as the training set has utterances."""
    by: Literal["corpus", "domain", "language", "speaker"] = "corpus"
    """What makes a group."""
    temperature: float = Field(default=2.0, ge=1)
    """For `temperature`: 1 is proportional, more draws small groups more often, up to all alike."""
    weights: dict[str, float] = {}
    """For `weights`: group to weight; the shares are these divided by their sum. Every group needs one; 0 leaves it
    out."""

    @model_validator(mode="after")
    def _check(self) -> "SamplingConfig":
        if (self.kind == "weights") != bool(self.weights):
            raise ValueError("weights go with kind: weights, which needs them: for example {librispeech: 3, fsdd: 1}")
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
    """Which utterance each position of an epoch is.

    Args:
        index: The training set's index.
        cfg: How much of what.
        seed: The run's.

    Attributes:
        shard: Shard of each position [N].

    Raises:
        SamplingError: A group has no weight, or a weight no group.
    """

    def __init__(self, index: ShardIndex, cfg: SamplingConfig, seed: int) -> None:
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
            # two epochs are open at once; another thread may be at work here, and comes to the same
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: order}
        rows: Rows = order[positions]
        return rows

    def _draw(self, cell: _Cell, epoch: int) -> Rows:
        """Goes on through endless shuffles of the cell's utterances where the epoch before has ended."""
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
        unknown = sorted(cfg.weights.keys() - set(names))
        missing = sorted(set(names) - cfg.weights.keys())
        if unknown or missing:
            what = f"a weight for {unknown[0]!r}" if unknown else f"no weight for {missing[0]!r}"
            raise SamplingError(
                f"train.sampling has {what}: the values of {cfg.by} are {', '.join(map(repr, sorted(names)))}"
            )
        shares = np.array([cfg.weights[name] for name in names])
    return apportion(shares, int(sizes.sum()))


def apportion(shares: NDArray[np.float64], total: int) -> Rows:
    """Divide a whole number in given proportions, by largest remainders (Hamilton's method)."""
    exact = shares / shares.sum() * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    result: Rows = counts
    return result


def _cells(shard: NDArray[Any], groups: Rows, quota: Rows) -> list[_Cell]:
    """Divide each group's draws among the shards that hold its utterances, by how many each holds."""
    cells: list[tuple[int, int, Rows, int]] = []
    for group, wanted in enumerate(quota):
        rows = np.flatnonzero(groups == group)
        rows = rows[np.argsort(shard[rows], kind="stable")]
        parts = np.split(rows, np.flatnonzero(np.diff(shard[rows])) + 1)
        draws = apportion(np.array([len(part) for part in parts], dtype=np.float64), int(wanted))
        cells += [(int(shard[part[0]]), group, part, int(n)) for part, n in zip(parts, draws, strict=True) if n]
    return [_Cell(rows, count) for _, _, rows, count in sorted(cells, key=lambda cell: cell[:2])]
