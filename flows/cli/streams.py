"""`starling transcribe --stream`: results while a recording goes on."""

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.common import err

if TYPE_CHECKING:
    from recognition.frame_stream import FrameStreamConfig
    from recognition.recognizer import Recognizer
    from recognition.streaming import StreamResult

STDIN = Path("-")
ChunkOption = Annotated[
    float, typer.Option("--chunk-ms", min=1, max=60_000, help="Audio of a chunk with --stream: results are as late.")
]


class _Shown:
    """Writes results: final ones to standard output, others over each other on a terminal.

    Args:
        kind: `text`, or `json`: a line for each result.
        name: What precedes the text of a recording; empty if there is one only.
    """

    def __init__(self, kind: str, name: str) -> None:
        self._json, self._name = kind == "json", name
        self._terminal = err.is_terminal and not self._json

    def add(self, result: "StreamResult") -> None:
        """Write a result at once."""
        if self._json:
            file = {"file": self._name} if self._name else {}
            self._line(json.dumps(file | asdict(result)))
        elif result.final:
            self.clear()
            self._line(f"{self._name}: {result.text}" if self._name else result.text)
        elif self._terminal:
            # the end of a line that is too long: what is spoken now
            self._over(result.text[-max(10, err.width - 2) :])

    def clear(self) -> None:
        """Remove a result that is not final."""
        if self._terminal:
            self._over("")

    @staticmethod
    def _line(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    @staticmethod
    def _over(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def check_options(**options: Any) -> None:
    """Check that `--stream` goes with the other options.

    Args:
        **options: Their names without dashes, and their values; those that are not given are false.

    Raises:
        ValueError: One of them needs whole recordings.
    """
    for name, value in options.items():
        if value:
            raise ValueError(f"--{name} needs whole recordings: leave it out, or leave out --stream")


def show_streams(
    recordings: list[tuple[Path, Path]],
    model: str,
    device: str,
    kind: str,
    chunk_ms: float,
    rate: int,
    hot_words: Path | None = None,
    hot_score: float | None = None,
) -> None:
    """Recognize recordings one after another, each while it is read.

    Args:
        recordings: Paths, as `find_audio` returns them.
        model: Name of the model.
        device: Where it computes.
        kind: `text` or `json`.
        chunk_ms: Audio of a chunk in milliseconds.
        rate: Of standard input without a header, in Hz; 0: the model's.
        hot_words: A file with phrases whose score is raised.
        hot_score: What each of their letters adds; None: the usual.
    """
    from flows.models import fetch_model, model_uri
    from recognition.bundle import own_decoder
    from recognition.frame_stream import FrameStreamConfig
    from recognition.recognizer import Recognizer
    from speech.audio import AudioError

    with redirect_stdout(sys.stderr):
        folder = fetch_model(model_uri(model), "--model")
        decode = own_decoder(folder).with_hot_words(str(hot_words), hot_score) if hot_words else None
        recognizer = Recognizer.load(folder, decode, device)
        recognizer.prepare()
    cfg, failed = FrameStreamConfig(chunk_ms=chunk_ms), 0
    for path, _ in recordings:
        shown = _Shown(kind, str(path) if len(recordings) > 1 else "")
        try:
            _show(path, recognizer, cfg, shown, rate)
        except AudioError as error:
            shown.clear()
            failed += 1
            err.print(f"{path}: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _show(path: Path, recognizer: "Recognizer[Any]", cfg: "FrameStreamConfig", shown: _Shown, rate: int) -> None:
    """Recognize one recording.

    Raises:
        AudioError: It cannot be read, or not to its end.
    """
    from recognition.frame_stream import FrameStream

    stream = FrameStream(recognizer, cfg)  # a model that needs whole utterances is refused before anything is read
    try:
        for number, (samples, own_rate) in enumerate(_pieces(path, cfg.chunk_ms, rate or recognizer.spec.sample_rate)):
            if number == 0:
                stream = FrameStream(recognizer, cfg, own_rate)
            for result in stream.accept(samples.numpy()):
                shown.add(result)
    except KeyboardInterrupt:  # how a person ends a recording
        if path != STDIN:
            raise
    for result in stream.finish():
        shown.add(result)


def _pieces(path: Path, chunk_ms: float, rate: int) -> Iterator[tuple[Any, int]]:
    """Samples of a recording and their rate, no more than a chunk at a time: results come as often."""
    import torch

    from speech.audio import stream_audio, stream_pcm

    blocks = stream_pcm(sys.stdin.buffer, rate) if path == STDIN else stream_audio(path)
    for block, own_rate in blocks:
        for piece in torch.split(block, max(1, int(own_rate * chunk_ms / 1000))):
            yield piece, own_rate
