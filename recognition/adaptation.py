"""Adaptation to speakers in recognition: the GMM-HMM in a bundle makes the network's features (fMLLR; Gales 1998).

All speech of a speaker is normalized together, decoded with the GMM-HMM in the graph of the network's decoder, first by
its mixtures for features that are not adapted, and a transform is estimated from the hypotheses; then again with this
transform. The network reads the features that the last transform gives, alone or with i-vectors and features of other
kinds beside them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from configurable.files import file_sha256
from recognition.bundle import HMM_FILES, IVECTOR_FILE, BundleError, BundleSpec, check_files, load_spec, save_spec
from speech.features import CmvnStats, FeatureConfig, FmllrConfig, build_features
from speech.features.cmvn import normalize_frames
from speech.hmm.adapted import AdaptedFeatures
from speech.hmm.config import AdaptationConfig
from speech.hmm.decode import MINIMUM_FRAMES, adapt_to_speaker, first_pass
from speech.hmm.ivector import IvectorExtractor
from speech.hmm.model import HmmModel, ModelError, model_digest

if TYPE_CHECKING:
    from speech.features.kaldi import FilterBank
    from speech.hmm.decode import GraphSearch


class SpeakerAdapter:
    """Makes the features of one speaker's utterances.

    Args:
        model: The speaker-adapted GMM-HMM.
        cfg: Its features, and how it decodes.
        sample_rate: Of the waveforms, Hz.
        search: The graph of the network's decoder, which has the same states.
        features: The features that the network reads.
        extractor: Of the i-vectors among them, if there are any.

    Raises:
        ValueError: They are of different sizes, so they do not belong together.
    """

    def __init__(
        self,
        model: HmmModel,
        cfg: AdaptationConfig,
        sample_rate: int,
        search: GraphSearch,
        features: FeatureConfig,
        extractor: IvectorExtractor | None = None,
    ) -> None:
        self.model, self.cfg = model, cfg
        _check(model, cfg, search, features, extractor)
        self._extract = build_features(cfg.features, sample_rate)
        self._adapted = AdaptedFeatures(features, model.chain, extractor)
        self._others = {n: build_features(part, sample_rate) for n, part in self._adapted.others.items()}
        self._transforms = any(isinstance(part, FmllrConfig) for part in features.components)
        self._search = search.with_options(first_pass(cfg.search))

    @torch.inference_mode()
    def __call__(self, waves: Iterable[Tensor]) -> list[Tensor]:
        """Adapted features of all of a speaker's utterances.

        Args:
            waves: Their waveforms [samples] in ±1.

        Returns:
            float32 [frames, D] for each; without fMLLR if there are fewer than 500 frames.
        """
        own, parts = SpeakerFrames(self._extract), {n: SpeakerFrames(extract) for n, extract in self._others.items()}
        for wave in waves:
            for frames in (own, *parts.values()):
                frames.add(wave)
        static = own.normalized()
        transform = self.transform(static, own.speech) if self._transforms else None
        ivectors = self._adapted.ivectors(static)
        others = {n: part.normalized() for n, part in parts.items()}
        return [
            self._adapted(frames, transform, ivectors[row], {n: sequences[row] for n, sequences in others.items()})
            for row, frames in enumerate(static)
        ]

    def static(self, waves: Sequence[Tensor]) -> list[Tensor]:
        """Features of utterances [frames, F], normalized over all of them, as the GMM-HMM was trained on."""
        frames = SpeakerFrames(self._extract)
        for wave in waves:
            frames.add(wave)
        return frames.normalized()

    def transform(self, static: Sequence[Tensor], speech: Sequence[Tensor] | None = None) -> Tensor | None:
        """The speaker's fMLLR [D, D + 1] by decoding; None if there is too little speech to estimate it.

        Args:
            static: Of `static`.
            speech: Which frames are loud enough for speech, bool [T] for each utterance; all by default.
        """
        if (sum(int(mask.sum()) for mask in speech) if speech else sum(map(len, static))) < MINIMUM_FRAMES:
            return None
        passes = self.cfg.search.passes
        return adapt_to_speaker(self.model, self._search, static, passes, speech=speech)[0]


def _check(
    model: HmmModel,
    cfg: AdaptationConfig,
    search: GraphSearch,
    features: FeatureConfig,
    extractor: IvectorExtractor | None,
) -> None:
    dim = model.gmm.dim
    sizes = [(model.num_features, cfg.features.width)]
    sizes += [(dim, part.width) for part in features.components if isinstance(part, FmllrConfig)]
    if extractor is not None:
        sizes.append((dim, extractor.model.dim))
    if search.num_states > model.gmm.num_pdfs or any(size != other for size, other in sizes):
        raise ValueError(
            f"the GMM-HMM of {model.gmm.num_pdfs} states and {dim} features does not fit the graph of "
            f"{search.num_states} states, its own features, or the network's: use the files that were made together"
        )


class SpeakerFrames:
    """Features of a speaker's utterances, which are computed one by one and normalized together.

    Args:
        extract: Computes them.

    Attributes:
        speech: For each utterance, which frames count in `cmvn`, bool `[T]`: all, or the loud ones if `cmvn_gate_db` is
            configured.
    """

    def __init__(self, extract: FilterBank) -> None:
        self._extract, self._frames, self.speech = extract, list[Tensor](), list[Tensor]()
        self._stats = CmvnStats(extract.dim)

    def add(self, wave: Tensor) -> None:
        """Add an utterance: its waveform [samples] in ±1."""
        feats, frames = self._extract(wave[None], torch.tensor([len(wave)]))
        utterance = feats[0, : int(frames[0])]
        self._frames.append(utterance)
        self.speech.append(self._extract.speech_mask(utterance))
        self._stats.add(utterance[self.speech[-1]])

    def normalized(self) -> list[Tensor]:
        """float32 `[T, F]` of each utterance, normalized over all of them if configured."""
        if not self._stats.count or self._extract.config.cmvn != "speaker":
            return self._frames
        mean, std, floor = self._stats.mean, self._stats.std, self._extract.config.cmvn_floor
        return [normalize_frames(frames, mean, std, floor) for frames in self._frames]


def add_adaptation(folder: Path, hmm: Path, adaptation: AdaptationConfig, ivector: Path | None = None) -> None:
    """Give a bundle the GMM-HMM that makes its features, and what extracts the i-vectors among them.

    Args:
        folder: The bundle's folder.
        hmm: Folder of the saved GMM-HMM.
        adaptation: How it is used.
        ivector: The saved extractor (`IvectorExtractor.save`), if the features have i-vectors.

    Raises:
        BundleError: The folder is no bundle, it is damaged, or the model was trained with another GMM-HMM.
    """
    files, spec = check_files(folder), load_spec(folder)
    if spec.states is None or model_digest(hmm) != spec.states.model:
        raise BundleError(f"{hmm} is not the GMM-HMM that {folder} was trained with: give that one, or train again")
    files |= _copied(folder, hmm, ivector)
    save_spec(folder, spec.model_copy(update={"adaptation": adaptation}), files)


def save_gmm(folder: Path, spec: BundleSpec, hmm: Path) -> None:
    """Write the bundle of a GMM-HMM that recognizes by itself.

    Args:
        folder: The bundle's folder.
        spec: Its contents.
        hmm: Folder of the saved GMM-HMM.
    """
    save_spec(folder, spec, _copied(folder, hmm))


def _copied(folder: Path, hmm: Path, ivector: Path | None = None) -> dict[str, str]:
    """Copy a GMM-HMM into a bundle, and the extractor of i-vectors if there is one; returns each file's SHA-256."""
    sources = {name: hmm / Path(name).name for name in HMM_FILES} | ({IVECTOR_FILE: ivector} if ivector else {})
    files = {}
    for name, source in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)
        files[name] = file_sha256(folder / name)
    return files


def load_hmm(folder: Path, spec: BundleSpec) -> HmmModel:
    """The GMM-HMM of a bundle, whose files have been checked.

    Raises:
        BundleError: There is none.
    """
    if spec.adaptation is None:
        raise BundleError(
            f"{folder} has a model for features of kind {spec.features.kind}, but not the GMM-HMM that makes them: "
            "use the registered model"
        )
    try:
        return HmmModel.load((folder / HMM_FILES[0]).parent)
    except ModelError as error:
        raise BundleError(f"{folder} has a damaged GMM-HMM ({error}): fetch the model again") from error


def load_extractor(folder: Path, spec: BundleSpec) -> IvectorExtractor | None:
    """What extracts a bundle's i-vectors, whose files have been checked; None if its features have none.

    Raises:
        BundleError: The features have i-vectors, but the file is missing, damaged or of another size.
    """
    part = AdaptedFeatures.ivector_part(spec.features)
    if part is None:
        return None
    try:
        extractor = IvectorExtractor.load(folder / IVECTOR_FILE)
    except ModelError as error:
        raise BundleError(f"{folder} lacks an intact {IVECTOR_FILE} ({error}): use the registered model") from error
    if extractor.rank != part.dim:
        raise BundleError(
            f"{folder / IVECTOR_FILE} has i-vectors of {extractor.rank} dimensions, but the features of the model have "
            f"{part.dim}: fetch the model again"
        )
    return extractor
