"""Asynchronous decentralized SGD: learners average with neighbours while they compute gradients, without waiting."""

from training.strategies.base import LearnerContext
from training.strategies.config import GossipConfig
from training.strategies.requests import Compute, Program


def adpsgd(context: LearnerContext, cfg: GossipConfig) -> Program:
    """Asynchronous decentralized parallel SGD (AD-PSGD, arXiv:1710.06952, 1904.04956).

        g = grad(W_i), while W_i <- (W_i + W_j) / 2 with a neighbour j;  W_i -= lr · g

    Averaging adds half the difference of two snapshots to the live weights, which loses no gradient step and conserves
    the sum over learners. Neighbours: the fixed ring, alternating left and right, or a random ring for every exchange
    with a shared seed, recommended beyond 16 learners (arXiv:2112.01433). At the end all take the mean.

    Synchronizes weights with one neighbour. Sends the model twice per exchange (as request and as answer), for any N,
    while the gradient is computed. Staleness: steps from a snapshot to the update that adds its result, at least 1. A
    slow learner trains less and does not delay others; a dead one costs its neighbours one time-out.
    """
    yield from h_adpsgd(context, cfg)


def h_adpsgd(context: LearnerContext, cfg: GossipConfig) -> Program:
    """Hierarchical AD-PSGD (arXiv:1907.05701): a node's learners are one super-learner, super-learners run AD-PSGD.

        g = mean over the node of grad(W_node);  W_node <- (W_node + W_other) / 2 meanwhile;  W_node -= lr · g

    L learners in nodes of N converge like L/N learners. With one node this is `scpsgd`; with nodes of one, `adpsgd`.
    In the simulator, the first learner of a node exchanges for it and distributes the result; in the training engine
    each learner exchanges its share of the weights, followed by an all-gather. The traffic on a machine's link is the
    same.

    Synchronizes gradients within a node, weights between nodes. Over the network, a node sends the model twice per
    exchange; within the node, a learner sends 2(N-1)/N of it for the gradients and half as much for the averages.
    Staleness as in `adpsgd`. A slow learner slows down its node only; a dead one takes its node with it.
    """
    while (work := (yield Compute(reduce="node", average=True))) is not None:
        if work.weight:
            context.replica.update()
