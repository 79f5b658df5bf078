"""One table of recipes: error rate, speed, latency and size of each recognizer.

    python -m benchmarks.recognition_table configs/fsdd.yaml configs/fsdd_transducer.yaml configs/fsdd_streaming.yaml
    python -m benchmarks.recognition_table "configs/demo.yaml train.objective=transducer decode=transducer"

Each recipe is run until its scores are there, which takes no time if it has been run. Then the bundle that would be
registered recognizes the scored sets' audio. Models that stream have a row for each of `--chunk-ms`, too. Columns:

- WER with its 95 % interval over utterances;
- real-time factor: CPU seconds of one thread, features, adaptation and search included, divided by those of audio;
- latency: audio after a word's end that has to be heard at most, which is a chunk and what the network looks ahead; of
  recognition that needs the whole utterance, that;
- size: the bundle's files, language models and graphs included.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.pipelines import run_pipeline
from flows.names import new_run_id
from recognition.frame_stream import FrameStream, FrameStreamConfig
from recognition.inference import decode_set, open_set
from recognition.recognizer import Recognizer
from tasks.config.pipeline import load_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.scores import summarize
from tasks.stages.base import Run
from tasks.stages.bundles import complete_bundle
from tasks.stages.run_sets import scored_sets
from tasks.stages.score import score_rows

CHUNKS_MS = (160.0, 640.0)
Row = dict[str, str]
"""An utterance, as `score_rows` reads it."""


@dataclass(frozen=True)
class Measured:
    """A row of the table."""

    recipe: str
    corpus: str
    system: str
    wer: float
    wer_low: float
    wer_high: float
    words: int
    real_time_factor: float
    latency_s: float | None
    """None: the whole utterance."""
    size_mb: float

    def line(self) -> str:
        """The row in Markdown."""
        wer = f"{100 * self.wer:.2f} % ({100 * self.wer_low:.2f} – {100 * self.wer_high:.2f}) of {self.words}"
        latency = "utterance" if self.latency_s is None else f"{self.latency_s:.2f} s"
        return (
            f"| {self.corpus} | {self.system} | {wer} | {self.real_time_factor:.3f} | {latency} | "
            f"{self.size_mb:.1f} MB |"
        )


HEAD = "| corpus | system | WER (interval) of words | real-time factor | latency | size |\n|---|---|---|---|---|---|"


def finished_run(recipe: str) -> Run:
    """The run of a recipe, `CONFIG FIELD=VALUE …`, with its scores."""
    config, *settings = shlex.split(recipe)
    run_pipeline(Path(config), settings)
    loaded = load_config(Path(config), settings)
    run = Run(loaded, new_run_id(loaded))
    run_plainly(run, "score")
    return run


def measure(run: Run, recipe: str = "", chunks_ms: Sequence[float] = CHUNKS_MS) -> Iterator[Measured]:
    """The rows of a finished run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            bundle = complete_bundle(run, Path(folder))
            size_mb = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) / 1e6
            recognizer: Recognizer[Any] = Recognizer.load(bundle)
            recognizer.prepare()
            yield _measured(run, recipe, recognizer, None, size_mb)
            model, features = recognizer.spec.model, recognizer.spec.features
            streams = model is not None and model.streams and not features.whole_utterance
            for chunk_ms in chunks_ms if streams else ():
                yield _measured(run, recipe, recognizer, chunk_ms, size_mb)
    finally:
        torch.set_num_threads(threads)


def _measured(run: Run, recipe: str, recognizer: Recognizer[Any], chunk_ms: float | None, size_mb: float) -> Measured:
    rows: list[Row] = []
    cpu_s = audio_s = 0.0
    for name in scored_sets(run):
        begin = time.process_time()
        some, seconds = (whole if chunk_ms is None else streamed)(run, name, recognizer, chunk_ms or 0.0)
        cpu_s, audio_s = cpu_s + time.process_time() - begin, audio_s + seconds
        rows += some
    scores = summarize(score_rows(rows), run.config.seed)
    system = run.config.system.kind if chunk_ms is None else f"{run.config.system.kind}, chunks of {chunk_ms:g} ms"
    return Measured(
        recipe=recipe,
        corpus=", ".join(sorted({source.corpus for source in run.config.data.sources})),
        system=system,
        **{name: scores[name] for name in ("wer", "wer_low", "wer_high", "words")},
        real_time_factor=cpu_s / audio_s,
        latency_s=None if chunk_ms is None else latency_s(recognizer, chunk_ms),
        size_mb=size_mb,
    )


def latency_s(recognizer: Recognizer[Any], chunk_ms: float) -> float:
    """Seconds of a stream's chunk, which has whole output frames, and of the later frames that its network reads."""
    shift = recognizer.spec.frame_ms / 1000
    return (max(1, round(chunk_ms / 1000 / shift)) + recognizer.spec.network.ahead) * shift


def whole(run: Run, name: str, recognizer: Recognizer[Any], _: float) -> tuple[list[Row], float]:
    """What is recognized in the recordings of a set, in batches, and the seconds of these."""
    url, cache = run.result("shard").store.child(name).url, run.cache_folder
    decoded = decode_set(recognizer, open_set(url, recognizer.spec.sample_rate, cache)).values()
    return [asdict(entry) for entry in decoded], sum(entry.duration for entry in decoded)


def streamed(run: Run, name: str, recognizer: Recognizer[Any], chunk_ms: float) -> tuple[list[Row], float]:
    """What is recognized in the recordings of a set, each a stream of its own, and the seconds of these."""
    data = open_set(run.result("shard").store.child(name).url, recognizer.spec.sample_rate, run.cache_folder)
    rows: list[Row] = []
    seconds, rate = 0.0, recognizer.spec.sample_rate
    for number in range(len(data.index)):
        wave, about = data.load(number), data.index.row(number)
        stream = FrameStream(recognizer, FrameStreamConfig(chunk_ms=chunk_ms, partials=False))
        results = [found for piece in wave.split(int(chunk_ms / 1000 * rate)) for found in stream.accept(piece.numpy())]
        text = " ".join(result.text for result in [*results, *stream.finish()] if result.final)
        rows.append(
            {field: about[field] for field in ("id", "speaker", "domain")} | {"ref": about["text"], "hyp": text}
        )
        seconds += len(wave) / rate
    return rows, seconds


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="'CONFIG [FIELD=VALUE …]'", help="as for `starling run --set`")
    parser.add_argument("--chunk-ms", type=float, nargs="*", default=CHUNKS_MS, help="of models that stream")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = []
    for recipe in options.recipes:
        with redirect_stdout(sys.stderr):
            rows += list(measure(finished_run(recipe), recipe, options.chunk_ms))
    if options.json:
        print(json.dumps({"benchmark": "recognition_table", "rows": [asdict(row) for row in rows]}))
        return
    print("\n".join([HEAD, *(row.line() for row in rows)]))


if __name__ == "__main__":
    main()
