"""WER on long and padded recordings: `python -m benchmarks.segmentation --config configs/demo.yaml [--model MODEL]`.

The clips of the configuration's test set are recognized three ways: as they are; each with a pause before and after it;
and joined to recordings of about two minutes, with pauses of 0.5 to 2 s between clips. Pauses are white noise of some
level. Each way is transcribed with every voice activity detector, or those of `--detectors`, and cut at pauses of
`--pauses` seconds, by default as suits the model. Capitals and punctuation do not count. The same command gives the
same recordings.
"""

import json
import random
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import BenchmarkError
from benchmarks.silence import clip_arguments, load_clips, open_model, padded, pause
from recognition.transcriber import Transcriber
from speech.vad import DETECTORS
from tasks.figures import percent
from tasks.stages.score import normalized_rates

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


@dataclass
class Result:
    """What recognizing some recordings gives."""

    wer: float
    """Word error rate over all of them."""
    pieces: int
    """Pieces that they were cut into."""
    cpu_s: float
    """CPU seconds of this process."""


def recognize(transcriber: Transcriber, recordings: list[Recording]) -> Result:
    """Recognize recordings, and score their texts without capitals and punctuation."""
    began = time.process_time()
    transcripts = transcriber.transcribe([recording.wave.numpy() for recording in recordings])
    cpu_s = time.process_time() - began
    if errors := [transcript.error for transcript in transcripts if transcript.error]:
        raise BenchmarkError(errors[0])
    rows = [
        {"id": str(number), "ref": recording.text, "hyp": transcript.text, "speaker": recording.speaker, "domain": ""}
        for number, (recording, transcript) in enumerate(zip(recordings, transcripts, strict=True))
    ]
    wer = normalized_rates(rows)["wer_normalized"]
    assert wer is not None  # clips have words
    return Result(wer, sum(len(transcript.pieces) for transcript in transcripts), cpu_s)


def measure(
    transcriber: Transcriber,
    clips: list[Recording],
    levels: list[float | None],
    detectors: list[str],
    pauses: list[float | None],
) -> list[dict[str, Any]]:
    """One row for each detector, shortest pause between pieces, and level of the pauses."""
    rate = transcriber.sample_rate
    rows: list[dict[str, Any]] = []
    for kind, pause_s in product(detectors, pauses):
        transcriber.vad = DETECTORS[kind](pause_s=pause_s).build()
        clean = recognize(transcriber, clips)
        for level in levels:
            around = [
                Recording(padded(clip.wave, 1.0, level, rate, number), clip.text, clip.speaker)
                for number, clip in enumerate(clips)
            ]
            ways = {"clean": clean, "padded": recognize(transcriber, around)}
            ways["joined"] = recognize(transcriber, join(clips, level, rate))
            about = {"vad": kind, "pause_s": pause_s, "pauses": "zeros" if level is None else f"{level:g} dB"}
            rows.append(about | {way: asdict(result) for way, result in ways.items()})
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    figures = " | ".join(percent(row[way]["wer"]) for way in ("clean", "padded", "joined"))
    least = "" if row["pause_s"] is None else f"{row['pause_s']:g} s"
    last = row["joined"]
    return f"| {row['vad']} | {least} | {row['pauses']} | {figures} | {last['pieces']} | {last['cpu_s']:.1f} |"


def main() -> None:
    """Run and print."""
    parser = clip_arguments(__doc__, 200, (-60.0, -40.0))
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=list(DETECTORS))
    parser.add_argument(
        "--pauses", type=float, nargs="+", help="shortest pauses between pieces, s; default: the model's"
    )
    options = parser.parse_args()
    with redirect_stdout(sys.stderr):
        transcriber, run = open_model(options)
        waves, said = load_clips(run, options.test_set, options.clips, transcriber.sample_rate)
        clips = [Recording(wave, text, speaker) for wave, (_, text, speaker) in zip(waves, said, strict=True)]
        rows = measure(transcriber, clips, [None, *options.levels], options.detectors, options.pauses or [None])
    if options.json:
        print(json.dumps(rows))
        return
    print("| detector | cut at | pauses | clips | padded | joined | pieces of joined | CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(map(_line, rows)))


if __name__ == "__main__":
    main()
