"""Hybrid: an acoustic model of the tied states of hidden Markov models, and a graph (Bourlard and Morgan 1994)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import override

from recognition.systems.acoustic import FrameSystem

if TYPE_CHECKING:
    from recognition.bundle import BundleSpec


class HybridSystem(FrameSystem):
    """An acoustic model of tied states, trained with `train.objective: frame_cross_entropy`."""

    kind: Literal["hybrid"] = "hybrid"
    objectives: ClassVar[tuple[str, ...]] = ("frame_cross_entropy",)
    targets: ClassVar[Literal["tokens", "states"]] = "states"
    decoders: ClassVar[tuple[str, ...]] = ("graph",)

    @override
    def check(self, spec: BundleSpec) -> None:
        super().check(spec)
        if spec.states is None:
            raise ValueError("a bundle of kind hybrid needs states: its system is ctc if it has tokens")
