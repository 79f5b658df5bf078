"""CTC: an acoustic model of tokens and a blank, trained over all alignments of the transcripts (Graves et al. 2006)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import override

from recognition.system import Ability
from recognition.systems.acoustic import FrameSystem

if TYPE_CHECKING:
    from recognition.bundle import BundleSpec
    from recognition.onnx_graphs import Chunks, Graph, HeardFeatures
    from speech.models.networks.base import TrainableNetwork


class CtcSystem(FrameSystem):
    """An acoustic model of tokens, trained with `train.objective: ctc`."""

    kind: Literal["ctc"] = "ctc"
    objectives: ClassVar[tuple[str, ...]] = ("ctc",)
    can_be_split: ClassVar[bool] = True
    decoders: ClassVar[tuple[str, ...]] = ("greedy", "beam", "tokens", "words")
    abilities: ClassVar[frozenset[Ability]] = FrameSystem.abilities | {"forced alignment"}

    @override
    def graphs(
        self, spec: BundleSpec, network: TrainableNetwork, heard: HeardFeatures, chunks: Chunks | None = None
    ) -> list[Graph]:
        from recognition.onnx_graphs import acoustic_graph
        from speech.models.networks.base import AcousticModel

        assert isinstance(network, AcousticModel)
        return [acoustic_graph(heard, network, spec.build_tokenizer().size, chunks)]

    @override
    def check(self, spec: BundleSpec) -> None:
        super().check(spec)
        if spec.states is not None:
            raise ValueError("a bundle of kind ctc has tokens, and this one has states: its system is hybrid")
