"""Calibrates the simulator to a published table: two numbers follow from two of its rows, the others are predicted."""

from dataclasses import dataclass

from training.simulation.cluster import Cluster
from training.simulation.problem import Timing
from training.simulation.simulator import Simulation
from training.strategies.registry import find_method

SLOW_DOWNS = (1.0, 2.0, 10.0, 100.0)
STRAGGLERS = {
    "adpsgd": (0.87, 0.89, 0.91, 0.92),
    "scpsgd": (1.09, 1.67, 6.24, 57.73),
    "d1d": (1.03, 1.63, 6.46, 60.80),
}
"""Hours per epoch of 16 P100, one of them slowed 1, 2, 10 and 100 times (arXiv:1904.04956; d1d is called HYBRID)."""
SPEEDUPS = {"adpsgd": 10.88, "scpsgd": 8.70, "d1d": 9.26}
"""Published speed-ups of the rows without a slow-down."""
MODEL_BYTES = 165e6
"""Size of the acoustic model of that table."""


@dataclass(frozen=True)
class Costs:
    """Hours per epoch of 16 learners.

    Attributes:
        compute: Forward and backward passes; a slow-down multiplies them.
        exposed: Communication that does not overlap with computation.
    """

    compute: float
    exposed: float


def calibrate(strategy: str) -> Costs:
    """Costs of the published runs.

    If learners wait for the slowest, an epoch takes s·c + a hours with one learner s times slower: the rows s = 1 and
    s = 2 give c and a, the rows 10 and 100 are predicted. If they do not, the rows hardly depend on s, so the published
    speed-up gives c (an epoch of one learner, divided by 16), and the row s = 1 gives the rest.
    """
    first, second = STRAGGLERS[strategy][:2]
    if find_method(strategy).free:
        compute = first * SPEEDUPS[strategy] / 16
        return Costs(compute, first - compute)
    return Costs(second - first, 2 * first - second)


def straggler_cluster(strategy: str, slow_down: float, steps: int) -> Cluster:
    """The published cluster; one virtual second stands for one hour.

    Args:
        strategy: Strategy whose calibration is used.
        slow_down: Slow-down of one learner's computation.
        steps: Steps of a learner per epoch.
    """
    costs = calibrate(strategy)
    step_s, exposed_s = costs.compute / steps, costs.exposed / steps
    slow = {15: slow_down} if slow_down != 1 else {}
    if strategy == "scpsgd":  # the whole all-reduce is exposed: choose the links' bandwidth to match
        gbit = 2 * 15 / 16 * MODEL_BYTES * 8 / 1e9 / exposed_s
        return Cluster(learners=16, step_s=step_s, slow=slow, link_gbit=gbit, link_ms=0)
    # hidden communication costs nothing; exposed communication is simulated as the learner's own work
    return Cluster(learners=16, step_s=step_s, overhead_s=exposed_s, slow=slow, link_gbit=1e9, link_ms=0)


def straggler_hours(strategy: str, slow_down: float, steps: int = 60) -> float:
    """Simulated hours per epoch of 16 learners, one of them slower."""
    problem = Timing(batches=16 * steps, num_bytes=MODEL_BYTES)
    return Simulation(straggler_cluster(strategy, slow_down, steps), strategy, problem).run().open_epoch_s
