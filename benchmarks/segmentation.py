"""WER on long and padded recordings: `python -m benchmarks.segmentation --config configs/demo.yaml [--model MODEL]`.

The clips of the configuration's test set are recognized three ways: as they are; each with a pause before and after it;
and joined to recordings of about two minutes, with pauses of 0.5 to 2 s between clips. Pauses are white noise of some
level. Each way is transcribed with every voice activity detector, or those of `--detectors`. The same command gives
the same recordings.
"""

import json
import random
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.silence import clip_arguments, load_clips, open_model, padded, pause
from recognition.transcriber import Transcriber
from speech.scoring import score_sets
from speech.vad import DETECTORS
from tasks.figures import percent

JOINED_S = 120.0


@dataclass
class Recording:
    """A recording and what is said in it."""

    wave: Tensor
    text: str
    speaker: str


def join(clips: list[Recording], level_db: float | None, sample_rate: int) -> list[Recording]:
    """Join clips to recordings of about two minutes, with pauses between, before and after them."""
    generator = random.Random(1)
    joined: list[Recording] = []
    parts: list[Tensor] = []
    texts: list[str] = []
    for number, clip in enumerate(clips):
        parts += [pause(generator.uniform(0.5, 2.0), level_db, sample_rate, number), clip.wave]
        texts.append(clip.text)
        if sum(map(len, parts)) >= JOINED_S * sample_rate or clip is clips[-1]:
            parts.append(pause(1.0, level_db, sample_rate, len(clips)))
            joined.append(Recording(torch.cat(parts), " ".join(texts), f"recording {len(joined)}"))
            parts, texts = [], []
    return joined


def wer(transcriber: Transcriber, recordings: list[Recording]) -> float:
    """Word error rate over all recordings."""
    texts = [
        transcript.text for transcript in transcriber.transcribe([recording.wave.numpy() for recording in recordings])
    ]
    rows = [
        (str(number), recording.text, text, recording.speaker, "")
        for number, (recording, text) in enumerate(zip(recordings, texts, strict=True))
    ]
    return float(score_sets(rows).wer)


def measure(
    transcriber: Transcriber, clips: list[Recording], levels: list[float | None], detectors: list[str]
) -> list[dict[str, object]]:
    """One row for each detector and level of the pauses."""
    rate = transcriber.sample_rate
    rows: list[dict[str, object]] = []
    for kind in detectors:
        transcriber.vad = DETECTORS[kind]().build()
        clean = wer(transcriber, clips)
        for level in levels:
            around = [
                Recording(padded(clip.wave, 1.0, level, rate, number), clip.text, clip.speaker)
                for number, clip in enumerate(clips)
            ]
            row: dict[str, object] = {
                "vad": kind,
                "pauses": "zeros" if level is None else f"{level:g} dB",
                "clean": clean,
            }
            rows.append(
                row | {"padded": wer(transcriber, around), "joined": wer(transcriber, join(clips, level, rate))}
            )
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, object]) -> str:
    figures = " | ".join(percent(float(str(row[name]))) for name in ("clean", "padded", "joined"))
    return f"| {row['vad']} | {row['pauses']} | {figures} |"


def main() -> None:
    """Run and print."""
    parser = clip_arguments(__doc__, 200, (-60.0, -40.0))
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=list(DETECTORS))
    options = parser.parse_args()
    with redirect_stdout(sys.stderr):
        transcriber, run = open_model(options)
        waves, said = load_clips(run, options.test_set, options.clips, transcriber.sample_rate)
        clips = [Recording(wave, text, speaker) for wave, (_, text, speaker) in zip(waves, said, strict=True)]
        rows = measure(transcriber, clips, [None, *options.levels], options.detectors)
    if options.json:
        print(json.dumps(rows))
        return
    print("| detector | pauses | clips | padded | joined |\n|---|---|---|---|---|")
    print("\n".join(map(_line, rows)))


if __name__ == "__main__":
    main()
