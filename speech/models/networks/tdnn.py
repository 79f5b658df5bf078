"""Factorized time-delay network (TDNN-F; Povey et al., "Semi-Orthogonal Low-Rank Matrix Factorization", 2018).

A layer factorizes a convolution over time into two: a linear one from frames t - s and t to a bottleneck, whose weights
are kept semi-orthogonal, and an affine one from bottleneck frames t and t + s back to the width. Differences from the
paper: layer normalization in place of batch normalization, since statistics of batches would make replicas differ; and
ordinary dropout.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from speech.features.cmvn import frame_mask
from speech.models.networks.base import AcousticModel, ModelStage
from speech.models.networks.dropout import Dropout
from speech.models.networks.lstm import Memory
from speech.models.tdnn import TdnnConfig

_BYPASS = 0.66
"""Scale of a layer's input that is added to its output; that of Kaldi's `tdnnf-layer`."""
_RATE = 0.125
"""Speed of the steps towards semi-orthogonality (the paper's ν, section 3.1)."""


def semi_orthogonal_step(weight_OI: Tensor) -> Tensor:
    """One step of a matrix with at least as many columns as rows towards a multiple of a semi-orthogonal one.

    With P = M Mᵀ and α² = tr(P Pᵀ) / tr(P), M moves by -4 ν / α² (P - α² I) M: the scale α floats (section 3.2).
    """
    product = weight_OI @ weight_OI.T
    tiny = torch.finfo(product.dtype).tiny
    trace = product.trace().clamp(min=tiny)
    scale = (product.square().sum() / trace).clamp(min=tiny)
    excess = product - scale * torch.eye(len(product), device=product.device, dtype=product.dtype)
    # far from the goal, whole steps diverge; the bounds are those of Kaldi's ConstrainOrthonormal
    spread = scale * len(product) / trace
    rate = _RATE / (1 + (spread > 1.02).float() + 2 * (spread > 1.1).float())
    return weight_OI - (4 * rate / scale) * (excess @ weight_OI)


class FactorizedLayer(nn.Module):
    """Two frames to the bottleneck, two bottleneck frames to the width, ReLU, normalization, dropout, bypass."""

    def __init__(self, cfg: TdnnConfig, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.linear = nn.Linear(2 * cfg.dim, cfg.bottleneck, bias=False)
        self.affine = nn.Linear(2 * cfg.bottleneck, cfg.dim)
        self.norm = nn.LayerNorm(cfg.dim)
        self.dropout = Dropout(cfg.dropout)
        nn.init.orthogonal_(self.linear.weight)

    def forward(self, x_BTD: Tensor, mask_BT1: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]; frames beyond an utterance have no effect on those within."""
        # one product for both frames, shifted afterwards: less to copy than joining the frames, which are wider
        weights_2K_D = torch.cat(self.linear.weight.chunk(2, dim=1))
        early_BTK, now_BTK = F.linear(x_BTD, weights_2K_D).chunk(2, dim=2)
        early_BTK = F.pad(early_BTK, (0, 0, self.stride, 0))[:, : x_BTD.shape[1]]
        z_BTK = (early_BTK + now_BTK) * mask_BT1
        return self._widened(F.pad(z_BTK, (0, 0, 0, self.stride)), x_BTD)

    def _widened(self, z_BTK: Tensor, x_BTD: Tensor) -> Tensor:
        """Frames of the bottleneck, `stride` more than there are in `x_BTD`, back to the width [B, T, D]."""
        early_BTK, late_BTK = z_BTK[:, : x_BTD.shape[1]], z_BTK[:, self.stride :]
        y_BTD = self.norm(torch.relu(self.affine(torch.cat([early_BTK, late_BTK], dim=2))))
        return torch.add(self.dropout(y_BTD), x_BTD, alpha=_BYPASS)

    def start(self, batch: int) -> Memory:
        """What is remembered before the first frame: `stride` frames of zeros, and no frame of the bottleneck."""
        weight = self.linear.weight
        return weight.new_zeros(batch, self.stride, weight.shape[1] // 2), weight.new_zeros(batch, 0, len(weight))

    def forward_chunk(self, x_BTD: Tensor, memory: Memory, last: bool = False) -> tuple[Tensor, Memory]:
        """As `forward`, for the next frames of utterances [B, T, D].

        Args:
            x_BTD: The frames; there may be none.
            memory: The last `stride` frames, and those of the bottleneck that wait for later ones.
            last: Whether no more will come.

        Returns:
            What can be computed by now: a frame waits for the one `stride` later. And what is remembered now.
        """
        before_BTD, waiting_BTK = memory
        early, now = self.linear.weight.chunk(2, dim=1)
        known_BTD = torch.cat((before_BTD, x_BTD), dim=1)
        z_BTK = F.linear(known_BTD[:, : x_BTD.shape[1]], early) + F.linear(x_BTD, now)
        z_BTK = F.pad(torch.cat((waiting_BTK, z_BTK), dim=1), (0, 0, 0, self.stride if last else 0))
        first, ready = self.stride - waiting_BTK.shape[1], max(0, z_BTK.shape[1] - self.stride)
        out_BTD = self._widened(z_BTK[:, : ready + self.stride], known_BTD[:, first : first + ready])
        return out_BTD, (known_BTD[:, x_BTD.shape[1] :].clone(), z_BTK[:, ready:].clone())


class Tdnn(AcousticModel):
    """`cfg.layers` factorized layers of `cfg.dim` units, and a linear bottleneck before the output."""

    cfg: TdnnConfig

    def __init__(self, cfg: TdnnConfig, num_features: int, vocab_size: int) -> None:
        super().__init__(cfg, num_features, vocab_size)
        self.layers = nn.ModuleList(FactorizedLayer(cfg, stride) for stride in cfg.strides)
        self.prefinal = nn.Linear(cfg.dim, cfg.prefinal, bias=False)
        self.norm = nn.LayerNorm(cfg.prefinal)
        self.output = nn.Linear(cfg.prefinal, vocab_size)

    @override
    def encode(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        return self._scores(run_layers(self.layers, x_BTD, lengths))

    def _scores(self, x_BTD: Tensor) -> Tensor:
        scores: Tensor = self.output(self.norm(self.prefinal(x_BTD)))
        return scores

    @override
    def layers_before(self, batch: int) -> tuple[Memory, ...]:
        return tuple(layer.start(batch) for layer in self._each_layer())

    @override
    def encode_chunk(self, x_BTD: Tensor, layers: tuple[Memory, ...], last: bool) -> tuple[Tensor, tuple[Memory, ...]]:
        after = []
        for layer, memory in zip(self._each_layer(), layers, strict=True):
            x_BTD, now = layer.forward_chunk(x_BTD, memory, last)
            after.append(now)
        return self._scores(x_BTD), tuple(after)

    @override
    def encode_window(self, x_BTD: Tensor, chunk: int, layers: tuple[Memory, ...]) -> tuple[Tensor, tuple[Memory, ...]]:
        after = []
        for layer, (before_BTD, none) in zip(self._each_layer(), layers, strict=True):
            # the frames behind the chunk are fewer with each layer, and are computed again with the next chunk
            after.append((torch.cat((before_BTD, x_BTD), dim=1)[:, chunk : chunk + layer.stride], none))
            x_BTD, _ = layer.forward_chunk(x_BTD, (before_BTD, none))
        return self._scores(x_BTD), tuple(after)

    def _each_layer(self) -> Iterator[FactorizedLayer]:
        for layer in self.layers:
            assert isinstance(layer, FactorizedLayer)
            yield layer

    @override
    def constrain(self) -> None:
        constrain_layers(self.layers)

    @override
    def layer_of(self, parameter: str) -> int | None:
        part, _, rest = parameter.partition(".")
        return int(rest.partition(".")[0]) if part == "layers" else None

    @override
    def stage(self, layers: range) -> "TdnnStage":
        return TdnnStage(self, layers)


def run_layers(layers: Iterable[nn.Module], x_BTD: Tensor, lengths: Tensor) -> Tensor:
    """Frames [B, T, D] of `lengths` [B] through layers."""
    mask_BT1 = frame_mask(lengths, x_BTD.shape[1], x_BTD.device).unsqueeze(2).to(x_BTD.dtype)
    for layer in layers:
        x_BTD = layer(x_BTD, mask_BT1)
    return x_BTD


@torch.no_grad()
def constrain_layers(layers: Iterable[nn.Module]) -> None:
    """One step of each layer's bottleneck towards semi-orthogonality."""
    for layer in layers:
        assert isinstance(layer, FactorizedLayer)
        weight = layer.linear.weight
        if weight.is_leaf and weight.requires_grad:  # neither frozen nor adapted
            weight.copy_(semi_orthogonal_step(weight))


class TdnnStage(ModelStage):
    """Layers of a TDNN."""

    def __init__(self, model: Tdnn, layers: range) -> None:
        super().__init__(model, layers)
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in layers})
        self.prefinal = model.prefinal if self.is_last else nn.Identity()
        self.norm = model.norm if self.is_last else nn.Identity()
        self.output = model.output if self.is_last else nn.Identity()

    @override
    def run(self, x: Tensor, frames: Tensor) -> Tensor:
        scores: Tensor = self.output(self.norm(self.prefinal(run_layers(self.layers.values(), x, frames))))
        return scores

    @override
    def constrain(self) -> None:
        constrain_layers(self.layers.values())
