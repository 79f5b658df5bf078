"""The GMM-HMM of the stage `align`, which recognizes with a graph: passes with fMLLR for each speaker.

The engine does not train it. Its bundles hold the GMM-HMM in the folder `hmm`, and the graph as their decoder's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from typing_extensions import override

from configurable.lazy import torch
from recognition.bundle import HMM_FILES, check_files
from recognition.recognizer import Adapter, Recognizer
from recognition.system import Ability, SystemConfig
from speech.decoding import GraphConfig
from speech.features import build_features
from speech.hypotheses import DecodeError, Hypothesis

if TYPE_CHECKING:
    from torch import Tensor

    from recognition.bundle import BundleSpec
    from speech.decoding import DecodeConfig
    from speech.features import FeatureConfig
    from speech.features.cmvn import CmvnStats
    from speech.hmm.config import AlignConfig, GraphSearchConfig
    from speech.hmm.decode import GraphSearch
    from speech.hmm.model import HmmModel
    from speech.lm import LmConfig
    from speech.models import ModelConfig
    from speech.words import FrameTimes


class GmmSystem(SystemConfig):
    """The GMM-HMM of the stage `align`, as `align.recognize` says."""

    kind: Literal["gmm"] = "gmm"
    decoders: ClassVar[tuple[str, ...]] = ("graph",)
    abilities: ClassVar[frozenset[Ability]] = frozenset({"word times"})
    files: ClassVar[tuple[str, ...]] = HMM_FILES

    @override
    def lacking(self, model: ModelConfig, align: AlignConfig | None, lm: LmConfig | None) -> str:
        if align and (align.recognize.arpa or lm):
            return ""
        return (
            "recognizer is gmm, which needs a GMM-HMM and a language model: give the sections align and lm, or set "
            "align.recognize.arpa"
        )

    @override
    def decoder(self, decode: DecodeConfig, align: AlignConfig | None) -> DecodeConfig:
        if align is None:  # a bundle has its own
            return decode
        search = align.recognize
        options = {name: getattr(search, name) for name in ("beam", "max_active", "acoustic_scale")}
        return GraphConfig(lm=search.arpa, **options)

    @override
    def by_speaker(self, features: FeatureConfig) -> bool:
        return True

    @override
    def check(self, spec: BundleSpec) -> None:
        if spec.adaptation is None:
            raise ValueError("a bundle of kind gmm needs adaptation")

    @override
    def open(
        self,
        folder: Path,
        spec: BundleSpec,
        decode: DecodeConfig,
        device: str | torch.device = "cpu",
        speakers: Mapping[str, CmvnStats] | None = None,
    ) -> GmmRecognizer:
        from recognition.adaptation import load_hmm

        check_files(folder)
        if isinstance(decode, GraphConfig) and decode.hot_words.read():
            raise DecodeError("a recognizer of kind gmm takes no hot words: remove them, or use one of kind hybrid")
        return GmmRecognizer(spec, load_hmm(folder, spec), decode)


class GmmRecognizer(Recognizer[list["Tensor"]]):
    """A GMM-HMM; what it encodes are features that are adapted to speakers.

    Args:
        spec: The bundle's contents.
        model: The GMM-HMM.
        decode: Decoding parameters of the last pass, with the graph.
    """

    def __init__(self, spec: BundleSpec, model: HmmModel, decode: DecodeConfig) -> None:
        super().__init__(spec, decode)
        self._model = model
        self._extract = build_features(spec.features, spec.sample_rate)

    @property
    def _options(self) -> GraphSearchConfig:
        assert self.spec.adaptation is not None
        return self.spec.adaptation.search

    @property
    def _passes(self) -> int:
        """How often a speaker's transform is estimated."""
        return self._options.passes if self._model.unadapted is not None else 0

    @property
    @override
    def adapter(self) -> Adapter:
        return self.adapted

    def adapted(self, waves: Iterable[Tensor]) -> list[Tensor]:
        """Features after the speaker's transform, an `Adapter`."""
        from recognition.adaptation import SpeakerFrames
        from speech.hmm.decode import adapt_to_speaker, first_pass

        frames = SpeakerFrames(self._extract)
        for wave in waves:
            frames.add(wave)
        static, first = frames.normalized(), self._search.with_options(first_pass(self._options))
        transform, _ = adapt_to_speaker(self._model, first, static, self._passes, speech=frames.speech)
        return [self._model.chain(features, transform) for features in static]

    @override
    def encode(
        self,
        inputs: Tensor,
        lengths: Tensor,
        speakers: Sequence[str] | None = None,
        languages: Sequence[str] | None = None,
    ) -> list[Tensor]:
        """The features of each utterance, which `adapter` has computed [frames, D]."""
        return [features[:size] for features, size in zip(inputs, lengths.tolist(), strict=True)]

    @override
    def search(self, encoded: list[Tensor]) -> list[Hypothesis]:
        return [self._one(frames) for frames in encoded]

    def _one(self, frames: Tensor) -> Hypothesis:
        from speech.decoding.graph import word_frames

        gmm = self._model.gmm if self._passes else self._model.unadapted or self._model.gmm
        best_path = self._search(gmm.log_likelihoods(frames).cpu().numpy())
        if not best_path.words:
            return Hypothesis(confidence=best_path.confidence)
        return Hypothesis(
            text=" ".join(best_path.words),
            score=-best_path.cost,
            confidence=best_path.confidence,
            word_frames=word_frames(best_path),
        )

    @override
    def prepare(self) -> None:
        assert self._search

    @cached_property
    def _search(self) -> GraphSearch:
        from speech.decoding.graph import open_search
        from speech.hmm.aligner import phone_families

        self.spec.system.check_decoder(self.cfg.kind)
        assert isinstance(self.cfg, GraphConfig)
        if self.cfg.ranks_again or self.cfg.nbest > 1:
            raise DecodeError("a recognizer of kind gmm finds one hypothesis: remove decode.rescore_lm and word_score")
        return open_search(self.cfg, self._model.gmm.num_pdfs, phone_families(self._model)[1])

    @override
    def with_decoder(self, cfg: DecodeConfig) -> Self:
        return type(self)(self.spec, self._model, cfg)

    @override
    def times(self, encoded: list[Tensor], row: int, begin: float = 0.0, end: float = math.inf) -> FrameTimes:
        from speech.words import FrameTimes

        return FrameTimes(self.spec.features.hop_ms / 1000, begin, begin, end)
