"""Acoustic models cut into stages, for pipelines: consecutive layers, each stage a module of its own.

The first stage holds the subsampling front end beside its layers, the last one the output layer. Stages take over the
model's parameters under the model's own names: their state dicts are disjoint parts of the whole model's.
"""

from functools import cache

import torch

from speech.models.networks.base import AcousticModel, ModelStage, halved


def border_bytes(model: AcousticModel, utterances: int, frames: int) -> float:
    """Bytes of what a stage sends on of a batch: hidden frames, as fp32.

    Args:
        model: As a whole.
        utterances: Of the batch.
        frames: Feature frames that it is padded to.
    """
    inner = int(halved(torch.tensor(max(1, frames)), model.cfg.halvings))
    return 4.0 * utterances * inner * model.hidden_width


def split_model(model: AcousticModel, stages: int) -> list[ModelStage]:
    """Cut a model into stages whose largest has as few parameters as can be.

    Args:
        model: Its parameters become the stages'.
        stages: How many; each gets a layer at least.

    Raises:
        ValueError: If the model has fewer layers, or is of a kind that cannot be split.
    """
    if model.cfg.layers < stages:
        raise ValueError(
            f"model.layers is {model.cfg.layers}, which cannot be split into {stages} stages: use at most as many "
            "learners as layers"
        )
    cuts = balanced(_costs(model), stages)
    return [model.stage(layers) for layers in cuts]


def _costs(model: AcousticModel) -> list[int]:
    """Parameters of each layer; the first one's with the front end, the last one's with the output layer."""
    costs, last = [0] * model.cfg.layers, model.cfg.layers - 1
    for name, parameter in model.named_parameters():
        number = model.layer_of(name)
        if number is None:
            number = 0 if name.startswith("subsampling.") else last
        costs[number] += parameter.numel()
    return costs


def balanced(costs: list[int], parts: int) -> list[range]:
    """Cut a sequence into consecutive parts, none empty, so that the largest sum is as small as can be."""

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sum(costs[start:]), (len(costs),)
        tries = range(start + 1, len(costs) - left + 2)
        choices = ((max(sum(costs[start:stop]), best(stop, left - 1)[0]), stop) for stop in tries)
        cost, stop = min(choices)
        return cost, (stop, *best(stop, left - 1)[1])

    stops = best(0, parts)[1]
    return [range(start, stop) for start, stop in zip((0, *stops[:-1]), stops, strict=True)]
