"""Scenarios and measurements of `benchmarks.scaling`."""

import math
from dataclasses import dataclass, field

PER_NODE = 2
"""Learners per node with h-adpsgd."""


@dataclass(frozen=True)
class Scenario:
    """Settings of a measurement.

    Attributes:
        strategy: single, adpsgd, scpsgd or h-adpsgd.
        learners: Number of learners over all nodes.
        condition: Name of the condition in the results.
        params: Number of weights of the model.
        step_s: Seconds per gradient.
        slow: Factor by which the last learner's gradients take longer.
        rate: Rate of the links between machines in the format of `tc`; empty for loopback.
        seconds: Minimum duration of the measurement, after the warm-up.
        closings: Minimum number of epochs to close during the measurement, unless it takes more than `limit_s`.
        epoch_s: Seconds per epoch without slow learners and waiting; determines the size of the index.
        limit_s: Maximum duration of the measurement in seconds.
        neighbours: ring or random-ring.
        wire: fp32 or bf16.
        encrypt: Whether exchanges on loopback are encrypted; between namespaces they always are.
        batch: Utterances per step of one learner.
    """

    strategy: str
    learners: int
    condition: str = "homogeneous"
    params: int = 1_000_000
    step_s: float = 0.3
    slow: float = 1.0
    rate: str = ""
    seconds: float = 8.0
    closings: int = 0
    epoch_s: float = 60.0
    limit_s: float = 300.0
    neighbours: str = "ring"
    wire: str = "fp32"
    encrypt: bool = True
    batch: int = 8

    @property
    def ranks(self) -> int:
        """Learners per node."""
        return {"scpsgd": self.learners, "h-adpsgd": PER_NODE}.get(self.strategy, 1)

    @property
    def nodes(self) -> int:
        """Number of nodes in the ring."""
        return self.learners // self.ranks

    @property
    def apart(self) -> bool:
        """Whether the learners of one node are on several machines (for scpsgd, but not for h-adpsgd)."""
        return bool(self.rate) and self.strategy == "scpsgd"

    @property
    def per_shard(self) -> int:
        """Utterances per shard: at least a second of a node's work, because shards of real corpora last many steps."""
        return self.batch * self.ranks * max(1, math.ceil(1.0 / self.step_s))

    @property
    def num_shards(self) -> int:
        """Number of shards in the index."""
        utterances = self.epoch_s / self.step_s * self.learners * self.batch
        return max(2 * self.nodes, round(utterances / self.per_shard))


@dataclass(frozen=True)
class Measured:
    """Measurements of a run.

    Attributes:
        steps_per_s: Steps per second of each learner, by number.
        utterances_per_s: Total over all learners.
        epoch_s: Seconds from the start to the last closing of an epoch, over the number of closings; None without any.
        closings: Number of closed epochs.
        index: Utterances per epoch.
        accounted: Whether every closed epoch counts each utterance exactly once.
        cpu_share: CPU load of the machine, by all processes.
        own_share: CPU load by this run's processes.
        exchanges_per_step: Exchanges initiated per step; 0 without a ring.
        exchange_s: Mean seconds of an exchange.
        failed: Exchanges that were not answered in time.
        seconds: Duration of the measurement.
        bytes_per_step: Bytes that a machine sends per step of a learner, headers included; 0 without links.
        staleness: Staleness of the last average of each learner, in steps.
    """

    steps_per_s: list[float]
    utterances_per_s: float
    epoch_s: float | None
    closings: int
    index: int
    accounted: bool
    cpu_share: float
    own_share: float
    exchanges_per_step: float = 0.0
    exchange_s: float = 0.0
    failed: int = 0
    seconds: float = 0.0
    bytes_per_step: float = 0.0
    staleness: list[float] = field(default_factory=list)
