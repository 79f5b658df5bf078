"""Asynchronous decentralized SGD: learners average with neighbours during the gradient, and wait for none."""

from training.strategies.base import LearnerContext
from training.strategies.config import GossipConfig
from training.strategies.requests import Compute, Program


def adpsgd(context: LearnerContext, cfg: GossipConfig) -> Program:
    """Asynchronous decentralized parallel SGD (AD-PSGD, arXiv:1710.06952, 1904.04956).

        g = grad(W_i), while W_i <- (W_i + W_j) / 2 with a neighbour j;  W_i -= lr · g

    The averaging adds half the difference of two snapshots to the live weights, which loses no gradient step and
    conserves the sum over learners. Neighbours: the fixed ring, alternating left and right, or a shared-seed random
    ring for every exchange, which is advised beyond 16 learners (arXiv:2112.01433). At the end all take the mean.

    Synchronizes weights with one neighbour. Sends the model twice a step (asking, and answering), for any N, while
    the gradient is computed. Staleness: the steps from a snapshot to the one that adds what it brought, at least 1. A
    slow learner trains less and delays no other; a dead one costs its neighbours one time-out.
    """
    yield from h_adpsgd(context, cfg)


def h_adpsgd(context: LearnerContext, cfg: GossipConfig) -> Program:
    """Hierarchical AD-PSGD (arXiv:1907.05701): a node's learners are one super-learner, super-learners run AD-PSGD.

        g = mean over the node of grad(W_node);  W_node <- (W_node + W_other) / 2 meanwhile;  W_node -= lr · g

    L learners in nodes of N converge as L/N learners do. With one node this is `scpsgd`; with nodes of one, `adpsgd`.
    In the simulator, the first learner of a node exchanges for it and hands on what the exchange has brought; in the
    training engine each learner exchanges its share of the weights, and they gather the shares. What a machine's link
    carries is the same.

    Synchronizes gradients within a node, weights between nodes. Sends the model twice a step and node over the network;
    within the node, a learner sends 2(N-1)/N of it for the gradients and half as much for the averages. Staleness as
    `adpsgd`. A slow learner slows its node only; a dead one takes its node with it.
    """
    while (work := (yield Compute(reduce="node", average=True))) is not None:
        if work.weight:
            context.replica.update()
