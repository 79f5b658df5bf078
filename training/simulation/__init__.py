"""N learners in one process on a virtual clock, running the same programs as real ones."""

from training.simulation.cluster import Cluster, Happening
from training.simulation.problem import Activations, Problem, Timing
from training.simulation.result import Observation, Outcome
from training.simulation.running import simulate
from training.simulation.world import Simulation, SimulationError

__all__ = [
    "Activations",
    "Cluster",
    "Happening",
    "Observation",
    "Outcome",
    "Problem",
    "Simulation",
    "SimulationError",
    "Timing",
    "simulate",
]
