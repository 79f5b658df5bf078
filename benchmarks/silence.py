"""Effect of pauses on recognition: `python -m benchmarks.silence --config configs/demo.yaml [--model MODEL]`.

Clips of the configuration's test set are recognized unchanged, and with a pause before and after each: zeros, or white
noise at some level. Prints for each pause the number of changed hypotheses, their word error rate, and their inserted
words. Pauses are deterministic.
"""

import argparse
import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flows.models import fetch_model
from flows.names import new_run_id
from recognition.data.dataset import SpeechDataset
from recognition.transcriber import Transcriber
from speech.scoring import ScoreReport, score_sets
from storage.index import ShardIndex
from storage.reading import ShardReader
from tasks.config.pipeline import load_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run, stages_of
from tasks.stages.bundles import complete_bundle

SECONDS = (0.1, 0.4, 1.0, 5.0)
LEVELS_DB = (-60.0, -50.0, -40.0, -30.0)


def find_model(name: str, run: Run) -> Path:
    """Folder of a bundle: the given one, or the one trained from the run's configuration."""
    if name:
        return fetch_model(name)
    stages = list(stages_of(run.config))
    run_plainly(run, stages[stages.index("decode") - 1])
    folder = tempfile.mkdtemp(prefix="starling-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return complete_bundle(run, Path(folder))


def load_clips(run: Run, name: str, count: int, sample_rate: int) -> tuple[list[Tensor], list[tuple[str, str, str]]]:
    """Load evenly spaced utterances of a set: their waveforms, and id, text and speaker of each."""
    store = run.result("shard").store.child(name)
    index = ShardIndex.read(store)
    dataset = SpeechDataset(index, ShardReader(store, index, run.cache_folder), sample_rate=sample_rate)
    chosen = np.unique(np.linspace(0, len(index) - 1, min(count, len(index))).astype(int)).tolist()
    rows = [index.row(row) for row in chosen]
    return [dataset.load(row) for row in chosen], [(row["id"], row["text"], row["speaker"]) for row in rows]


def pause(seconds: float, level_db: float | None, sample_rate: int, seed: int) -> Tensor:
    """Zeros, or white noise at a level relative to full scale: `[num_samples]`."""
    num_samples = int(seconds * sample_rate)
    if level_db is None:
        return torch.zeros(num_samples)
    noise = torch.randn(num_samples, generator=torch.Generator().manual_seed(seed))
    return noise * 10 ** (level_db / 20)


def padded(wave: Tensor, seconds: float, level_db: float | None, sample_rate: int, seed: int) -> Tensor:
    """Add a pause before and after an utterance."""
    before, after = (pause(seconds, level_db, sample_rate, 2 * seed + end) for end in (0, 1))
    return torch.cat([before, wave, after])


def recognized(
    transcriber: Transcriber, clips: Sequence[Tensor], said: Sequence[tuple[str, str, str]]
) -> tuple[list[str], ScoreReport]:
    """What is recognized in clips, and its score; `said` are id, text and speaker of each."""
    texts = [transcript.text for transcript in transcriber.transcribe([clip.numpy() for clip in clips])]
    return texts, score_sets([(who, ref, hyp, spk, "") for (who, ref, spk), hyp in zip(said, texts, strict=True)])


def measure(
    transcriber: Transcriber, run: Run, name: str, count: int, pauses: list[tuple[float, float | None]]
) -> list[dict[str, Any]]:
    """Measure one row for the unchanged clips, and one for each pause (seconds; level of the noise, or None)."""
    rate = transcriber.sample_rate
    waves, said = load_clips(run, name, count, rate)
    clean: list[str] = []
    rows = []
    for seconds, level_db in [(0.0, None), *pauses]:
        clips = [padded(wave, seconds, level_db, rate, number) for number, wave in enumerate(waves)]
        texts, report = recognized(transcriber, clips, said)
        clean = clean or texts
        rows.append(
            {
                "seconds": seconds,
                "pause": "zeros" if level_db is None else f"noise {level_db:g} dB",
                "changed": sum(text != before for text, before in zip(texts, clean, strict=True)),
                "clips": len(texts),
                "wer": report.wer,
                "inserted": report.total.ins,
            }
        )
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    what = f"{row['pause']:>13}, {row['seconds']:3.1f} s" if row["seconds"] else "as they are"
    changed = f"{row['changed']:3} of {row['clips']} changed"
    return f"{what:>20}: {changed}, WER {100 * row['wer']:6.2f} %, {row['inserted']:3} words inserted"


def clip_arguments(description: str | None, clips: int, levels: Sequence[float]) -> argparse.ArgumentParser:
    """Arguments of benchmarks that recognize clips of a test set, with pauses around them.

    Args:
        description: Of the benchmark.
        clips: Default number of clips.
        levels: Default noise levels.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--model", default="", help="a bundle's folder or models:/…; default: the configuration's")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as in `starling run`")
    parser.add_argument("--test-set", default="test")
    parser.add_argument("--clips", type=int, default=clips)
    parser.add_argument("--levels", type=float, nargs="*", default=levels, help="noise levels, dB of full scale")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def open_model(options: argparse.Namespace) -> tuple[Transcriber, Run]:
    """The model that `clip_arguments` name, and a run of their configuration whose shards are made."""
    config = load_config(options.config, options.set)
    run = Run(config, new_run_id(config), "")
    run_plainly(run, "shard")
    return Transcriber(find_model(options.model, run)), run


def main() -> None:
    """Run and print."""
    parser = clip_arguments(__doc__, 40, LEVELS_DB)
    parser.add_argument("--seconds", type=float, nargs="*", default=SECONDS, help="durations of the pauses")
    options = parser.parse_args()
    with redirect_stdout(sys.stderr):
        transcriber, run = open_model(options)
        pauses = [(seconds, level) for level in (None, *options.levels) for seconds in options.seconds]
        rows = measure(transcriber, run, options.test_set, options.clips, pauses)
    if options.json:
        print(json.dumps({"benchmark": "silence", "rows": rows}))


if __name__ == "__main__":
    main()
