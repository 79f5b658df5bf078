"""Recognizes WAV files with the model in this script's folder and sherpa-onnx.

    pip install sherpa-onnx numpy
    python recognize.py [--int8] FILE.wav ...

Files are 16-bit PCM of any sample rate, which sherpa-onnx resamples. One line is printed for each: its name and the
words.
"""

import argparse
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from sherpa_onnx.lib import _sherpa_onnx as sherpa


def load(folder: Path, int8: bool = False, threads: int = 1) -> Any:
    """A recognizer.

    Args:
        folder: The exported model.
        int8: Whether to use the files with weights in int8.
        threads: Threads of the network.
    """
    about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    files = {name: str(folder / f"{name}{'.int8' if int8 else ''}.onnx") for name in about["graphs"]}
    if about["system"] == "ctc":
        network = {"zipformer_ctc": sherpa.OfflineZipformerCtcModelConfig(files["model"])}
    else:
        parts = sherpa.OfflineTransducerModelConfig(files["encoder"], files["predictor"], files["joiner"])
        network = {"transducer": parts, "model_type": "transducer"}
    config = sherpa.OfflineRecognizerConfig(
        feat_config=sherpa.FeatureExtractorConfig(**about["sherpa_onnx"]["features"]),
        model_config=sherpa.OfflineModelConfig(tokens=str(folder / "tokens.txt"), num_threads=threads, **network),
        **about["sherpa_onnx"]["search"],
    )
    return sherpa.OfflineRecognizer(config)


def read_wav(path: Path) -> tuple[np.ndarray[Any, Any], int]:
    """Samples in ±1 of the first channel, and their rate in Hz."""
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise SystemExit(f"{path} is not 16-bit PCM: convert it, for example with ffmpeg -i {path} new.wav")
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)[:: file.getnchannels()]
        return samples.astype(np.float32) / 32768, file.getframerate()


def recognize(recognizer: Any, samples: np.ndarray[Any, Any], rate: int) -> str:
    """The words of an utterance."""
    stream = recognizer.create_stream()
    stream.accept_waveform(rate, samples)
    recognizer.decode_stream(stream)
    return str(stream.result.text).strip()


def main() -> None:
    """Recognize the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--int8", action="store_true", help="use the files with weights in int8")
    arguments = parser.parse_args()
    recognizer = load(Path(__file__).resolve().parent, arguments.int8)
    for path in arguments.files:
        print(path, recognize(recognizer, *read_wav(path)), sep="\t")


if __name__ == "__main__":
    main()
