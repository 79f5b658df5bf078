"""A bundle: everything that turns audio into text, in one folder without code and without pickle.

`model.safetensors` holds the weights, `bundle.json` the rest: sample rate, features with their statistics, tokens,
model sizes, text normalization and decoding parameters.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speech.decoding import DecodeConfig
from speech.features import FeatureConfig
from speech.features.cmvn import CmvnStats
from speech.frontend import FrontEnd
from speech.models import AcousticModel, ModelConfig, build_model
from speech.text import NormalizerConfig
from speech.tokens import Tokenizer, tokenizer_from_dict

FORMAT = 1


class BundleError(ValueError):
    """A folder is not a usable bundle."""


class BundleSpec(BaseModel):
    """The contents of bundle.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    format: int = FORMAT
    sample_rate: int
    features: FeatureConfig
    stats: dict[str, Any] | None
    tokenizer: dict[str, Any]
    model: ModelConfig
    normalizer: NormalizerConfig = NormalizerConfig()
    decode: DecodeConfig = DecodeConfig()
    provenance: dict[str, Any] = {}

    def build_frontend(self, speakers: dict[str, CmvnStats] | None = None) -> FrontEnd:
        """The front end with this bundle's statistics."""
        stats = CmvnStats.from_dict(self.stats) if self.stats else None
        return FrontEnd(self.features, self.sample_rate, stats, speakers)

    def build_tokenizer(self) -> Tokenizer:
        """The tokens."""
        return tokenizer_from_dict(self.tokenizer)

    def build_model(self) -> AcousticModel:
        """The acoustic model, freshly initialized."""
        return build_model(self.model, self.build_frontend().dim, self.build_tokenizer().size)


def save_bundle(folder: Path, spec: BundleSpec, weights: dict[str, Tensor]) -> None:
    """Write a bundle into a folder, bundle.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))
    text = json.dumps(spec.model_dump(mode="json"), indent=2, sort_keys=True)
    (folder / "bundle.json").write_text(text + "\n", encoding="utf-8")


def load_spec(folder: Path) -> BundleSpec:
    """Read bundle.json.

    Raises:
        BundleError: If the folder has none, or it does not fit this version.
    """
    path = folder / "bundle.json"
    if not path.is_file():
        raise BundleError(f"{folder} is no model bundle: it has no bundle.json")
    try:
        spec = BundleSpec.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BundleError(f"{path} does not fit this version of Starling: {error}") from error
    if spec.format != FORMAT:
        raise BundleError(f"{path} has format {spec.format}, this version of Starling reads {FORMAT}")
    return spec


def load_bundle(folder: Path) -> tuple[BundleSpec, AcousticModel]:
    """Read a bundle; the model comes in evaluation mode on the CPU.

    Raises:
        BundleError: If the folder is not a usable bundle.
    """
    spec = load_spec(folder)
    try:
        model = spec.build_model()
    except ValueError as error:
        raise BundleError(f"{folder / 'bundle.json'} describes no model: {error}") from error
    try:
        model.load_state_dict(load_file(str(folder / "model.safetensors")))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise BundleError(f"{folder / 'model.safetensors'} does not fit its bundle.json: {error}") from error
    return spec, model.eval()
