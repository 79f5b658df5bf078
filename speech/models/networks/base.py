"""What every network and every acoustic model promises, and the front end that shortens the frame sequence."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from typing_extensions import override

from speech.features.cmvn import frame_mask
from speech.models.config import ModelConfig
from speech.models.networks.lstm import Memory


def halved(lengths: Tensor, times: int = 1) -> Tensor:
    """Output frames of `times` stride-2 convolutions for each number of frames."""
    for _ in range(times):
        lengths = torch.div(lengths + 1, 2, rounding_mode="floor")
    return lengths


class Subsampling(nn.Module):
    """Stride-2 convolutions over time and frequency, then a projection to the encoder's width.

    Padding is masked to zero before every convolution, so that an utterance's frames do not depend on what it was
    batched with. Each stride-2 convolution maps T frames to ceil(T / 2).

    Args:
        num_features: Width of a feature frame.
        dim: The encoder's width.
        factor: Feature frames per output frame.
        channels: Of the convolutions.
        causal: Whether a convolution reads its frame and the two before it, instead of one before and one after it:
            then output frame t needs no later feature frame than `factor` * t.
    """

    def __init__(self, num_features: int, dim: int, factor: int, channels: int, causal: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        self.causal = causal
        self._num_features, padding = num_features, (0, 1) if causal else 1
        width, in_channels = num_features, 1
        for _ in range(factor.bit_length() - 1):
            self.convs.append(nn.Conv2d(in_channels, channels, kernel_size=3, stride=2, padding=padding))
            width, in_channels = (width + 1) // 2, channels
        self.project = nn.Linear(width * in_channels, dim)

    def forward(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, F] and [B] -> [B, T', dim] and [B]."""
        if feats_BTF.shape[1] == 0:  # a convolution needs a frame to look at; the lengths of 0 hide it again
            feats_BTF = feats_BTF.new_zeros(feats_BTF.shape[0], 1, feats_BTF.shape[2])
        x = feats_BTF.unsqueeze(1)
        for conv in self.convs:
            x = x * frame_mask(lengths, x.shape[2])[:, None, :, None]
            x = torch.relu(conv(nn.functional.pad(x, (0, 0, 2, 0)) if self.causal else x))
            lengths = halved(lengths)
        x_BTD = self.project(x.transpose(1, 2).flatten(2))
        return x_BTD * frame_mask(lengths, x_BTD.shape[1])[..., None], lengths

    def start(self, batch: int) -> Memory:
        """What the convolutions remember before the first frame: one or two frames of zeros each, as wide as they read.

        Each is [batch, channels, frames, F].
        """
        memory: list[Tensor] = []
        width, before = self._num_features, 2 if self.causal else 1
        for conv in self.convs:
            assert isinstance(conv, nn.Conv2d)
            memory.append(self.project.weight.new_zeros(batch, conv.in_channels, before, width))
            width = (width + 1) // 2
        return tuple(memory)

    def num_ready(self, frames: int) -> int:
        """Output frames that `forward_chunk` computes from the first `frames` frames of a stream that goes on."""
        factor = 1 << len(self.convs)
        return -(-frames // factor) if self.causal else frames // factor

    def frames_for(self, ready: int) -> int:
        """The fewest frames from which `forward_chunk` computes the first `ready` output frames, at least 1."""
        factor = 1 << len(self.convs)
        return (ready - 1) * factor + 1 if self.causal else ready * factor

    def forward_chunk(self, feats_BTF: Tensor, memory: Memory, last: bool = False) -> tuple[Tensor, Memory]:
        """As `forward`, for the next frames of utterances [B, T, F].

        Args:
            feats_BTF: The frames; there may be none.
            memory: What the convolutions remember of those before.
            last: Whether no more will come: convolutions that read a frame ahead read zeros there.

        Returns:
            Those output frames that can be computed by now, and what the convolutions remember: the one or two last
            frames that they read.
        """
        x, after = feats_BTF.unsqueeze(1), []
        ahead = 1 if last and not self.causal else 0
        for conv, before in zip(self.convs, memory, strict=True):
            assert isinstance(conv, nn.Conv2d)
            x = nn.functional.pad(torch.cat((before, x), dim=2), (0, 0, 0, ahead))
            ready = max(0, (x.shape[2] - 1) // 2)
            after.append(x[:, :, 2 * ready :].clone())
            if not ready:
                x = x.new_zeros(len(x), conv.out_channels, 0, (x.shape[3] + 1) // 2)
                continue
            # they are padded in time here, and in frequency as ever
            x = torch.relu(nn.functional.conv2d(x, conv.weight, conv.bias, conv.stride, (0, 1)))
        return self.project(x.transpose(1, 2).flatten(2)), tuple(after)


class TrainableNetwork(nn.Module):
    """What the engine trains: an acoustic model, or a language model.

    It is called with inputs [batch, frames, features], the frames of each sequence [batch] and what else its task gives
    it, such as tokens. It returns natural log probabilities [batch, output frames, outputs] and output frames [batch],
    or what its task reads in place of them.
    """

    def num_frames(self, lengths: Tensor) -> Tensor:
        """Output frames for each number of input frames [batch]; on the host if they are there, without the device."""
        return lengths

    def own_names(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Another model's weights by the names of this network, which may contain that model."""
        return dict(weights)

    @property
    def output_rows(self) -> tuple[str, ...]:
        """Names of the parameters that have a row for each output."""
        return ()

    def constrain(self) -> None:
        """Move the parameters towards what constrains them; called after each update."""

    def num_parameters(self) -> int:
        """Trainable parameters."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


Network = TypeVar("Network", bound=TrainableNetwork)


def load_network(path: Path, build: Callable[[], Network], layers: int) -> Network:
    """A network with the weights of a safetensors file, in evaluation mode on the CPU.

    What describes a network may ask for any size. Nothing of it is allocated before its shapes have been compared with
    those in the file's header, which safetensors compares with the file's length.

    Args:
        path: The file.
        build: Makes the network; first on torch's device `meta`, whose tensors have no memory.
        layers: How many it makes, each of which has weights.

    Raises:
        ValueError: The file's tensors are not those of the network.
        SafetensorError: The file is no safetensors file.
        OSError: It cannot be read.
    """
    with safe_open(str(path), "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        if layers > len(shapes):
            raise ValueError(f"{layers} layers are described, but {path} has {len(shapes)} tensors")
        try:
            with torch.device("meta"):
                described = {name: tuple(tensor.shape) for name, tensor in build().state_dict().items()}
        except (OverflowError, RuntimeError, TypeError) as error:  # sizes that torch cannot count
            raise ValueError(f"no network has the sizes that are described: {error}") from error
        if described != shapes:
            name = min(name for name in described | shapes if described.get(name) != shapes.get(name))
            raise ValueError(
                f"{path} does not have the weights of the network that is described: {name} is "
                f"{shapes.get(name, 'missing')}, not {described.get(name, 'part of it')}"
            )
        network = build()
        network.load_state_dict({name: file.get_tensor(name) for name in shapes})
    return network.eval()


class Advance(Protocol):
    """Computes a chunk of streams, as `AcousticModel.advance` does."""

    def __call__(
        self, part_BTD: Tensor, chunk: int, layers: tuple[Memory, ...], /
    ) -> tuple[Tensor, tuple[Memory, ...]]:
        """Compute it."""


@dataclass(frozen=True)
class StreamState:
    """What a network remembers of streams that it has read up to now; its size does not grow with them."""

    chunk: int
    """Output frames of a chunk."""
    front: Memory
    """The last frames that the subsampling's convolutions read."""
    waiting: Tensor
    """Subsampled frames that wait for the rest of their chunk [batch, frames, dim]."""
    layers: tuple[Memory, ...]
    """Of each layer, and of all of them."""

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        tensors = (*self.front, self.waiting, *(tensor for memory in self.layers for tensor in memory))
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class AcousticModel(TrainableNetwork, ABC):
    """Feature frames in, natural log probabilities over tokens (index 0: CTC's blank) or tied states out.

    Attributes:
        stackable: Whether `torch.func.vmap` computes several replicas at once, which makes simulations faster: torch's
            recurrent layers cannot.
        by_window: Whether a chunk of a stream is computed together with the `cfg.ahead` frames after it, which are
            computed again with the next one.
    """

    stackable: ClassVar[bool] = False
    by_window: ClassVar[bool] = False

    def __init__(self, cfg: ModelConfig, num_features: int, vocab_size: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.num_features = num_features
        self.vocab_size = vocab_size
        self.subsampling = self.front_end()

    def front_end(self) -> nn.Module:
        """Make what shortens features [B, T, F] of lengths [B] by `cfg.subsampling`, to [B, T', dim] and lengths [B].

        A model of raw audio has its own convolutions here.
        """
        cfg = self.cfg
        return Subsampling(self.num_features, cfg.dim, cfg.subsampling, cfg.channels, cfg.causal)

    @abstractmethod
    def encode(self, x_BTD: Tensor, lengths: Tensor) -> Tensor:
        """Subsampled frames [B, T', D] to unnormalized token scores [B, T', vocab_size]."""

    def forward(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities of the tokens for every output frame.

        Args:
            feats_BTF: Normalized features [batch, frames, num_features], zero beyond each length.
            lengths: Feature frames of each utterance [batch].

        Returns:
            Log probabilities [batch, output frames, vocab_size] in float32 and the output frames of each
            utterance [batch]. What stands beyond a length is unspecified.
        """
        logits_BTV, out_lengths = self.outputs(feats_BTF, lengths)
        return logits_BTV.float().log_softmax(dim=-1), out_lengths

    def outputs(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, not normalized: what a larger network reads that has this one as its encoder."""
        x_BTD, out_lengths = self.subsampling(feats_BTF, lengths)
        return self.encode(x_BTD, out_lengths), out_lengths

    # --- speech as it comes: the same outputs, chunk by chunk

    def stream_state(self, batch: int, chunk: int) -> StreamState:
        """What the network remembers before the first frame.

        Args:
            batch: Streams that are computed together, frame by frame.
            chunk: Output frames of a chunk.

        Raises:
            ValueError: Models of this kind, or with this configuration, cannot go on from chunk to chunk.
        """
        if not self.cfg.streams:
            raise ValueError(f"model {self.cfg.kind} {self.cfg.streaming_remedy}")
        if chunk < 1:
            raise ValueError(f"a chunk has 1 or more output frames, not {chunk}")
        assert isinstance(self.subsampling, Subsampling)
        weight = self.subsampling.project.weight
        waiting = weight.new_zeros(batch, 0, len(weight))
        return StreamState(chunk, self.subsampling.start(batch), waiting, self.layers_before(batch))

    def frames_for_chunk(self, state: StreamState, frames: int) -> int:
        """Feature frames, from the start of a stream, with which `chunk_outputs` can compute the next chunk.

        Args:
            state: What the network remembers.
            frames: Feature frames that it has read.
        """
        assert isinstance(self.subsampling, Subsampling)
        computed = self.subsampling.num_ready(frames) - state.waiting.shape[1]
        return self.subsampling.frames_for(computed + self._window(state))

    def _window(self, state: StreamState) -> int:
        """Subsampled frames that are computed at once, of which a chunk comes out."""
        return state.chunk + (self.cfg.ahead if self.by_window else 0)

    def forward_chunk(
        self, feats_BTF: Tensor, state: StreamState, last: bool = False, advance: Advance | None = None
    ) -> tuple[Tensor, StreamState]:
        """As `forward`, for the next feature frames of streams, any number of them; in evaluation mode.

        Outputs come chunk by chunk, and are those of `forward` over all frames if its attention has the same chunks.

        Args:
            feats_BTF: The frames [batch, frames, num_features]; there may be none.
            state: What the network remembers of those before.
            last: Whether no more will come: then the last chunk is computed, however short it is.
            advance: Computes chunks; by default the method of this name.

        Returns:
            Log probabilities [batch, output frames, vocab_size] in float32, and what the network remembers now.
        """
        scores_BTV, state = self.chunk_outputs(feats_BTF, state, last, advance)
        return scores_BTV.float().log_softmax(dim=-1), state

    def chunk_outputs(
        self, feats_BTF: Tensor, state: StreamState, last: bool = False, advance: Advance | None = None
    ) -> tuple[Tensor, StreamState]:
        """As `forward_chunk`, not normalized; see `outputs`."""
        assert isinstance(self.subsampling, Subsampling)
        x_BTD, front = self.subsampling.forward_chunk(feats_BTF, state.front, last)
        x_BTD, layers, parts, start = torch.cat((state.waiting, x_BTD), dim=1), state.layers, [], 0
        size = self._window(state)
        while x_BTD.shape[1] - start >= (1 if last else size):
            scores_BTV, layers = (advance or self.advance)(x_BTD[:, start : start + size], state.chunk, layers)
            parts.append(scores_BTV)
            start += state.chunk
        if last or not parts:
            scores_BTV, layers = self.encode_chunk(x_BTD[:, :0], layers, last)
            parts.append(scores_BTV)
        return torch.cat(parts, dim=1), StreamState(state.chunk, front, x_BTD[:, start:].clone(), layers)

    def advance(self, part_BTD: Tensor, chunk: int, layers: tuple[Memory, ...]) -> tuple[Tensor, tuple[Memory, ...]]:
        """A chunk of streams, whose number is the first dimension of all tensors.

        Args:
            part_BTD: The subsampled frames that are computed at once: those of the chunk, and those after it that a
                network reads which computes by window.
            chunk: Frames of the chunk.
            layers: What the layers remember.

        Returns:
            Scores, and what the layers remember after the chunk.
        """
        if self.by_window:
            return self.encode_window(part_BTD, chunk, layers)
        return self.encode_chunk(part_BTD, layers, False)

    def window_outputs(self, feats_BTF: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        """As `chunk_outputs`, but of a chunk and the `cfg.ahead` frames after it at once: all sizes are fixed.

        It is for graphs of other programs, which give a window of features, put out a chunk, and move on by a chunk.

        Args:
            feats_BTF: The features of the window.
            state: What the network remembers of those before; one of zeros is that before the first frame.

        Returns:
            Scores of the chunk, and what the network remembers after it.
        """
        assert isinstance(self.subsampling, Subsampling)
        shift = state.chunk * self.cfg.subsampling
        x_BTD, front = self.subsampling.forward_chunk(feats_BTF[:, :shift], state.front)
        if self.cfg.ahead:
            ahead_BTD, _ = self.subsampling.forward_chunk(feats_BTF[:, shift:], front)
            x_BTD = torch.cat((x_BTD, ahead_BTD), dim=1)
        scores_BTV, layers = self.encode_window(x_BTD, state.chunk, state.layers)
        return scores_BTV, replace(state, front=front, layers=layers)

    def layers_before(self, batch: int) -> tuple[Memory, ...]:
        """What each layer remembers before the first frame, tensors of zeros [batch, ...]."""
        raise NotImplementedError(f"model {self.cfg.kind} says that it streams")

    def encode_chunk(self, x_BTD: Tensor, layers: tuple[Memory, ...], last: bool) -> tuple[Tensor, tuple[Memory, ...]]:
        """As `encode`, for the next subsampled frames, or for none.

        Args:
            x_BTD: The frames.
            layers: What each layer remembers.
            last: Whether no more will come.

        Returns:
            Token scores, of these frames or of earlier ones if the network looks ahead, and what the layers remember.
        """
        raise NotImplementedError(f"model {self.cfg.kind} says that it streams")

    def encode_window(self, x_BTD: Tensor, chunk: int, layers: tuple[Memory, ...]) -> tuple[Tensor, tuple[Memory, ...]]:
        """As `encode`, for a chunk of subsampled frames and those after it that its outputs read.

        Args:
            x_BTD: The chunk and the `cfg.ahead` frames after it; at the end of a stream, there may be fewer.
            chunk: Frames of the chunk.
            layers: What each layer remembers; the shapes of what comes back are the same.

        Returns:
            Token scores of the chunk's frames, and what the layers remember after it.
        """
        assert not self.cfg.ahead, f"model {self.cfg.kind} looks ahead"
        return self.encode_chunk(x_BTD, layers, False)

    @override
    def num_frames(self, lengths: Tensor) -> Tensor:
        return self.num_frames_rule()(lengths)

    def num_frames_rule(self) -> Callable[[Tensor], Tensor]:
        """What `num_frames` computes, without the network: stages of it compute it, too."""
        return partial(halved, times=self.cfg.halvings)

    @property
    def hidden_width(self) -> int:
        """Values of a frame between two layers."""
        return self.cfg.dim

    def layer_of(self, parameter: str) -> int | None:
        """Number of the layer that a named parameter belongs to; None for the front end and the output layer."""
        return None

    @property
    @override
    def output_rows(self) -> tuple[str, ...]:
        """Names of the parameters and buffers that have a row for each output."""
        return ("output.weight", "output.bias")

    def stage(self, layers: range) -> "ModelStage":
        """Consecutive layers as a module of its own, with this model's parameters.

        Raises:
            ValueError: If models of this kind cannot be split.
        """
        raise ValueError(self.cfg.unsplit)


class ModelStage(nn.Module, ABC):
    """Some consecutive layers of an acoustic model.

    Args:
        model: Whose parameters are taken over.
        layers: Numbers of the layers.

    Attributes:
        in_width: Values of a frame that comes in.
        out_width: Values of a frame that goes out.
    """

    def __init__(self, model: AcousticModel, layers: range) -> None:
        super().__init__()
        self.cfg = model.cfg
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.cfg.layers
        self.in_width = model.num_features if self.is_first else model.hidden_width
        self.out_width = model.vocab_size if self.is_last else model.hidden_width
        self.subsampling = model.subsampling if self.is_first else None
        self._num_frames = model.num_frames_rule()

    def constrain(self) -> None:
        """What `AcousticModel.constrain` does, for these layers."""

    def num_frames(self, lengths: Tensor) -> Tensor:
        """Output frames for each number of feature frames."""
        return self._num_frames(lengths)

    @abstractmethod
    def run(self, x: Tensor, frames: Tensor) -> Tensor:
        """Subsampled or hidden frames [B, T', D] through this stage's layers, and to scores if it is the last."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """What `AcousticModel.forward` does, as far as this stage goes.

        Args:
            x: Features [batch, frames, num_features] for the first stage; the previous one's result for the others.
            lengths: Feature frames of each utterance [batch], for all stages.

        Returns:
            Log probabilities [batch, output frames, vocab_size] of the last stage, hidden frames [batch, output frames,
            width] of the others; float32.
        """
        if self.subsampling is not None:
            x, _ = self.subsampling(x, lengths)
        x = self.run(x, self.num_frames(lengths)).float()
        return (x.log_softmax(dim=-1) if self.is_last else x).contiguous()
