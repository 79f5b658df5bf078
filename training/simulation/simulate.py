"""Simulates any strategy by name, with the simulator of programs or of pipelines."""

from typing import cast

from training.simulation.cluster import Cluster
from training.simulation.pipeline import PipelineSimulation
from training.simulation.problem import Problem
from training.simulation.result import Outcome
from training.simulation.simulator import Simulation
from training.strategies.pipeline import LayerPipelineConfig
from training.strategies.registry import find_strategy
from training.strategies.strategy import StrategyConfig


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
        cluster: Machines, links, and learners that die or join.
        strategy: Name of the strategy.
        problem: Model, data and schedule.
        config: The strategy's configuration; its defaults if None.
        seed: Seed of jitter and random neighbours.
        observe: Evaluations of the average model per epoch.

    Raises:
        SimulationError: If learners wait for each other forever.
        StrategyError: If the strategy is unknown or does not support the cluster, or all learners have died.
    """
    if find_strategy(strategy).traits.split:
        layers = cast(LayerPipelineConfig | None, config)
        return PipelineSimulation(cluster, problem, layers, seed=seed, observe=observe).run()
    return Simulation(cluster, strategy, problem, config, seed=seed, observe=observe).run()
