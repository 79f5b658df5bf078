"""Which method a cluster wants: predicted epoch time, efficiency and network load of each, and a recommendation."""

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from training.simulation.cluster import Cluster, Positive, Seconds
from training.simulation.problem import Timing
from training.simulation.running import simulate
from training.strategies.base import StrategyError
from training.strategies.registry import PIPELINE, STRATEGIES
from training.strategy_config import GossipConfig, LayerPipelineConfig, StrategyConfig

STEPS = 24
"""Steps of each learner that are simulated; blocks of 8 end thrice in them."""
MICRO_BATCHES = 4
"""Micro-batches for each stage of a pipeline: with these, little is lost in filling and draining (arXiv:1811.06965)."""
MOST_UPDATES = 20_000
"""Steps of all learners together that are simulated at most."""
FIXED_RING = 16
"""Super-learners that a fixed ring keeps together; beyond, random neighbours (arXiv:2112.01433)."""
ADVISED = ("d1d", "adpsgd", "adpsgd random-ring", "h-adpsgd", "h-adpsgd random-ring", "scpsgd")
"""What the recommendation chooses from: methods with published accuracy at the scale in question."""
_MODEL_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)


class PlanRequest(BaseModel):
    """A model, a cluster and a data size."""

    model_config = _MODEL_CONFIG

    parameters: int = Field(ge=1)
    """Weights of the model; each is 4 bytes on the wire."""
    step_s: Positive
    """Seconds of a forward and backward pass of one learner's batch, as measured."""
    overhead_s: Seconds = 0.0
    """Seconds a step that communication costs the learner's own processor with several learners."""
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
    """Its latency, milliseconds."""
    local_gbit: Positive = 200.0
    """Bandwidth between the GPUs of a machine, Gbit/s."""
    slow: tuple[Positive, ...] = ()
    """Slow-downs to expect: so many learners, each so many times slower."""
    losses_per_day: float = Field(default=0.0, ge=0)
    """Learners that die in a day."""
    restart_s: Seconds = 60.0
    """Seconds until a lost learner is known to be lost and the others go on."""
    layers: int = Field(default=0, ge=0)
    """Layers of the model, for `pipeline`, which needs one a learner; 0 if nobody knows."""
    border_mb: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Megabytes of hidden frames that go from layer to layer for one learner's batch; 0 if nobody knows."""

    @property
    def learners(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node

    @property
    def batches(self) -> float:
        """One learner's batches in an epoch of all learners together."""
        return self.data_hours * 3600 / self.batch_seconds

    def cluster(self) -> Cluster:
        """As the simulator wants it.

        Raises:
            ValueError: More learners are slow than there are.
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
    """What a method would do.

    Attributes:
        strategy: Its name, with its neighbours where there is a choice.
        epoch_s: Seconds of an epoch.
        speedup: Over one learner that trains alone.
        efficiency: Share of the time of all learners together that is spent on gradients, if all were equally fast.
        nic_gb: Gigabytes that the busiest machine sends in an epoch.
        staleness: Mean, in steps.
        averaged: Replicas that average with each other; 1 where all weights are equal at every step.
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
    """Predictions, the quickest first, what to take, and what is left out and why."""

    predictions: list[Prediction]
    choice: str
    reason: str
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        rows = [asdict(one) for one in self.predictions]
        choice = {"strategy": self.choice, "reason": self.reason}
        return {"rows": rows, "recommendation": choice, "left_out": self.left_out}


def plan(request: PlanRequest, seed: int = 0) -> Plan:
    """Predict every method that the cluster allows, and recommend one.

    Raises:
        ValueError: The cluster contradicts itself.
    """
    found = []
    for label, name, config in _candidates(request):
        try:
            found.append(predict(request, label, name, config, seed))
        except StrategyError:
            continue  # not on these machines
    found.sort(key=lambda one: one.epoch_s)
    choice, reason = recommend(request, found)
    obstacle = _pipeline_obstacle(request)
    return Plan(found, choice, reason, {PIPELINE.name: obstacle} if obstacle else {})


def _pipeline_obstacle(request: PlanRequest) -> str:
    """Why nothing can be said about `pipeline`; empty if something can."""
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
        if method is PIPELINE:
            if request.learners > 1 and not _pipeline_obstacle(request):
                micro_batches = MICRO_BATCHES * request.learners
                chosen.append((name, name, LayerPipelineConfig(micro_batches=micro_batches)))
            continue
        if (method.traits.grouped and request.gpus_per_node == 1) or (method.traits.shared and request.nodes > 1):
            continue
        if method.traits.exchange:  # one exchange a step: the least that a learner makes, however large the model
            chosen.append((name, name, GossipConfig(neighbours="ring", per_step=1)))
            chosen.append((f"{name} random-ring", name, GossipConfig(neighbours="random-ring", per_step=1)))
        elif name in ("ma", "bmuf", "easgd"):
            chosen.append((name, name, method.config.model_validate({"tau": 8})))
        else:
            chosen.append((name, name, method.config()))
    return chosen


def predict(request: PlanRequest, label: str, name: str, config: StrategyConfig, seed: int = 0) -> Prediction:
    """Simulate some steps of a method, and extend them to an epoch."""
    learners = request.learners
    method = STRATEGIES[name]
    steps = max(8, min(STEPS, MOST_UPDATES // learners))
    if method is PIPELINE:
        steps = 1  # one step is like another, and has many passes
    problem = Timing(steps * learners, num_bytes=4.0 * request.parameters, border_bytes=1e6 * request.border_mb)
    outcome = simulate(request.cluster(), name, problem, config, seed=seed)
    per_batch = (outcome.open_epoch_s or outcome.epoch_s) / problem.batches
    epoch_s = request.batches * per_batch / (1.0 - _lost_share(request, name))
    alone = request.batches * request.step_s
    averaged = (
        (request.nodes if method.traits.grouped else learners) if method.traits.exchange or name == "sdpsgd" else 1
    )
    return Prediction(
        strategy=label,
        epoch_s=epoch_s,
        speedup=alone / epoch_s,
        efficiency=alone / epoch_s / learners,
        nic_gb=outcome.bytes_per_nic * request.batches / problem.batches / 1e9,
        staleness=outcome.staleness.mean,
        averaged=averaged,
    )


def _lost_share(request: PlanRequest, name: str) -> float:
    """Share of all learners' time that deaths cost: everybody's where all wait, else the dead one's (or its node's)."""
    method = STRATEGIES[name]
    hit = request.learners
    if method.free:
        hit = request.gpus_per_node if method.traits.grouped else 1
    return min(0.9, request.losses_per_day * request.restart_s / 86400 * hit / request.learners)


def recommend(request: PlanRequest, found: list[Prediction]) -> tuple[str, str]:
    """The method to take, and why.

    Among methods with published accuracy: the quickest, of those within 5 % of it the one that keeps the fewest
    different replicas, as accuracy falls with their number (arXiv:2110.11199, 2112.01433); fixed rings up to 16
    replicas, random ones beyond.
    """
    if request.learners == 1:
        return "single", "there is one learner: nothing to distribute"
    fit = [one for one in found if one.strategy in ADVISED and _ring_fits(one)]
    quickest = min(fit, key=lambda one: one.epoch_s)
    near = [one for one in fit if one.epoch_s <= 1.05 * quickest.epoch_s]
    best = min(near, key=lambda one: (one.averaged, one.staleness, one.epoch_s))
    return best.strategy, f"{_why(request, best)}; {best.efficiency:.0%} efficient here"


def _ring_fits(one: Prediction) -> bool:
    if "adpsgd" not in one.strategy:
        return True
    return ("random" in one.strategy) == (one.averaged > FIXED_RING)


def _why(request: PlanRequest, best: Prediction) -> str:
    uneven = "learners are unevenly fast" if request.slow else "learners die" if request.losses_per_day else ""
    if best.strategy == "scpsgd":
        return "the all-reduce costs next to nothing here, and synchronous SGD has no staleness"
    if best.strategy == "d1d":
        return "learners are evenly fast and the all-reduce hides behind the gradient: all weights stay equal"
    neighbours = f"{best.averaged} replicas are many for a fixed ring: random neighbours"
    if best.averaged <= FIXED_RING:
        neighbours = f"a fixed ring keeps {best.averaged} replicas together"
    if best.strategy.startswith("h-adpsgd"):
        return f"GPUs of a node are well linked and nodes are not{f' and {uneven}' if uneven else ''}; {neighbours}"
    return f"{uneven or 'the network is slower than a gradient'}, and nobody waits for anybody; {neighbours}"
