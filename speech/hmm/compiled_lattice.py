"""The lattice search and the search for its best sentences, as loops over arrays that numba compiles.

`speech.hmm.lattice` describes the algorithms and what the arrays mean. Tokens and links of all frames follow one
another in arrays that grow; `begins` has where those of each frame begin. A link is an arc between two tokens: the
token that it leaves and the one it enters, by their places in their frames, and the arc's number.

Order matters where costs are equal, and sums round: `tests/speech/hmm/lattice_in_numpy.py` gives the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speech.compiled import compiled

Array = NDArray[Any]
_SOME = 1024
"""Rows that growing arrays begin with."""
_LINK = np.dtype([("source", "i4"), ("target", "i4"), ("arc", "i4")])


class GraphArrays(NamedTuple):
    """A decoding graph.

    Attributes:
        start: Its first state.
        finals: float64 `[S]`, final costs.
        first: int64 `[2 S + 1]`: the first arc of each state that consumes no frame, and the first that does.
        arcs: Records of ilabel, olabel, weight and target; of each state, first those that consume no frame.
    """

    start: int
    finals: Array
    first: Array
    arcs: Array


# --- the search


@compiled
def search(
    graph: GraphArrays, scores: Array, beam: float, most: int, lattice_beam: float, block: int
) -> tuple[bool, Array, Array, Array, Array]:
    """Search an utterance, and drop what is only on paths outside the lattice beam.

    Args:
        graph: The graph.
        scores: float32 `[T, P]`.
        beam: Tokens with a cost this much above the frame's best one are dropped.
        most: Tokens of a frame from which the search goes on.
        lattice_beam: Paths with a cost this much above the best one's stay.
        block: Frames after which paths are dropped.

    Returns:
        Whether any path is left, `begins` of tokens, links within frames and links to the next one `[T + 2, 3]`, states
        of the tokens, and both kinds of links.
    """
    begins = np.zeros((len(scores) + 2, 3), np.int64)
    places = np.full(len(graph.finals), -1, np.int32)  # of states among the current tokens
    states, costs = np.empty(_SOME, np.int32), np.empty(_SOME, np.float64)
    silent, spoken = np.empty(_SOME, _LINK), np.empty(_SOME, _LINK)
    states[0], costs[0] = graph.start, 0.0
    begins[1, 0] = 1
    cutoff, last = beam, len(scores)
    for frame in range(last + 1):
        if frame:
            cutoff, states, costs, spoken = _step(
                graph, scores[frame - 1], beam, most, places, begins, frame, states, costs, spoken
            )
        if not np.isfinite(cutoff):
            return False, begins, states, silent, spoken
        states, costs, silent = _close(graph, places, begins, frame, cutoff, states, costs, silent)
        if frame == last or (frame and frame % block == 0):
            until = frame - block if frame < last else frame - last
            extra = np.zeros(begins[frame + 1, 0] - begins[frame, 0])
            if frame == last:
                _end(graph, begins, states, costs, extra)
            _prune(graph, scores, lattice_beam, begins, frame, until, extra, states, costs, silent, spoken)
    return True, begins, states, silent, spoken


@compiled
def _end(graph: GraphArrays, begins: Array, states: Array, costs: Array, extra: Array) -> None:
    """How much the best path that ends in each of the last tokens costs above the best one of all."""
    begin, best = begins[-2, 0], np.inf
    complete = _complete(graph, begins, states)
    for token in range(len(extra)):
        final = graph.finals[states[begin + token]] if complete else 0.0
        extra[token] = costs[begin + token] + final
        best = min(best, extra[token])
    for token in range(len(extra)):
        extra[token] -= best


@compiled
def _complete(graph: GraphArrays, begins: Array, states: Array) -> bool:
    """Whether any of the last tokens is in a final state; if not, paths end in all of them."""
    for state in states[begins[-2, 0] : begins[-1, 0]]:  # noqa: SIM110 - numba has no any() of a generator
        if np.isfinite(graph.finals[state]):
            return True
    return False


@compiled
def _room(values: Array, needed: int) -> Array:
    """An array with at least as many rows, and the same beginning."""
    if needed <= len(values):
        return values
    grown = np.empty(max(2 * len(values), needed), values.dtype)
    for row in range(len(values)):  # compiled much sooner than an assignment of slices
        grown[row] = values[row]
    return grown


@compiled
def _step(
    graph: GraphArrays,
    row: Array,
    beam: float,
    most: int,
    places: Array,
    begins: Array,
    frame: int,
    states: Array,
    costs: Array,
    spoken: Array,
) -> tuple[float, Array, Array, Array]:
    """Tokens of a frame, and the links to them; the cutoff is infinite if no state is possible."""
    begin, end, first, arcs = begins[frame - 1, 0], begins[frame, 0], graph.first, graph.arcs
    limit, most_links = _limit(costs[begin:end], beam, most), 0
    for token in range(begin, end):
        if costs[token] <= limit:
            most_links += first[2 * states[token] + 2] - first[2 * states[token] + 1]
    reached, count, best, possible = np.empty(most_links, np.float64), 0, np.inf, True
    for token in range(begin, end):
        if costs[token] <= limit:
            state = states[token]
            for number in range(first[2 * state + 1], first[2 * state + 2]):
                cost = costs[token] + arcs[number].weight - row[arcs[number].ilabel - 1]
                reached[count] = cost
                count += 1
                best = min(best, cost)
                possible &= cost > -np.inf  # NaN is not, either
    cutoff = best + beam
    if not possible or not np.isfinite(cutoff):
        return np.inf, states, costs, spoken
    links, most_links = begins[frame - 1, 2], 0
    for cost in reached:
        most_links += cost <= cutoff
    spoken, count = _room(spoken, links + most_links), 0  # not for each link: it would count references each time
    for token in range(begin, end):
        if costs[token] <= limit:
            state = states[token]
            for number in range(first[2 * state + 1], first[2 * state + 2]):
                if reached[count] <= cutoff:
                    target = arcs[number].target
                    spoken[links].source, spoken[links].target, spoken[links].arc = token - begin, target, number
                    places[target] = links - begins[frame - 1, 2]
                    reached[links - begins[frame - 1, 2]] = reached[count]
                    links += 1
                count += 1
    states, costs, end = _entered(spoken[begins[frame - 1, 2] : links], reached, places, states, costs, end)
    begins[frame, 2], begins[frame + 1, 0] = links, end
    return cutoff, states, costs, spoken


@compiled
def _limit(costs: Array, beam: float, most: int) -> float:
    """The greatest cost of tokens from which the search goes on."""
    best, within = costs[0], 0
    for cost in costs:
        best = min(best, cost)
    chosen = np.empty(len(costs), np.float64)
    for cost in costs:
        if cost <= best + beam:
            chosen[within] = cost
            within += 1
    return _smallest(chosen, most - 1, within - 1) if within > most else best + beam


@compiled
def _smallest(values: Array, rank: int, high: int) -> float:
    """The value of some rank among the first `high + 1`, which change places (quickselect)."""
    low = np.int64(0)
    while low < high:
        pivot, left, right = values[(low + high) // 2], low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while values[right] > pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left, right = left + 1, right - 1
        if rank > right and rank < left:
            break
        low, high = (low, right) if rank <= right else (left, high)
    return values[rank]


@compiled
def _entered(
    links: Array, reached: Array, places: Array, states: Array, costs: Array, begin: int
) -> tuple[Array, Array, int]:
    """The tokens that links lead to, whose targets become places: in the order of the last link to each state.

    `places` has the last link to each state.
    """
    states, costs = _room(states, begin + len(links)), _room(costs, begin + len(links))
    end = begin
    for number in range(len(links)):
        state = links[number].target
        if places[state] == number:
            states[end], costs[end] = state, np.inf
            end += 1
    for token in range(begin, end):
        places[states[token]] = token - begin
    for number in range(len(links)):
        place = places[links[number].target]
        links[number].target = place
        costs[begin + place] = min(costs[begin + place], reached[number])
    return states, costs, end


@compiled
def _close(
    graph: GraphArrays,
    places: Array,
    begins: Array,
    frame: int,
    cutoff: float,
    states: Array,
    costs: Array,
    silent: Array,
) -> tuple[Array, Array, Array]:
    """Add the tokens that arcs without frames lead to, and the links to them."""
    begin, end, first, arcs = begins[frame, 0], begins[frame + 1, 0], graph.first, graph.arcs
    for token in range(begin, end):
        places[states[token]] = token - begin
    improved, waiting = np.arange(begin, end), np.zeros(end - begin, np.bool_)
    reached, targets = np.empty(_SOME, np.float64), np.empty(_SOME, np.int32)
    while len(improved):
        most_links, count = 0, 0
        for token in improved:
            most_links += first[2 * states[token] + 1] - first[2 * states[token]]
        reached, targets = _room(reached, most_links), _room(targets, most_links)
        for token in improved:
            state = states[token]
            for number in range(first[2 * state], first[2 * state + 1]):
                cost = costs[token] + arcs[number].weight
                if cost <= cutoff:
                    reached[count], targets[count] = cost, arcs[number].target
                    count += 1
        fresh, states = end, _room(states, end + count)
        for state in targets[:count]:
            if places[state] < 0:
                states[end], places[state] = state, 0
                end += 1
        states[fresh:end].sort()
        costs, waiting = _room(costs, end), _room(waiting, end - begin)
        for token in range(fresh, end):
            places[states[token]], costs[token], waiting[token - begin] = token - begin, np.inf, False
        improved, number = np.empty(count, np.int64), 0
        for cost, state in zip(reached[:count], targets[:count]):  # noqa: B905 - numba knows no strict
            token = begin + places[state]
            if cost < costs[token]:
                costs[token] = cost
                if not waiting[token - begin]:
                    waiting[token - begin], improved[number] = True, token
                    number += 1
        improved = improved[:number]
        for token in improved:
            waiting[token - begin] = False
    begins[frame + 1, 0] = end
    silent = _link(graph, places, begins, frame, cutoff, states, costs, silent)
    for token in range(begin, end):
        places[states[token]] = -1
    return states, costs, silent


@compiled
def _link(
    graph: GraphArrays,
    places: Array,
    begins: Array,
    frame: int,
    cutoff: float,
    states: Array,
    costs: Array,
    silent: Array,
) -> Array:
    """Add the links within a frame."""
    begin, end, links, first, arcs = begins[frame, 0], begins[frame + 1, 0], begins[frame, 1], graph.first, graph.arcs
    most_links = 0
    for token in range(begin, end):
        most_links += first[2 * states[token] + 1] - first[2 * states[token]]
    silent = _room(silent, links + most_links)
    for token in range(begin, end):
        state = states[token]
        for number in range(first[2 * state], first[2 * state + 1]):
            if costs[token] + arcs[number].weight <= cutoff:
                silent[links].source, silent[links].target = token - begin, places[arcs[number].target]
                silent[links].arc = number
                links += 1
    begins[frame + 1, 1] = links
    return silent


# --- pruning


@compiled
def _prune(
    graph: GraphArrays,
    scores: Array,
    lattice_beam: float,
    begins: Array,
    last: int,
    until: int,
    last_extra: Array,
    states: Array,
    costs: Array,
    silent: Array,
    spoken: Array,
) -> None:
    """Drop links and tokens that are only on paths outside the lattice beam, from the last frame backwards.

    Args:
        graph: The graph.
        scores: float32 `[T, P]`.
        lattice_beam: Of `search`.
        begins: Of the frames up to the last one, changed in place like what they are of.
        last: Number of the last frame.
        until: Frames before this one are left alone if no token after them was dropped.
        last_extra: For each token of the last frame, how much its best path's cost is above the best one's.
        states: Of the tokens.
        costs: Of the tokens.
        silent: Links within frames.
        spoken: Links to the next frame.
    """
    extra = np.full(begins[last + 1, 0], np.inf)
    places = np.full(len(extra), -1, np.int32)  # after pruning
    for token in range(len(last_extra)):
        extra[begins[last, 0] + token] = last_extra[token]
    frame, kept = last, np.int64(0)
    while frame >= 0:
        begin, end = begins[frame, 0], begins[frame + 1, 0]
        if frame < last:
            if frame < until and kept == begins[frame + 2, 0] - end:
                break
            row = scores[frame]
            for link in spoken[begins[frame, 2] : begins[frame + 1, 2]]:
                arc = graph.arcs[link.arc]
                source, target = begin + link.source, end + link.target
                above = extra[target] + (costs[source] + (arc.weight - row[arc.ilabel - 1]) - costs[target])
                extra[source] = min(extra[source], above)
                if above > lattice_beam or places[target] < 0:
                    link.arc = -1
        _prune_silent(
            graph, lattice_beam, silent[begins[frame, 1] : begins[frame + 1, 1]], costs[begin:end], extra[begin:end]
        )
        kept = 0
        for token in range(begin, end):
            if extra[token] <= lattice_beam:
                places[token] = kept
                kept += 1
        frame -= 1
    _compact(begins, frame + 1, last, places, states, costs, silent, spoken)


@compiled
def _prune_silent(graph: GraphArrays, lattice_beam: float, links: Array, costs: Array, extra: Array) -> None:
    """Mark the links within a frame that go; `extra` becomes what each token is above the best path through them."""
    changed = True
    while changed:
        changed = False
        for link in links:
            weight = graph.arcs[link.arc].weight
            above = extra[link.target] + (costs[link.source] + weight - costs[link.target])
            if above < extra[link.source]:
                extra[link.source], changed = above, True
    for link in links:
        weight = graph.arcs[link.arc].weight
        above = extra[link.target] + (costs[link.source] + weight - costs[link.target])
        if above > lattice_beam or extra[link.target] > lattice_beam:
            link.arc = -1


@compiled
def _compact(
    begins: Array,
    first: int,
    last: int,
    places: Array,
    states: Array,
    costs: Array,
    silent: Array,
    spoken: Array,
) -> None:
    """Move tokens and links that stay, of the frames from one on, to where they belong."""
    tokens, inside, onward = begins[first, 0], begins[first, 1], begins[first, 2]
    begin, silent_begin, spoken_begin = tokens, inside, onward
    for frame in range(first, last + 1):
        end, silent_end, spoken_end = begins[frame + 1, 0], begins[frame + 1, 1], begins[frame + 1, 2]
        begins[frame, 0], begins[frame, 1], begins[frame, 2] = tokens, inside, onward
        for token in range(begin, end):
            if places[token] >= 0:
                states[tokens], costs[tokens] = states[token], costs[token]
                tokens += 1
        for link in silent[silent_begin:silent_end]:
            if link.arc >= 0:
                silent[inside].source, silent[inside].target = places[begin + link.source], places[begin + link.target]
                silent[inside].arc = link.arc
                inside += 1
        for link in spoken[spoken_begin:spoken_end]:
            if link.arc >= 0:
                spoken[onward].source, spoken[onward].target = places[begin + link.source], places[end + link.target]
                spoken[onward].arc = link.arc
                onward += 1
        begin, silent_begin, spoken_begin = end, silent_end, spoken_end
    begins[last + 1, 0], begins[last + 1, 1], begins[last + 1, 2] = tokens, inside, onward


# --- the lattice


@compiled
def assemble(
    graph: GraphArrays, scores: Array, begins: Array, states: Array, silent: Array, spoken: Array
) -> tuple[bool, Array, Array, Array, Array, Array, Array, Array, Array]:
    """The arrays of a lattice from what a search gives.

    Args:
        graph: The graph.
        scores: float32 `[T, P]`.
        begins: Where tokens and links of each frame begin.
        states: Of the tokens.
        silent: Links within frames.
        spoken: Links to the next frame.

    Returns:
        Whether paths end in final states of the graph; frames before each state of the lattice and final costs `[S]`;
        sources, targets, pdfs, words, graph and acoustic costs of the arcs `[A]`.
    """
    last, size = len(begins) - 2, begins[-1, 0]
    numbers, frames = np.empty(size, np.int32), np.empty(size, np.int32)
    for frame in range(last + 1):
        begin = begins[frame, 0]
        own = numbers[begin : begins[frame + 1, 0]]
        _sort_topologically(own, begin, silent[begins[frame, 1] : begins[frame + 1, 1]])
        for token in range(len(own)):
            frames[begin + token] = frame
    complete, finals = _complete(graph, begins, states), np.full(size, np.inf)
    for token in range(begins[last, 0], size):
        finals[numbers[token]] = graph.finals[states[token]] if complete else 0.0
    count = begins[-1, 1] + begins[-1, 2]
    sources, targets = np.empty(count, np.int32), np.empty(count, np.int32)
    pdfs, words = np.empty(count, np.int32), np.empty(count, np.int32)
    costs, acoustic = np.empty(count, np.float64), np.empty(count, np.float64)
    places = _first_places(begins, numbers, silent, spoken)
    for frame in range(last + 1):
        begin, after = begins[frame, 0], begins[frame + 1, 0]
        for link in silent[begins[frame, 1] : begins[frame + 1, 1]]:
            state, arc = numbers[begin + link.source], graph.arcs[link.arc]
            place = places[state]
            sources[place], targets[place], pdfs[place] = state, numbers[begin + link.target], -1
            words[place], costs[place], acoustic[place] = arc.olabel, arc.weight, 0.0
            places[state] += 1
        for link in spoken[begins[frame, 2] : begins[frame + 1, 2]]:
            state, arc = numbers[begin + link.source], graph.arcs[link.arc]
            place = places[state]
            sources[place], targets[place], pdfs[place] = state, numbers[after + link.target], arc.ilabel - 1
            words[place], costs[place] = arc.olabel, arc.weight
            acoustic[place] = -scores[frame, arc.ilabel - 1]
            places[state] += 1
    return complete, frames, finals, sources, targets, pdfs, words, costs, acoustic


@compiled
def _sort_topologically(places: Array, begin: int, links: Array) -> None:
    """Number a frame's tokens, from a number on, in an order in which arcs without frames lead forward."""
    size, deepest, changed, rounds = len(places), 0, True, 0
    depth = np.zeros(size, np.int32)
    while changed and rounds < size:
        changed, rounds = False, rounds + 1
        for link in links:
            if depth[link.target] <= depth[link.source]:
                depth[link.target] = depth[link.source] + 1
                deepest, changed = max(deepest, depth[link.target]), True
    first = np.zeros(deepest + 2, np.int64)
    for level in depth:
        first[level + 1] += 1
    first[0] = begin
    for level in range(deepest + 1):
        first[level + 1] += first[level]
    for token in range(size):
        places[token] = first[depth[token]]
        first[depth[token]] += 1


@compiled
def _first_places(begins: Array, numbers: Array, silent: Array, spoken: Array) -> Array:
    """The number of each state's first arc."""
    places = np.zeros(len(numbers) + 1, np.int64)
    for frame in range(len(begins) - 1):
        begin = begins[frame, 0]
        for link in silent[begins[frame, 1] : begins[frame + 1, 1]]:
            places[numbers[begin + link.source] + 1] += 1
        for link in spoken[begins[frame, 2] : begins[frame + 1, 2]]:
            places[numbers[begin + link.source] + 1] += 1
    for state in range(len(numbers)):
        places[state + 1] += places[state]
    return places


@compiled
def remaining(first: Array, targets: Array, costs: Array, finals: Array) -> Array:
    """The cost of the best way from each state of a lattice to an end `[S]`."""
    best = finals.copy()
    for state in range(len(finals) - 1, -1, -1):
        for arc in range(first[state], first[state + 1]):
            best[state] = min(best[state], costs[arc] + best[targets[arc]])
    return best


# --- sentences

_DIGITS = 1e7
"""Prefixes whose states' costs differ from each other by the same, to seven digits, go on in the same way."""
_GROUP = np.dtype([("first", "i8"), ("last", "i8"), ("step", "i8"), ("best", "f8"), ("total", "f8")])
"""States after a prefix and its next word: its entries, the step that follows, the cost of the best one, and the least
with what remains."""
_ENTRY = np.dtype([("state", "i8"), ("arc", "i8"), ("cost", "f8")])
"""A state of a group, the arc that puts the word out, and the cost since the best state of the prefix before."""
_STEP = np.dtype([("groups", "i8"), ("groups_end", "i8"), ("backs", "i8"), ("backs_end", "i8"), ("end", "i8"),
                  ("end_cost", "f8")])  # fmt: skip
"""What follows a group: the groups by next word, over which arcs without a word states are reached, and the best end:
its state, -1 if there is none, and its cost."""
_BACK = np.dtype([("state", "i8"), ("arc", "i8")])
"""The last arc of the best way to a state; -1 where the word before it ended."""
_PREFIX = np.dtype([("before", "i8"), ("group", "i8"), ("cost", "f8")])
"""A beginning of sentences, with the cost of its best state."""
_ITEM = np.dtype([("cost", "f8"), ("number", "i8"), ("prefix", "i8"), ("end", "i8")])
"""A prefix, or a sentence that ends in a state, by the cost of its best completion."""
_CANDIDATE = np.dtype([("pair", "i8"), ("arc", "i8"), ("cost", "f8")])


class Arcs(NamedTuple):
    """A lattice, as the search for sentences reads it.

    Attributes:
        first: int64 `[S + 1]`, the first arc of each state.
        sources: int32 `[A]`.
        targets: int32 `[A]`.
        costs: float64 `[A]`.
        finals: float64 `[S]`.
        remaining: float64 `[S]`.
        pairs: int64 `[A]`, numbers of pairs of word and target; -1 without a word.
        words: int64 `[pairs]`, the word of each, by numbers from 0 on.
    """

    first: Array
    sources: Array
    targets: Array
    costs: Array
    finals: Array
    remaining: Array
    pairs: Array
    words: Array


class _Marks(NamedTuple):
    """What is known of states, pairs and words in the step whose number is in the second column, or array.

    Attributes:
        reached: float64 `[S]`, costs of states.
        states: int64 `[S, 2]`, the arcs over which they are reached.
        pairs: int64 `[pairs, 2]`, places of candidates.
        words: int64 `[words, 2]`, numbers of groups.
    """

    reached: Array
    states: Array
    pairs: Array
    words: Array


@compiled
def best_sentences(lattice: Arcs, limit: int, beam: float, most_work: int) -> tuple[Array, Array]:
    """The best paths of different word sequences, the best first.

    Args:
        lattice: The lattice.
        limit: Most paths.
        beam: Paths with a cost this much above the best one's are left out.
        most_work: Arcs that are looked at, at most.

    Returns:
        int64, the arcs of all paths one after another, and where each begins, with the end of the last one.
    """
    marks = _Marks(
        np.empty(len(lattice.finals)),
        np.full((len(lattice.finals), 2), -1, np.int64),
        np.full((len(lattice.words), 2), -1, np.int64),
        np.full((len(lattice.words), 2), -1, np.int64),  # there are no more words than pairs
    )
    used = np.array([0, 1, 1, 0, 1, 0, 0])  # steps, groups, entries, backs, prefixes, items ever, items
    steps, groups, entries = np.empty(_SOME, _STEP), np.empty(_SOME, _GROUP), np.empty(_SOME, _ENTRY)
    backs, prefixes, items = np.empty(_SOME, _BACK), np.empty(_SOME, _PREFIX), np.empty(_SOME, _ITEM)
    table = np.full(2 * _SOME, -1, np.int64)
    entries[0].state, entries[0].arc, entries[0].cost = 0, -1, 0.0
    groups[0].first, groups[0].last, groups[0].step, groups[0].best = 0, 1, -1, 0.0
    prefixes[0].before, prefixes[0].group, prefixes[0].cost = -1, 0, 0.0
    longer, no_end = np.int64(0), np.int64(-1)
    items = _push(items, used, lattice.remaining[0], longer, no_end)
    most, work = lattice.remaining[0] + beam, 0
    arcs, begins = np.empty(_SOME, np.int64), [0]
    while used[6] and work < most_work and len(begins) <= limit:
        prefix, end = items[0].prefix, items[0].end
        _pop(items, used)
        if end >= 0:
            arcs, count = _path(lattice, steps, groups, entries, backs, prefixes, prefix, end, arcs, begins[-1])
            begins.append(count)
            continue
        group, cost = prefixes[prefix].group, prefixes[prefix].cost
        if groups[group].step < 0:
            table, slot = _slot(table, groups, entries, group, used[0])
            if table[slot] < 0:
                steps, groups, entries, backs, more = _followed(
                    lattice, marks, used, steps, groups, entries, backs, group, most - cost
                )
                table[slot], work = group, work + more
            groups[group].step = groups[table[slot]].step
        step = steps[groups[group].step]
        if step.end >= 0 and cost + step.end_cost <= most:
            items = _push(items, used, cost + step.end_cost, prefix, step.end)
        for following in range(step.groups, step.groups_end):
            total = cost + groups[following].total
            if total <= most:
                longer = used[4]
                prefixes = _room(prefixes, longer + 1)
                prefixes[longer].before, prefixes[longer].group = prefix, following
                prefixes[longer].cost = cost + groups[following].best
                used[4] += 1
                items = _push(items, used, total, longer, no_end)
    return arcs[: begins[-1]], np.array(begins)


@compiled
def _push(items: Array, used: Array, cost: float, prefix: int, end: int) -> Array:
    """Add to a heap, which is ordered by costs, then by numbers."""
    number, place = used[5], used[6]
    used[5], used[6] = number + 1, place + 1
    items = _room(items, place + 1)
    while place:
        above = (place - 1) // 2
        if items[above].cost < cost or (items[above].cost == cost and items[above].number < number):
            break
        items[place] = items[above]
        place = above
    items[place].cost, items[place].number, items[place].prefix, items[place].end = cost, number, prefix, end
    return items


@compiled
def _pop(items: Array, used: Array) -> None:
    """Remove the first one from a heap."""
    used[6] -= 1
    size, place, below = used[6], 0, 1
    last = items[size]
    cost, number, prefix, end = last.cost, last.number, last.prefix, last.end
    while below < size:
        left, right = items[below], items[below + 1]
        if below + 1 < size and (right.cost < left.cost or (right.cost == left.cost and right.number < left.number)):
            below += 1
        least = items[below]
        if cost < least.cost or (cost == least.cost and number < least.number):
            break
        items[place] = items[below]
        place, below = below, 2 * below + 1
    items[place].cost, items[place].number, items[place].prefix, items[place].end = cost, number, prefix, end


@compiled
def _slot(table: Array, groups: Array, entries: Array, group: int, filled: int) -> tuple[Array, int]:
    """Where a hash table has a group with the same states and relative costs, or room for this one."""
    if 2 * filled > len(table):
        grown = np.full(2 * len(table), -1, np.int64)
        for known in table:
            if known >= 0:
                grown[_place(grown, groups, entries, known)] = known
        table = grown
    return table, _place(table, groups, entries, group)


@compiled
def _place(table: Array, groups: Array, entries: Array, group: int) -> int:
    first, last, best = groups[group].first, groups[group].last, groups[group].best
    mixed = 0
    for entry in entries[first:last]:
        mixed = 1_000_003 * (mixed ^ entry.state) + int(np.rint((entry.cost - best) * _DIGITS))
        mixed ^= mixed >> 17
    place = mixed & (len(table) - 1)
    while table[place] >= 0:
        other = groups[table[place]]
        same = other.last - other.first == last - first
        for number in range(last - first if same else 0):
            mine, its = entries[first + number], entries[other.first + number]
            costs = np.rint((mine.cost - best) * _DIGITS), np.rint((its.cost - other.best) * _DIGITS)
            same &= mine.state == its.state and costs[0] == costs[1]
        if same:
            break
        place = (place + 1) & (len(table) - 1)
    return place


@compiled
def _followed(
    lattice: Arcs,
    marks: _Marks,
    used: Array,
    steps: Array,
    groups: Array,
    entries: Array,
    backs: Array,
    group: int,
    limit: float,
) -> tuple[Array, Array, Array, Array, int]:
    """Add the step that follows a group, on paths up to a cost since its best state; returns arcs looked at, too."""
    number, work, end, end_cost = used[0], 0, -1, np.inf
    waiting, size, count = np.empty(_SOME, np.int64), np.int64(0), np.int64(0)
    for entry in entries[groups[group].first : groups[group].last]:
        waiting, size = _put(waiting, size, entry.state), size + 1
        marks.reached[entry.state] = entry.cost - groups[group].best
        marks.states[entry.state, 0], marks.states[entry.state, 1] = -1, number
    candidates, first_back, first_group = np.empty(_SOME, _CANDIDATE), used[3], used[1]
    while size:
        state, size = waiting[0], _take(waiting, size)
        here = marks.reached[state]
        backs = _room(backs, used[3] + 1)
        backs[used[3]].state, backs[used[3]].arc = state, marks.states[state, 0]
        used[3] += 1
        if lattice.finals[state] < np.inf and here + lattice.finals[state] < end_cost:
            end, end_cost = state, here + lattice.finals[state]
        work += lattice.first[state + 1] - lattice.first[state]
        for arc in range(lattice.first[state], lattice.first[state + 1]):
            target, cost = np.int64(lattice.targets[arc]), here + lattice.costs[arc]
            if cost + lattice.remaining[target] > limit:
                continue
            if lattice.pairs[arc] >= 0:
                candidates = _room(candidates, count + 1)
                count = _noted(marks, number, candidates, count, lattice.pairs[arc], arc, cost)
                continue
            if marks.states[target, 1] != number:
                waiting, size = _put(waiting, size, target), size + 1
            elif not cost < marks.reached[target]:
                continue
            marks.reached[target] = cost
            marks.states[target, 0], marks.states[target, 1] = arc, number
    groups, entries = _grouped(lattice, marks, used, groups, entries, candidates[:count])
    steps = _room(steps, number + 1)
    step = steps[number]
    step.groups, step.groups_end, step.backs, step.backs_end = first_group, used[1], first_back, used[3]
    step.end, step.end_cost = end, end_cost
    groups[group].step = number
    used[0] += 1
    return steps, groups, entries, backs, work


@compiled
def _noted(marks: _Marks, step: int, candidates: Array, count: int, pair: int, arc: int, cost: float) -> int:
    """Add an arc with a word, or replace a worse one with the same word and target; returns how many there are."""
    if marks.pairs[pair, 1] != step:
        marks.pairs[pair, 0], marks.pairs[pair, 1] = count, step
        candidates[count].pair, candidates[count].arc, candidates[count].cost = pair, arc, cost
        return count + 1
    known = candidates[marks.pairs[pair, 0]]
    if cost < known.cost:
        known.arc, known.cost = arc, cost
    return count


@compiled
def _grouped(
    lattice: Arcs, marks: _Marks, used: Array, groups: Array, entries: Array, candidates: Array
) -> tuple[Array, Array]:
    """Add the groups of a step, one for each word in the order in which they occur; states of a group are sorted."""
    step, first_group = used[0], used[1]
    for candidate in candidates:
        word = lattice.words[candidate.pair]
        if marks.words[word, 1] != step:
            marks.words[word, 0], marks.words[word, 1] = used[1], step
            groups = _room(groups, used[1] + 1)
            groups[used[1]].last = 0
            used[1] += 1
        groups[marks.words[word, 0]].last += 1
    for group in groups[first_group : used[1]]:
        count = group.last
        group.first = group.last = used[2]
        group.step, group.best, group.total = -1, np.inf, np.inf
        used[2] += count
    entries = _room(entries, used[2])
    for candidate in candidates:
        group = groups[marks.words[lattice.words[candidate.pair], 0]]
        state, place = lattice.targets[candidate.arc], group.last
        while place > group.first and entries[place - 1].state > state:
            entries[place] = entries[place - 1]
            place -= 1
        entries[place].state, entries[place].arc, entries[place].cost = state, candidate.arc, candidate.cost
        group.last += 1
        group.best = min(group.best, candidate.cost)
        group.total = min(group.total, candidate.cost + lattice.remaining[state])
    return groups, entries


@compiled
def _put(waiting: Array, size: int, state: int) -> Array:
    """Add a state to a heap."""
    waiting = _room(waiting, size + 1)
    place = size
    while place and waiting[(place - 1) // 2] > state:
        waiting[place] = waiting[(place - 1) // 2]
        place = (place - 1) // 2
    waiting[place] = state
    return waiting


@compiled
def _take(waiting: Array, size: int) -> int:
    """Remove the first state from a heap; returns how many are left."""
    size -= 1
    place, below, last = 0, 1, waiting[size]
    while below < size:
        if below + 1 < size and waiting[below + 1] < waiting[below]:
            below += 1
        if last <= waiting[below]:
            break
        waiting[place] = waiting[below]
        place, below = below, 2 * below + 1
    waiting[place] = last
    return size


@compiled
def _path(
    lattice: Arcs,
    steps: Array,
    groups: Array,
    entries: Array,
    backs: Array,
    prefixes: Array,
    prefix: int,
    state: int,
    arcs: Array,
    begin: int,
) -> tuple[Array, int]:
    """Write the arcs of the best path of a sentence that ends in a state; returns where they end, too."""
    end = begin
    while prefix >= 0:
        group = groups[prefixes[prefix].group]
        step = steps[group.step]
        arc = _last_arc(backs, step.backs, step.backs_end, state)
        while arc >= 0:
            arcs = _room(arcs, end + 1)
            arcs[end], state = arc, np.int64(lattice.sources[arc])
            end += 1
            arc = _last_arc(backs, step.backs, step.backs_end, state)
        prefix = prefixes[prefix].before
        if prefix >= 0:
            arc = _last_arc(entries, group.first, group.last, state)
            arcs = _room(arcs, end + 1)
            arcs[end], state = arc, np.int64(lattice.sources[arc])
            end += 1
    for place in range((end - begin) // 2):
        arcs[begin + place], arcs[end - 1 - place] = arcs[end - 1 - place], arcs[begin + place]
    return arcs, end


@compiled
def _last_arc(reached: Array, first: int, last: int, state: int) -> int:
    """The arc over which a state is reached, in rows that are sorted by state."""
    while first < last:
        middle = (first + last) // 2
        if reached[middle].state < state:
            first = middle + 1
        else:
            last = middle
    return reached[first].arc
