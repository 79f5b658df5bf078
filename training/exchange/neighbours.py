"""Whom to average with: pure functions of the view, the node, a running number and the shared seed."""

import random
from typing import Literal

from training.coordinator.membership import View

Kind = Literal["ring", "random-ring", "exponential", "auto"]
FIXED_RING = 8
"""From so many nodes on, `auto` is a random ring: averages cross a fixed one ever more slowly."""


def resolve(kind: Kind, nodes: int) -> Kind:
    """What `auto` means for so many nodes."""
    if kind != "auto":
        return kind
    return "random-ring" if nodes >= FIXED_RING else "ring"


def hop(kind: Kind, nodes: int, number: int) -> int:
    """Places from a node to the one that it asks in exchange `number`, in the order of `ring_order`.

    On the fixed ring, even numbers ask the right neighbour and odd ones the left one (arXiv:1904.04956). On the
    random ring every number has a ring of its own, and each node asks the right neighbour and is asked by the left.
    On the exponential graph distances are 1, 2, 4, ... by turns (one-peer exponential, arXiv:2110.13363).
    """
    kind = resolve(kind, nodes)
    if kind == "exponential":
        return 1 << number % max(1, (nodes - 1).bit_length())
    return -1 if kind == "ring" and number % 2 == 1 else 1


def ring_order(kind: Kind, view: View, number: int, seed: int) -> tuple[int, ...]:
    """The nodes in the order in which they form the ring.

    Args:
        kind: `ring`, `exponential`: by node number, always the same; `random-ring`: a Fisher-Yates permutation for each
            number, the same on every node that has the same seed and view (arXiv:2112.01433, section III).
        view: Who takes part.
        number: Running number of the exchange.
        seed: Shared by the whole ring.
    """
    order = list(view.nodes)
    if resolve(kind, len(order)) == "random-ring":
        random.Random(f"starling ring {seed} {number}").shuffle(order)
    return tuple(order)


def neighbour(kind: Kind, view: View, node: int, number: int, seed: int) -> int | None:
    """The node to ask for exchange `number`; None if there is none."""
    order = ring_order(kind, view, number, seed)
    if node not in order or len(order) < 2:
        return None
    return order[(order.index(node) + hop(kind, len(order), number)) % len(order)]


def by_distance(view: View, node: int) -> tuple[int, ...]:
    """All other members, the nearest on the fixed ring first: whom a newcomer asks for weights."""
    others = view.without(node).nodes
    order = sorted({*others, node})
    place = {member: index for index, member in enumerate(order)}
    count = len(order)
    gap = {member: (place[member] - place[node]) % count for member in others}
    return tuple(sorted(others, key=lambda member: (min(gap[member], count - gap[member]), member)))
