"""Steps of training and their results as bytes, for workers in other processes: JSON and safetensors, no pickle.

    data = dump_value({"model": model, "alignments": alignments})
    value = load_value(data)

Values are JSON's, tuples, mappings with any keys, tensors, arrays, and objects of the classes in `CLASSES`. Arrays of a
type are stored one after the other, so that thousands of small ones cost little.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from speech.files import DAMAGED
from speech.hmm import steps
from speech.hmm.gmm import DiagGmm, GmmStatistics
from speech.hmm.graphs import GraphOptions, UtteranceGraph
from speech.hmm.ivector import BackgroundModel, BaumWelch, IvectorExtractor, VariabilityStatistics
from speech.hmm.model import FeatureChain, HmmModel
from speech.hmm.topology import PhoneSet, Scales, TransitionModel
from speech.hmm.transforms import FmllrStatistics, LdaStatistics, MlltStatistics
from speech.hmm.tree import ContextStatistics, DecisionTree
from speech.hmm.viterbi import AlignOptions, StatePath

CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        HmmModel,
        steps.AlignedShard,
        StatePath,
        AlignOptions,
        BackgroundModel,
        BaumWelch,
        ContextStatistics,
        DecisionTree,
        DiagGmm,
        FeatureChain,
        FmllrStatistics,
        GmmStatistics,
        GraphOptions,
        IvectorExtractor,
        LdaStatistics,
        MlltStatistics,
        PhoneSet,
        Scales,
        steps.Statistics,
        TransitionModel,
        UtteranceGraph,
        VariabilityStatistics,
    )
}
"""Classes whose objects may be stored: dataclasses, and those in `_ATTRIBUTES`."""
_ATTRIBUTES = {DiagGmm: ("weights", "means", "variances"), TransitionModel: ("phones", "keys", "log_probs")}
"""Arguments of classes that are not dataclasses; their objects have attributes of the same names."""
STEPS: dict[str, Callable[..., Any]] = {
    step.__name__: step
    for step in (
        steps.accumulate_shard,
        steps.align,
        steps.align_equally,
        steps.context_statistics,
        steps.fmllr_statistics,
        steps.lda_statistics,
        steps.make_graphs,
        steps.mllt_statistics,
    )
}
"""Steps that may be stored."""
_TREE = "tree"


class SerializationError(ValueError):
    """Bytes that are not a stored value."""


class _Writer:
    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self.sizes: dict[str, int] = {}

    def encode(self, value: Any) -> Any:
        """The JSON form of a value; arrays are set aside."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.floating | np.integer):
            return value.item()
        if isinstance(value, Tensor | np.ndarray):
            return self._array(value)
        if isinstance(value, list | tuple):
            return {"list" if isinstance(value, list) else "tuple": [self.encode(item) for item in value]}
        if isinstance(value, Mapping):
            return {"map": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        name = type(value).__name__
        if CLASSES.get(name) is not type(value):
            raise TypeError(f"objects of the class {name} cannot be stored")
        return {"class": name, "fields": [self.encode(getattr(value, field)) for field in _fields(type(value))]}

    def _array(self, value: Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
        is_tensor = isinstance(value, Tensor)
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        name = str(tensor.dtype).removeprefix("torch.")
        start = self.sizes.get(name, 0)
        self.parts.setdefault(name, []).append(tensor.reshape(-1))
        self.sizes[name] = start + tensor.numel()
        return {"tensor" if is_tensor else "array": name, "start": start, "shape": list(tensor.shape)}


def _fields(kind: type) -> tuple[str, ...]:
    """Names of a class' arguments."""
    if not is_dataclass(kind):
        return _ATTRIBUTES[kind]
    return tuple(field.name for field in fields(kind) if field.init and not field.name.startswith("_"))


def dump_value(value: Any) -> bytes:
    """Convert a value to bytes.

    Raises:
        TypeError: The value contains an object of another class.
    """
    writer = _Writer()
    tree = json.dumps(writer.encode(value)).encode()
    arrays = {name: torch.cat(parts) for name, parts in writer.parts.items()}
    return bytes(save(arrays | {_TREE: torch.frombuffer(bytearray(tree), dtype=torch.uint8)}))


def load_value(data: bytes) -> Any:
    """The inverse of `dump_value`; tensors are on the CPU.

    Raises:
        SerializationError: The bytes are not a stored value.
    """
    try:
        arrays = load(data)
        return _decode(json.loads(arrays.pop(_TREE).numpy().tobytes()), arrays)
    except DAMAGED as error:
        raise SerializationError(f"this is not a stored value ({error!r})") from error


def _decode(tree: Any, arrays: Mapping[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "list" in tree:
        return [_decode(item, arrays) for item in tree["list"]]
    if "tuple" in tree:
        return tuple(_decode(item, arrays) for item in tree["tuple"])
    if "map" in tree:
        return {_decode(key, arrays): _decode(item, arrays) for key, item in tree["map"]}
    if "class" in tree:
        kind = CLASSES[tree["class"]]
        values = [_decode(item, arrays) for item in tree["fields"]]
        return kind(**dict(zip(_fields(kind), values, strict=True)))
    shape, start = tuple(tree["shape"]), tree["start"]
    size = int(np.prod(shape, dtype=np.int64))
    if "tensor" in tree:
        return arrays[tree["tensor"]][start : start + size].reshape(shape)
    return arrays[tree["array"]][start : start + size].reshape(shape).numpy()


def step_parts(step: Callable[..., Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The name of a step that training maps over shards, with its positional and keyword arguments.

    Args:
        step: A `functools.partial` of one of `STEPS`.
    """
    assert isinstance(step, partial)
    assert STEPS.get(step.func.__name__) is step.func, f"{step.func} is not a step"
    return step.func.__name__, step.args, dict(step.keywords)
