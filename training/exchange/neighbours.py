"""Choice of the neighbour to average with: pure functions of view, node, exchange number and shared seed."""

import random
from typing import Literal

from training.coordinator.membership import View

Kind = Literal["ring", "random-ring", "exponential", "auto"]
FIXED_RING = 8
"""From this number of nodes on, `auto` is a random ring, because averages spread too slowly in a large fixed ring."""


def resolve(kind: Kind, nodes: int) -> Kind:
    """Resolve `auto` for a number of nodes."""
    if kind != "auto":
        return kind
    return "random-ring" if nodes >= FIXED_RING else "ring"


def hop(kind: Kind, nodes: int, number: int) -> int:
    """Distance in `ring_order` from a node to the one that it asks in exchange `number`.

    On the fixed ring, even numbers ask the right neighbour and odd ones the left one (arXiv:1904.04956). On the
    random ring every number has its own ring, in which each node asks its right neighbour and is asked by its left one.
    On the exponential graph the distances 1, 2, 4, ... alternate (one-peer exponential, arXiv:2110.13363).
    """
    kind = resolve(kind, nodes)
    if kind == "exponential":
        return 1 << number % max(1, (nodes - 1).bit_length())
    return -1 if kind == "ring" and number % 2 == 1 else 1


def ring_order(kind: Kind, view: View, number: int, seed: int) -> tuple[int, ...]:
    """The nodes in ring order.

    Args:
        kind: `ring`, `exponential`: by node number, constant; `random-ring`: a Fisher-Yates permutation for each
            number, the same on all nodes with the same seed and view (arXiv:2112.01433, section III).
        view: The members.
        number: Running number of the exchange.
        seed: Shared by the whole ring.
    """
    order = list(view.nodes)
    if resolve(kind, len(order)) == "random-ring":
        random.Random(f"starling ring {seed} {number}").shuffle(order)
    return tuple(order)


def neighbour(kind: Kind, view: View, node: int, number: int, seed: int) -> int | None:
    """The node to ask in exchange `number`; None if there is none."""
    order = ring_order(kind, view, number, seed)
    if node not in order or len(order) < 2:
        return None
    return order[(order.index(node) + hop(kind, len(order), number)) % len(order)]


def by_distance(view: View, node: int) -> tuple[int, ...]:
    """All other members, nearest on the fixed ring first: the order in which a newcomer asks for weights."""
    others = view.without(node).nodes
    order = sorted({*others, node})
    place = {member: index for index, member in enumerate(order)}
    count = len(order)
    gap = {member: (place[member] - place[node]) % count for member in others}
    return tuple(sorted(others, key=lambda member: (min(gap[member], count - gap[member]), member)))
