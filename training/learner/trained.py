"""What is trained of a network: frozen parameters, low-rank adapters, and the learning rates of layers.

A parameter that is frozen for good becomes a constant of its module (a buffer that is not persistent). So the flat
buffer, the optimizer, exchanges, replicas and checkpoints hold only what is trained: adapters of 1 % of the weights
cost 1 % of the exchange. Every process makes the constants itself, from the task's initial network: a resume finds them
where the training began. `TrainedNetwork.whole` puts them back, and merges adapters, when a model is saved.

A parameter that thaws later is part of all that from the start, because the flat buffer must have the same size at all
learners while they are in different epochs; until then its gradient and its learning rate are zero.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from storage.batching import derive_seed
from training.config import LoraConfig, TrainConfig
from training.job import TrainJob
from training.learner.optim import Rate, Rates
from training.learner.task import LayeredNetwork, WarmTask

_ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.RNNBase)
_SHOWN = 12
"""Names in a message."""


# --- adapters


_FACTORS = ("lora_a", "lora_b")


def _factor(weight: str, which: str) -> str:
    """Name of an adapter's factor beside its weight: `lora_a` of `weight`, `weight_ih_l0_lora_a` of `weight_ih_l0`."""
    return which if weight == "weight" else f"{weight}_{which}"


def _adapted_by(parameter: str) -> str:
    """Name of the weight that a factor adapts; other names stay as they are."""
    owner, dot, own = parameter.rpartition(".")
    for which in _FACTORS:
        if own == which or own.endswith(f"_{which}"):
            own = own.removesuffix(which).removesuffix("_") or "weight"
    return f"{owner}{dot}{own}"


def _adapted(weight: str) -> property:
    factors = [_factor(weight, which) for which in _FACTORS]

    def read(module: Any) -> Tensor:
        constant: Tensor = module._buffers[weight]
        a, b = (getattr(module, factor) for factor in factors)
        adapted: Tensor = constant + (module.lora_scale * (b @ a)).view(constant.shape)
        return adapted

    return property(read)


@cache
def _adapted_class(kind: type[nn.Module], weights: tuple[str, ...]) -> type[nn.Module]:
    return type(f"LowRank{kind.__name__}", (kind,), {weight: _adapted(weight) for weight in weights})


def add_adapters(module: nn.Module, weights: Sequence[str], cfg: LoraConfig) -> None:
    """Let a module compute with W + alpha / rank · B A, whose W is already a constant; B is zero at the start.

    The module's class becomes a subclass whose weights are the sums, so that whatever reads a weight gets the adapted
    one. Names of parameters do not change; `lora_a` and `lora_b` are added for each weight. A convolution's W is seen
    as a matrix with a row for each output channel.

    Args:
        module: A linear layer, a convolution, or recurrent layers.
        weights: Names of its weights.
        cfg: Rank and scale.
    """
    made: Any = module
    for name in weights:
        weight = module._buffers[name]
        assert weight is not None
        a, b = weight.new_empty(cfg.rank, weight[0].numel()), weight.new_zeros(weight.shape[0], cfg.rank)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))  # as nn.Linear, and the authors' code
        for which, factor in zip(_FACTORS, (a, b), strict=True):
            setattr(made, _factor(name, which), nn.Parameter(factor))
    made.lora_scale = cfg.alpha / cfg.rank
    kind: Any = type(module)
    made.__class__ = _adapted_class(kind, tuple(weights))


def _adaptable(network: nn.Module) -> dict[str, list[str]]:
    """Linear, convolutional and recurrent layers by name, with their weights' own names; those that have weights."""
    layers = {name: module for name, module in network.named_modules() if isinstance(module, _ADAPTABLE)}
    weights = {
        name: [
            own for own, parameter in layer._parameters.items() if parameter is not None and own.startswith("weight")
        ]
        for name, layer in layers.items()
    }
    return {name: own for name, own in weights.items() if own}


# --- a network and what is trained of it


@dataclass(frozen=True)
class TrainedNetwork:
    """A network whose frozen parameters are constants.

    Attributes:
        network: The network; its parameters are what is trained.
        names: Names of all its weights and buffers, as a saved model has them.
        constants: Names of the frozen ones.
        rates: Learning rates that differ from the schedule's.
    """

    network: nn.Module
    names: tuple[str, ...]
    constants: frozenset[str] = frozenset()
    rates: Rates = field(default_factory=dict)

    @property
    def num_trained(self) -> int:
        """Number of trained weights."""
        return sum(parameter.numel() for parameter in self.network.parameters() if parameter.requires_grad)

    @property
    def num_weights(self) -> int:
        """Number of weights of the whole network, adapters not counted."""
        trained = {p: name for name, p in self.network.named_parameters() if p.requires_grad}
        constants = {id(constant): constant.numel() for constant in map(self._constant, self.constants)}
        return sum(p.numel() for p, name in trained.items() if name in self.names) + sum(constants.values())

    def _constant(self, name: str) -> Tensor:
        owner, _, own = name.rpartition(".")
        constant = self.network.get_submodule(owner)._buffers[own]
        assert constant is not None
        return constant

    def _values(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            yield name, self._constant(name) if name in self.constants else weights[name]

    @torch.no_grad()
    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole network's state by name, on the CPU, with adapters merged into the weights.

        Args:
            weights: State of what is trained, such as a replica's.
        """
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in self._values(weights)}
        for name in self.constants:
            owner, _, own = name.rpartition(".")
            a, b = (f"{owner}.{_factor(own, which)}" for which in _FACTORS)
            if b in weights:
                scale: float = self.network.get_submodule(owner).lora_scale  # type: ignore[assignment]
                product = scale * (weights[b] @ weights[a])
                whole[name] = whole[name] + product.cpu().view(whole[name].shape)
        return whole


def initial_network(job: TrainJob) -> TrainedNetwork:
    """The network that a job's training begins with, the same in all its processes."""
    torch.manual_seed(derive_seed("init", job.seed))
    task = job.known_task
    new = task.new_parameters if isinstance(task, WarmTask) else None
    return trained_network(task.build_network(), job.train, new)


def trained_network(network: nn.Module, cfg: TrainConfig, new: Collection[str] | None = None) -> TrainedNetwork:
    """Freeze parameters, add adapters, and find the learning rates of layers.

    Args:
        network: The network; it is changed.
        cfg: Which parameters are frozen, and so on.
        new: Names of parameters that do not begin with another model's weights; None if all are random.

    Raises:
        ValueError: If a pattern matches nothing, or nothing would be trained.
    """
    names = tuple(network.state_dict())
    parameters = dict(network.named_parameters(remove_duplicate=False))
    fresh = frozenset(parameters) if new is None else frozenset(new)
    until = _frozen(parameters, cfg)
    adapted: dict[str, list[str]] = {}
    if cfg.lora:
        adapted = _adapted_modules(network, cfg.lora, fresh, until)
        until |= {name: 0 for name in parameters if name not in fresh}
    depths = _depths(network, parameters) if cfg.layer_decay != 1 else {}
    top = max(depths.values(), default=0)
    frozen = {id(parameters[name]) for name, epochs in until.items() if not epochs}
    constants = frozenset(name for name, parameter in parameters.items() if id(parameter) in frozen)
    _make_constant(network, constants)
    for name, weights in adapted.items():
        assert cfg.lora is not None
        add_adapters(network.get_submodule(name), weights, cfg.lora)
    rates: dict[Tensor, Rate] = {}
    for name, parameter in network.named_parameters():
        depth = depths.get(_adapted_by(name), top)  # an adapter belongs to the layer of its weight
        is_new = name not in parameters or (new is not None and name in fresh)
        scale = cfg.layer_decay ** (top - depth) * (cfg.new_lr if is_new else 1.0)
        rate = Rate(scale, until.get(name, 0))
        if rate != Rate():
            rates[parameter] = rate
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if not any(rates.get(parameter, Rate()).until == 0 for parameter in trained):
        raise ValueError(
            "train.freeze leaves no parameter that is trained in the first epoch: leave out a pattern. The parameters "
            f"are {_listed(_groups(parameters))}"
        )
    return TrainedNetwork(network, names, constants, rates)


def _frozen(parameters: Collection[str], cfg: TrainConfig) -> dict[str, int]:
    """Frozen parameters and their number of epochs, 0 for good; of several patterns, the later one counts."""
    until: dict[str, int] = {}
    for number, rule in enumerate(cfg.freeze):
        for pattern in rule.names:
            matching = _matching(parameters, pattern)
            if not matching:
                raise ValueError(
                    f"train.freeze.{number}.names: {pattern!r} matches no parameter; there are "
                    f"{_listed(_groups(parameters))}"
                )
            until |= dict.fromkeys(matching, rule.until)
    return until


def _adapted_modules(
    network: nn.Module, cfg: LoraConfig, fresh: Collection[str], frozen: Collection[str]
) -> dict[str, list[str]]:
    """Layers that get adapters, with their weights: those that are another model's, and that no pattern freezes."""
    known, left_out = _adaptable(network), {*fresh, *frozen}
    able = {
        name: left
        for name, weights in known.items()
        if (left := [own for own in weights if f"{name}.{own}" not in left_out])
    }
    chosen: dict[str, list[str]] = {}
    for pattern in cfg.modules:
        if not (matching := _matching(able, pattern)):
            why = "only layers that are new or frozen" if _matching(known, pattern) else "no layer"
            have = f"these layers can be adapted: {_listed(able)}" if able else "none can be adapted"
            raise ValueError(f"train.lora.modules: {pattern!r} matches {why}; {have}")
        chosen |= {name: able[name] for name in matching}
    return chosen


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _groups(parameters: Iterable[str]) -> Iterator[str]:
    """Patterns that match all parameters: those of all numbered layers, and those of each module outside of them."""
    for name in parameters:
        stem = re.split(r"\.\d+\.", name)[0]
        yield f"{stem if stem != name else name.rpartition('.')[0]}.*" if "." in name else name


def _listed(names: Iterable[str]) -> str:
    """The first names; those that differ in numbers only are one pattern."""
    patterns = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
    more = f" and {len(patterns) - _SHOWN} more" if len(patterns) > _SHOWN else ""
    return ", ".join(patterns[:_SHOWN]) + more


def _make_constant(network: nn.Module, names: Collection[str]) -> None:
    for path, module in network.named_modules(remove_duplicate=False):
        for own in list(module._parameters):
            parameter = module._parameters[own]
            if parameter is not None and (f"{path}.{own}" if path else own) in names:
                del module._parameters[own]
                module.register_buffer(own, parameter.detach(), persistent=False)


def _depths(network: nn.Module, parameters: Collection[str]) -> dict[str, int]:
    """Depth of each parameter: 0 before the layers, then the layers, then what follows them.

    Raises:
        ValueError: If the network does not number its layers.
    """
    layers = {name: network.layer_of(name) for name in parameters} if isinstance(network, LayeredNetwork) else {}
    numbers = {number for number in layers.values() if number is not None}
    if not numbers:
        raise ValueError(f"train.layer_decay needs a model of several layers, which {type(network).__name__} has not")
    first = min(place for place, name in enumerate(parameters) if layers[name] is not None)
    depths: dict[str, int] = {}
    for place, name in enumerate(parameters):
        number = layers[name]
        depths[name] = number + 1 if number is not None else 0 if place < first else max(numbers) + 2
    return depths
