"""Bundles: folders with everything needed to turn audio into text, without code or pickle.

`bundle.json` says of which system the recognizer is. `model.safetensors` contains the weights of a network,
`bundle.json` the rest: sample rate, features with their statistics, tokens, model sizes, text normalization and
decoding parameters. Files that these name (a language model, a list of words) are copied into the folder; so is the
GMM-HMM that adapts features to speakers (`recognition.adaptation`) or recognizes by itself. A flipped bit in a weight
would silently change the output, so `bundle.json` contains the SHA-256 of the other files and of itself; loading
verifies them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from safetensors import SafetensorError

from configurable.addresses import address_content
from configurable.files import file_sha256
from recognition.system import SystemConfig
from speech.decoding import DecodeChoice, DecodeConfig, GreedyConfig
from speech.features import FeatureChoice
from speech.features.cmvn import CmvnStats
from speech.files import check_finite
from speech.hmm.config import AdaptationConfig
from speech.hmm.priors import StateOutputs
from speech.hypotheses import Hypothesis
from speech.models import ModelConfig, ModelOption
from speech.text import LanguageError, NormalizerConfig, normalizer_of
from speech.tokens import TOKENIZERS, Tokenizer, tokenizer_from_dict

if TYPE_CHECKING:
    from torch import Tensor

    from speech.frontend import FrontEnd
    from speech.models.networks.base import TrainableNetwork

log = logging.getLogger(__name__)
FORMAT = 1
WEIGHTS, SPEC = "model.safetensors", "bundle.json"
HMM_FILES = ("hmm/model.json", "hmm/model.safetensors")
"""The GMM-HMM that adapts features to speakers."""
IVECTOR_FILE = "hmm/ivector.safetensors"
"""What extracts the i-vectors among the features, if there are any."""
_TRIMMED = 16
"""Feature frames by which trimming may lengthen an utterance, at most."""
_LONGEST_FRAME = 100
"""Aligned frames to an output frame, at most: decoding repeats the scores of an output frame as often."""


class BundleError(ValueError):
    """The folder is not a usable bundle."""


class TiedStates(BaseModel):
    """The tied states of hidden Markov models that a network's outputs stand for."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    model: str
    """SHA-256 of the model that aligned the training data."""
    frame_shift_ms: float = Field(gt=0)
    """Time between two aligned frames, milliseconds."""
    log_priors: tuple[float, ...]
    """Natural logarithm of each state's share of the aligned frames."""

    @property
    def size(self) -> int:
        """Number of states."""
        return len(self.log_priors)


def _implied_system(states: TiedStates | None) -> str:
    """The system of descriptions that name none, as earlier versions wrote them."""
    return "hybrid" if states else "ctc"


def _known_system(value: Any, info: ValidationInfo) -> SystemConfig:
    """The system that a description names.

    Raises:
        ValueError: This version does not know it.
    """
    from recognition.systems import SYSTEMS  # these import bundles

    if isinstance(value, SystemConfig):
        return value
    value = _implied_system(info.data.get("states")) if value is None else value
    value = {"kind": value} if isinstance(value, str) else value
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if kind not in SYSTEMS:
        raise ValueError(f"system {kind!r} is none of {', '.join(SYSTEMS)}")
    return SYSTEMS[kind].model_validate(value)


class BundleSpec(BaseModel):
    """The contents of bundle.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    members: ClassVar[tuple[str, ...]] = (WEIGHTS, SPEC)
    """Names of the files that `save` writes, in the order in which they are published."""

    format: int = FORMAT
    sample_rate: int = Field(ge=1, le=1_000_000)
    features: FeatureChoice
    stats: dict[str, Any] | None
    tokenizer: dict[str, Any] | None
    """Of systems with tokens."""
    model: ModelOption
    """Of systems with a network."""
    normalizer: NormalizerConfig = NormalizerConfig()
    decode: DecodeChoice = GreedyConfig()
    provenance: dict[str, Any] = {}
    states: TiedStates | None = None
    """What the outputs stand for if they are not tokens."""
    adaptation: AdaptationConfig | None = None
    """How the GMM-HMM in the folder `hmm` adapts the features to speakers, if they are adapted ones."""
    system: Annotated[SerializeAsAny[SystemConfig], PlainValidator(_known_system)] = Field(
        default=None, validate_default=True
    )
    """What is recognized with; by default `hybrid` if the outputs are states, else `ctc`."""

    @model_validator(mode="after")
    def _check_system(self) -> BundleSpec:
        self.system.check(self)
        return self

    @property
    def network(self) -> ModelConfig:
        """The model, of systems that have one."""
        assert self.model is not None
        return self.model

    def build_frontend(self, speakers: dict[str, CmvnStats] | None = None) -> FrontEnd:
        """The front end with this bundle's statistics."""
        stats = CmvnStats.from_dict(self.stats) if self.stats else None
        from speech.frontend import FrontEnd

        return FrontEnd(self.features, self.sample_rate, stats, speakers)

    def build_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        assert self.tokenizer is not None
        return tokenizer_from_dict(self.tokenizer)

    def comparable(self, hypothesis: Hypothesis) -> str:
        """What is recognized, in the form of the transcripts that it is compared with."""
        if self.tokenizer is None or not TOKENIZERS[self.tokenizer["kind"]].written:
            return hypothesis.text
        return self._normalized(hypothesis.text, hypothesis.language or str(self.tokenizer.get("language", "")))

    def searched(self, decode: DecodeConfig) -> DecodeConfig:
        """Decoding parameters with hot words in the form of the texts that are searched.

        Raises:
            DecodeError: A file with them cannot be read.
        """
        writes = self.tokenizer is not None and TOKENIZERS[self.tokenizer["kind"]].written
        return decode.with_normalized_phrases(str if writes else self._normalized)

    def _normalized(self, text: str, language: str = "") -> str:
        """A text in the form of the transcripts."""
        try:
            return normalizer_of(self.normalizer).normalize(text, language)
        except LanguageError:  # a model that chooses the language may take one whose numbers nobody can spell
            return normalizer_of(self.normalizer).normalize(text, "en")

    @property
    def num_outputs(self) -> int:
        """Width of the model's output: tied states, or tokens."""
        return self.states.size if self.states else self.build_tokenizer().size

    @property
    def frame_ms(self) -> float:
        """Time between two output frames, milliseconds."""
        return self.network.subsampling * self.features.stride * self.features.hop_ms

    @property
    def frame_factor(self) -> int:
        """Aligned frames to an output frame; 1 if the outputs are tokens.

        Raises:
            ValueError: The output frames are not a multiple of the aligned ones.
        """
        if self.states is None:
            return 1
        factor = self.frame_ms / self.states.frame_shift_ms
        if not 1 <= factor <= _LONGEST_FRAME or not factor.is_integer():
            raise ValueError(
                f"the model puts out a frame every {self.frame_ms:g} ms, which is no multiple of the alignments' "
                f"{self.states.frame_shift_ms:g} ms (1 to {_LONGEST_FRAME} times): change features.hop_ms, "
                "features.stride or model.subsampling"
            )
        return int(factor)

    def max_inputs(self, stored: bool = False) -> int:
        """Samples, or stored frames, of the longest utterance that the network can read; 0 if it reads any."""
        if self.model is None or not self.model.max_frames:
            return 0
        frames = self.model.max_frames - (_TRIMMED if self.features.trim_db else 0)
        hop = 1 if stored else self.sample_rate * self.features.hop_ms / 1000
        return int(frames * self.features.stride * hop)

    @property
    def max_seconds(self) -> float:
        """Duration of the longest utterance that the network can read, in seconds; infinite if it reads any."""
        return self.max_inputs() / self.sample_rate or math.inf

    @property
    def min_seconds(self) -> float:
        """Seconds that the network computes even for the shortest utterance."""
        frames = self.model.min_frames if self.model is not None else 0
        return frames * self.features.stride * self.features.hop_ms / 1000

    @property
    def states_per_frame(self) -> float:
        """Aligned frames to a frame of features."""
        return self.frame_factor / self.network.subsampling

    @property
    def state_outputs(self) -> StateOutputs | None:
        """What a decoder needs to know about outputs that are tied states; None for tokens."""
        return StateOutputs(self.states.log_priors, self.frame_factor) if self.states else None

    @property
    def input_width(self) -> int:
        """Values of a frame that the network reads."""
        return self.features.width * self.features.frame_factor

    def build_model(self) -> TrainableNetwork:
        """The system's network, with random weights."""
        return self.system.build_network(self)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the bundle into a folder."""
        save_bundle(folder, self, weights)


class _Written(BundleSpec):
    """The contents of bundle.json: the spec and the checksums."""

    files: dict[str, str]
    """SHA-256 of each other file by name."""
    checksum: str = ""
    """SHA-256 of this JSON as `_checksum` computes it; empty if somebody has edited it."""


def save_bundle(folder: Path, spec: BundleSpec, weights: dict[str, Tensor]) -> None:
    """Write a bundle into a folder, bundle.json last."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / WEIGHTS))
    save_spec(folder, spec, {WEIGHTS: file_sha256(folder / WEIGHTS)})


def save_spec(folder: Path, spec: BundleSpec, files: Mapping[str, str]) -> None:
    """Write bundle.json.

    Args:
        folder: The bundle's folder.
        spec: Contents of the bundle without the weights.
        files: SHA-256 of each other file by name.
    """
    value = spec.model_dump(mode="json") | {"files": dict(files)}
    text = json.dumps(value | {"checksum": _checksum(value)}, indent=2, sort_keys=True)
    (folder / SPEC).write_text(text + "\n", encoding="utf-8")


def add_decoder(folder: Path, decode: DecodeConfig) -> None:
    """Give a bundle other decoding parameters; the files that they name are made or copied into it.

    Raises:
        BundleError: The folder is no bundle, it is damaged, or a file is not there.
    """
    files = {
        name: sha256 for name, sha256 in check_files(folder).items() if name in (WEIGHTS, *HMM_FILES, IVECTOR_FILE)
    }
    with tempfile.TemporaryDirectory(prefix="starling-decoder-") as made:
        decode = decode.prepared(Path(made))
        names = _copy_files(folder, decode, files)
    spec = load_spec(folder).model_copy(update={"decode": decode.with_files(names.__getitem__)})
    save_spec(folder, spec, files)


def _copy_files(folder: Path, decode: DecodeConfig, files: dict[str, str]) -> dict[str, str]:
    """Copy the files that a decoder reads into a bundle, add their SHA-256 to `files`; returns their names by path."""
    names: dict[str, str] = {}
    for field, path in decode.files().items():
        source = Path(path)
        if not source.is_file():
            raise BundleError(f"decode.{field} names {path}, which is not there")
        names[path] = name = decode.file_fields[field] + "".join(source.suffixes[-2:])
        shutil.copyfile(source, folder / name)
        files[name] = file_sha256(folder / name)
    return names


def own_decoder(folder: Path) -> DecodeConfig:
    """A bundle's own decoding parameters, with its files' paths.

    Raises:
        BundleError: They name files that are not in the bundle.
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


def bundle_digest(bundle: Path) -> str:
    """SHA-256 of a bundle's description, which has the checksums of the other files, and of its weights if any."""
    weights = file_sha256(bundle / WEIGHTS) if (bundle / WEIGHTS).exists() else ""
    return hashlib.sha256((bundle / SPEC).read_bytes() + weights.encode()).hexdigest()


def copy_network(source: Path, target: Path) -> str:
    """Copy a bundle's network and front end, without its decoder and what adapts features.

    Returns:
        The digest of the copy, the same for bundles that differ in these parts only.

    Raises:
        BundleError: If the source is not a usable bundle.
    """
    check_files(source)
    spec, files = _network_of(source)
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / WEIGHTS, target / WEIGHTS)
    save_spec(target, spec, files)
    return network_digest(target)


def _network_of(folder: Path) -> tuple[BundleSpec, dict[str, str]]:
    """A bundle's spec without its decoder and what adapts features, and the SHA-256 of the file that is left."""
    own: dict[str, Any] = {"decode": GreedyConfig(), "adaptation": None, "provenance": {}}
    spec, files = _with_network(folder)
    return spec.model_copy(update=own), {WEIGHTS: files.get(WEIGHTS, "")}


def network_digest(folder: Path) -> str:
    """Digest of a bundle's network and front end: the same for bundles that differ in their other parts only.

    Raises:
        BundleError: If the folder is not a usable bundle.
    """
    spec, files = _network_of(folder)
    # not of the file, which has all defaults
    without = ("system",) if spec.system.kind == _implied_system(spec.states) else ()
    content = json.dumps(address_content(spec, without=without) | files, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def load_spec(folder: Path) -> BundleSpec:
    """Read bundle.json; does not check the other files.

    Raises:
        BundleError: If the file is missing, damaged, or incompatible with this version.
    """
    return _read(folder)[0]


def _read(folder: Path) -> tuple[BundleSpec, dict[str, str]]:
    """The spec, and the SHA-256 of the other files."""
    path = folder / SPEC
    if not path.is_file():
        raise BundleError(f"{folder} is not a model bundle: it has no bundle.json")
    try:
        value = _Written.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BundleError(
            f"{path} is damaged or incompatible with this version of Starling: {_AGAIN}, or install the version that "
            f"wrote it. {error}"
        ) from error
    if value.format != FORMAT:
        raise BundleError(
            f"{path} has format {value.format}, but this version of Starling reads {FORMAT}: install the version that "
            f"wrote it, or {_AGAIN}"
        )
    if value.checksum and value.checksum != _checksum(json.loads(path.read_bytes())):
        raise BundleError(f"{_damaged(path)}. If you have edited it, remove its field checksum")
    return BundleSpec(**{name: getattr(value, name) for name in BundleSpec.model_fields}), value.files


def check_files(folder: Path, network_only: bool = False) -> dict[str, str]:
    """Verify the checksums of the other files of a bundle.

    Args:
        folder: The bundle.
        network_only: Verify the weights alone.

    Returns:
        SHA-256 of each file by name.

    Raises:
        BundleError: If a file, or bundle.json itself, is missing or damaged.
    """
    spec, files = _read(folder)
    digests = {}
    for name in (WEIGHTS,) if network_only else dict.fromkeys((*spec.system.files, *files)):
        if not (folder / name).is_file():
            raise BundleError(f"{folder / name} is missing: {_AGAIN}")
        digests[name] = file_sha256(folder / name)
        if digests[name] != files.get(name):
            raise _damaged(folder / name)
    return digests


_AGAIN = "fetch the model again, or recreate it with `starling run CONFIG --from register`"


def _damaged(path: Path) -> BundleError:
    return BundleError(f"{path} is damaged, its SHA-256 differs from bundle.json: {_AGAIN}")


def _with_network(folder: Path) -> tuple[BundleSpec, dict[str, str]]:
    """The description of a bundle that has a network, and the SHA-256 of its other files.

    Raises:
        BundleError: It has none, or is damaged.
    """
    spec, files = _read(folder)
    if WEIGHTS not in spec.system.files:
        raise BundleError(
            f"{folder}: a recognizer of kind {spec.system.kind} has no network: give another kind's model"
        )
    return spec, files


def load_bundle(folder: Path, network_only: bool = False) -> tuple[BundleSpec, TrainableNetwork]:
    """Load a bundle with a network, which is on the CPU and in evaluation mode.

    Args:
        folder: The bundle.
        network_only: Do without its other files, such as the decoder's.

    Raises:
        BundleError: If the folder is not a usable bundle, or its system has no network.
    """
    from speech.models.networks.base import load_network

    spec, _ = _with_network(folder)
    check_files(folder, network_only)
    try:
        spec.network.check_packages()
    except ValueError as error:
        raise BundleError(f"{folder} cannot be loaded: {error}") from error
    try:
        spec.build_frontend()
        layers = spec.system.num_layers(spec)
        assert spec.frame_factor
        assert spec.num_outputs
    except ValueError as error:
        raise BundleError(f"{folder / SPEC} does not describe a valid model: {error}") from error
    try:
        model = load_network(folder / WEIGHTS, spec.build_model, layers)
    except (OSError, ValueError, SafetensorError) as error:
        raise BundleError(f"{folder / WEIGHTS} does not match its bundle.json: {error}") from error
    try:
        check_finite(model.state_dict())
    except ValueError as error:
        raise BundleError(f"{folder / WEIGHTS} is damaged: {error}; {_AGAIN}") from error
    return spec, model
