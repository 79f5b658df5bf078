"""Decision trees that tie the states of phones in context (Young, Odell & Woodland 1994).

A tree maps a triphone's state (left phone, phone, right phone, state) to a pdf. The phones of a family, say the vowel
AH in all its stresses, grow one tree with all their states, and questions may ask for left, centre or right phone or
for the state. `grow_tree` splits the leaf and question of the largest gain in log-likelihood of single Gaussians. The
questions about phones are clusters of phones whose Gaussians are alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speech.hmm.topology import MAX_STATES, Ints, PhoneSet

Contexts = NDArray[np.int32]
"""int32 `[N, 4]`: left phone, phone, right phone (0: none), state."""
_STATE = 3


@dataclass
class ContextStatistics:
    """Frames of each state in each context: what trees are grown from.

    Attributes:
        contexts: int32 `[N, 4]`, each once, sorted.
        counts: float64 `[N]`, frames.
        sums: float64 `[N, 2 D]`, sums of the frames and of their squares.
    """

    contexts: Contexts
    counts: NDArray[np.float64]
    sums: NDArray[np.float64]

    @classmethod
    def of_frames(cls, contexts: Contexts, frames: NDArray[np.float32]) -> ContextStatistics:
        """Statistics of frames `[T, D]` whose contexts are `[T, 4]`."""
        extended = np.concatenate([frames, np.square(frames)], axis=1)
        return cls._summed(contexts, np.ones(len(frames)), extended)

    @classmethod
    def _summed(
        cls, contexts: Contexts, counts: NDArray[np.float64], sums: NDArray[Any], codes: NDArray[np.int64] | None = None
    ) -> ContextStatistics:
        wide = contexts.astype(np.int64)
        codes = ((wide[:, 0] * 4096 + wide[:, 1]) * 4096 + wide[:, 2]) * 64 + wide[:, 3]
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        total = np.add.reduceat(sums[order], starts, axis=0, dtype=np.float64)
        return cls(contexts[order][starts], np.add.reduceat(counts[order], starts), total)

    @classmethod
    def merge(cls, parts: Sequence[ContextStatistics]) -> ContextStatistics:
        """Statistics of all parts together."""
        return cls._summed(
            np.concatenate([part.contexts for part in parts]),
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.sums for part in parts]),
        )

    def rows(self) -> NDArray[np.float64]:
        """Counts and sums together: `[N, 1 + 2 D]`."""
        return np.concatenate([self.counts[:, None], self.sums], axis=1)


@dataclass
class DecisionTree:
    """Trees over contexts; leaves are numbered pdfs.

    Attributes:
        phones: The phone set.
        roots: int32 `[phones + 1, states]`, the node where the tree of a phone's state begins.
        nodes: Of each inner node: position asked (0 left, 1 centre, 2 right, 3 state), the phones or states for which
            the answer is yes, the node for yes, the node for no. Leaf p is written -1 - p.
        num_pdfs: Number of leaves.
        context_dependent: Whether a neighbour is ever asked for.
    """

    phones: PhoneSet
    roots: Ints
    nodes: list[tuple[int, tuple[int, ...], int, int]]
    num_pdfs: int
    _cache: dict[int, Ints] = field(default_factory=dict, repr=False)

    @property
    def context_dependent(self) -> bool:
        """Whether any question asks for a neighbouring phone."""
        return any(position in (0, 2) for position, _, _, _ in self.nodes)

    def pdfs(self, contexts: Ints) -> Ints:
        """Pdfs of the states of phones in context.

        Args:
            contexts: int32 `[N, 3]`, left phone, phone, right phone.

        Returns:
            int32 `[N, MAX_STATES]`, -1 beyond a phone's states.
        """
        contexts = np.asarray(contexts)
        pdfs = np.full((len(contexts), MAX_STATES), -1, dtype=np.int32)
        for phone in np.unique(contexts[:, 1]).tolist():
            rows = contexts[:, 1] == phone
            pdfs[rows] = self._table(phone)[contexts[rows, 0], contexts[rows, 2]]
        return pdfs

    def _table(self, phone: int) -> Ints:
        """Pdfs of a phone in all contexts: `[phones + 1, phones + 1, MAX_STATES]`."""
        if phone not in self._cache:
            size, states = len(self.phones) + 1, self.phones.topology(phone).num_states
            left, right, state = (axis.ravel() for axis in np.indices((size, size, states), dtype=np.int32))
            leaves = self._route(np.stack([left, np.full_like(left, phone), right, state], axis=1))
            table = np.full((size, size, MAX_STATES), -1, dtype=np.int32)
            table[:, :, :states] = leaves.reshape(size, size, states)
            self._cache[phone] = table
        return self._cache[phone]

    def _route(self, contexts: Contexts) -> Ints:
        """Leaves that contexts `[N, 4]` with the same phone end in."""
        leaves = np.empty(len(contexts), dtype=np.int32)
        phone = int(contexts[0, 1])
        waiting = [
            (int(self.roots[phone, state]), np.flatnonzero(contexts[:, _STATE] == state))
            for state in range(self.phones.topology(phone).num_states)
        ]
        while waiting:
            node, rows = waiting.pop()
            if node < 0:
                leaves[rows] = -1 - node
            elif len(rows):
                position, yes, left, right = self.nodes[node]
                answer = np.isin(contexts[rows, position], yes)
                waiting += [(left, rows[answer]), (right, rows[~answer])]
        return leaves

    def transition_keys(self) -> Ints:
        """All phones' states with the pdfs that they may have: int32 `[N, 3]` of phone, state, pdf, sorted."""
        keys = []
        for phone in range(1, len(self.phones) + 1):
            for state in range(self.phones.topology(phone).num_states):
                keys += [(phone, state, pdf) for pdf in np.unique(self._table(phone)[:, :, state]).tolist()]
        return np.array(keys, dtype=np.int32)

    def to_dict(self) -> dict[str, Any]:
        """A value for JSON."""
        nodes = [[position, list(yes), left, right] for position, yes, left, right in self.nodes]
        return {
            "phones": self.phones.to_dict(),
            "roots": self.roots.tolist(),
            "nodes": nodes,
            "num_pdfs": self.num_pdfs,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DecisionTree:
        """The inverse of `to_dict`.

        Raises:
            ValueError: A number is out of range.
        """
        nodes = [(int(p), tuple(int(v) for v in yes), int(a), int(b)) for p, yes, a, b in value["nodes"]]
        roots = np.array(value["roots"], dtype=np.int32)
        tree = cls(PhoneSet.from_dict(value["phones"]), roots, nodes, int(value["num_pdfs"]))
        tree._check()
        return tree

    def _check(self) -> None:
        """Refuse what would lead outside the tables, or round in a circle: a node's answers are later nodes."""
        if self.roots.shape != (len(self.phones) + 1, MAX_STATES):
            raise ValueError(f"the tree's roots {self.roots.shape} are not those of {len(self.phones)} phones")
        states = [self.phones.topology(phone).num_states for phone in range(len(self.phones) + 1)]
        used = self.roots[1:][np.arange(MAX_STATES) < np.array(states[1:])[:, None]]
        if not -self.num_pdfs <= used.min() <= used.max() < len(self.nodes):
            raise ValueError("a root of the tree is none of its nodes and leaves")
        for number, (position, _, *answers) in enumerate(self.nodes):
            inside = (-self.num_pdfs <= answer < 0 or number < answer < len(self.nodes) for answer in answers)
            if not 0 <= position <= _STATE or not all(inside):
                raise ValueError(f"node {number} of the tree is out of range")


def monophone_tree(phones: PhoneSet) -> DecisionTree:
    """A separate pdf for each state of each phone, independent of the context."""
    roots = np.zeros((len(phones) + 1, MAX_STATES), dtype=np.int32)
    number = 0
    for phone in range(1, len(phones) + 1):
        for state in range(phones.topology(phone).num_states):
            roots[phone, state] = -1 - number
            number += 1
    return DecisionTree(phones, roots, [], number)


@dataclass
class _Leaf:
    """A leaf that grows: its statistics, and its best question."""

    rows: NDArray[np.int64]
    total: NDArray[np.float64]
    family: int
    gain: float = 0.0
    position: int = 0
    yes: tuple[int, ...] = ()


class _Grower:
    """Greedy growth of all trees at once."""

    def __init__(
        self, stats: ContextStatistics, questions: Sequence[Sequence[int]], size: int, floor: float, minimum: float
    ) -> None:
        self.contexts, self.rows = stats.contexts, stats.rows()
        self.floor, self.minimum = floor, minimum
        states = [tuple(range(state + 1)) for state in range(MAX_STATES - 1)]
        self.asked = [list(map(tuple, questions)) if position < _STATE else states for position in range(4)]
        self.answers = []
        for position, sets in enumerate(self.asked):
            table = np.zeros((len(sets), size if position < _STATE else MAX_STATES))
            for row, members in zip(table, sets, strict=True):
                row[list(members)] = 1.0
            self.answers.append(table)

    def leaf(self, rows: NDArray[np.int64], family: int) -> _Leaf:
        """A leaf with its best question."""
        leaf = _Leaf(rows, self.rows[rows].sum(0), family)
        whole = gaussian_log_likelihood(leaf.total[None], self.floor)[0]
        for position, answers in enumerate(self.answers):
            values, where = np.unique(self.contexts[rows, position], return_inverse=True)
            if len(values) < 2:
                continue
            picks = np.zeros((len(values), len(rows)))
            picks[where, np.arange(len(rows))] = 1.0
            yes = answers[:, values] @ (picks @ self.rows[rows])
            no = leaf.total - yes
            gains = gaussian_log_likelihood(yes, self.floor) + gaussian_log_likelihood(no, self.floor) - whole
            gains[np.minimum(yes[:, 0], no[:, 0]) < self.minimum] = 0.0
            best = int(gains.argmax())
            if gains[best] > leaf.gain:
                leaf.gain, leaf.position, leaf.yes = float(gains[best]), position, self.asked[position][best]
        return leaf

    def halves(self, leaf: _Leaf) -> tuple[_Leaf, _Leaf]:
        """The leaves for yes and no."""
        answer = np.isin(self.contexts[leaf.rows, leaf.position], leaf.yes)
        return self.leaf(leaf.rows[answer], leaf.family), self.leaf(leaf.rows[~answer], leaf.family)


def grow_tree(
    phones: PhoneSet,
    stats: ContextStatistics,
    questions: Sequence[Sequence[int]],
    leaves: int,
    minimum: float = 50.0,
    variance_floor: float = 0.01,
    merge: bool = True,
) -> DecisionTree:
    """Grow trees to a wanted number of leaves.

    Args:
        phones: The phone set.
        stats: Statistics of the training frames.
        questions: Sets of phones.
        leaves: Wanted number; silence and noise have a leaf for each state besides.
        minimum: Frames that a leaf must have.
        variance_floor: Smallest variance of a leaf's Gaussian.
        merge: Unite leaves of a family that lose less than the last split has gained.

    Returns:
        The tree; after merging it has somewhat fewer leaves.
    """
    grower = _Grower(stats, questions, len(phones) + 1, variance_floor, minimum)
    families = phones.families()
    spoken = [number for number, family in enumerate(families) if family[0] > phones.noises]
    nodes: list[tuple[int, tuple[int, ...], int, int]] = []
    by_number: dict[int, _Leaf] = {}
    roots: dict[int, int] = {}
    for number in spoken:
        rows = np.flatnonzero(np.isin(stats.contexts[:, 1], families[number]))
        roots[number] = -1 - len(by_number)
        by_number[len(by_number)] = grower.leaf(rows, number)
    parents: dict[int, tuple[int, int]] = {}
    last = _split(grower, by_number, nodes, parents, roots, leaves)
    numbering = _merged(by_number, last if merge else 0.0, variance_floor)
    return _numbered(phones, families, nodes, roots, numbering)


def _split(
    grower: _Grower,
    by_number: dict[int, _Leaf],
    nodes: list[tuple[int, tuple[int, ...], int, int]],
    parents: dict[int, tuple[int, int]],
    roots: dict[int, int],
    leaves: int,
) -> float:
    """Split leaves by gain; returns the last split's gain."""
    queue = [(-leaf.gain, number) for number, leaf in by_number.items() if leaf.gain > 0]
    heapq.heapify(queue)
    last = 0.0
    while queue and len(by_number) < leaves:
        gain, number = heapq.heappop(queue)
        leaf, last, node, other = by_number[number], -gain, len(nodes), len(by_number)
        nodes.append((leaf.position, leaf.yes, -1 - number, -1 - other))
        if number in parents:
            above, side = parents[number]
            position, yes, left, right = nodes[above]
            nodes[above] = (position, yes, node, right) if side == 0 else (position, yes, left, node)
        else:
            roots[leaf.family] = node
        by_number[number], by_number[other] = grower.halves(leaf)
        parents[number], parents[other] = (node, 0), (node, 1)
        for half in (number, other):
            if by_number[half].gain > 0:
                heapq.heappush(queue, (-by_number[half].gain, half))
    return last


def _merged(by_number: Mapping[int, _Leaf], threshold: float, floor: float) -> dict[int, int]:
    """Number each leaf gets, the same for leaves of a family whose union loses less than the threshold."""
    numbering: dict[int, int] = {}
    total = 0
    for family in sorted({leaf.family for leaf in by_number.values()}):
        members = [number for number, leaf in by_number.items() if leaf.family == family]
        clusters = merge_clusters(np.stack([by_number[number].total for number in members]), threshold, floor)
        for number, cluster in zip(members, clusters, strict=True):
            numbering[number] = total + cluster
        total += max(clusters) + 1
    return numbering


def _numbered(
    phones: PhoneSet,
    families: Sequence[Sequence[int]],
    nodes: Sequence[tuple[int, tuple[int, ...], int, int]],
    roots: Mapping[int, int],
    numbering: Mapping[int, int],
) -> DecisionTree:
    """The tree with its final pdfs: those of silence and noise come first."""
    table = np.zeros((len(phones) + 1, MAX_STATES), dtype=np.int32)
    noises = 0
    for phone in range(1, phones.noises + 1):
        for state in range(phones.topology(phone).num_states):
            table[phone, state] = -1 - noises
            noises += 1

    def final(node: int) -> int:
        return node if node >= 0 else -1 - (noises + numbering[-1 - node])

    for family, root in roots.items():
        for phone in families[family]:
            table[phone, : phones.topology(phone).num_states] = final(root)
    renumbered = [(position, yes, final(left), final(right)) for position, yes, left, right in nodes]
    return DecisionTree(phones, table, renumbered, noises + len(set(numbering.values())))


Rows = NDArray[np.float64]
"""float64 `[N, 1 + 2 D]`: count, sums and sums of squares."""


def gaussian_log_likelihood(rows: Rows, floor: float) -> NDArray[np.float64]:
    """Log likelihood of frames under the diagonal Gaussian of their own moments.

    -n/2 (D log 2π + D + Σ log σ²), with variances of at least `floor`; 0 for no frames.

    Args:
        rows: `[N, 1 + 2 D]`.
        floor: Smallest variance.

    Returns:
        `[N]`.
    """
    dim = (rows.shape[1] - 1) // 2
    counts = rows[:, :1]
    moments = rows[:, 1:] / np.maximum(counts, 1e-10)
    variances = np.maximum(moments[:, dim:] - np.square(moments[:, :dim]), floor)
    # a floored variance keeps the frames' squared distance: Σ (x - μ)² / σ² is less than n
    spread = np.maximum(moments[:, dim:] - np.square(moments[:, :dim]), 0.0) / variances
    densities = dim * math.log(2 * math.pi) + (np.log(variances) + spread).sum(1)
    return np.where(counts[:, 0] > 0, -0.5 * counts[:, 0] * densities, 0.0)


def _losses(rows: Rows, cluster: int, others: NDArray[np.int64], floor: float, own: Rows) -> Rows:
    """What uniting a cluster with others costs in log-likelihood."""
    together = gaussian_log_likelihood(rows[cluster] + rows[others], floor)
    losses: Rows = own[cluster] + own[others] - together
    return losses


def dendrogram(rows: Rows, floor: float, threshold: float = math.inf) -> list[tuple[int, int]]:
    """Agglomerative clustering: pairs of clusters in the order of their union, cheapest first.

    Args:
        rows: `[N, 1 + 2 D]`, one row for each first cluster.
        floor: Smallest variance.
        threshold: Stop when the cheapest union costs as much.

    Returns:
        Pairs (kept, absorbed) of row numbers: the union goes on under the first's number.
    """
    rows = rows.copy()
    count = len(rows)
    own = gaussian_log_likelihood(rows, floor)
    losses = np.full((count, count), math.inf)
    for cluster in range(count - 1):
        others = np.arange(cluster + 1, count)
        losses[cluster, cluster + 1 :] = _losses(rows, cluster, others, floor, own)
    alive = np.ones(count, dtype=bool)
    unions = []
    while alive.sum() > 1:
        kept, absorbed = (int(i) for i in np.unravel_index(losses.argmin(), losses.shape))
        if losses[kept, absorbed] >= threshold:
            break
        unions.append((kept, absorbed))
        rows[kept] += rows[absorbed]
        own[kept] = gaussian_log_likelihood(rows[kept][None], floor)[0]
        alive[absorbed] = False
        losses[absorbed, :] = losses[:, absorbed] = math.inf
        others = np.flatnonzero(alive)
        others = others[others != kept]
        cost = _losses(rows, kept, others, floor, own)
        losses[np.minimum(kept, others), np.maximum(kept, others)] = cost
    return unions


def merge_clusters(rows: Rows, threshold: float, floor: float) -> list[int]:
    """Unite rows as long as a union costs less than a threshold: the cluster of each row, numbered from 0."""
    label = list(range(len(rows)))
    for kept, absorbed in dendrogram(rows, floor, threshold):
        label = [kept if cluster == absorbed else cluster for cluster in label]
    order = {cluster: number for number, cluster in enumerate(dict.fromkeys(label))}
    return [order[cluster] for cluster in label]


def phonetic_questions(phones: Sequence[int], tables: Sequence[Rows], floor: float = 0.01) -> list[tuple[int, ...]]:
    """Sets of phones that sound alike: every cluster on the way from single phones to all of them.

    Args:
        phones: Phone numbers.
        tables: Statistics of each phone `[N, 1 + 2 D]`, for instance one table for each state; each gives questions.
        floor: Smallest variance.

    Returns:
        Sets, sorted, each once.
    """
    questions: set[tuple[int, ...]] = {(phone,) for phone in phones}
    for rows in tables:
        members = {i: {phone} for i, phone in enumerate(phones)}
        for kept, absorbed in dendrogram(rows, floor):
            members[kept] = members[kept] | members.pop(absorbed)
            questions.add(tuple(sorted(members[kept])))
    return sorted(questions)
