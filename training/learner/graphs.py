"""Replays a model's forward and backward pass as CUDA graphs: one launch each, instead of thousands.

A small model leaves a fast GPU idle: the host needs about 20 µs to launch an operation that the GPU computes in 3. A
graph records the launches for one shape of the input and repeats them with a single call, on the same memory. So
batches are padded to few shapes (`rounded`), inputs and results are copied in and out, and the gradients go where they
went when the graph was recorded: into the flat buffer.

The loss is computed outside: CTC reads lengths on the host, which no graph can hold. So are the parts of a network that
read tokens beside the encoder's frames: their lengths would multiply the number of shapes.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from devices.choice import is_out_of_memory
from devices.transfers import without_host_values
from training.learner.flat import FlatParameters

log = logging.getLogger(__name__)

Forward = Callable[..., tuple[Tensor, Tensor]]
"""Features [B, T, F] and frames [B], with what else a network reads, to scores [B, T', V] and output frames [B]."""
Shape = tuple[int, int, int]

MAX_GRAPHS = 64
"""Recordings kept, those used last: each holds its inputs and results on the device, but shares all other memory."""
WARM_UP = 3
"""Passes before a recording, in which cuDNN and cuBLAS choose their kernels and allocate their work spaces."""
FINENESS = 8
"""Sizes between two powers of two: padding adds at most an eighth, on average a sixteenth."""


def rounded(size: int, fineness: int = FINENESS) -> int:
    """The next size of a geometric series with `fineness` sizes between two powers of two; small ones stay."""
    step = 1 << max(0, (size - 1).bit_length() - fineness.bit_length())
    return -(-size // step) * step


class PassRecording(Protocol):
    """A forward and a backward pass on fixed memory.

    Attributes:
        feats: Input [B, T, F].
        lengths: Input [B].
        scores: Result of `forward` [B, T', V].
        frames: Result of `forward` [B].
        grads: Input of `backward`: the gradient of `scores`.
    """

    feats: Tensor
    lengths: Tensor
    scores: Tensor
    frames: Tensor
    grads: Tensor

    def forward(self) -> None:
        """Compute `scores` and `frames`."""

    def backward(self) -> None:
        """Add the parameters' gradients to where they are accumulated."""


class CudaRecording:
    """Two CUDA graphs, which share memory with those of other shapes: they are never replayed at the same time.

    Args:
        run: The forward pass, with its own autocast context.
        feats: Input of the shape to record [B, T, F].
        lengths: Input [B].
        pool: Memory pool of all recordings.
        stream: Stream that all recordings are made on: autograd remembers it.
    """

    def __init__(self, run: Forward, feats: Tensor, lengths: Tensor, pool: Any, stream: torch.cuda.Stream) -> None:
        self.feats, self.lengths = feats.clone(), lengths.clone()
        self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(feats.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                scores, _ = run(self.feats, self.lengths)
                if scores.requires_grad:
                    torch.autograd.backward(scores, torch.zeros_like(scores))
            del scores
        # threads that load batches allocate page-locked memory meanwhile
        fields: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self._graphs[0], **fields):
            scores, self.frames = run(self.feats, self.lengths)
            self.grads = torch.zeros_like(scores)
        self._learns = scores.requires_grad  # a frozen encoder does not
        if self._learns:
            with torch.cuda.graph(self._graphs[1], **fields):
                torch.autograd.backward(scores, self.grads)
        # without its history, which would keep autograd on the recording's stream
        self.scores = scores.detach()
        torch.cuda.current_stream(feats.device).wait_stream(stream)

    def forward(self) -> None:
        """Replay the forward pass."""
        self._graphs[0].replay()

    def backward(self) -> None:
        """Replay the backward pass, if there is one."""
        if self._learns:
            self._graphs[1].replay()


class _Replayed(torch.autograd.Function):
    """A recording as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: PassRecording) -> tuple[Tensor, Tensor]:
        recording.forward()
        ctx.recording = recording
        frames = recording.frames.clone()
        ctx.mark_non_differentiable(frames)
        return recording.scores.detach(), frames

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.recording.grads.copy_(grads[0])
        ctx.recording.backward()
        return None, None


class GraphedForward:
    """A forward pass that is replayed for shapes that have occurred before; its gradients go to flat parameters.

    Each result must be used, and its backward pass made, before the next call.

    Args:
        run: The forward pass, with its own autocast context.
        flat: The model's parameters and gradients.
        record: Makes a recording of `run` for a shape.
        size: The number of utterances, or of frames, that a smaller one is padded to.
        rest: What computes the scores from the results of `run` and further tensors, if `run` is not the whole network.

    Attributes:
        recordings: Those kept, by shape, the one used last at the end.
    """

    def __init__(
        self,
        run: Forward,
        flat: FlatParameters,
        record: Callable[..., PassRecording] | None = None,
        size: Callable[[int], int] = rounded,
        rest: Callable[..., Tensor] | None = None,
    ) -> None:
        self._run, self._flat, self._size, self._rest = run, flat, size, rest
        self._record = record or self._cuda_recorder()
        self.recordings: OrderedDict[Shape, PassRecording] = OrderedDict()
        self._seen: set[Shape] = set()
        self._refused: set[Shape] = set()
        self._told = False
        self._memory = self._addresses()
        self._anchor = torch.zeros((), device=flat.weights.device, requires_grad=True)

    def __call__(self, feats_BTF: Tensor, lengths: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """As `run`, and then `rest` if it is given, with what else the network reads.

        A shape that occurs for the first time, or that cannot be recorded, is computed by `run` itself.
        """
        if others and self._rest is None:  # a recording has no memory for them
            if not self._told:
                log.warning("no CUDA graphs: the network reads more than features and their lengths")
                self._told = True
            return self._run(feats_BTF, lengths, *others)
        scores, frames = self._first(feats_BTF, lengths)
        return (self._rest(scores, frames, *others) if self._rest else scores), frames

    def _first(self, feats_BTF: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What `run` gives."""
        size, time, dim = feats_BTF.shape
        shape = self._size(size), self._size(time), dim
        feats, frames = _padded(feats_BTF, lengths, shape)
        recording = self._recording(shape, feats, frames)
        if recording is None:
            return self._run(feats_BTF, lengths)
        recording.feats.copy_(feats)
        recording.lengths.copy_(frames)
        scores, out_frames = _Replayed.apply(self._anchor, recording)  # type: ignore[no-untyped-call]
        return scores[:size], out_frames[:size]

    def forget(self) -> None:
        """Drop all recordings, as when other parameters get gradients."""
        self.recordings.clear()

    def _recording(self, shape: Shape, feats: Tensor, frames: Tensor) -> PassRecording | None:
        if self._addresses() != self._memory:  # weights or gradients have been moved: recordings hold old addresses
            self._memory = self._addresses()
            self.recordings.clear()
        if shape in self.recordings:
            self.recordings.move_to_end(shape)
            return self.recordings[shape]
        if shape in self._refused or shape not in self._seen:
            self._seen.add(shape)
            return None
        while len(self.recordings) >= MAX_GRAPHS:
            self.recordings.popitem(last=False)
        return self._recorded(shape, feats, frames)

    def _recorded(self, shape: Shape, feats: Tensor, frames: Tensor) -> PassRecording | None:
        """Record a shape; neither gradients nor random numbers are the worse for it. None if it fails.

        Raises:
            RuntimeError: If the device is out of memory.
        """
        device = feats.device
        grads = self._flat.grads.clone()
        random = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        try:
            with without_host_values():
                self.recordings[shape] = self._record(self._run, feats, frames)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._refused.add(shape)
            log.warning("no CUDA graph of batches of shape %s: %s", shape, error)
        finally:
            self._flat.grads.copy_(grads)
            torch.cuda.set_rng_state(random, device) if device.type == "cuda" else torch.set_rng_state(random)
        return self.recordings.get(shape)

    def _addresses(self) -> tuple[int, int]:
        return self._flat.weights.data_ptr(), self._flat.grads.data_ptr()

    def _cuda_recorder(self) -> Callable[[Forward, Tensor, Tensor], PassRecording]:
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._flat.weights.device)  # type: ignore[no-untyped-call]
        return lambda run, feats, frames: CudaRecording(run, feats, frames, pool, stream)


def _padded(feats_BTF: Tensor, lengths: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Pad with frames of zeros, and with whole utterances of them: one without frames could have an undefined score."""
    size, time, _ = feats_BTF.shape
    rows, frames = shape[0] - size, shape[1] - time
    feats = F.pad(feats_BTF, (0, 0, 0, frames, 0, rows)) if rows or frames else feats_BTF
    lengths = lengths.to(feats.device, non_blocking=True)
    return feats, F.pad(lengths, (0, rows), value=shape[1]) if rows else lengths
