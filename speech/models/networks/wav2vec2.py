"""wav2vec 2.0 and its kin (HuBERT, WavLM, data2vec-audio, UniSpeech): raw audio in.

Convolutions without padding turn samples into frames, of which the positional convolution and the layers see no others
than the utterance's own. Models of the smaller size normalize the first convolution's output over the whole utterance;
here that is over its own frames, so that a batch changes nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from speech.features.cmvn import frame_mask
from speech.models.networks.dropout import Dropout
from speech.models.networks.pretrained import (
    PretrainedEncoder,
    PretrainedStage,
    fills,
    key_mask,
    layer_output,
    use_fast_dropout,
)
from speech.models.pretrained import describing, import_transformers
from speech.models.wav2vec2 import Wav2Vec2Config

Convolutions = Sequence[tuple[int, int]]
"""Kernel and stride of each, in samples or frames."""


def frames_of(lengths: Tensor, block: int, convolutions: Convolutions) -> Tensor:
    """Output frames of unpadded convolutions for each number of blocks of samples."""
    lengths = lengths * block
    for kernel, stride in convolutions:
        lengths = torch.div(lengths - kernel, stride, rounding_mode="floor") + 1
    return lengths.clamp(min=0)


class UtteranceNorm(nn.Module):
    """Normalizes each channel over an utterance's own frames: a group normalization that padding does not change.

    Args:
        norm: The library's, with a group for each channel; its parameters are taken over.
    """

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x_BCT: Tensor, lengths: Tensor) -> Tensor:
        """[B, C, T] and [B] -> [B, C, T]."""
        # the kernel rounds a single frame's deviation from itself to something else than 0
        if x_BCT.shape[2] > 1 and fills(lengths, x_BCT.shape[2]):
            return torch.group_norm(x_BCT, x_BCT.shape[1], self.weight, self.bias, self.eps)
        with torch.autocast(x_BCT.device.type, enabled=False):
            x_BCT = x_BCT.float()
            mask_B1T = frame_mask(lengths, x_BCT.shape[2])[:, None]
            counts = lengths.clamp(min=1)[:, None, None]
            mean = (x_BCT * mask_B1T).sum(2, keepdim=True) / counts
            centred = (x_BCT - mean) * mask_B1T
            scale = torch.rsqrt(centred.square().sum(2, keepdim=True) / counts + self.eps) * self.weight[:, None]
            return torch.addcmul(self.bias[:, None], centred, scale)


class Wav2Vec2FrontEnd(nn.Module):
    """Convolutions over samples, the projection to the encoder's width, and the positional convolution."""

    def __init__(self, model: Any, cfg: Wav2Vec2Config, convolutions: Convolutions, block: int) -> None:
        super().__init__()
        self.conv_layers, self.projection = model.feature_extractor.conv_layers, model.feature_projection
        self.positions = model.encoder.pos_conv_embed
        self.norm = nn.Identity() if model.config.do_stable_layer_norm else model.encoder.layer_norm
        self.dropout = Dropout(cfg.dropout)
        self._convolutions, self._block = convolutions, block
        self._least = int(_needed_samples(convolutions))
        for layer in self.conv_layers:
            if isinstance(getattr(layer, "layer_norm", None), nn.GroupNorm):
                layer.layer_norm = UtteranceNorm(layer.layer_norm)

    def forward(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of samples [B, T, F] and [B] -> [B, T', D] and [B]."""
        x_BCT = feats_BTF.flatten(1)[:, None]
        x_BCT = F.pad(x_BCT, (0, max(0, self._least - x_BCT.shape[2])))
        for number, layer in enumerate(self.conv_layers):
            x_BCT = self._convolved(layer, x_BCT, lengths, number)
        out_lengths = frames_of(lengths, self._block, self._convolutions)
        x = self.projection(x_BCT.transpose(1, 2))
        x_BTD = layer_output(x)
        mask = None if fills(out_lengths, x_BTD.shape[1]) else frame_mask(out_lengths, x_BTD.shape[1])[..., None]
        x_BTD = x_BTD if mask is None else x_BTD * mask
        return self.dropout(self.norm(x_BTD + self._positions(x_BTD, mask))), out_lengths

    def _convolved(self, layer: nn.Module, x_BCT: Tensor, lengths: Tensor, number: int) -> Tensor:
        norm = getattr(layer, "layer_norm", None)
        if isinstance(norm, UtteranceNorm):
            frames = frames_of(lengths, self._block, self._convolutions[: number + 1])
            out: Tensor = layer.activation(norm(layer.conv(x_BCT), frames))  # type: ignore[operator]
        else:
            out = layer(x_BCT)
        return out

    def _positions(self, x_BTD: Tensor, mask_BT1: Tensor | None) -> Tensor:
        """The positional convolution, or several, none of which sees what others make of the padding."""
        several = getattr(self.positions, "layers", None)
        if several is None:
            positions: Tensor = self.positions(x_BTD)
            return positions
        for layer in several:
            x_BTD = layer(x_BTD.transpose(1, 2)).transpose(1, 2)
            x_BTD = x_BTD if mask_BT1 is None else x_BTD * mask_BT1
        return x_BTD


def _needed_samples(convolutions: Convolutions) -> int:
    """Samples that one output frame is computed from."""
    samples = 1
    for kernel, stride in reversed(convolutions):
        samples = (samples - 1) * stride + kernel
    return samples


class Wav2Vec2Encoder(PretrainedEncoder):
    """The encoder's convolutions and layers."""

    cfg: Wav2Vec2Config

    @override
    def front_end(self) -> Wav2Vec2FrontEnd:
        model = self._model()
        self.layers = model.encoder.layers
        use_fast_dropout(self.layers)
        self.norm = model.encoder.layer_norm if model.config.do_stable_layer_norm else nn.Identity()
        self._relative = model.config.model_type == "wavlm"
        self._convolutions = list(zip(model.config.conv_kernel, model.config.conv_stride, strict=True))
        return Wav2Vec2FrontEnd(model, self.cfg, self._convolutions, self.num_features)

    def _model(self) -> Any:
        """The model as the library builds it, with random weights.

        Raises:
            ValueError: Its convolutions do not fit the blocks of samples, or its sizes do not match.
        """
        cfg, library = self.cfg, import_transformers()
        none = ("attention_dropout", "activation_dropout", "feat_proj_dropout", "layerdrop", "mask_time_prob")
        own = cfg.encoder | dict.fromkeys((*none, "mask_feature_prob"), 0.0)
        own |= {"hidden_size": cfg.dim, "num_hidden_layers": cfg.layers, "hidden_dropout": cfg.dropout}
        if "conv_stride" not in own:  # of no published model: a convolution over each block, and one over blocks
            own |= {"conv_kernel": [self.num_features, 1], "conv_stride": [self.num_features, cfg.subsampling]}
        own.setdefault("do_stable_layer_norm", False)
        with describing():
            name = cfg.model_types[str(cfg.encoder["model_type"])]
            model = getattr(library, f"{name}Model")(getattr(library, f"{name}Config")(**own))
        if (stride := prod(model.config.conv_stride)) != self.num_features * cfg.subsampling:
            raise ValueError(
                f"the encoder has a frame for every {stride} samples, not for {cfg.subsampling} blocks of "
                f"{self.num_features}"
            )
        return model

    @override
    def run_layers(self, layers: Iterable[nn.Module], x_BTD: Tensor, lengths: Tensor) -> Tensor:
        if self._relative:
            return run_relative_layers(layers, x_BTD, lengths)
        return run_layers(layers, x_BTD, lengths)

    @override
    def num_frames_rule(self) -> Callable[[Tensor], Tensor]:
        return partial(frames_of, block=self.num_features, convolutions=self._convolutions)

    @override
    def stage(self, layers: range) -> PretrainedStage:
        if self.cfg.unsplit:
            raise ValueError(self.cfg.unsplit)
        return super().stage(layers)


def run_layers(layers: Iterable[nn.Module], x_BTD: Tensor, lengths: Tensor) -> Tensor:
    """Run layers of all models but WavLM over frames [B, T, D] of `lengths` [B]."""
    mask_BT = key_mask(lengths, x_BTD.shape[1])
    mask = None if mask_BT is None else mask_BT[:, None, None, :]
    for layer in layers:
        x_BTD = layer_output(layer(x_BTD, attention_mask=mask))
    return x_BTD


def run_relative_layers(layers: Iterable[nn.Module], x_BTD: Tensor, lengths: Tensor) -> Tensor:
    """Run WavLM's layers over frames [B, T, D] of `lengths` [B]: all add the first one's bias of relative positions."""
    mask_BT, bias = key_mask(lengths, x_BTD.shape[1]), None
    for layer in layers:
        if bias is None:
            bias = _position_bias(layer.attention, *x_BTD.shape[:2])
        x_BTD = layer_output(layer(x_BTD, attention_mask=mask_BT, position_bias=bias))
    return x_BTD


def _position_bias(attention: Any, batch: int, num_frames: int) -> Tensor:
    """What the library's `compute_bias` computes, on the device of the weights from the start [B * heads, T, T]."""
    places = torch.arange(num_frames, device=attention.rel_attn_embed.weight.device)
    buckets = attention._relative_positions_bucket(places[None, :] - places[:, None])
    bias: Tensor = attention.rel_attn_embed(buckets).permute(2, 0, 1)
    return bias.repeat(batch, 1, 1)
