"""Recognizes WAV files with the model in this script's folder and sherpa-onnx.

    pip install sherpa-onnx numpy
    python recognize.py [--int8] FILE.wav ...

Files are 16-bit PCM of any sample rate, which sherpa-onnx resamples. One line is printed for each: its name and the
words. A model for streams reads them as they would come from a microphone, and prints what it has recognized by then on
standard error.
"""

import argparse
import json
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sherpa_onnx.lib import _sherpa_onnx as sherpa


class Loaded(NamedTuple):
    """A recognizer."""

    engine: Any
    tail_s: float
    """Seconds of silence after which the last speech of a stream has been recognized."""


def load(folder: Path, int8: bool = False, threads: int = 1) -> Loaded:
    """A recognizer.

    Args:
        folder: The exported model.
        int8: Whether to use the files with weights in int8.
        threads: Threads of the network.
    """
    about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    files = {name: str(folder / f"{name}{'.int8' if int8 else ''}.onnx") for name in about["graphs"]}
    options = {
        "feat_config": sherpa.FeatureExtractorConfig(**about["sherpa_onnx"]["features"]),
        **about["sherpa_onnx"]["search"],
    }
    known = {"tokens": str(folder / "tokens.txt"), "num_threads": threads}
    if "stream" in about:
        if about["system"] == "ctc":
            network = {"zipformer2_ctc": sherpa.OnlineZipformer2CtcModelConfig(files["model"])}
        else:
            parts = (files["encoder"], files["predictor"], files["joiner"])
            network = {"transducer": sherpa.OnlineTransducerModelConfig(*parts)}
        model = sherpa.OnlineModelConfig(**known, **network)
        config = sherpa.OnlineRecognizerConfig(model_config=model, enable_endpoint=False, **options)
        return Loaded(sherpa.OnlineRecognizer(config), about["stream"]["tail_s"])
    if about["system"] == "ctc":
        network = {"zipformer_ctc": sherpa.OfflineZipformerCtcModelConfig(files["model"])}
    else:
        parts = sherpa.OfflineTransducerModelConfig(files["encoder"], files["predictor"], files["joiner"])
        network = {"transducer": parts, "model_type": "transducer"}
    model = sherpa.OfflineModelConfig(**known, **network)
    return Loaded(sherpa.OfflineRecognizer(sherpa.OfflineRecognizerConfig(model_config=model, **options)), 0.0)


def read_wav(path: Path) -> tuple[np.ndarray[Any, Any], int]:
    """Samples in ±1 of the first channel, and their rate in Hz."""
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise SystemExit(f"{path} is not 16-bit PCM: convert it, for example with ffmpeg -i {path} new.wav")
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)[:: file.getnchannels()]
        return samples.astype(np.float32) / 32768, file.getframerate()


def recognize(
    recognizer: Loaded, samples: np.ndarray[Any, Any], rate: int, show: Callable[[str], object] = lambda text: None
) -> str:
    """The words of an utterance; of a stream, those that are known by now are shown ten times a second."""
    engine = recognizer.engine
    stream = engine.create_stream()
    if isinstance(engine, sherpa.OnlineRecognizer):
        for piece in np.array_split(samples, 1 + 10 * len(samples) // rate):
            stream.accept_waveform(rate, piece)
            show(_decoded(engine, stream))
        stream.accept_waveform(rate, np.zeros(int(recognizer.tail_s * rate), np.float32))
        return _decoded(engine, stream)
    stream.accept_waveform(rate, samples)
    engine.decode_stream(stream)
    return str(stream.result.text).strip()


def _decoded(engine: Any, stream: Any) -> str:
    """The words of a stream up to now."""
    while engine.is_ready(stream):
        engine.decode_stream(stream)
    return str(engine.get_result(stream).text).strip()


def main() -> None:
    """Recognize the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--int8", action="store_true", help="use the files with weights in int8")
    arguments = parser.parse_args()
    recognizer = load(Path(__file__).resolve().parent, arguments.int8)
    for path in arguments.files:
        print(path, recognize(recognizer, *read_wav(path), lambda text: print(text, file=sys.stderr)), sep="\t")


if __name__ == "__main__":
    main()
