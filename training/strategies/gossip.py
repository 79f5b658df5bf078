"""Asynchronous decentralized SGD: learners average with neighbours while they compute gradients, without waiting."""

from typing import ClassVar, Literal

from pydantic import Field

from training.strategies.base import LearnerContext
from training.strategies.requests import Compute, Program
from training.strategies.strategy import NOBODY_WAITS, Facts, Method, StrategyConfig, Traits

Newcomer = Literal["weights", "weights+optimizer"]
"""What a node that joins a running training takes from a neighbour."""


class GossipConfig(StrategyConfig):
    """Asynchronous decentralized SGD between nodes of one learner."""

    kind: Literal["adpsgd", "h-adpsgd"] = "adpsgd"
    traits: ClassVar[Traits] = Traits(one_learner=True, exchange=True, decentralized=True)
    neighbours: Literal["auto", "ring", "random-ring", "exponential"] = "auto"
    """`ring` alternates left and right; `random-ring` shuffles the ring at every exchange; `exponential` cycles through
    the distances 1, 2, 4, ...; `auto` is `ring` below eight nodes and `random-ring` from eight on."""
    per_step: int = Field(default=4, ge=1)
    """Maximum number of exchanges that a node starts per training step, one after the other: more keep replicas
    closer."""
    newcomer: Newcomer = "weights"
    """What a node that joins or rejoins a running training takes from a neighbour: its weights, or weights and
    optimizer state (momentum; AdamW's moments) of one step, which the neighbour copies once."""


class HierarchicalGossipConfig(GossipConfig):
    """Asynchronous decentralized SGD between nodes of several learners, which all-reduce gradients within a node."""

    kind: Literal["h-adpsgd"] = "h-adpsgd"
    traits: ClassVar[Traits] = Traits(exchange=True, decentralized=True, grouped=True, buckets=True)


def _train(context: LearnerContext) -> Program:
    """Train with gradients averaged within the node while weights are averaged with a neighbouring node."""
    while (work := (yield Compute(reduce="node", average=True))) is not None:
        if work.weight:
            context.replica.update()


def adpsgd(context: LearnerContext, cfg: GossipConfig) -> Program:
    """Asynchronous decentralized parallel SGD (AD-PSGD, arXiv:1710.06952, 1904.04956).

        g = grad(W_i), while W_i <- (W_i + W_j) / 2 with a neighbour j;  W_i -= lr · g

    Averaging adds half the difference of two snapshots to the live weights, which loses no gradient step and conserves
    the sum over learners. Neighbours: the fixed ring, alternating left and right, or a random ring for every exchange
    with a shared seed, recommended beyond 16 learners (arXiv:2112.01433). At the end all take the mean.

    Staleness counts the steps from a snapshot to the update that adds its result.
    """
    yield from _train(context)


def h_adpsgd(context: LearnerContext, cfg: HierarchicalGossipConfig) -> Program:
    """Hierarchical AD-PSGD (arXiv:1907.05701): a node's learners are one super-learner, super-learners run AD-PSGD.

        g = mean over the node of grad(W_node);  W_node <- (W_node + W_other) / 2 meanwhile;  W_node -= lr · g

    L learners in nodes of N converge like L/N learners. With one node this is `scpsgd`; with nodes of one, `adpsgd`.
    In the simulator, the first learner of a node exchanges for it and distributes the result; in the training engine
    each learner exchanges its share of the weights, followed by an all-gather. The traffic on a machine's link is the
    same.
    """
    yield from _train(context)


def _sent(learners: int, size: float, cfg: GossipConfig) -> float:
    return 2 * size * cfg.per_step * (learners > 1)


ADPSGD = Method(
    "adpsgd",
    GossipConfig,
    Facts(
        "weights, with a neighbour",
        _sent,
        "at least 1",
        NOBODY_WAITS,
        "its neighbours lose one time-out",
        sent_text="2 M per exchange, overlapped with the gradient; up to `per_step` exchanges",
        advice=lambda uneven: f"{uneven or 'the network is slower than a gradient'}, and no learner waits for another",
    ),
    program=adpsgd,
    equal=True,
    state_per_rank=False,
)
H_ADPSGD = Method(
    "h-adpsgd",
    HierarchicalGossipConfig,
    Facts(
        "gradients within a node, weights with a neighbouring node",
        _sent,
        "at least 1",
        "delays only its own node",
        "its whole node is lost",
        sent_text="2 M per node and exchange over the network; 3(N−1)/N · M per learner within the node",
        advice=lambda uneven: f"GPUs of a node are well linked and nodes are not{f' and {uneven}' if uneven else ''}",
    ),
    program=h_adpsgd,
    equal=True,
    state_per_rank=False,
)
