"""Weights that a training begins with: those of another model, by name and shape.

    source = open_source(folder)
    check_source(source, spec, "models:/digits/3")
    transfer = transfer_weights(source, spec, network)
    initial = save_initial(transfer, store)

The network's outputs are tokens, or tied states. Tokens that both models have keep their rows of the output layer; the
rows of new ones begin as the network's own initialization gives them. Tied states are kept if the same GMM-HMM defines
them. `READERS` has a function for each format of a source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from configurable.addresses import address_content
from configurable.configuration import Configuration
from recognition.bundle import SPEC, BundleSpec, TiedStates, load_bundle, network_digest
from recognition.system import SystemConfig
from speech.features import FeatureConfig
from speech.models import ModelConfig
from speech.tokens import Tokenizer
from storage.intact import readable
from storage.objects import ObjectStore

if TYPE_CHECKING:
    from torch import Tensor

    from recognition.pretrained import PretrainedModel
    from speech.models.networks.base import TrainableNetwork

FOLDER = "initial"
FILE = f"{FOLDER}/model.safetensors"
"""In a training's output: the weights that it begins with."""
PRETRAINED = "config.json"
"""In a folder with a pretrained model: what describes it."""
_NAMES = 8
"""Names of parameters in a message."""
_PARTS = {"new": "new", "left out": "left_out"}


class SourceError(ValueError):
    """A model that a training should begin with is none, or does not fit."""


# --- models that a training may begin with


@dataclass(frozen=True)
class SourceModel:
    """A model that a training may begin with; what its format does not say is None."""

    model: ModelConfig
    """Kind and sizes of the network."""
    digest: str
    """SHA-256 of everything that a training takes from it."""
    weights: Callable[[], dict[str, Tensor]]
    """Reads the weights by name."""
    sample_rate: int | None = None
    features: FeatureConfig | None = None
    stats: dict[str, Any] | None = None
    tokenizer: Tokenizer | None = None
    states: TiedStates | None = None
    system: SystemConfig | None = None
    pretrained: PretrainedModel | None = None
    """What it is, if others have trained it."""
    began_with: dict[str, str] | None = None
    """Of a bundle: what its record says of the pretrained model that its own training began with."""


def _read_bundle(folder: Path) -> SourceModel:
    spec, model = load_bundle(folder, network_only=True)
    return SourceModel(
        model=spec.network,
        digest=network_digest(folder),
        weights=lambda: dict(model.state_dict()),
        sample_rate=spec.sample_rate,
        features=spec.features,
        stats=spec.stats,
        tokenizer=None if spec.states else spec.build_tokenizer(),
        states=spec.states,
        system=spec.system,
        began_with=spec.provenance.get("pretrained"),
    )


def _read_pretrained(folder: Path) -> SourceModel:
    from recognition.pretrained import read_pretrained_source

    source = read_pretrained_source(str(folder), folder)
    weights = source.weights()  # now: the folder may be gone later
    return replace(source, weights=lambda: weights)


READERS: dict[str, Callable[[Path], SourceModel]] = {SPEC: _read_bundle, PRETRAINED: _read_pretrained}
"""What reads a folder of each format, which may be gone afterwards; by the name of a file that is in it."""


def open_source(folder: Path, name: str = "") -> SourceModel:
    """Read a model that a training should begin with.

    Args:
        folder: Its folder.
        name: What the user calls it, for messages.

    Raises:
        SourceError: If it is no model, or it is damaged.
    """
    for file, read in READERS.items():
        if (folder / file).is_file():
            try:
                return read(folder)
            except ValueError as error:
                raise SourceError(f"train.init: {error}") from error
    raise SourceError(
        f"train.init: {name or folder} is no model: it has no {' or '.join(READERS)}. Give models:/NAME@ALIAS, NAME/3, "
        "or the folder or URL of a bundle or of a pretrained model"
    )


# --- whether it fits


def check_source(source: SourceModel, spec: BundleSpec, name: str) -> None:
    """Check that what a model has learned means the same in another one.

    Args:
        source: The model that training should begin with.
        spec: What is to be trained.
        name: What the user calls the source, for messages.

    Raises:
        SourceError: If not; the message has every field that differs, and the remedy.
    """
    check_fields(source, spec.network, spec.features, spec.sample_rate, name)
    if spec.features.adapted and (source.states is None or source.states != _same_states(source, spec)):
        raise SourceError(
            f"train.init: the features of {name} were adapted with another GMM-HMM than this run's stage align: align "
            "with the same data and section align, or begin with another model"
        )


def check_kind(source: SourceModel, model: ModelConfig, name: str) -> None:
    """Check that a model that training should begin with is of the kind that is to be trained; arguments as below.

    Raises:
        SourceError: If not.
    """
    if source.model.kind != model.kind:
        raise SourceError(
            f"train.init: {name} is a {source.model.kind}, and model.kind is {model.kind}: set model.kind="
            f"{source.model.kind}, or begin with another model"
        )


def check_fields(source: SourceModel, model: ModelConfig, features: FeatureConfig, sample_rate: int, name: str) -> None:
    """Check the part of `check_source` that the configuration alone tells.

    Numbers of layers may differ, as may dropout.

    Args:
        source: The model that training should begin with.
        model: The one that is to be trained.
        features: What this reads.
        sample_rate: Of the audio, in Hz.
        name: What the user calls the source, for messages.

    Raises:
        SourceError: If not; the message has every field that differs, and the remedy.
    """
    check_kind(source, model, name)
    differences = _differences("model", source.model, model, model.free_beside(source.model))
    if source.features is not None:
        differences |= _differences("features", source.features, features, {"stored"})
    if source.sample_rate not in (None, sample_rate):
        differences["data.sample_rate"] = (source.sample_rate, sample_rate)
    if differences:
        what = "; ".join(f"{place} is {mine}, and there {theirs}" for place, (theirs, mine) in differences.items())
        remedy = " ".join(f"--set {place}={theirs}" for place, (theirs, _) in differences.items())
        raise SourceError(f"train.init: {name} does not fit: {what}. Use its values ({remedy}), or another model")


def _same_states(source: SourceModel, spec: BundleSpec) -> TiedStates | None:
    """The source's states, if the same GMM-HMM defines those of the other model."""
    mine = spec.states
    same = mine is not None and source.states is not None and source.states.model == mine.model
    return source.states if same else None


def _differences(place: str, theirs: BaseModel, mine: BaseModel, free: set[str] | frozenset[str]) -> dict[str, Any]:
    """Fields with different values: of the source, and of what is to be trained."""
    if type(theirs) is not type(mine):
        return {f"{place}.kind": (getattr(theirs, "kind", ""), getattr(mine, "kind", ""))}
    pairs = {name: (getattr(theirs, name), getattr(mine, name)) for name in type(mine).model_fields if name not in free}
    return {f"{place}.{name}": _shown(*pair) for name, pair in pairs.items() if pair[0] != pair[1]}


def _shown(*values: Any) -> tuple[Any, ...]:
    return tuple(address_content(value) if isinstance(value, BaseModel) else value for value in values)


# --- what is taken


@dataclass(frozen=True)
class Transfer:
    """Initial weights of a network, and where they come from."""

    weights: dict[str, Tensor]
    """All of the network's, by name."""
    taken: tuple[str, ...]
    """Names of those that are the source's."""
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Names of those of which only some rows are the source's: how many, and of how many."""
    new: tuple[str, ...] = ()
    """Names of those that the source does not have."""
    left_out: tuple[str, ...] = ()
    """Names of the source's that the network does not have."""
    outputs: dict[str, int] = field(default_factory=dict)
    """Numbers of outputs that are `kept`, `new` and `left_out`."""

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Names of those that are not, or not entirely, the source's."""
        return (*self.new, *self.rows)

    def summary(self) -> dict[str, Any]:
        """What is taken, left out and new, as JSON, for a record."""
        return {
            "taken": len(self.taken),
            "taken_weights": sum(self.weights[name].numel() for name in self.taken),
            "rows": {name: list(counts) for name, counts in self.rows.items()},
            "new": list(self.new),
            "left_out": list(self.left_out),
            "outputs": self.outputs,
        }

    def text(self) -> str:
        """The same in a line."""
        return summary_text(self.summary())


def summary_text(summary: Mapping[str, Any]) -> str:
    """What `Transfer.summary` says, in a line."""
    parts = [f"takes {summary['taken']} tensors ({summary['taken_weights']:,} weights)"]
    parts += [f"{kept} of {total} rows of {name}" for name, (kept, total) in summary["rows"].items()]
    parts += [f"{what}: {_some(names)}" for what, part in _PARTS.items() if (names := summary[part])]
    return "; ".join(parts)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


def transfer_weights(source: SourceModel, spec: BundleSpec, network: TrainableNetwork) -> Transfer:
    """Take a source's weights into a network with random ones.

    Args:
        source: A source that `check_source` has accepted.
        spec: What is to be trained.
        network: Its network; it is not changed.

    Raises:
        SourceError: If a tensor of the same name has another shape.
    """
    theirs, own = (
        network.own_names(source.weights()),
        {name: tensor.detach().clone() for name, tensor in network.state_dict().items()},
    )
    origin = _origin(source, spec)
    taken: list[str] = []
    rows: dict[str, tuple[int, int]] = {}
    new: list[str] = []
    for name, tensor in own.items():
        given = theirs.get(name)
        if name in network.output_rows:
            kept = _take_rows(tensor, given, origin)
            if 0 < kept < len(tensor):
                rows[name] = (kept, len(tensor))
                continue
            (taken if kept else new).append(name)
        elif given is None:
            new.append(name)
        elif given.shape != tensor.shape:
            raise SourceError(
                f"train.init: {name} is {tuple(given.shape)} there, and {tuple(tensor.shape)} in the model that is to "
                "be trained: give its section model the sizes of the other"
            )
        else:
            tensor.copy_(given)
            taken.append(name)
    kept = sum(place is not None for place in origin)
    counts = {"kept": kept, "new": len(origin) - kept, "left_out": _num_outputs(source) - kept}
    left_out = tuple(name for name in theirs if name not in own)
    return Transfer(own, tuple(taken), rows, tuple(new), left_out, counts)


def _num_outputs(source: SourceModel) -> int:
    if source.states is not None:
        return source.states.size
    return source.tokenizer.size if source.tokenizer else 0


def _origin(source: SourceModel, spec: BundleSpec) -> list[int | None]:
    """For each output of the network, the source's output that means the same."""
    if spec.states is not None:
        same = _same_states(source, spec) is not None and _num_outputs(source) == spec.states.size
        return list(range(spec.states.size)) if same else [None] * spec.states.size
    mine = spec.build_tokenizer()
    if source.tokenizer is None or source.tokenizer.kind != mine.kind:  # the blank means the same everywhere
        return [None if source.tokenizer is None or number else 0 for number in range(mine.size)]
    known = {symbol: number for number, symbol in enumerate(source.tokenizer.symbols)}
    return [known.get(symbol) for symbol in mine.symbols]


def _take_rows(tensor: Tensor, given: Tensor | None, origin: Sequence[int | None]) -> int:
    """Copy the rows of outputs that both have; returns their number."""
    if given is None or given.shape[1:] != tensor.shape[1:]:
        return 0
    pairs = [(own, place) for own, place in enumerate(origin) if place is not None]
    if pairs:
        own, places = (list(rows) for rows in zip(*pairs, strict=True))
        tensor[own] = given[places]
    return len(pairs)


# --- how a training finds them


class InitialWeights(Configuration):
    """Weights that a training begins with, in an object store that all its processes reach."""

    url: str = ""
    """Store with the file `initial/model.safetensors`, which has all of the network's weights; empty for measurements,
    in which they may be random."""
    sha256: str = ""
    """Of the file."""
    new: tuple[str, ...] = ()
    """Names of the parameters that are not, or not entirely, another model's."""

    def read(self) -> dict[str, Tensor]:
        """The weights by name.

        Raises:
            SourceError: If the file is another one, such as one that was cut short.
            ObjectMissingError: If it is gone.
        """
        from safetensors.torch import load

        store = ObjectStore(self.url)
        data = store.read(FILE)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise SourceError(f"{store.join(FILE)} is not what the training began with: start it again with --force")
        with readable(store.join(FILE)):
            return dict(load(data))


def save_initial(transfer: Transfer, store: ObjectStore) -> InitialWeights:
    """Write initial weights into a training's output."""
    from safetensors.torch import save

    data = save({name: tensor.contiguous() for name, tensor in transfer.weights.items()})
    store.write(FILE, data)
    return InitialWeights(url=store.url, sha256=hashlib.sha256(data).hexdigest(), new=transfer.incomplete)
