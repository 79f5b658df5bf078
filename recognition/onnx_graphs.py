"""The parts of a recognizer as graphs of ONNX: what is traced, and writing and quantizing the files.

A graph reads features as they are computed from audio, and normalizes them itself: what recognizes with it needs no
statistics. Padding has no effect on it, and is zero in what it puts out. Batch and time may have any size.

Graphs of streams read a window of frames and a state, and give the outputs of a chunk and the next state: the network's
caches, as one vector that begins with zeros. Their sizes are fixed, but for the batch.

Graphs are traced by torch's TorchScript exporter. The newer one, by `torch.export`, cannot export LSTMs over any number
of frames, and takes a minute where this one takes two seconds. Tracing makes a constant of everything that Python
computes from sizes, so each file is compared with the network at sizes that it was not traced with.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from speech.features.cmvn import frame_mask
from speech.models.networks.predictor import StatelessPredictor

if TYPE_CHECKING:
    from speech.features.kaldi import FilterBank
    from speech.frontend import FrontEnd
    from speech.models.networks.base import AcousticModel, StreamState
    from speech.models.networks.encoder_decoder import EncoderDecoder, EncoderWithCtc
    from speech.models.networks.transducer import Transducer

OPSET = 17
"""The first with LayerNorm and the Fourier transform, in onnxruntime since 1.13."""
TOLERANCE = 1e-3
"""Largest difference of a file from its network: rounding adds up to a tenth of it in deep networks."""
_TRACED, _TRIED = (2, 96), ((1, 5), (1, 64), (3, 131))
"""Batch and frames of the inputs that graphs are traced with, and of those that files are tried with."""
_QUANTIZED = ("MatMul", "Gemm", "LSTM")
"""Operations whose weights become int8; convolutions have few weights, and are slower in int8 on most CPUs."""


@dataclass(frozen=True)
class Graph:
    """A part of a recognizer that becomes a file."""

    name: str
    """Stem of the file."""
    module: nn.Module
    inputs: dict[str, dict[int, str]]
    """Names of what it reads, and of the axes that may have any size."""
    outputs: dict[str, dict[int, str]]
    """Names of what it puts out, likewise."""
    example: Callable[[int, int], tuple[Tensor, ...]]
    """Inputs of a number of utterances with at most some frames or tokens."""
    metadata: dict[str, str | int] = field(default_factory=dict)
    """What readers of the file look up in it."""


@dataclass(frozen=True)
class Chunks:
    """How graphs read streams: a window of features after another, each a chunk later, with a state between them."""

    layout: Literal["sherpa-onnx", "plain"]
    """Whose names and shapes of inputs and outputs they have."""
    frames: int
    """Output frames of a chunk."""
    ahead: int
    """Output frames after it that are computed with it."""
    factor: int
    """Feature frames of an output frame."""

    @property
    def window(self) -> int:
        """Feature frames that are read at once."""
        return (self.frames + self.ahead) * self.factor

    @property
    def shift(self) -> int:
        """Feature frames from the start of a window to that of the next."""
        return self.frames * self.factor


class _Features(nn.Module):
    def __init__(self, bank: FilterBank) -> None:
        super().__init__()
        self.bank = bank

    def forward(self, wave: Tensor, wave_lens: Tensor) -> tuple[Tensor, Tensor]:
        return self.bank.traceable(wave, wave_lens)


def features_graph(bank: FilterBank) -> Graph:
    """Samples in ±1 [N, S] and their numbers [N] to features that are not normalized [N, T, F] and their frames [N]."""

    def example(count: int, most: int) -> tuple[Tensor, Tensor]:
        lengths = _lengths(count, most) * bank.hop_length + bank.frame_length
        time = torch.arange(int(lengths.max())) / bank.sample_rate
        tone = 0.3 * torch.sin(2000.0 * time) * torch.sin(9.0 * time)
        generator = torch.Generator().manual_seed(most)
        return tone + 0.05 * torch.randn(count, len(time), generator=generator), lengths

    return Graph(
        "features",
        _Features(bank),
        {"wave": {0: "N", 1: "S"}, "wave_lens": {0: "N"}},
        _of_frames(),
        example,
        {"sample_rate": bank.sample_rate, "feature_dim": bank.dim},
    )


class HeardFeatures(nn.Module):
    """From features as they are computed from audio to those that a network reads.

    Args:
        frontend: Normalization, trimming of silence, deltas, splicing and stride.
    """

    def __init__(self, frontend: FrontEnd) -> None:
        super().__init__()
        self.frontend, self.width = frontend, frontend.extract.dim

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        """[N, T, F] and [N] to what the network reads."""
        x = x.masked_fill(~frame_mask(x_lens, x.shape[1]).unsqueeze(2), 0.0)
        feats, frames, _ = self.frontend.trimmed(x, x_lens)
        return feats, frames


def _of_frames(name: str = "x") -> dict[str, dict[int, str]]:
    return {name: {0: "N", 1: "T"}, f"{name}_lens": {0: "N"}}


def _lengths(count: int, most: int) -> Tensor:
    return torch.tensor([max(1, most - 7 * number) for number in range(count)])


def _inside(values: Tensor, frames: Tensor) -> Tensor:
    """Values [N, T, D], zero in the padding."""
    return values.masked_fill(~frame_mask(frames, values.shape[1]).unsqueeze(2), 0.0)


def _speechlike(count: int, most: int, width: int) -> tuple[Tensor, Tensor]:
    """Log energies that rise and fall as those of speech do, and lengths."""
    generator = torch.Generator().manual_seed(count * 1000 + most)
    loud = 5.0 * torch.sin(torch.arange(most) / 9.0)[None, :, None]
    return 9.0 + loud + 2.0 * torch.randn(count, most, width, generator=generator), _lengths(count, most)


class _Acoustic(nn.Module):
    def __init__(self, heard: HeardFeatures, network: AcousticModel) -> None:
        super().__init__()
        self.heard, self.network = heard, network

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, frames = self.network(*self.heard(x, x_lens))
        return _inside(log_probs, frames), frames


def acoustic_graph(
    heard: HeardFeatures, network: AcousticModel, vocab_size: int, chunks: Chunks | None = None
) -> Graph:
    """Features to natural log posteriors of tokens [N, T', V] and their frames [N], or those of a chunk."""
    if chunks is not None:
        return _chunk_graph("model", "log_probs", heard, network, nn.LogSoftmax(-1), vocab_size, chunks)
    return Graph(
        "model",
        _Acoustic(heard, network),
        _of_frames(),
        _of_frames("log_probs"),
        lambda count, most: _speechlike(count, most, heard.width),
        # sherpa-onnx's name of CTC models that read log-mel energies without dither and normalize them themselves
        {"model_type": "zipformer2_ctc", "vocab_size": vocab_size, "normalize_type": ""},
    )


class _Encoder(nn.Module):
    """The frames that other parts read, after a layer if there is one, and CTC's posteriors if they are wanted."""

    def __init__(self, heard: HeardFeatures, network: EncoderWithCtc, layer: nn.Module, ctc: bool) -> None:
        super().__init__()
        self.heard, self.network, self.layer, self.ctc = heard, network, layer, ctc

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, ...]:
        encoded, frames = self.network.encode(*self.heard(x, x_lens))
        out = _inside(self.layer(encoded), frames), frames
        posteriors = self.network.posteriors(encoded) if self.ctc else None
        return out if posteriors is None else (*out, _inside(posteriors, frames))


class _StatelessPredictor(nn.Module):
    """The last tokens [N, context] to what the joiner adds; before a text, they are 0 or -1."""

    def __init__(self, network: Transducer) -> None:
        super().__init__()
        self.predictor, self.layer = network.predictor, network.joiner.predictor

    def forward(self, y: Tensor) -> Tensor:
        y = y.clamp(min=0)
        before = nn.functional.pad(y[:, :-1], (1, 0))
        vectors, _ = self.predictor.step(y[:, -1], (before,))
        projected: Tensor = self.layer(vectors)
        return projected


class _RecurrentPredictor(nn.Module):
    """The last token [N] and the states before it [N, layers, D] to what the joiner adds, and the states after it."""

    def __init__(self, network: Transducer) -> None:
        super().__init__()
        self.predictor, self.layer = network.predictor, network.joiner.predictor

    def forward(self, y: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        vectors, after = self.predictor.step(y, states)
        return self.layer(vectors), *after


def transducer_graphs(heard: HeardFeatures, network: Transducer, chunks: Chunks | None = None) -> list[Graph]:
    """Encoder, predictor and joiner; the joiner's linear layers are in the other two, so that they run once."""
    joiner = network.joiner
    vocab_size, width = joiner.output.weight.shape
    if chunks is not None:
        encoder = _chunk_graph("encoder", "encoder_out", heard, network.encoder, joiner.encoder, vocab_size, chunks)
    else:
        encoder = Graph(
            "encoder",
            _Encoder(heard, network, joiner.encoder, ctc=False),
            _of_frames(),
            _of_frames("encoder_out"),
            lambda count, most: _speechlike(count, most, heard.width),
            # sherpa-onnx's name of all offline encoders that go with a stateless predictor
            {"model_type": "conformer"},
        )
    join = Graph(
        "joiner",
        _Join(network),
        {"encoder_out": {0: "N"}, "decoder_out": {0: "N"}},
        {"logit": {0: "N"}},
        lambda count, _: (torch.randn(count, width), torch.randn(count, width)),
        {"joiner_dim": width, "vocab_size": vocab_size},
    )
    return [encoder, _predictor_graph(network, vocab_size), join]


def _predictor_graph(network: Transducer, vocab_size: int) -> Graph:
    predictor = network.predictor
    if isinstance(predictor, StatelessPredictor):
        context = predictor.context
        return Graph(
            "predictor",
            _StatelessPredictor(network),
            {"y": {0: "N"}},
            {"decoder_out": {0: "N"}},
            lambda count, _: (torch.randint(-1, vocab_size, (count, context)),),
            {"vocab_size": vocab_size, "context_size": context},
        )
    shapes = [state.shape[1:] for state in predictor.nothing(1)]
    names = [f"state_{number}" for number in range(len(shapes))]
    return Graph(
        "predictor",
        _RecurrentPredictor(network),
        {"y": {0: "N"}, **{name: {0: "N"} for name in names}},
        {"decoder_out": {0: "N"}, **{f"next_{name}": {0: "N"} for name in names}},
        lambda count, _: (torch.randint(0, vocab_size, (count,)), *(torch.randn(count, *shape) for shape in shapes)),
        {"vocab_size": vocab_size},
    )


class _Join(nn.Module):
    def __init__(self, network: Transducer) -> None:
        super().__init__()
        self.joiner = network.joiner

    def forward(self, encoder_out: Tensor, decoder_out: Tensor) -> Tensor:
        scores: Tensor = self.joiner(encoder_out, decoder_out)
        return scores


class _Decoder(nn.Module):
    def __init__(self, network: EncoderDecoder) -> None:
        super().__init__()
        self.decoder = network.decoder

    def forward(self, tokens: Tensor, encoder_out: Tensor, encoder_out_lens: Tensor) -> Tensor:
        log_probs: Tensor = self.decoder(tokens, encoder_out, encoder_out_lens)
        return log_probs


def attention_graphs(heard: HeardFeatures, network: EncoderDecoder) -> list[Graph]:
    """The encoder, with CTC's posteriors if it has CTC, and the decoder network over whole texts."""
    vocab_size, width, ctc = network.decoder.vocab_size, network.width, network.ctc is not None

    def example(count: int, most: int) -> tuple[Tensor, ...]:
        tokens = torch.randint(0, vocab_size, (count, 1 + most // 8))
        return tokens, torch.randn(count, most, width), _lengths(count, most)

    encoder = Graph(
        "encoder",
        _Encoder(heard, network, nn.Identity(), ctc),
        _of_frames(),
        _of_frames("encoder_out") | ({"log_probs": {0: "N", 1: "T"}} if ctc else {}),
        lambda count, most: _speechlike(count, most, heard.width),
        {"vocab_size": vocab_size},
    )
    decoder = Graph(
        "decoder",
        _Decoder(network),
        {"tokens": {0: "N", 1: "L"}, **_of_frames("encoder_out")},
        {"log_probs": {0: "N", 1: "L"}},
        example,
        {"vocab_size": vocab_size},
    )
    return [encoder, decoder]


# --- speech as it comes


class _Chunk(nn.Module):
    """A window of features [N, window, F] and a state [N, width] to the outputs of a chunk and the next state.

    The state is what `AcousticModel.window_outputs` remembers: all tensors, flattened, one after another.

    Args:
        heard: What precedes the network.
        encoder: The network.
        layer: What follows it.
        chunks: Sizes.
    """

    def __init__(self, heard: HeardFeatures, encoder: AcousticModel, layer: nn.Module, chunks: Chunks) -> None:
        super().__init__()
        self.heard, self.encoder, self.layer = heard, encoder, layer
        self._before = encoder.stream_state(1, chunks.frames)
        self.width = sum(part.numel() for part in _tensors(self._before))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        feats, _ = self.heard.frontend(x, torch.full((x.shape[0],), x.shape[1]))
        scores, after = self.encoder.window_outputs(feats, self._split(state))
        parts = [part.reshape(x.shape[0], -1) for part in _tensors(after) if part.numel()]
        return self.layer(scores), torch.cat(parts, dim=1)

    def _split(self, state: Tensor) -> StreamState:
        """The tensors of a state, in the order of `_tensors`."""
        parts, start = [], 0
        for like in _tensors(self._before):
            part = state[:, start : start + like.numel()]
            empty = like.new_zeros(state.shape[0], *like.shape[1:])
            parts.append(part.reshape(state.shape[0], *like.shape[1:]) if like.numel() else empty)
            start += like.numel()
        front = [parts.pop(0) for _ in self._before.front]
        layers = [tuple(parts.pop(0) for _ in memory) for memory in self._before.layers]
        return replace(self._before, front=tuple(front), layers=tuple(layers))


def _tensors(state: StreamState) -> list[Tensor]:
    """What a state has for the next window: first of the subsampling, then of each layer."""
    return [*state.front, *(tensor for memory in state.layers for tensor in memory)]


_Example = Callable[[int, int], tuple[Tensor, Tensor]]
"""Windows of features and states, for a number of streams that have been read for at most some frames."""


class _AsLstm(nn.Module):
    """In the form of sherpa-onnx's streaming LSTMs, whose two states have any widths: [1, N, width] and [1, N, 1].

    Its model type `conformer` has no place for the states of a subsampling, and as many layers in both states.
    """

    def __init__(self, chunk: _Chunk) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        out, after = self.chunk(x, h[0])
        return out, after[None], c + 1


class _AsZipformer(nn.Module):
    """In the form of sherpa-onnx's streaming Zipformer CTC models, as one of one layer: its keys are the state.

    What else the layer and the subsampling would have stays as it is. Of the other kinds of streaming CTC models,
    NeMo's are given other features, and WeNet's one stream at a time, of samples in the range of int16.
    """

    def __init__(self, chunk: _Chunk, chunks: Chunks) -> None:
        super().__init__()
        self.chunk, self.shift = chunk, chunks.shift

    def forward(self, x: Tensor, key: Tensor, *unused: Tensor) -> tuple[Tensor, ...]:
        *rest, heard = unused
        out, after = self.chunk(x, key[0])
        return out, after[None], *(part * 1 for part in rest), heard + self.shift


def _chunk_graph(
    name: str,
    output: str,
    heard: HeardFeatures,
    encoder: AcousticModel,
    layer: nn.Module,
    vocab_size: int,
    chunks: Chunks,
) -> Graph:
    """A window of features and a state to the outputs of a chunk and the next state, in the form of a layout."""
    chunk = _Chunk(heard, encoder.eval(), layer, chunks)

    def example(count: int, most: int) -> tuple[Tensor, Tensor]:
        state = torch.zeros(count, chunk.width)
        x, _ = _speechlike(count, chunks.window + most, heard.width)
        with torch.no_grad():
            for start in range(0, most, 40):  # states as they are after some chunks
                _, state = chunk(x[:, start : start + chunks.window], state)
        return x[:, most:], state

    known: dict[str, str | int] = {"vocab_size": vocab_size, "window": chunks.window, "shift": chunks.shift}
    if chunks.layout == "plain":
        inputs = {"x": {0: "N"}, "state": {0: "N"}}
        outputs = {output: {0: "N"}, "next_state": {0: "N"}}
        return Graph(name, chunk, inputs, outputs, example, known | {"state": chunk.width})
    if output == "encoder_out":
        return _lstm_graph(name, chunk, chunks, example)
    return _zipformer_graph(name, chunk, chunks, example)


def _lstm_graph(name: str, chunk: _Chunk, chunks: Chunks, example: _Example) -> Graph:
    """An encoder for sherpa-onnx."""

    def packed(count: int, most: int) -> tuple[Tensor, ...]:
        x, state = example(count, most)
        return x, state[None], torch.zeros(1, count, 1)

    metadata: dict[str, str | int] = {"model_type": "lstm", "num_encoder_layers": 1, "rnn_hidden_size": 1}
    return Graph(
        name,
        _AsLstm(chunk),
        {"x": {0: "N"}, "h": {1: "N"}, "c": {1: "N"}},
        {"encoder_out": {0: "N"}, "next_h": {1: "N"}, "next_c": {1: "N"}},
        packed,
        metadata | {"d_model": chunk.width, "T": chunks.window, "decode_chunk_len": chunks.shift},
    )


def _zipformer_graph(name: str, chunk: _Chunk, chunks: Chunks, example: _Example) -> Graph:
    """A CTC model for sherpa-onnx."""
    metadata: dict[str, str | int] = {
        "encoder_dims": 4,
        "query_head_dims": chunk.width,
        "value_head_dims": 1,
        "num_heads": 1,
        "num_encoder_layers": 1,
        "cnn_module_kernels": 2,
        "left_context_len": 1,
    }
    # shapes that follow from these values, those of the subsampling, and the axis of the batch
    unused = {
        "cached_nonlin_attn": ((1, 1, 1, 3), 1),
        "cached_val1": ((1, 1, 1), 1),
        "cached_val2": ((1, 1, 1), 1),
        "cached_conv1": ((1, 4, 1), 0),
        "cached_conv2": ((1, 4, 1), 0),
        "embed_states": ((1, 128, 3, 19), 0),
    }

    def packed(count: int, most: int) -> tuple[Tensor, ...]:
        x, state = example(count, most)
        rest = [torch.zeros(shape).repeat_interleave(count, axis) for shape, axis in unused.values()]
        return x, state[None], *rest, torch.zeros(count, dtype=torch.long)

    states = {"cached_key": {1: "N"}, **{part: {axis: "N"} for part, (_, axis) in unused.items()}}
    states["processed_lens"] = {0: "N"}
    return Graph(
        name,
        _AsZipformer(chunk, chunks),
        {"x": {0: "N"}, **states},
        {"log_probs": {0: "N"}, **{f"new_{part}": axes for part, axes in states.items()}},
        packed,
        metadata | {"model_type": "zipformer2_ctc", "T": chunks.window, "decode_chunk_len": chunks.shift},
    )


# --- files


def write_graph(graph: Graph, path: Path, metadata: dict[str, str | int]) -> float:
    """Write a graph as an ONNX file, and compare the file with the network.

    Args:
        graph: What to write.
        path: The file.
        metadata: What readers of the file look up in it, beside what the graph has.

    Returns:
        The largest difference between them, see `difference`.

    Raises:
        ValueError: A part of it has no ONNX form, or the file computes something else.
    """
    import onnx

    _know_fourier_transforms()
    module = graph.module.eval()
    for batch, frames in (_TRACED, *_TRIED):  # fills the caches of what does not depend on the input
        module(*graph.example(batch, frames))
    try:
        with quiet():
            torch.onnx.export(
                module,
                graph.example(*_TRACED),
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_axes={**graph.inputs, **graph.outputs},
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ValueError(f"the {graph.name} has no ONNX form: {str(error).splitlines()[0]}") from error
    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, {name: str(value) for name, value in {**graph.metadata, **metadata}.items()})
    onnx.save(model, str(path))
    worst = max(difference(graph, path, *graph.example(batch, frames)) for batch, frames in _TRIED)
    if not worst <= TOLERANCE:
        raise ValueError(
            f"{path.name} differs from the {graph.name} that it was made from by {worst:.2g}, more than {TOLERANCE:g}: "
            "it cannot be exported with this model and these versions of torch and onnxruntime"
        )
    return worst


def _know_fourier_transforms() -> None:
    """Teach the exporter the transform of real frames: ONNX has it, with pairs of numbers in place of complex ones."""
    from torch.onnx.utils import register_custom_op_symbolic

    def transform(graph: Any, x: Any, n: Any, dim: Any, norm: Any) -> Any:
        last = graph.op("Constant", value_t=torch.tensor([-1]))
        return graph.op("DFT", graph.op("Unsqueeze", x, last), axis_i=-2, onesided_i=1)

    register_custom_op_symbolic("aten::fft_rfft", transform, OPSET)
    register_custom_op_symbolic("aten::view_as_real", lambda graph, pairs: pairs, OPSET)


def quantize(source: Path, target: Path) -> None:
    """Write a file with weights in int8; what they are multiplied with is quantized while it runs."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    _copy_shared_weights(model)
    with quiet():
        quantize_dynamic(model, target, op_types_to_quantize=list(_QUANTIZED), weight_type=QuantType.QInt8)


def _copy_shared_weights(model: Any) -> None:
    """Give operations that share weights their own, which the quantizer does not find otherwise, or changes twice."""
    weights = {weight.name: weight for weight in model.graph.initializer}
    shared = [node for node in model.graph.node if node.op_type == "Identity" and node.input[0] in weights]
    for node in shared:
        own = model.graph.initializer.add()
        own.CopyFrom(weights[node.input[0]])
        own.name = node.output[0]
        model.graph.node.remove(node)


@torch.inference_mode()
def difference(graph: Graph, path: Path, *inputs: Tensor) -> float:
    """The largest difference between a file's outputs and a network's.

    Of log posteriors, it is that of the probabilities; of others, relative to the largest absolute value above 1.
    Numbers of frames must be equal: the difference is infinite otherwise.
    """
    theirs = session(path).run(None, {name: x.numpy() for name, x in zip(graph.inputs, inputs, strict=True)})
    own = graph.module(*inputs)
    worst = 0.0
    for name, mine, their in zip(graph.outputs, own if isinstance(own, tuple) else (own,), theirs, strict=True):
        other = torch.from_numpy(their)
        if mine.shape != other.shape or (name.endswith("_lens") and not torch.equal(mine, other)):
            return math.inf
        apart = (mine.exp() - other.exp() if name == "log_probs" else mine - other).abs().max()
        scale = 1.0 if name == "log_probs" else max(1.0, float(mine.abs().max()))
        worst = max(worst, float(apart) / scale)
    return worst


def session(path: Path) -> Any:
    """A file, ready to run on the CPU with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = 3  # errors: it warns of what it optimizes away
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the exporter's and the quantizer's warnings, which users can do nothing about."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(level)
