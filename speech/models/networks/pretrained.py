"""What networks with a pretrained encoder share: its layers, which `transformers` has built, and the output layer.

The library's own forward passes are not used: they skip layers at random, mask frames, and let padding change results.
Its modules are; so weights have one meaning here and there.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from speech.features.cmvn import frame_mask
from speech.models.networks.base import AcousticModel, ModelStage
from speech.models.networks.dropout import Dropout
from speech.models.pretrained import PretrainedConfig


def fills(lengths: Tensor, num_frames: int) -> bool:
    """Whether a batch is known to have no padding, so that no mask is needed; on a GPU that is not known.

    Args:
        lengths: Frames of each utterance [batch].
        num_frames: Frames of the batch.
    """
    return lengths.device.type == "cpu" and not torch.compiler.is_compiling() and bool((lengths >= num_frames).all())


def key_mask(lengths: Tensor, num_frames: int) -> Tensor | None:
    """Mask of the frames that others may attend to [B, T]; None if all may.

    Args:
        lengths: Frames of each utterance [batch]; one without any gets a frame: all keys masked would give NaN.
        num_frames: Frames of the batch.
    """
    lengths = lengths.clamp(min=1)
    return None if fills(lengths, num_frames) else frame_mask(lengths, num_frames)


def layer_output(output: Any) -> Tensor:
    """What a layer of the library computes: from version 5 of it on a tensor, before that the first of a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def use_fast_dropout(module: nn.Module) -> None:
    """Replace a module's dropouts by those that are fast on a CPU."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))


class PretrainedEncoder(AcousticModel):
    """An encoder's front end and layers, and a linear output layer.

    Attributes:
        layers: The encoder's layers, from the input to the output.
        norm: What normalizes the last layer's output.
    """

    cfg: PretrainedConfig
    layers: nn.ModuleList
    norm: nn.Module

    def __init__(self, cfg: PretrainedConfig, num_features: int, vocab_size: int) -> None:
        cfg.check_built()
        super().__init__(cfg, num_features, vocab_size)
        self.dropout = Dropout(cfg.dropout)
        self.output = nn.Linear(cfg.dim, vocab_size)

    @abstractmethod
    def run_layers(self, layers: Iterable[nn.Module], x_BTD: Tensor, lengths: Tensor) -> Tensor:
        """Run layers over frames [B, T, D] of `lengths` [B]."""

    @override
    def encode(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        scores: Tensor = self.output(self.dropout(self.norm(self.run_layers(self.layers, x_BTD, lengths))))
        return scores

    def fixed_tensors(self) -> dict[str, Tensor]:
        """Tensors that are computed rather than trained, by name: a pretrained model must have the same."""
        return {}

    @override
    def layer_of(self, parameter: str) -> int | None:
        part, _, rest = parameter.partition(".")
        return int(rest.partition(".")[0]) if part == "layers" else None

    @override
    def stage(self, layers: range) -> "PretrainedStage":
        return PretrainedStage(self, layers)


class PretrainedStage(ModelStage):
    """Layers of a pretrained encoder."""

    norm: nn.Module

    def __init__(self, model: PretrainedEncoder, layers: range) -> None:
        super().__init__(model, layers)
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in layers})
        self._run_layers = model.run_layers
        self.norm = model.norm if self.is_last else nn.Identity()
        self.dropout = model.dropout if self.is_last else nn.Identity()
        self.output = model.output if self.is_last else nn.Identity()

    @override
    def run(self, x: Tensor, frames: Tensor) -> Tensor:
        x = self._run_layers(self.layers.values(), x, frames)
        scores: Tensor = self.output(self.dropout(self.norm(x)))
        return scores
