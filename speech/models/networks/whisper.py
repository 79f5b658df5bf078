"""Whisper's encoder (Radford et al. 2022, arXiv:2212.04356), with and without its 30 seconds of padding.

Whisper's own code pads every utterance with silence to 30 s. Here, an utterance has the positions that it needs, from
the first one on, and neither convolutions nor attention see what it is padded with in a batch; unless the configuration
says that the encoder hears the silence (`WhisperConfig.silence`), or some seconds of it.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from speech.features.cmvn import frame_mask
from speech.features.whisper_logmel import followed_by_silence
from speech.models.networks.base import halved
from speech.models.networks.dropout import Dropout
from speech.models.networks.pretrained import PretrainedEncoder, PretrainedStage, fills, key_mask, layer_output
from speech.models.pretrained import describing, import_transformers
from speech.models.whisper import WhisperConfig

_LONGEST_WAVE = 10_000.0
"""Wavelength of the slowest sinusoid, relative to the fastest one."""


def sinusoids(num_frames: int, dim: int, device: torch.device) -> Tensor:
    """Whisper's encoding of positions: sines, then cosines [num_frames, dim]."""
    # step by step as in the published code: a late position's angle turns a rounding error into 1e-4
    step = math.log(_LONGEST_WAVE) / max(1, dim // 2 - 1)
    rates = torch.exp(-step * torch.arange(dim // 2, device=device, dtype=torch.float32))
    angles = torch.arange(num_frames, device=device, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def frames_of(lengths: Tensor, longest: int, silence: int = 0) -> Tensor:
    """Output frames for each number of feature frames; 0 for an utterance that is longer than the positions.

    Args:
        lengths: Feature frames of each utterance [batch].
        longest: Feature frames of all positions.
        silence: Feature frames of silence behind an utterance, up to the last position, that count, too.
    """
    frames = halved((lengths + silence).clamp(max=longest))
    return frames.masked_fill((lengths > longest) | (lengths == 0), 0)


class WhisperFrontEnd(nn.Module):
    """Two convolutions over time, the second with stride 2, and the encoding of positions."""

    def __init__(self, encoder: Any, cfg: WhisperConfig) -> None:
        super().__init__()
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2
        self.dropout = Dropout(cfg.dropout)
        self._longest, self._silence, self._output_silence = cfg.max_frames, cfg.silence_frames, cfg.output_silence

    def forward(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, F] and [B] -> [B, ceil(T / 2), D], T with the silence that the encoder hears, and [B]."""
        if feats_BTF.shape[1] == 0:  # a convolution needs a frame to look at
            feats_BTF = feats_BTF.new_zeros(feats_BTF.shape[0], 1, feats_BTF.shape[2])
        heard = lengths
        if self._silence:
            heard = (lengths + self._silence).clamp(max=self._longest)
            total = min(self._longest, feats_BTF.shape[1] + self._silence)
            feats_BTF = followed_by_silence(feats_BTF, lengths, total)
        mask_B1T = None
        if self._silence < self._longest and not fills(heard, feats_BTF.shape[1]):
            mask_B1T = frame_mask(heard, feats_BTF.shape[1])[:, None]
        x_BDT = F.gelu(self.conv1(_masked(feats_BTF.transpose(1, 2), mask_B1T)))
        x_BDT = F.gelu(self.conv2(_masked(x_BDT, mask_B1T)))
        positions = sinusoids(x_BDT.shape[2], x_BDT.shape[1], x_BDT.device)
        frames = frames_of(lengths, self._longest, self._output_silence)
        return self.dropout(x_BDT.transpose(1, 2) + positions), frames


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


class WhisperEncoder(PretrainedEncoder):
    """The encoder's convolutions and layers."""

    cfg: WhisperConfig

    @override
    def front_end(self) -> WhisperFrontEnd:
        encoder = self._encoder()
        self.layers, self.norm = encoder.layers, encoder.layer_norm
        return WhisperFrontEnd(encoder, self.cfg)

    def _encoder(self) -> Any:
        """The encoder as the library builds it, with random weights.

        Raises:
            ValueError: The features are not those that it reads, or its sizes do not match.
        """
        cfg, library = self.cfg, import_transformers()
        mels = cfg.encoder.get("num_mel_bins", self.num_features)
        if mels != self.num_features:
            raise ValueError(f"the encoder reads {mels} mel bands, but there are {self.num_features} features")
        if cfg.subsampling not in cfg.subsamplings:
            raise ValueError(f"model.subsampling is {cfg.subsampling}, but Whisper's is {cfg.subsamplings[0]}")
        sizes = {"d_model": cfg.dim, "encoder_layers": cfg.layers, "num_mel_bins": mels, "dropout": cfg.dropout}
        none = {"attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0}
        # the positions are computed, and the library would allocate a table of them
        own = {**cfg.encoder, **sizes, **none, "max_source_positions": 1}
        with describing():
            return library.models.whisper.modeling_whisper.WhisperEncoder(library.WhisperConfig(**own))

    @override
    def run_layers(self, layers: Iterable[nn.Module], x_BTD: Tensor, lengths: Tensor) -> Tensor:
        if self.cfg.silence_frames >= self.cfg.max_frames:
            return run_layers(layers, x_BTD, None)
        more = (self.cfg.silence_frames - self.cfg.output_silence) // 2  # heard, without outputs
        return run_layers(layers, x_BTD, (lengths + more).clamp(max=self.cfg.positions) if more else lengths)

    @override
    def outputs(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        scores_BTV, frames = super().outputs(feats_BTF, lengths)
        if self.cfg.silence == "encoder":
            scores_BTV = scores_BTV[:, : max(1, (feats_BTF.shape[1] + 1) // 2)]
        return scores_BTV, frames

    @override
    def num_frames_rule(self) -> Callable[[Tensor], Tensor]:
        return partial(frames_of, longest=self.cfg.max_frames, silence=self.cfg.output_silence)

    @override
    def stage(self, layers: range) -> PretrainedStage:
        if self.cfg.unsplit:
            raise ValueError(self.cfg.unsplit)
        return super().stage(layers)

    @override
    def fixed_tensors(self) -> dict[str, Tensor]:
        return {"subsampling.positions": sinusoids(self.cfg.positions, self.cfg.dim, torch.device("cpu"))}


def run_layers(layers: Iterable[nn.Module], x_BTD: Tensor, lengths: Tensor | None) -> Tensor:
    """Run Whisper's layers over frames [B, T, D] of `lengths` [B]; without lengths, all frames are attended to."""
    mask_BT = None if lengths is None else key_mask(lengths, x_BTD.shape[1])
    mask = None if mask_BT is None else mask_BT[:, None, None, :]
    for layer in layers:
        # version 4 of the library wants a mask of heads, version 5 passes on what it does not know
        x_BTD = layer_output(layer(x_BTD, attention_mask=mask, layer_head_mask=None))
    return x_BTD
