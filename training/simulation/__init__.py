"""The simulator: N learners in one process on a virtual clock, running the same programs as real ones."""

from training.simulation.cluster import Cluster, MembershipChange
from training.simulation.problem import Activations, Problem, Timing
from training.simulation.result import Observation, Outcome
from training.simulation.simulator import Simulation, SimulationError, simulate

__all__ = [
    "Activations",
    "Cluster",
    "MembershipChange",
    "Observation",
    "Outcome",
    "Problem",
    "Simulation",
    "SimulationError",
    "Timing",
    "simulate",
]
