"""Reads pretrained models: a folder, a URL on object storage, or a name on the Hugging Face hub; safetensors only.

    pretrained = read_pretrained(config, cache)     # config.source is models/whisper-base
    config = pretrained.sized(config)               # with the sizes of its encoder
    weights = pretrained.weights(config)            # by the names of our network

Nothing is unpickled, and no code that comes with a model is run. Only a name on the hub with its revision leads to the
network, where `HF_HUB_OFFLINE=1` forbids it and the hub's own cache is asked first.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from torch import Tensor

from configurable.files import known_sha256
from recognition.initial_weights import PRETRAINED as CONFIG
from recognition.initial_weights import SourceModel
from speech.features import FeatureConfig
from speech.files import ShapeError, check_finite, read_described
from speech.models import MODELS, PretrainedConfig
from speech.models.networks.pretrained import PretrainedEncoder
from speech.models.networks.whisper_decoder import GENERATION, TOKENIZER, with_missing_merges
from storage.intact import DamagedObjectError, parse_json
from storage.objects import ObjectStore

log = logging.getLogger(__name__)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PREPROCESSOR, CARD = "preprocessor_config.json", "README.md"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LARGEST_JSON = 64 << 20
"""Bytes of a description; an index of a very large model has a few."""
_TOLERANCE = 2e-3
"""Difference between tensors that are computed here and those in a file, which may be in fp16."""


class PretrainedError(ValueError):
    """The pretrained model cannot be used; the message names the remedy."""


@dataclass(frozen=True)
class PretrainedModel:
    """A pretrained model where it is."""

    name: str
    """As configured: a folder, a URL, or a name on the hub."""
    revision: str
    """Commit on the hub; empty for others."""
    config: dict[str, Any]
    """Content of `config.json`."""
    preprocessor: dict[str, Any]
    """Content of `preprocessor_config.json`; empty without one."""
    generation: dict[str, Any]
    """Content of `generation_config.json`; empty without one."""
    tokenizer: str
    """Content of `tokenizer.json`, with all merges; empty without one."""
    card: dict[str, Any]
    """What the head of its model card states: licence, data sets."""
    paths: tuple[Path, ...]
    """Local files with its weights."""
    digest: str
    """SHA-256 over its configuration and weights."""

    def sized(self, cfg: PretrainedConfig) -> PretrainedConfig:
        """A configuration with the sizes of this model's encoder.

        Raises:
            PretrainedError: It is of another kind.
        """
        try:
            return cfg.with_encoder(self.config)
        except ValueError as error:
            raise PretrainedError(f"{self.name} cannot be used: {error}") from error

    def check(self, cfg: PretrainedConfig, features: FeatureConfig, sample_rate: int) -> PretrainedConfig:
        """Check that features are those that this model was trained on.

        Args:
            cfg: The configuration that names it.
            features: What it is to read.
            sample_rate: Of the audio, in Hz.

        Returns:
            The configuration with the sizes of its encoder.

        Raises:
            ValueError: They are not; the message names the field.
        """
        sized = self.sized(cfg)
        sized.check_inputs(features, sample_rate)
        sized.check_preprocessor(features, self.preprocessor)
        return sized

    def weights(self, cfg: PretrainedConfig) -> dict[str, Tensor]:
        """The encoder's weights, by the names of our network, in float32.

        Args:
            cfg: What `sized` gives.

        Raises:
            PretrainedError: A file is damaged, or the weights are not those of the encoder that is described.
        """
        wanted, fixed = self._expected(cfg)
        expected, tensors = wanted | fixed, dict[str, Tensor]()
        for path in self.paths:
            try:
                tensors |= read_described(path, expected, cfg.own_name)
            except ShapeError as error:
                raise PretrainedError(
                    f"{self.name}: {error.name} is {error.shape}, but its {CONFIG} describes {error.wanted}: its files "
                    "are not of one model"
                ) from error
            except (SafetensorError, OSError) as error:
                raise PretrainedError(f"{path} is damaged or truncated ({error}): fetch the model again") from error
        self._check_complete(wanted, tensors)
        for name, tensor in fixed.items():
            if name in tensors and not torch.allclose(tensors[name], tensor, atol=_TOLERANCE, rtol=0):
                raise PretrainedError(f"{self.name}: {name} differs from the published one, which is not supported")
        return {name: tensors[name].contiguous() for name in wanted}

    def _expected(self, cfg: PretrainedConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The encoder's trained tensors by name, without memory, and those that are computed."""
        try:
            with torch.device("meta"):
                network = cfg.build(cfg.num_features, 2)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise PretrainedError(f"{self.name}: {CONFIG} describes no encoder: {error}") from error
        assert isinstance(network, PretrainedEncoder)
        names = {name: tensor for name, tensor in network.state_dict().items() if name not in network.output_rows}
        return names, network.fixed_tensors()

    def _check_complete(self, wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        if missing := sorted(wanted.keys() - tensors.keys()):
            raise PretrainedError(
                f"{self.name} has no weights for {missing[0]}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + ": is it complete, and of the architecture that its config.json names?"
            )
        try:
            check_finite(tensors)
        except ValueError as error:
            raise PretrainedError(f"{self.name} is damaged: {error}; fetch the model again") from error

    def about(self) -> dict[str, str]:
        """What a finished model's record says of it."""
        datasets = self.card.get("datasets") or ""
        return {
            "source": self.name,
            "revision": self.revision,
            "sha256": self.digest,
            "architecture": str(self.config.get("model_type", "")),
            "licence": str(self.card.get("license_name") or self.card.get("license") or ""),
            "trained_on": ", ".join(map(str, datasets)) if isinstance(datasets, list) else str(datasets),
        }

    def source_model(self, cfg: PretrainedConfig) -> SourceModel:
        """This model as one that a training may begin with.

        Args:
            cfg: What `sized` gives.
        """
        return SourceModel(cfg, self.digest, lambda: self.weights(cfg), cfg.sample_rate, pretrained=self)


def read_pretrained(cfg: PretrainedConfig, cache: Path) -> PretrainedModel:
    """Find and describe a pretrained model.

    Args:
        cfg: Names the source.
        cache: Local folder for copies of what is on object storage.

    Raises:
        PretrainedError: It is not there, or not in a form that can be used.
    """
    store = ObjectStore(hub_folder(cfg.source, cfg.revision) if cfg.revision else cfg.source)
    sizes = {entry.path: (entry.size, entry.modified) for entry in store.entries() if "/" not in entry.path}
    if CONFIG not in sizes:
        raise PretrainedError(_not_a_model(cfg.source, bool(sizes)))
    config = _json(store, CONFIG)
    names = _weight_files(cfg.source, store, sizes.keys())
    paths = tuple(_local(store, name, sizes[name], cache) for name in names)
    generation = _json(store, GENERATION) if GENERATION in sizes else {}
    described = with_missing_merges(_json(store, TOKENIZER)) if TOKENIZER in sizes else {}
    tokenizer = json.dumps(described, ensure_ascii=False) if described else ""
    sha256 = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    if generation or tokenizer:
        sha256.update((json.dumps(generation, sort_keys=True) + tokenizer).encode())
    for path in paths:
        sha256.update(known_sha256(path).encode())
    return PretrainedModel(
        name=cfg.source,
        revision=cfg.revision,
        config=config,
        preprocessor=_json(store, PREPROCESSOR) if PREPROCESSOR in sizes else {},
        generation=generation,
        tokenizer=tokenizer,
        card=_card(store.read(CARD, 0, _LARGEST_JSON)) if CARD in sizes else {},
        paths=paths,
        digest=sha256.hexdigest(),
    )


def read_pretrained_source(source: str, cache: Path) -> SourceModel:
    """A model that a training may begin with, of the kind that its `config.json` names.

    Args:
        source: Its folder or URL.
        cache: Local folder for copies of what is on object storage.

    Raises:
        PretrainedError: It cannot be used.
    """
    kinds = [kind for kind in MODELS.values() if issubclass(kind, PretrainedConfig)]
    store = ObjectStore(source)
    if not store.exists(CONFIG):
        raise PretrainedError(_not_a_model(source, bool(store.list())))
    model_type = str(_json(store, CONFIG).get("model_type", ""))
    kind = next((candidate for candidate in kinds if model_type in candidate.model_types), kinds[0])
    cfg = kind(source=source)
    pretrained = read_pretrained(cfg, cache)
    return pretrained.source_model(pretrained.sized(cfg))


def _not_a_model(source: str, exists: bool) -> str:
    """Message about a source without a configuration."""
    if exists:
        return f"the pretrained model {source} has no {CONFIG}: name a folder in Hugging Face's format"
    text = f"the pretrained model {source} is not there: correct the path"
    return f"{text}; for a name on the Hugging Face hub, give model.revision, too (a commit)"


def _json(store: ObjectStore, name: str) -> dict[str, Any]:
    try:
        value = parse_json(store.join(name), store.read(name, 0, _LARGEST_JSON))
    except DamagedObjectError as error:
        raise PretrainedError(
            f"{store.join(name)} {error.reason.removeprefix('it ')}: fetch the model again"
        ) from error
    if not isinstance(value, dict):
        raise PretrainedError(f"{store.join(name)} is not a mapping: fetch the model again")
    return value


def _card(text: bytes) -> dict[str, Any]:
    """The head of a model card, in YAML between two lines of hyphens; empty if there is none that can be read."""
    parts = text.decode(errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        value = yaml.safe_load(parts[1])
    except (yaml.YAMLError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _weight_files(source: str, store: ObjectStore, names: Any) -> list[str]:
    """Names of the files with the weights."""
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX in names:
        parts = _json(store, INDEX).get("weight_map")
        files = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
        missing = [name for name in files if name not in names]
        if missing or not files:
            what = f"{missing[0]}, which {INDEX} names, is missing" if missing else f"{INDEX} names no files"
            raise PretrainedError(f"the pretrained model {source} is incomplete: {what}; fetch the model again")
        return files
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        command = f"AutoModel.from_pretrained({source!r}).save_pretrained({source!r})"
        raise PretrainedError(
            f"the pretrained model {source} has its weights in {pickles[0]} only, a pickle, which can run code and is "
            f'not read. If you trust it, convert it: python -c "from transformers import AutoModel; {command}"'
        )
    raise PretrainedError(f"the pretrained model {source} has no {WEIGHTS}: fetch the model again, or name another")


def _local(store: ObjectStore, name: str, version: tuple[int, float], cache: Path) -> Path:
    """A local file with the content of an object: the object itself, or a copy of this version of it."""
    if (own := store.local_path(name)) is not None:
        return own
    key = hashlib.sha256(repr((store.url, name, version)).encode()).hexdigest()[:24]
    folder = cache / "pretrained" / key
    if not (folder / name).is_file() or (folder / name).stat().st_size != version[0]:
        log.info("%s is copied to %s", store.join(name), folder)
        store.fetch(name, folder)
    return folder / name


def hub_folder(name: str, revision: str) -> str:
    """Local folder with a model of the Hugging Face hub: from the hub's cache, or else from the network.

    Args:
        name: The model's name, such as `openai/whisper-base`.
        revision: The commit.

    Raises:
        PretrainedError: It is not in the cache, and cannot be fetched.
    """
    from huggingface_hub import constants, snapshot_download

    patterns = [CONFIG, PREPROCESSOR, GENERATION, TOKENIZER, CARD, WEIGHTS, INDEX, "model-*.safetensors"]
    what = {"repo_id": name, "revision": revision, "allow_patterns": patterns}
    offline = bool(constants.HF_HUB_OFFLINE)
    try:
        folder = Path(snapshot_download(**what, local_files_only=True))
        if (folder / CONFIG).is_file() and any(folder.glob("*.safetensors")):
            return str(folder)
    except (OSError, ValueError) as error:
        missing: Exception | str = error
    else:
        missing = "its copy is incomplete"
    if not offline:
        log.warning("%s, revision %s, is fetched from %s", name, revision, constants.ENDPOINT)
        try:
            return str(snapshot_download(**what))
        except (OSError, ValueError) as error:
            missing = error
    reason = "HF_HUB_OFFLINE forbids to fetch it" if offline else f"it cannot be fetched: {missing}"
    raise PretrainedError(
        f"the pretrained model {name}, revision {revision}, is not in the cache of the Hugging Face hub "
        f"({constants.HF_HUB_CACHE}), and {reason}. Where there is a network, run `hf download {name} --revision "
        f"{revision} --local-dir FOLDER`, and name the folder in model.source, without model.revision"
    ) from None
