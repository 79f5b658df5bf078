"""Simulates a strategy by name, whatever it is made of."""

from typing import cast

from training.simulation.cluster import Cluster
from training.simulation.pipeline import PipelineSimulation
from training.simulation.problem import Problem
from training.simulation.result import Outcome
from training.simulation.simulator import Simulation
from training.strategies.config import LayerPipelineConfig, StrategyConfig
from training.strategies.registry import PIPELINE, find_strategy


def simulate(
    cluster: Cluster,
    strategy: str,
    problem: Problem,
    config: StrategyConfig | None = None,
    *,
    seed: int = 0,
    observe: int = 1,
) -> Outcome:
    """Train on a virtual clock until all work is done.

    Args:
        cluster: Machines, links and what befalls them.
        strategy: Its name.
        problem: Model, data and schedule.
        config: The strategy's constants; its defaults if there are none.
        seed: Of jitter and random neighbours.
        observe: Looks at the average model per epoch.

    Raises:
        SimulationError: Learners wait for each other for ever.
        StrategyError: The strategy is unknown, cannot do that, or all learners have died.
    """
    if find_strategy(strategy) is PIPELINE:
        layers = cast(LayerPipelineConfig | None, config)
        return PipelineSimulation(cluster, problem, layers, seed=seed, observe=observe).run()
    return Simulation(cluster, strategy, problem, config, seed=seed, observe=observe).run()
