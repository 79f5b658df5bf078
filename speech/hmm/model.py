"""The acoustic model: tree, transitions, mixtures and the chain of feature transforms; saved without pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from configurable.files import replace_file
from speech.features.expand import add_deltas, splice
from speech.files import DAMAGED, check_finite
from speech.hmm.gmm import MOST_COMPONENTS, DiagGmm
from speech.hmm.topology import TransitionModel
from speech.hmm.tree import DecisionTree


class ModelError(ValueError):
    """A file is missing, damaged, or not an acoustic model."""


@dataclass(frozen=True)
class FeatureChain:
    """The transform from normalized static features to those of the mixtures.

    Attributes:
        context: Neighbours on either side that frames are spliced with; 0 stands for deltas of first and second order.
        matrix: float32 `[D, (2 context + 1) F]`, LDA and MLLT in one, or None.
    """

    context: int = 0
    matrix: Tensor | None = None

    def wide(self, frames: Tensor) -> Tensor:
        """Frames `[T, F]` with deltas or neighbours."""
        lengths = torch.tensor([len(frames)])
        if self.context == 0:
            return add_deltas(frames.unsqueeze(0), lengths)[0]
        return splice(frames.unsqueeze(0), lengths, self.context, self.context)[0]

    def __call__(self, frames: Tensor, adaptation: Tensor | None = None) -> Tensor:
        """Transform an utterance.

        Args:
            frames: `[T, F]`.
            adaptation: The speaker's affine transform `[D, D + 1]`.

        Returns:
            `[T, D]`.
        """
        wide = self.wide(frames)
        transformed = wide if self.matrix is None else wide @ self.matrix.to(wide).T
        return transformed if adaptation is None else adapt(transformed, adaptation)


def adapt(frames: Tensor, transform: Tensor) -> Tensor:
    """Frames `[T, D]` under an affine transform `[D, D + 1]`, whose last column is the offset."""
    transform = transform.to(frames)
    return torch.addmm(transform[:, -1], frames, transform[:, :-1].T)


@dataclass(frozen=True)
class HmmModel:
    """A trained model.

    Attributes:
        tree: Contexts to pdfs.
        transitions: Transition probabilities.
        gmm: The pdfs.
        chain: Features.
        unadapted: Mixtures for features without the speaker's transform, of the same tree, or None.
    """

    tree: DecisionTree
    transitions: TransitionModel
    gmm: DiagGmm
    chain: FeatureChain
    unadapted: DiagGmm | None = None

    def to(self, device: torch.device | str) -> HmmModel:
        """The same model with its mixtures on a device."""
        if self.gmm.weights.device == torch.device(device):
            return self
        unadapted = self.unadapted.to(device) if self.unadapted else None
        return replace(self, gmm=self.gmm.to(device), unadapted=unadapted)

    def save(self, folder: Path) -> None:
        """Write `model.safetensors` and `model.json`; the second one, written last, says that both are there."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"gmm.{name}": value for name, value in _tensors(self.gmm).items()}
        if self.unadapted is not None:
            tensors |= {f"unadapted.{name}": value for name, value in _tensors(self.unadapted).items()}
        if self.chain.matrix is not None:
            tensors["matrix"] = self.chain.matrix.contiguous()
        tensors["transitions.keys"] = torch.from_numpy(self.transitions.keys)
        tensors["transitions.log_probs"] = torch.from_numpy(self.transitions.log_probs)
        write_tensors(folder / "model.safetensors", tensors)
        write_json(folder / "model.json", {"tree": self.tree.to_dict(), "context": self.chain.context})

    @classmethod
    def load(cls, folder: Path) -> HmmModel:
        """The inverse of `save`.

        Raises:
            ModelError: A file is missing or damaged, or the parts do not fit together.
        """
        try:
            facts = json.loads((folder / "model.json").read_text())
            tensors = load_file(folder / "model.safetensors")
            # a transition may have the probability 0
            check_finite({name: value for name, value in tensors.items() if name != "transitions.log_probs"})
            tree = DecisionTree.from_dict(facts["tree"])
            keys = tensors["transitions.keys"].numpy().astype(np.int32)
            transitions = TransitionModel(tree.phones, keys, tensors["transitions.log_probs"].numpy())
            gmm = _gmm(tensors, "gmm")
            unadapted = _gmm(tensors, "unadapted") if "unadapted.weights" in tensors else None
            chain = FeatureChain(int(facts["context"]), tensors.get("matrix"))
            model = cls(tree, transitions, gmm, chain, unadapted)
            model._check()
        except DAMAGED as error:
            raise ModelError(f"{folder} holds no acoustic model ({error!r}): train it again") from error
        return model

    def _check(self) -> None:
        pdfs, dim = self.tree.num_pdfs, self.gmm.dim
        for gmm in (self.gmm, self.unadapted):
            if gmm is not None:
                gmm.check()
                if (gmm.num_pdfs, gmm.dim) != (pdfs, dim) or gmm.weights.shape[1] > MOST_COMPONENTS:
                    raise ValueError(f"{gmm.num_pdfs} mixtures of {gmm.dim} features for {pdfs} leaves of the tree")
        if self.transitions.keys[:, 2].max() >= pdfs:
            raise ValueError("a transition belongs to a state that the tree lacks")
        if not (self.transitions.log_probs <= 1e-6).all() or not np.isfinite(self.transitions.log_probs).all():
            raise ValueError("a transition has no probability")
        self.num_features  # noqa: B018 - checks the chain
        matrix = self.chain.matrix
        if matrix is not None and not (len(matrix) == dim and torch.isfinite(matrix).all()):
            raise ValueError(f"a matrix of {tuple(matrix.shape)} for mixtures of {dim} features")

    @property
    def num_features(self) -> int:
        """Number of static features in a frame, F.

        Raises:
            ValueError: The width of the transform is no multiple of what a feature becomes.
        """
        matrix, context = self.chain.matrix, self.chain.context
        width = self.gmm.dim if matrix is None else matrix.shape[1]
        copies = 2 * context + 1 if context else 3
        if context < 0 or width % copies:
            raise ValueError(f"{width} features are not {copies} times as many as before splicing or deltas")
        return int(width // copies)


def model_digest(folder: Path) -> str:
    """SHA-256 of a saved acoustic model (`HmmModel.save`), in hex."""
    digest = hashlib.sha256()
    for name in ("model.json", "model.safetensors"):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _tensors(gmm: DiagGmm) -> dict[str, Tensor]:
    return {name: getattr(gmm, name).cpu().contiguous() for name in ("weights", "means", "variances")}


def _gmm(tensors: Mapping[str, Tensor], name: str) -> DiagGmm:
    return DiagGmm(tensors[f"{name}.weights"], tensors[f"{name}.means"], tensors[f"{name}.variances"])


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, save({name: value.contiguous() for name, value in tensors.items()}))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(value).encode())
