"""Recognition in noise: `python -m benchmarks.noise --config configs/fsdd.yaml [--files FOLDER] [--set FIELD=VALUE]`.

Clips of the configuration's test set are recognized as they are, and with pink noise, or a part of a recording from
--files, at each --snr (dB, over the whole clip). Prints the word error rate of each, with its 95 % interval. The noise
of a clip depends on its id only: all models hear the same.
"""

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.silence import clip_arguments, load_clips, open_model, recognized
from recognition.transcriber import Transcriber
from speech.features.augment import AugmentConfig, NoiseConfig, WaveAugment, utterance_seeds
from tasks.scores import summarize
from tasks.stages.base import Run

SNR_DB = (20.0, 10.0, 5.0, 0.0)


def noisy(waves: list[Tensor], ids: list[str], noise: NoiseConfig, sample_rate: int) -> list[Tensor]:
    """Clips `[num_samples]` with noise."""
    augment = WaveAugment(AugmentConfig(noise=noise), sample_rate)
    seeds = utterance_seeds(1, 0, ids)
    lengths = [torch.tensor([len(wave)]) for wave in waves]
    return [
        augment(wave.unsqueeze(0), length, [seed])[0][0]
        for wave, length, seed in zip(waves, lengths, seeds, strict=True)
    ]


def measure(transcriber: Transcriber, run: Run, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for the unchanged clips, and one for each kind of noise and ratio."""
    rate = transcriber.sample_rate
    waves, said = load_clips(run, options.test_set, options.clips, rate)
    ids = [who for who, _, _ in said]
    kinds: dict[str, dict[str, Any]] = {"pink": {"generated": ("pink",)}}
    if options.files:
        kinds["recorded"] = {"files": tuple(str(path) for path in options.files)}
    rows = []
    conditions = [(kind, snr_db) for kind in kinds for snr_db in options.snr]
    for kind, snr_db in [("none", None), *conditions]:
        clips = waves
        if snr_db is not None:
            clips = noisy(waves, ids, NoiseConfig(snr_db=(snr_db, snr_db), **kinds[kind]), rate)
        _, report = recognized(transcriber, clips, said)
        scores = summarize(report, run.config.seed)
        rows.append({"noise": kind, "snr_db": snr_db, **scores})
        ratio = "" if snr_db is None else f"{snr_db:5g} dB"
        rates = "WER {wer:7.2%} ({wer_low:.1%} – {wer_high:.1%})".format(**scores)
        print(f"{kind:>10} {ratio:>8}: {rates}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Run and print."""
    parser = clip_arguments(__doc__, 10_000, ())
    parser.add_argument("--snr", type=float, nargs="*", default=SNR_DB, help="signal-to-noise ratios, dB")
    parser.add_argument("--files", type=Path, nargs="*", help="recorded noise, as in train.augment.noise.files")
    options = parser.parse_args()
    with redirect_stdout(sys.stderr):
        transcriber, run = open_model(options)
        rows = measure(transcriber, run, options)
    if options.json:
        print(json.dumps({"benchmark": "noise", "config": options.config.name, "rows": rows}))


if __name__ == "__main__":
    main()
