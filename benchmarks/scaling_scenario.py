"""What `benchmarks.scaling` measures, and what it finds."""

import math
from dataclasses import dataclass, field

PER_NODE = 2
"""Learners of a node of h-adpsgd."""


@dataclass(frozen=True)
class Scenario:
    """What to measure.

    Attributes:
        strategy: single, adpsgd, scpsgd or h-adpsgd.
        learners: How many, over all nodes.
        condition: Its name in the results.
        params: Weights of the model.
        step_s: Seconds that a gradient takes.
        slow: The last learner takes so many times longer.
        rate: Of the links between machines, as `tc` writes it; empty for loopback.
        seconds: To measure at least, after the warm-up.
        closings: Epochs that are to be closed meanwhile, at least, unless it takes more than `limit_s`.
        epoch_s: Seconds that an epoch takes if nobody is slow and nobody waits: sets the size of the index.
        limit_s: To measure at most.
        neighbours: ring or random-ring.
        wire: fp32 or bf16.
        encrypt: Whether exchanges on loopback are encrypted; between namespaces they always are.
        batch: Utterances in a step of one learner.
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
        """Learners of a node."""
        return {"scpsgd": self.learners, "h-adpsgd": PER_NODE}.get(self.strategy, 1)

    @property
    def nodes(self) -> int:
        """Nodes in the ring."""
        return self.learners // self.ranks

    @property
    def apart(self) -> bool:
        """Whether the learners of one node are on several machines: h-adpsgd's are not, scpsgd's are."""
        return bool(self.rate) and self.strategy == "scpsgd"

    @property
    def per_shard(self) -> int:
        """Utterances of a shard: a second or more of a node's work, as shards of real corpora are many steps long."""
        return self.batch * self.ranks * max(1, math.ceil(1.0 / self.step_s))

    @property
    def num_shards(self) -> int:
        """Shards of the index."""
        utterances = self.epoch_s / self.step_s * self.learners * self.batch
        return max(2 * self.nodes, round(utterances / self.per_shard))


@dataclass(frozen=True)
class Measured:
    """What a run gave.

    Attributes:
        steps_per_s: Of each learner, in the order of their numbers.
        utterances_per_s: Over all learners.
        epoch_s: Seconds from the start to the last closing of an epoch, over the number of closings; None without any.
        closings: Epochs closed.
        index: Utterances of an epoch.
        accounted: Whether every closed epoch counts each utterance exactly once.
        cpu_share: Busy share of the machine's cores, whoever kept them busy.
        own_share: Share of the cores' time that this run's processes took.
        exchanges_per_step: Exchanges that a node began, per step; 0 without a ring.
        exchange_s: Mean seconds of an exchange.
        failed: Exchanges that were not answered in time.
        seconds: Measured time.
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
    staleness: list[float] = field(default_factory=list)
