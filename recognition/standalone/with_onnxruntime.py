"""Recognizes WAV files with the model in this script's folder and onnxruntime.

    pip install onnxruntime numpy
    python recognize.py [--int8] FILE.wav ...

Files are 16-bit PCM at the model's sample rate. One line is printed for each: its name and the words. Each search is
greedy: the best token of every frame (CTC), one token or none in each frame (transducers), one token after another
(attention).
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
        feats, frames = self.run("features", samples[None].astype(np.float32), np.array([len(samples)]))
        search = {"ctc": self._ctc, "transducer": self._transducer, "attention": self._attention}[self.about["system"]]
        tokens = search(feats, frames) if int(frames[0]) else []
        text = "".join(self.symbols[token] for token in tokens)
        return " ".join(text.replace("▁", " ").split())

    def _ctc(self, feats: Array, frames: Array) -> list[int]:
        log_probs, counts = self.run("model", feats, frames)
        best = log_probs[0, : int(counts[0])].argmax(1)
        changes = np.flatnonzero(np.diff(best, prepend=-1))
        return [int(token) for token in best[changes] if token]

    def _transducer(self, feats: Array, frames: Array) -> list[int]:
        encoded, counts = self.run("encoder", feats, frames)
        shapes = [entry.shape for entry in self.graphs["predictor"].get_inputs()]
        if len(shapes) == 1:  # the predictor knows the last tokens
            tokens, states = [0] * shapes[0][1], []
            predicted = self.run("predictor", np.array([tokens]))[0]
        else:
            tokens, states = [0], [np.zeros((1, *shape[1:]), np.float32) for shape in shapes[1:]]
            predicted, *states = self.run("predictor", np.array([0]), *states)
        nothing = len(tokens)
        for frame in range(int(counts[0])):
            token = int(self.run("joiner", encoded[:, frame], predicted)[0].argmax())
            if token:
                tokens.append(token)
                known = np.array([token]) if states else np.array([tokens[-nothing:]])
                predicted, *states = self.run("predictor", known, *states)
        return tokens[nothing:]

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
