"""A bundle: everything that turns audio into text, in one folder without code and without pickle.

`model.safetensors` holds the weights, `bundle.json` the rest: sample rate, features with their statistics, tokens,
model sizes, text normalization and decoding parameters. What these name (a language model, a list of words) lies beside
them. A flipped bit in a weight would give other words, or none,
without an error, so `bundle.json` has the SHA-256 of the other files, and of itself; loading compares them.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speech.choices import choice_of, own_fields
from speech.decoding import DecodeChoice, DecodeConfig, GreedyConfig
from speech.features import FeatureChoice
from speech.features.cmvn import CmvnStats
from speech.frontend import FrontEnd
from speech.models import AcousticModel, ModelChoice, build_model
from speech.text import NormalizerConfig
from speech.tokens import Tokenizer, tokenizer_from_dict

log = logging.getLogger(__name__)
FORMAT = 1
WEIGHTS, SPEC = "model.safetensors", "bundle.json"


class BundleError(ValueError):
    """A folder is not a usable bundle."""


class BundleSpec(BaseModel):
    """The contents of bundle.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    format: int = FORMAT
    sample_rate: int
    features: FeatureChoice
    stats: dict[str, Any] | None
    tokenizer: dict[str, Any]
    model: ModelChoice
    normalizer: NormalizerConfig = NormalizerConfig()
    decode: DecodeChoice = GreedyConfig()
    provenance: dict[str, Any] = {}

    @field_validator("features", "model", "decode", mode="before")
    @classmethod
    def _own_fields(cls, value: Any, info: ValidationInfo) -> Any:
        choice = choice_of(cls.model_fields[str(info.field_name)])
        assert choice is not None
        return own_fields(value, choice.kinds)

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


class _Written(BundleSpec):
    """What bundle.json holds: the spec, and checksums."""

    files: dict[str, str] = {}
    """Name of each other file to its SHA-256; empty in bundles that are older than their checksums."""
    checksum: str = ""
    """SHA-256 of this JSON, see `_checksum`."""


def save_bundle(folder: Path, spec: BundleSpec, weights: dict[str, Tensor]) -> None:
    """Write a bundle into a folder, bundle.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / WEIGHTS))
    save_spec(folder, spec, {WEIGHTS: _sha256(folder / WEIGHTS)})


def save_spec(folder: Path, spec: BundleSpec, files: Mapping[str, str]) -> None:
    """Write bundle.json.

    Args:
        folder: The bundle.
        spec: What it says.
        files: Name of each other file to its SHA-256.
    """
    value = spec.model_dump(mode="json") | {"files": dict(files)}
    text = json.dumps(value | {"checksum": _checksum(value)}, indent=2, sort_keys=True)
    (folder / SPEC).write_text(text + "\n", encoding="utf-8")


def add_decoder(folder: Path, decode: DecodeConfig) -> None:
    """Give a bundle other decoding parameters; the files that they name are copied into it.

    Raises:
        BundleError: The folder is no bundle, it is damaged, or a file is not there.
    """
    files = {WEIGHTS: check_files(folder)[WEIGHTS]}
    names: dict[str, str] = {}
    for field, path in decode.files().items():
        source = Path(path)
        if not source.is_file():
            raise BundleError(f"decode.{field} names {path}, which is not there")
        names[path] = name = decode.file_fields[field] + "".join(source.suffixes[-2:])
        shutil.copyfile(source, folder / name)
        files[name] = _sha256(folder / name)
    save_spec(folder, load_spec(folder).model_copy(update={"decode": decode.with_files(names.__getitem__)}), files)


def own_decoder(folder: Path) -> DecodeConfig:
    """A bundle's own decoding parameters, with its files' paths.

    Raises:
        BundleError: They name files that are none of the bundle's.
    """
    spec, files = _read(folder)
    for field, name in spec.decode.files().items():
        if name not in files or Path(name).name != name:
            raise BundleError(f"{folder / SPEC} names {name!r} as decode.{field}, which is no file of the bundle")
    return spec.decode.with_files(lambda name: str(folder / name))


def _checksum(value: dict[str, Any]) -> str:
    """SHA-256 of bundle.json without the checksum itself: keys sorted, no spaces."""
    rest = {name: item for name, item in value.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_spec(folder: Path) -> BundleSpec:
    """Read bundle.json; see `check_files` for the other files.

    Raises:
        BundleError: If the folder has none, it is damaged, or it does not fit this version.
    """
    return _read(folder)[0]


def _read(folder: Path) -> tuple[BundleSpec, dict[str, str]]:
    """The spec, and the SHA-256 of the other files; none in bundles that are older than their checksums."""
    path = folder / SPEC
    if not path.is_file():
        raise BundleError(f"{folder} is no model bundle: it has no bundle.json")
    try:
        value = _Written.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BundleError(f"{path} does not fit this version of Starling, or is damaged: {error}") from error
    if value.format != FORMAT:
        raise BundleError(f"{path} has format {value.format}, this version of Starling reads {FORMAT}")
    if value.checksum and value.checksum != _checksum(json.loads(path.read_bytes())):
        raise BundleError(f"{_damaged(path)}. If you have edited it, remove its field checksum")
    return BundleSpec(**{name: getattr(value, name) for name in BundleSpec.model_fields}), value.files


def check_files(folder: Path) -> dict[str, str]:
    """Compare the files beside bundle.json with their checksums.

    Returns:
        Name of each to its SHA-256.

    Raises:
        BundleError: If one is missing or damaged, or bundle.json is.
    """
    files = _read(folder)[1]
    if not files:
        log.warning("%s has no checksums (it is older than they are): damage to its weights may go unnoticed", folder)
    found = {}
    for name in {WEIGHTS: "", **files}:
        if not (folder / name).is_file():
            raise BundleError(f"{folder / name} is missing: {_AGAIN}")
        found[name] = _sha256(folder / name)
        if files and found[name] != files.get(name):
            raise _damaged(folder / name)
    return found


_AGAIN = "fetch the model again, or make it again with `starling register CONFIG --again`"


def _damaged(path: Path) -> BundleError:
    return BundleError(f"{path} is damaged, its SHA-256 is not what bundle.json says: {_AGAIN}")


def load_bundle(folder: Path) -> tuple[BundleSpec, AcousticModel]:
    """Read a bundle; the model comes in evaluation mode on the CPU.

    Raises:
        BundleError: If the folder is not a usable bundle.
    """
    spec = load_spec(folder)
    check_files(folder)
    try:
        model = spec.build_model()
    except ValueError as error:
        raise BundleError(f"{folder / SPEC} describes no model: {error}") from error
    try:
        model.load_state_dict(load_file(str(folder / WEIGHTS)))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise BundleError(f"{folder / WEIGHTS} does not fit its bundle.json: {error}") from error
    return spec, model.eval()
