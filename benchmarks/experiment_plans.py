"""The runs of each experiment, and the criterion of convergence."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.experiment_runs import LINK_GBIT, Data, Problems, Record, Results, Run

RATES = (0.00316, 0.01, 0.0316, 0.1, 0.316)
"""Learning rates, two per decade, the same for all methods and batches."""
UNLEARNED = {"digits": math.log(10), "segments": 5.50}
"""Held-out loss of the best model that ignores the audio, by kind of data: ten equally likely words, in nats per word;
437 tied states, each as frequent as in the training set, in nats per frame."""
CONVERGED = {name: loss / 2 for name, loss in UNLEARNED.items()}
"""A training has converged if its model's held-out loss is below this."""
TARGET = 0.5
"""Held-out loss in nats per word at which virtual times are compared."""


@dataclass(frozen=True)
class Choice:
    """A method with its settings in an experiment; fields as in `Run`."""

    strategy: str
    options: tuple[str, ...] = ()
    momentum: float = 0.9
    per_machine: int = 1

    def run(self, learners: int, batch: int, lr: float, **fields: Any) -> Run:
        """A training run with this method."""
        return replace(Run(learners=learners, batch=batch, lr=lr, **asdict(self)), **fields)


HEADLINE_LEARNERS = 16
HEADLINE = (
    Choice("scpsgd"),
    Choice("adpsgd", ("neighbours=ring", "per_step=1")),
    Choice("adpsgd", ("neighbours=ring", "per_step=4")),
    Choice("adpsgd", ("neighbours=random-ring", "per_step=1")),
    Choice("adpsgd", ("neighbours=random-ring", "per_step=4")),
    Choice("bmuf", ("tau=4",), momentum=0.0),
)
"""BMUF uses blocks of four steps (epochs with the larger batches have no more), and only its block momentum."""
FEW = (HEADLINE[0], HEADLINE[2], HEADLINE[5])
"""One of each kind, for the most expensive table."""


@dataclass(frozen=True)
class Sweep:
    """An experiment with increasing batch sizes, with a range of learning rates for each method.

    Attributes:
        batches: Total batch sizes over all learners, ascending.
        clip: Norm to which gradients are clipped; 0 for no clipping.
        epochs: Passes over the data.
        choices: Methods.
        rates: Learning rates, ascending.
        data: What is trained on.
        repeated: Batch sizes near the largest possible one, which are run with all seeds.
    """

    batches: tuple[int, ...] = (64, 128, 256, 512)
    clip: float = 5.0
    epochs: int = 16
    choices: tuple[Choice, ...] = HEADLINE
    rates: tuple[float, ...] = RATES
    data: Data = "digits"
    repeated: tuple[int, ...] = ()

    def runs(self, batch: int, choice: Choice) -> list[Run]:
        """The runs of one method and batch size, by ascending learning rate."""
        fields = {"clip": self.clip, "epochs": self.epochs, "data": self.data}
        return [choice.run(HEADLINE_LEARNERS, batch, lr, **fields) for lr in self.rates]


SWEEPS = {
    "headline": Sweep(repeated=(128, 256)),
    "unclipped": Sweep(clip=0.0),
    "longer": Sweep((256, 512), epochs=48),
    "longer-unclipped": Sweep((256, 512), clip=0.0, epochs=48, choices=FEW),
    "segments": Sweep(
        (256, 1024, 4096, 8192, 12288),
        choices=HEADLINE[:2],
        rates=(0.1, 0.316, 1.0, 3.16, 10.0),
        data="segments",
        repeated=(12288,),
    ),
}
SEEDS = (1, 2, 3)

KEPT_BATCH, KEPT_RATES = 64, (0.000316, 0.001, *RATES)
RESET_BATCH, RESET_RATES = 256, (0.01, 0.0316, 0.1)
"""BMUF with the same momentum as the others, either kept across blocks or reset at each block."""

STRATEGY_LEARNERS, STRATEGY_BATCH, SLOW = 8, 64, 10.0
STRATEGIES = (
    Choice("scpsgd"),
    Choice("d1d"),
    Choice("d1d", momentum=0.0),
    Choice("onebit"),
    Choice("onebit", ("block=64",)),
    Choice("onebit", momentum=0.0),
    Choice("sdpsgd"),
    Choice("ma", ("tau=4",)),
    Choice("bmuf", ("tau=4", "momentum=reset")),
    Choice("bmuf", ("tau=4",), momentum=0.0),
    Choice("adpsgd", ("neighbours=ring", "per_step=4")),
    Choice("adpsgd", ("neighbours=random-ring", "per_step=4")),
    Choice("h-adpsgd", ("per_step=4",), per_machine=2),
    Choice("asgd"),
    Choice("asgd", momentum=0.0),
    Choice("easgd"),
    Choice("hogwild"),
    Choice("hogwild", momentum=0.0),
)
STRATEGY_RATES, PLAIN_RATES = (0.0316, 0.01, 0.00316, 0.001), (0.316, 0.1, 0.0316, 0.01)
"""Tried in this order until a model reaches the target; the latter for methods without momentum."""
PLAIN_BATCH = LINK_BATCH = 256
LINKS, LINK_EXCHANGES, LINK_SEEDS = (LINK_GBIT, 10 * LINK_GBIT), (1, 4, 16), (1, 3)
RECIPE_BATCHES = (64, 128, 256)
RING_LEARNERS, RING_BATCH, RING_RATE = (8, 16, 32, 64), 64, 0.0316
RINGS = tuple(choice for choice in HEADLINE if choice.strategy == "adpsgd")

Recipe = tuple[Literal["sgd", "adamw"], float]
"""An optimizer and its learning rate."""
NEWCOMER_RECIPES: tuple[Recipe, ...] = (("sgd", 0.0316), ("adamw", 0.00316), ("adamw", 0.01))
NEWCOMER_LEARNERS, NEWCOMER_BATCH, NEWCOMER_SEEDS = 8, 64, (1, 2, 3)
NEWCOMERS = ((1, 100.0), (4, 175.0))
"""Number of late learners and their joining time: after about ten epochs, when the learning rate is highest."""

RECIPES: tuple[tuple[Literal["sgd", "adamw"], float, float], ...] = (
    ("sgd", 5.0, 0.0316),
    ("sgd", 0.0, 0.0316),
    ("sgd", 0.0, 0.1),
    ("adamw", 5.0, 0.01),
)
"""Optimizer, clipping norm and learning rate of the pilot experiment, from which the others' recipe was chosen."""


def recipes(batch: int) -> list[Run]:
    """Runs of one learner with each recipe."""
    return [Run("scpsgd", 1, batch, lr, clip=clip, optimizer=kind) for kind, clip, lr in RECIPES]


def momenta() -> list[Run]:
    """Runs of BMUF with block momentum and momentum within blocks."""
    return [
        Run("bmuf", HEADLINE_LEARNERS, batch, lr, ("tau=4", f"momentum={what}"))
        for what, batch, rates in (("keep", KEPT_BATCH, KEPT_RATES), ("reset", RESET_BATCH, RESET_RATES))
        for lr in rates
    ]


def strategies(choice: Choice) -> list[Run]:
    """Runs of one method with equal learners, in the order in which learning rates are tried."""
    rates = STRATEGY_RATES if choice.momentum or choice.strategy == "bmuf" else PLAIN_RATES
    return [choice.run(STRATEGY_LEARNERS, STRATEGY_BATCH, lr, looks=2) for lr in rates]


def plain() -> list[Run]:
    """Runs of the methods with momentum at a large batch without it, with up to ten times higher learning rates."""
    return [
        choice.run(HEADLINE_LEARNERS, PLAIN_BATCH, lr, momentum=0.0)
        for choice in HEADLINE
        if choice.momentum
        for lr in (0.1, 0.316, 1.0)
    ]


def seeds(sweep: Sweep, batch: int, choice: Choice, results: Results) -> list[Run]:
    """Runs of a method with all seeds at the best learning rate of the first seed; empty if that is unknown."""
    runs = sweep.runs(batch, choice)
    top = best(runs, results)
    best_run = next((run for run in runs if results.get(run) is top), None) if top else None
    return [replace(best_run, seed=seed) for seed in SEEDS] if best_run else []


def links() -> list[Run]:
    """Runs of ADPSGD at a too large batch, with more exchanges per step and faster links; two seeds."""
    return [
        replace(
            Choice("adpsgd", ("neighbours=ring", f"per_step={per_step}")).run(HEADLINE_LEARNERS, LINK_BATCH, 0.1), **at
        )
        for link in LINKS
        for per_step in LINK_EXCHANGES
        for at in ({"link": link, "seed": seed} for seed in LINK_SEEDS)
    ]


def rings(seed: int = 1) -> list[Run]:
    """Runs of all rings by number of learners, at the same total batch; with other seeds, only the largest."""
    return [
        choice.run(learners, RING_BATCH, RING_RATE, looks=2, seed=seed)
        for learners in (RING_LEARNERS if seed == 1 else RING_LEARNERS[-1:])
        for choice in RINGS
    ]


def newcomers(recipe: Recipe, late: int, takes: str) -> list[Run]:
    """Runs in which some learners join late, with all seeds.

    Args:
        recipe: Recipe of all learners.
        late: Number of late learners.
        takes: What they take from a neighbour.
    """
    options = ("per_step=4", f"newcomer={takes}")
    optimizer, lr = recipe
    run = Run("adpsgd", NEWCOMER_LEARNERS, NEWCOMER_BATCH, lr, options, looks=4)
    return [
        replace(run, optimizer=optimizer, late=late, join_s=dict(NEWCOMERS)[late], seed=seed) for seed in NEWCOMER_SEEDS
    ]


def sweep(runs: Sequence[Run], results: Results, problems: Problems) -> Iterator[Record]:
    """Search over ascending learning rates, from the middle one upwards and then downwards.

    A direction ends with a run that diverges (upwards only), or that is worse than the best run so far if that one has
    converged. So if nothing converges, all rates are tried.
    """
    middle = len(runs) // 2
    top = results.ensure(runs[middle], problems)
    yield top
    for direction, part in ((1, runs[middle + 1 :]), (-1, runs[:middle][::-1])):
        for run in part:
            record = results.ensure(run, problems)
            yield record
            worse = record["loss"] is None or (top["loss"] is not None and record["loss"] >= top["loss"])
            if not worse:
                top = record
            if (direction > 0 and record["loss"] is None) or (worse and converged(top)):
                break


def best(runs: Sequence[Run], results: Results) -> Record | None:
    """The record with the lowest held-out loss; None if no run has a loss."""
    records = [record for run in runs if (record := results.get(run)) is not None and record["loss"] is not None]
    return min(records, key=lambda record: record["loss"], default=None)


def converged(record: Record | None) -> bool:
    """Whether a training run has converged."""
    if record is None or record["loss"] is None:
        return False
    return bool(record["loss"] < CONVERGED[record["run"].get("data", "digits")])


def time_to(record: Record, loss: float) -> float | None:
    """Virtual seconds until the average model's held-out loss reached a target; None if it never did."""
    return next((point[0] for point in record["curve"] if point[2] is not None and point[2] <= loss), None)
