"""Splits acoustic models into stages of consecutive layers, for pipeline parallelism.

The first stage also contains the subsampling, the last one the output layer. Stages share the model's parameters under
the same names: their state dicts are disjoint parts of the model's state dict.
"""

from abc import ABC, abstractmethod
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speech.models.base import AcousticModel, halved
from speech.models.blstm import Blstm, run_lstm
from speech.models.conformer import Conformer, ConformerConfig, run_layers


class ModelStage(nn.Module, ABC):
    """Consecutive layers of an acoustic model.

    Args:
        model: The model, whose parameters are shared.
        layers: Indices of the layers.
        hidden: Width of the frames between stages.

    Attributes:
        in_width: Width of an input frame.
        out_width: Width of an output frame.
    """

    def __init__(self, model: AcousticModel, layers: range, hidden: int) -> None:
        super().__init__()
        self.cfg = model.cfg
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.cfg.layers
        self.in_width = model.num_features if self.is_first else hidden
        self.out_width = model.vocab_size if self.is_last else hidden
        self.subsampling = model.subsampling if self.is_first else None
        self._halvings = len(model.subsampling.convs)

    def num_frames(self, lengths: Tensor) -> Tensor:
        """Output frames for each number of feature frames."""
        return halved(lengths, self._halvings)

    @abstractmethod
    def run(self, x: Tensor, frames: Tensor) -> Tensor:
        """Run this stage's layers over subsampled or hidden frames [B, T', D]; the last stage returns scores."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """This stage's part of `AcousticModel.forward`.

        Args:
            x: Features [batch, frames, num_features] for the first stage, the previous stage's output for the others.
            lengths: Feature frames of each utterance [batch], for all stages.

        Returns:
            Log probabilities [batch, output frames, vocab_size] of the last stage, hidden frames [batch, output frames,
            width] of the others; float32.
        """
        if self.subsampling is not None:
            x, _ = self.subsampling(x, lengths)
        x = self.run(x, self.num_frames(lengths)).float()
        return (x.log_softmax(dim=-1) if self.is_last else x).contiguous()


class ConformerStage(ModelStage):
    """Layers of a Conformer."""

    cfg: ConformerConfig

    def __init__(self, model: Conformer, layers: range) -> None:
        super().__init__(model, layers, hidden_width(model))
        self.dropout = model.dropout if self.is_first else nn.Identity()
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in layers})
        self.output = model.output if self.is_last else nn.Identity()

    def run(self, x: Tensor, frames: Tensor) -> Tensor:
        """See the base class."""
        scores: Tensor = self.output(run_layers(self.layers.values(), self.dropout(x), frames, self.cfg))
        return scores


def hidden_width(model: AcousticModel) -> int:
    """Width of the frames between two layers."""
    return 2 * model.cfg.dim if isinstance(model, Blstm) else model.cfg.dim


def border_bytes(model: AcousticModel, utterances: int, frames: int) -> float:
    """Bytes of hidden frames (fp32) that a stage sends to the next one for a batch.

    Args:
        model: The whole model.
        utterances: Utterances in the batch.
        frames: Feature frames to which the batch is padded.
    """
    inner = int(halved(torch.tensor(max(1, frames)), len(model.subsampling.convs)))
    return 4.0 * utterances * inner * hidden_width(model)


class LstmLayers(nn.Module):
    """Some layers of a bidirectional LSTM, with its parameters under the same names.

    Args:
        lstm: The LSTM, whose parameters are shared.
        layers: Indices of the layers.
    """

    def __init__(self, lstm: nn.LSTM, layers: range) -> None:
        super().__init__()
        self.dropout = lstm.dropout if layers.stop < lstm.num_layers else 0.0
        part = nn.LSTM(
            input_size=2 * lstm.hidden_size if layers.start else lstm.input_size,
            hidden_size=lstm.hidden_size,
            num_layers=len(layers),
            dropout=lstm.dropout if len(layers) > 1 else 0.0,
            bidirectional=True,
            batch_first=True,
            device="meta",  # its own parameters are never used
        )
        for own, name in ((number - layers.start, number) for number in layers):
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                for end in ("", "_reverse"):
                    parameter = getattr(lstm, f"{kind}_l{name}{end}")
                    setattr(part, f"{kind}_l{own}{end}", parameter)
                    self.register_parameter(f"{kind}_l{name}{end}", parameter)
        # in a tuple, so that it is not a submodule, whose parameters would be registered again under other names
        self._part = (part,)

    def forward(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        """[B, T, D] and [B] -> [B, T, 2 x hidden_size], with dropout after all but the LSTM's last layer."""
        (part,) = self._part
        return F.dropout(run_lstm(part.train(self.training), x_BTD, lengths), self.dropout, self.training)


class BlstmStage(ModelStage):
    """Layers of a BLSTM."""

    def __init__(self, model: Blstm, layers: range) -> None:
        super().__init__(model, layers, hidden_width(model))
        self.lstm = LstmLayers(model.lstm, layers)
        self.bottleneck = model.bottleneck if self.is_last else nn.Identity()
        self.dropout = model.dropout if self.is_last else nn.Identity()
        self.output = model.output if self.is_last else nn.Identity()

    def run(self, x: Tensor, frames: Tensor) -> Tensor:
        """See the base class."""
        scores: Tensor = self.output(self.dropout(self.bottleneck(self.lstm(x, frames))))
        return scores


def split_model(model: AcousticModel, stages: int) -> list[ModelStage]:
    """Split a model into stages, minimizing the number of parameters of the largest one.

    Args:
        model: The model; the stages share its parameters.
        stages: Number of stages; each gets at least one layer.

    Raises:
        ValueError: If the model has fewer layers than stages.
    """
    if model.cfg.layers < stages:
        raise ValueError(
            f"model.layers is {model.cfg.layers}, which cannot be split into {stages} stages: use at most as many "
            "learners as layers"
        )
    cuts = balanced(_costs(model), stages)
    if isinstance(model, Conformer):
        return [ConformerStage(model, layers) for layers in cuts]
    assert isinstance(model, Blstm)
    return [BlstmStage(model, layers) for layers in cuts]


def _costs(model: AcousticModel) -> list[int]:
    """Parameters of each layer; the first includes the subsampling, the last the output layer."""
    costs, last = [0] * model.cfg.layers, model.cfg.layers - 1
    for name, parameter in model.named_parameters():
        part, _, rest = name.partition(".")
        if part == "layers":
            number = int(rest.partition(".")[0])
        elif part == "lstm":
            number = int(rest.split("_l")[1].removesuffix("_reverse"))
        else:
            number = 0 if part == "subsampling" else last
        costs[number] += parameter.numel()
    return costs


def balanced(costs: list[int], parts: int) -> list[range]:
    """Split a sequence into consecutive non-empty parts, minimizing the largest sum."""

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sum(costs[start:]), (len(costs),)
        tries = range(start + 1, len(costs) - left + 2)
        found = ((max(sum(costs[start:stop]), best(stop, left - 1)[0]), stop) for stop in tries)
        cost, stop = min(found)
        return cost, (stop, *best(stop, left - 1)[1])

    stops = best(0, parts)[1]
    return [range(start, stop) for start, stop in zip((0, *stops[:-1]), stops, strict=True)]
