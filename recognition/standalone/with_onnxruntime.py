"""Recognizes WAV files with the model in this script's folder and onnxruntime.

    pip install onnxruntime numpy
    python recognize.py [--int8] FILE.wav ...

Files are 16-bit PCM at the model's sample rate. One line is printed for each: its name and the words. Each search is
greedy: the best token of every frame (CTC), one token or none in each frame (transducers), one token after another
(attention). A model for streams reads files as they would come from a microphone.
"""

import argparse
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

Array = np.ndarray[Any, Any]


class Model:
    """The files of an exported model.

    Args:
        folder: The exported model.
        int8: Whether to use the files with weights in int8.
        threads: Threads of the networks.
    """

    def __init__(self, folder: Path, int8: bool = False, threads: int = 1) -> None:
        self.about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        self.sample_rate: int = self.about["sample_rate"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        self.graphs = {}
        for name in ("features", *self.about["graphs"]):
            path = folder / f"{name}{'.int8' if int8 and name != 'features' else ''}.onnx"
            self.graphs[name] = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        lines = (folder / "tokens.txt").read_text(encoding="utf-8").splitlines()
        self.symbols = [line.rpartition(" ")[0] for line in lines]

    def run(self, name: str, *inputs: Array) -> list[Array]:
        """What a graph puts out."""
        graph = self.graphs[name]
        names = [entry.name for entry in graph.get_inputs()]
        outputs: list[Array] = graph.run(None, dict(zip(names, inputs, strict=True)))
        return outputs

    def recognize(self, samples: Array) -> str:
        """The words of an utterance.

        Args:
            samples: Mono, in ±1, at the model's sample rate.
        """
        if "stream" in self.about:
            stream = ModelStream(self)
            for piece in np.array_split(samples, 1 + 10 * len(samples) // self.sample_rate):
                stream.accept(piece)
            stream.accept(np.zeros(int(self.about["stream"]["tail_s"] * self.sample_rate), np.float32))
            return stream.text
        feats, frames = self.run("features", samples[None].astype(np.float32), np.array([len(samples)]))
        search = {"ctc": self._ctc, "transducer": self._transducer, "attention": self._attention}[self.about["system"]]
        tokens = search(feats, frames) if int(frames[0]) else []
        return self.text(tokens)

    def text(self, tokens: list[int]) -> str:
        """The words of tokens."""
        text = "".join(self.symbols[token] for token in tokens)
        return " ".join(text.replace("▁", " ").split())

    def _ctc(self, feats: Array, frames: Array) -> list[int]:
        log_probs, counts = self.run("model", feats, frames)
        search = GreedyCtc()
        search.accept(log_probs[0, : int(counts[0])])
        return search.tokens

    def _transducer(self, feats: Array, frames: Array) -> list[int]:
        encoded, counts = self.run("encoder", feats, frames)
        search = GreedyTransducer(self)
        search.accept(encoded[0, : int(counts[0])])
        return search.tokens

    def _attention(self, feats: Array, frames: Array) -> list[int]:
        encoded, counts = self.run("encoder", feats, frames)[:2]
        tokens = [0]  # stands for the start and for the end
        while len(tokens) <= int(counts[0]):
            log_probs = self.run("decoder", np.array([tokens]), encoded, counts)[0]
            token = int(log_probs[0, -1].argmax())
            if not token:
                break
            tokens.append(token)
        return tokens[1:]


class GreedyTransducer:
    """One token or none in each frame of an utterance."""

    def __init__(self, model: Model) -> None:
        self._model, self.tokens = model, list[int]()
        shapes = [entry.shape for entry in model.graphs["predictor"].get_inputs()]
        self._context = shapes[0][1] if len(shapes) == 1 else 0  # or the predictor has states
        self._states: list[Array] = [np.zeros((1, *shape[1:]), np.float32) for shape in shapes[1:]]
        self._predict()

    def _predict(self) -> None:
        last = [0] * max(1, self._context) + self.tokens[-max(1, self._context) :]
        known = np.array([last[-self._context :]]) if self._context else np.array([last[-1]])
        self._predicted, *self._states = self._model.run("predictor", known, *self._states)

    def accept(self, encoded: Array) -> None:
        """Go on with further frames [frames, D]."""
        for frame in encoded:
            token = int(self._model.run("joiner", frame[None], self._predicted)[0].argmax())
            if token:
                self.tokens.append(token)
                self._predict()


class GreedyCtc:
    """The best token of every frame of an utterance."""

    def __init__(self) -> None:
        self.tokens, self._before = list[int](), 0

    def accept(self, log_probs: Array) -> None:
        """Go on with further frames [frames, tokens]."""
        for token in log_probs.argmax(1).tolist():
            if token not in (0, self._before):
                self.tokens.append(token)
            self._before = token


class ModelStream:
    """Recognizes speech as it comes, with a model for streams.

    Args:
        model: The model.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._sizes = model, model.about["stream"]
        self._wave: Array = np.zeros(0, np.float32)
        self._given = self._skipped = 0
        self._transducer = model.about["system"] == "transducer"
        self._search: GreedyTransducer | GreedyCtc = GreedyTransducer(model) if self._transducer else GreedyCtc()
        _, state = model.graphs["encoder" if self._transducer else "model"].get_inputs()
        self._feats: Array | None = None
        self._state: Array = np.zeros((1, state.shape[1]), np.float32)

    @property
    def text(self) -> str:
        """The words up to now."""
        return self._model.text(self._search.tokens)

    def accept(self, samples: Array) -> None:
        """Hear further samples [samples], mono, in ±1, at the model's sample rate."""
        feats = self._features(samples)
        self._feats = feats if self._feats is None else np.concatenate((self._feats, feats))
        while len(self._feats) >= self._sizes["window"]:
            window = self._feats[None, : self._sizes["window"]]
            outputs, self._state = self._model.run("encoder" if self._transducer else "model", window, self._state)
            self._search.accept(outputs[0])
            self._feats = self._feats[self._sizes["shift"] :]

    def _features(self, samples: Array) -> Array:
        """Frames that are complete: nothing after the samples has an effect on them."""
        sizes, skipped = self._sizes, min(self._skipped, len(samples))  # between two frames that do not touch
        wave = np.concatenate((self._wave, samples[skipped:].astype(np.float32)))
        feats, frames = self._model.run("features", wave[None], np.array([len(wave)]))
        inside = (len(wave) + sizes["lead"] - sizes["frame_length"]) // sizes["hop_length"] + 1
        ready = max(self._given, min(inside, int(frames[0])))
        kept = max(0, ready - -(-sizes["lead"] // sizes["hop_length"]))
        own = feats[0, self._given : ready]
        self._skipped += max(0, kept * sizes["hop_length"] - len(wave)) - skipped
        self._wave, self._given = wave[kept * sizes["hop_length"] :], ready - kept
        return own


def read_wav(path: Path, sample_rate: int) -> Array:
    """Samples in ±1 of the first channel."""
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2 or file.getframerate() != sample_rate:
            raise SystemExit(
                f"{path} is not 16-bit PCM at {sample_rate} Hz: convert it, for example with "
                f"ffmpeg -i {path} -ar {sample_rate} new.wav"
            )
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)[:: file.getnchannels()]
        return samples.astype(np.float32) / 32768


def main() -> None:
    """Recognize the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--int8", action="store_true", help="use the files with weights in int8")
    arguments = parser.parse_args()
    model = Model(Path(__file__).resolve().parent, arguments.int8)
    for path in arguments.files:
        print(path, model.recognize(read_wav(path, model.sample_rate)), sep="\t")


if __name__ == "__main__":
    main()
