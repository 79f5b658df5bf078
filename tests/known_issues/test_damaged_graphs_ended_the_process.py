"""Decoding graphs with numbers out of range: OpenFst and kaldi-decoder read outside their arrays, or never returned.

A start state, an arc's target or a label beyond the graph's tables ended the process by a segmentation fault; a cycle
that consumes no frame and whose cost falls kept the search going for ever; counts in the header were allocated as read.
"""

import struct

import kaldifst
import numpy as np
import pytest

from speech.hmm.decode import GraphSearch
from speech.hmm.decoding_graph import WordTable
from speech.hmm.fst_arrays import FstArrays
from speech.hmm.graph_files import read_graph
from speech.hypotheses import DecodeError

GRAPH = "0 1 1 1 0.5\n1 0 2 2 0.5\n1 0\n"


def graph_file(folder, fst=GRAPH, **changes):
    """A graph's file with other values in its first arc, of its start or of its last final cost."""
    arrays = FstArrays.of(kaldifst.compile(fst))
    for name, value in changes.items():
        if name == "start":
            arrays.start = value
        elif name == "final":
            arrays.finals[-1] = value
        else:
            arrays.arcs[name][0] = value
    arrays.write(folder / "graph.fst")
    (folder / "words.txt").write_text("A\nB\n")
    return folder / "graph.fst", folder / "words.txt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 2}, "starts in state 2"),
        ({"start": -1}, "starts in state -1"),
        ({"target": 2}, "not among its 2"),
        ({"target": -1}, "not among its 2"),
        ({"ilabel": -1}, "negative label"),
        ({"olabel": -1}, "negative label"),
        ({"olabel": 3}, "2 words, fewer than the graph"),
        ({"weight": np.nan}, "no number"),
        ({"weight": -np.inf}, "no number"),
        ({"final": np.nan}, "no number"),
        ({"final": -np.inf}, "no number"),
    ],
)
def test_number_out_of_range_is_refused(tmp_path, change, message):
    with pytest.raises(DecodeError, match=message):
        read_graph(*graph_file(tmp_path, **change))


def test_intact_graph_is_read(tmp_path):
    graph = read_graph(*graph_file(tmp_path, weight=np.inf))  # an arc that is never taken
    assert graph.words == WordTable(("A", "B"))
    assert graph.arrays.arcs["target"].tolist() == [1, 0]


def test_cycle_without_frames_is_refused(tmp_path):
    with pytest.raises(DecodeError, match="consumes no frame"):
        read_graph(*graph_file(tmp_path, "0 1 1 1 0.5\n1 0 0 0 -0.5\n0 1 0 0 -0.5\n1 0\n"))


def test_way_without_frames_is_no_cycle(tmp_path):
    read_graph(*graph_file(tmp_path, "0 1 1 1 0.5\n1 2 0 0 -0.5\n2 0 2 0 0.5\n2 0\n"))


def test_empty_graph_is_refused(tmp_path):
    empty = FstArrays(-1, *(np.zeros(0, dtype=kind) for kind in (np.float32, np.int32)), FstArrays.of(
        kaldifst.compile(GRAPH)).arcs[:0])  # fmt: skip
    empty.write(tmp_path / "graph.fst")
    (tmp_path / "words.txt").write_text("A\n")
    with pytest.raises(DecodeError, match="no states"):
        read_graph(tmp_path / "graph.fst", tmp_path / "words.txt")


@pytest.mark.parametrize(("place", "value"), [(49, 10**15), (57, 10**15), (49, -1), (57, -1)])
def test_claimed_counts_are_compared_with_the_size_of_the_file(tmp_path, place, value):
    path, _ = graph_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[place : place + 8] = struct.pack("<q", value)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="bytes that it claims"):
        FstArrays.read(path)


def test_state_that_claims_more_arcs_is_refused_before_they_are_allocated(tmp_path):
    path, _ = graph_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[65 + 8 : 65 + 12] = struct.pack("<I", 2**32 - 1)  # number of arcs of the first state
    path.write_bytes(data)
    with pytest.raises(ValueError, match="other arcs"):
        FstArrays.read(path)


def test_every_truncated_graph_is_refused(tmp_path):
    path, _ = graph_file(tmp_path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="constant transducer|bytes that it claims"):
            FstArrays.read(path)


def test_scores_of_fewer_states_than_the_graph_are_refused(tmp_path):
    graph = read_graph(*graph_file(tmp_path))
    search = GraphSearch(graph.arrays, graph.words)
    for call in (search, lambda scores: search.nbest(scores, 2, 8.0)):
        with pytest.raises(ValueError, match="2 states, the log-likelihoods 1"):
            call(np.zeros((3, 1), dtype=np.float32))
