"""Weighted transducers as numpy arrays, and back, through OpenFst's file format for constant transducers.

Graphs have millions of arcs: what changes every arc is done on arrays, and OpenFst (kaldifst) does the rest.
"""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np
from numpy.typing import NDArray

_MAGIC = 2125659606
_STATE = np.dtype([("final", "<f4"), ("first", "<u4"), ("arcs", "<u4"), ("in_eps", "<u4"), ("out_eps", "<u4")])
_ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("weight", "<f4"), ("target", "<i4")])
_HEAD = struct.pack("<ii5si8sii", _MAGIC, 5, b"const", 8, b"standard", 2, 0)
_COUNTS = struct.Struct("<Qqqq")  # properties, start, states, arcs
_EXPANDED = 1  # the property that OpenFst's constant transducers have; the others are found out when needed
_CYCLIC = 1 << 34  # OpenFst's kCyclic


@dataclass
class FstArrays:
    """A transducer.

    Attributes:
        start: Its first state.
        finals: float32 `[S]`, final costs, infinite where a state is not final.
        sources: int32 `[A]`, sorted: the state that each arc leaves.
        arcs: `[A]`, records of ilabel, olabel, weight (a cost) and target.
    """

    start: int
    finals: NDArray[np.float32]
    sources: NDArray[np.int32]
    arcs: NDArray[Any]

    def write(self, path: Path) -> None:
        """Write a constant transducer that `kaldifst.StdConstFst.read` reads."""
        states = np.zeros(len(self.finals), dtype=_STATE)
        counts = np.bincount(self.sources, minlength=len(states))
        states["final"], states["arcs"] = self.finals, counts
        states["first"] = np.cumsum(counts) - counts
        for field, label in (("in_eps", "ilabel"), ("out_eps", "olabel")):
            states[field] = np.bincount(self.sources[self.arcs[label] == 0], minlength=len(states))
        with path.open("wb") as file:
            file.write(_HEAD)
            file.write(_COUNTS.pack(_EXPANDED, self.start, len(states), len(self.arcs)))
            states.tofile(file)
            self.arcs.tofile(file)

    @classmethod
    def read(cls, path: Path) -> FstArrays:
        """The inverse of `write`.

        Raises:
            ValueError: The file is no constant transducer, it is damaged, or a number in it is out of range.
        """
        with path.open("rb") as file:
            head = file.read(len(_HEAD) + _COUNTS.size)
            if not head.startswith(_HEAD) or len(head) < len(_HEAD) + _COUNTS.size:
                raise ValueError(f"{path} is not a constant transducer of OpenFst: build the graph again")
            _, start, count, arcs = _COUNTS.unpack(head[len(_HEAD) :])
            expected = len(head) + count * _STATE.itemsize + arcs * _ARC.itemsize
            # compared before anything is allocated: the counts may be anything
            if min(count, arcs) < 0 or os.fstat(file.fileno()).st_size != expected:
                raise ValueError(f"{path} does not have the {expected} bytes that it claims: build the graph again")
            states = np.fromfile(file, _STATE, count)
            records = np.fromfile(file, _ARC, arcs)
        if int(states["arcs"].sum(dtype=np.int64)) != arcs:
            raise ValueError(f"{path} has other arcs than its states claim: build the graph again")
        sources = np.repeat(np.arange(count, dtype=np.int32), states["arcs"])
        graph = cls(start, states["final"].copy(), sources, records)
        if wrong := graph.fault():
            raise ValueError(f"{path} has {wrong}: build the graph again")
        return graph

    def fault(self) -> str:
        """What is out of range; empty if nothing is. OpenFst and kaldi-decoder do not look, and end the process."""
        size, arcs = len(self.finals), self.arcs
        if not (0 <= self.start < size or (size == 0 and self.start == -1)):
            return f"{size} states, and starts in state {self.start}"
        if len(arcs) and not 0 <= arcs["target"].min() <= arcs["target"].max() < size:
            return f"an arc to a state that is not among its {size}"
        if len(arcs) and min(arcs["ilabel"].min(), arcs["olabel"].min()) < 0:
            return "a negative label"
        if not (arcs["weight"] > -np.inf).all() or not (self.finals > -np.inf).all():  # NaN is not greater either
            return "a cost that is no number"
        return ""

    def has_silent_cycle(self) -> bool:
        """Whether arcs that consume no input form a cycle, in which a search may go round for ever."""
        silent = self.arcs["ilabel"] == 0
        part = FstArrays(self.start, self.finals, self.sources[silent], self.arcs[silent])
        return bool(part.constant().properties(_CYCLIC, True))

    def wordless_labels(self) -> NDArray[np.int32]:
        """Input labels on paths from the start to a final state that put out nothing, sorted.

        In a decoding graph, these are silence's: each word puts itself out somewhere. There are none if the language
        model has no empty sentence.
        """
        wordless = self.arcs["olabel"] == 0
        sources, arcs = self.sources[wordless], self.arcs[wordless]
        ahead, back = np.zeros(len(self.finals), dtype=bool), np.isfinite(self.finals)
        if len(ahead):
            ahead[self.start] = True
        _spread(ahead, sources, arcs["target"])
        _spread(back, arcs["target"], sources)
        labels = np.unique(arcs["ilabel"][ahead[sources] & back[arcs["target"]]])
        return labels[labels > 0].astype(np.int32)

    @classmethod
    def of(cls, fst: Any) -> FstArrays:
        """The arrays of a kaldifst transducer."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "fst"
            constant = fst if isinstance(fst, kaldifst.StdConstFst) else kaldifst.StdConstFst(fst)
            if not constant.write(str(path)):
                raise OSError(errno.ENOSPC, "a graph cannot be written: is the disk full?", str(path))
            return cls.read(path)

    def constant(self) -> Any:
        """As kaldifst's constant transducer."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "fst"
            self.write(path)
            return kaldifst.StdConstFst.read(str(path))

    def vector(self) -> Any:
        """As kaldifst's mutable transducer."""
        return kaldifst.StdVectorFst(self.constant())


def _spread(reached: NDArray[np.bool_], sources: NDArray[Any], targets: NDArray[Any]) -> None:
    """Add the states to which arcs lead from those that are reached, and from these, in place."""
    before = -1
    while before != (before := int(reached.sum())):
        reached[targets[reached[sources]]] = True


def arc_records(ilabel: Any, olabel: Any, weight: Any, target: Any) -> NDArray[Any]:
    """Arcs from columns."""
    records = np.zeros(len(target), dtype=_ARC)
    records["ilabel"], records["olabel"], records["weight"], records["target"] = ilabel, olabel, weight, target
    return records


def from_arcs(start: int, finals: NDArray[np.float32], sources: NDArray[Any], arcs: NDArray[Any]) -> FstArrays:
    """A transducer from arcs in any order."""
    order = np.argsort(sources, kind="stable")
    return FstArrays(start, finals.astype(np.float32), sources[order].astype(np.int32), arcs[order])
