"""The planner: predicts epoch time, efficiency and network load of each method for a cluster, and recommends one."""

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import Field

from configurable.configuration import Configuration
from training.simulation.cluster import Cluster, Positive, Seconds
from training.simulation.problem import Timing
from training.simulation.simulator import simulate
from training.strategies.base import StrategyError
from training.strategies.pipeline import PIPELINE, LayerPipelineConfig
from training.strategies.registry import STRATEGIES, find_strategy
from training.strategies.strategy import Strategy, StrategyConfig

STEPS = 24
"""Simulated steps of each learner: three blocks of 8."""
MICRO_BATCHES = 4
"""Micro-batches per stage of a pipeline: with these, filling and draining cost little (arXiv:1811.06965)."""
MOST_UPDATES = 20_000
"""Maximum number of simulated steps over all learners."""
FIXED_RING = 16
"""Maximum number of super-learners on a fixed ring; beyond, random neighbours (arXiv:2112.01433)."""
BLOCK = 8
"""Steps of a block, for methods with blocks."""
RANDOM_RING = "random-ring"


class PlanRequest(Configuration):
    """A model, a cluster and a data size."""

    parameters: int = Field(ge=1)
    """Weights of the model; each is 4 bytes on the wire."""
    step_s: Positive
    """Seconds of a forward and backward pass of one learner's batch, as measured."""
    overhead_s: Seconds = 0.0
    """Seconds per step that communication takes on the learner's own processor, with several learners."""
    data_hours: Positive
    """Hours of audio in the training set."""
    batch_seconds: Positive
    """Seconds of audio in one learner's batch."""
    nodes: int = Field(default=1, ge=1, le=4096)
    """Machines."""
    gpus_per_node: int = Field(default=1, ge=1, le=64)
    """Learners of a machine."""
    link_gbit: Positive = 10.0
    """Bandwidth of a machine's network link, Gbit/s."""
    link_ms: Seconds = 0.05
    """Latency of that link, milliseconds."""
    local_gbit: Positive = 200.0
    """Bandwidth between the GPUs of a machine, Gbit/s."""
    slow: tuple[Positive, ...] = ()
    """Expected slow-downs: a factor for each slow learner."""
    losses_per_day: float = Field(default=0.0, ge=0)
    """Learners that die per day."""
    restart_s: Seconds = 60.0
    """Seconds until a learner's death is detected and the others continue."""
    layers: int = Field(default=0, ge=0)
    """Layers of the model, for `pipeline`, which needs at least one per learner; 0 if unknown."""
    border_mb: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Megabytes of hidden frames between two layers for one learner's batch; 0 if unknown."""

    @property
    def learners(self) -> int:
        """Total number of GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def batches(self) -> float:
        """One learner's batches in an epoch of all learners together."""
        return self.data_hours * 3600 / self.batch_seconds

    def cluster(self) -> Cluster:
        """The cluster for the simulator.

        Raises:
            ValueError: If there are more slow-downs than learners.
        """
        if len(self.slow) > self.learners:
            raise ValueError(f"slow names {len(self.slow)} learners of {self.learners}: leave some out")
        return Cluster(
            learners=self.learners,
            per_machine=self.gpus_per_node,
            step_s=self.step_s,
            overhead_s=self.overhead_s if self.learners > 1 else 0.0,
            slow={self.learners - 1 - number: factor for number, factor in enumerate(self.slow)},
            link_gbit=self.link_gbit,
            link_ms=self.link_ms,
            local_gbit=self.local_gbit,
        )


@dataclass(frozen=True)
class Prediction:
    """Prediction for a method.

    Attributes:
        strategy: Name of the method, with its neighbours if there is a choice.
        epoch_s: Seconds of an epoch.
        speedup: Relative to a single learner.
        efficiency: Speed-up divided by the number of learners.
        nic_gb: Gigabytes that the busiest machine sends in an epoch.
        staleness: Mean staleness, in steps.
        averaged: Number of different replicas that average with each other; 1 if all are equal after every step.
    """

    strategy: str
    epoch_s: float
    speedup: float
    efficiency: float
    nic_gb: float
    staleness: float
    averaged: int


@dataclass(frozen=True)
class Plan:
    """Predictions, the fastest first; the recommended strategy and the reason; strategies left out, with reasons."""

    predictions: list[Prediction]
    choice: str
    reason: str
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        rows = [asdict(prediction) for prediction in self.predictions]
        choice = {"strategy": self.choice, "reason": self.reason}
        return {"rows": rows, "recommendation": choice, "left_out": self.left_out}


def plan(request: PlanRequest, seed: int = 0) -> Plan:
    """Predict every method that the cluster allows, and recommend one.

    Raises:
        ValueError: If the cluster is inconsistent.
    """
    predictions = []
    for label, name, config in _candidates(request):
        try:
            predictions.append(predict(request, label, name, config, seed))
        except StrategyError:
            continue  # the method does not support this cluster
    predictions.sort(key=lambda prediction: prediction.epoch_s)
    choice, reason = recommend(request, predictions)
    obstacle = _pipeline_obstacle(request)
    return Plan(predictions, choice, reason, {PIPELINE.name: obstacle} if obstacle else {})


def _pipeline_obstacle(request: PlanRequest) -> str:
    """Why there is no prediction for `pipeline`; empty if there is one."""
    if request.learners == 1:
        return ""
    if not (request.layers and request.border_mb):
        return "give the model's --layers and --border-mb, or --measure"
    if request.layers < request.learners:
        return f"{request.learners} learners need as many layers, and the model has {request.layers}"
    return ""


def _candidates(request: PlanRequest) -> list[tuple[str, str, StrategyConfig]]:
    chosen: list[tuple[str, str, StrategyConfig]] = []
    for name, method in STRATEGIES.items():
        if method.traits.split:
            if request.learners > 1 and not _pipeline_obstacle(request):
                micro_batches = MICRO_BATCHES * request.learners
                chosen.append((name, name, LayerPipelineConfig(micro_batches=micro_batches)))
            continue
        if (method.traits.grouped and request.gpus_per_node == 1) or (method.traits.shared and request.nodes > 1):
            continue
        if method.traits.exchange:  # one exchange per step: the minimum, which a model of any size needs
            for label, graph in ((name, "ring"), (f"{name} {RANDOM_RING}", RANDOM_RING)):
                chosen.append((label, name, method.config.model_validate({"neighbours": graph, "per_step": 1})))
        elif "tau" in method.config.model_fields:
            chosen.append((name, name, method.config.model_validate({"tau": BLOCK})))
        else:
            chosen.append((name, name, method.config()))
    return chosen


def predict(request: PlanRequest, label: str, name: str, config: StrategyConfig, seed: int = 0) -> Prediction:
    """Simulate some steps of a method, and extrapolate to an epoch."""
    learners = request.learners
    method = STRATEGIES[name]
    steps = max(8, min(STEPS, MOST_UPDATES // learners))
    if method.traits.split:
        steps = 1  # all steps are alike, and each has many passes
    problem = Timing(steps * learners, num_bytes=4.0 * request.parameters, border_bytes=1e6 * request.border_mb)
    outcome = simulate(request.cluster(), name, problem, config, seed=seed)
    per_batch = (outcome.open_epoch_s or outcome.epoch_s) / problem.batches
    epoch_s = request.batches * per_batch / (1.0 - _lost_share(request, name))
    alone = request.batches * request.step_s
    replicas = request.nodes if method.traits.grouped else learners
    return Prediction(
        strategy=label,
        epoch_s=epoch_s,
        speedup=alone / epoch_s,
        efficiency=alone / epoch_s / learners,
        nic_gb=outcome.bytes_per_nic * request.batches / problem.batches / 1e9,
        staleness=outcome.staleness.mean,
        averaged=replicas if method.traits.decentralized else 1,
    )


def _lost_share(request: PlanRequest, name: str) -> float:
    """Share of the total time lost by deaths: all learners lose time if they wait, else the dead one or its node."""
    method = STRATEGIES[name]
    hit = request.learners
    if method.free:
        hit = request.gpus_per_node if method.traits.grouped else 1
    return min(0.9, request.losses_per_day * request.restart_s / 86400 * hit / request.learners)


def recommend(request: PlanRequest, predictions: list[Prediction]) -> tuple[str, str]:
    """Recommend a method, with the reason.

    Among the methods with published accuracy that are at most 5 % slower than the fastest, it is the one with the
    fewest different replicas, since accuracy falls with their number (arXiv:2110.11199, 2112.01433). Rings are fixed up
    to 16 replicas, random beyond.
    """
    if request.learners == 1:
        return "single", "there is one learner: nothing to distribute"
    fit = [prediction for prediction in predictions if _method(prediction).facts.advice and _ring_fits(prediction)]
    quickest = min(fit, key=lambda prediction: prediction.epoch_s)
    near = [prediction for prediction in fit if prediction.epoch_s <= 1.05 * quickest.epoch_s]
    best = min(near, key=lambda prediction: (prediction.averaged, prediction.staleness, prediction.epoch_s))
    return best.strategy, f"{_why(request, best)}; {100 * best.efficiency:.0f} % efficient here"


def _method(prediction: Prediction) -> Strategy:
    """The predicted strategy, without its neighbours."""
    return find_strategy(prediction.strategy.split()[0])


def _ring_fits(prediction: Prediction) -> bool:
    if not _method(prediction).traits.exchange:
        return True
    return prediction.strategy.endswith(RANDOM_RING) == (prediction.averaged > FIXED_RING)


def _why(request: PlanRequest, best: Prediction) -> str:
    uneven = "learners are unevenly fast" if request.slow else "learners die" if request.losses_per_day else ""
    method = _method(best)
    assert method.facts.advice is not None
    reason = method.facts.advice(uneven)
    if not method.traits.exchange:
        return reason
    if best.averaged <= FIXED_RING:
        return f"{reason}; a fixed ring keeps {best.averaged} replicas together"
    return f"{reason}; {best.averaged} replicas are many for a fixed ring: random neighbours"
