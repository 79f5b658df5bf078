"""Near-duplicate detection in real speech: recall of inserted copies and false positives of the fingerprints.

    STARLING_SHARED_DATA=… python -m benchmarks.bench_duplicates [--share 1.0] [--others] [--json]

Each corpus is searched once for every kind of alteration, with one altered copy of some recordings. Copies that are not
found lower the recall; all other pairs are false positives. `--others` searches for kinds of copies that fingerprints
are not made for: other speeds, stretched or shifted in pitch, or with noise. Takes about three minutes; `--share 0.2`
uses a fifth of the files.
"""

import argparse
import io
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor
from torchaudio.functional import phase_vocoder

from speech.audio import decode_audio, resample
from speech.fingerprint import fingerprint
from tasks.dataset.duplicates import BIT_ERRORS, Fingerprints

Audio = tuple[Tensor, int]


@dataclass(frozen=True)
class Part:
    """Recordings of a corpus: pattern of the files, their maximum number, and the number of copies."""

    pattern: str
    files: int
    copies: int


CORPORA = {
    "LibriSpeech": (Part("LibriSpeech/dev-clean-5/**/*.flac", 96, 24), Part("LibriSpeech/train*/**/*.opus", 150, 24)),
    "speechocean762": (Part("speechocean762/**/*.opus", 1200, 60),),
    "fsdd": (Part("fsdd/recordings/*.flac", 2000, 150),),
}


def coded(wave: Tensor, rate: int, kind: str, subtype: str) -> Audio:
    """Encode and decode a recording."""
    buffer = io.BytesIO()
    soundfile.write(buffer, wave.numpy(), rate, format=kind, subtype=subtype)
    return decode_audio(buffer.getvalue())


def padded(wave: Tensor, rate: int, before: float = 0.317, after: float = 0.6) -> Tensor:
    """Pad a recording with silence before and after (seconds)."""
    return torch.cat([torch.zeros(int(before * rate)), wave, torch.zeros(int(after * rate))])


Kinds = dict[str, Callable[[Tensor, int], Audio]]
KINDS: Kinds = {
    "opus": lambda w, r: coded(w, r, "OGG", "OPUS"),
    "vorbis": lambda w, r: coded(w, r, "OGG", "VORBIS"),
    "mp3": lambda w, r: coded(resample(w, r, 16000), 16000, "MP3", "MPEG_LAYER_III"),
    "mu-law 8 kHz": lambda w, r: coded(resample(w, r, 8000), 8000, "WAV", "ULAW"),
    "padded": lambda w, r: (padded(w, r), r),
    "other rate": lambda w, r: (resample(w, r, 22050), 22050),
    "gain -20 dB": lambda w, r: (w * 0.1, r),
    "padded, 8 kHz, gain, opus": lambda w, r: coded(padded(resample(w, r, 8000), 8000) * 0.2, 8000, "OGG", "OPUS"),
}


def with_noise(wave: Tensor, snr_db: float) -> Tensor:
    """Add white noise at a signal-to-noise ratio."""
    noise = torch.randn(len(wave), generator=torch.Generator().manual_seed(0))
    return wave + noise * float(wave.square().mean().sqrt()) * 10 ** (-snr_db / 20)


def stretched(wave: Tensor, speed: float) -> Tensor:
    """Change the speed and keep the pitch, with a phase vocoder."""
    window = torch.hann_window(512)
    spectra = torch.stft(wave, 512, 128, window=window, return_complex=True)
    advance = torch.linspace(0, math.pi * 128, 257)[:, None]
    return torch.istft(phase_vocoder(spectra, speed, advance), 512, 128, window=window)


def sped(wave: Tensor, rate: int, speed: float) -> Tensor:
    """Change the speed, and the pitch with it."""
    return resample(wave, round(rate * speed), rate)


OTHERS: Kinds = {
    "noise at 20 dB": lambda w, r: (with_noise(w, 20), r),
    "noise at 10 dB": lambda w, r: (with_noise(w, 10), r),
    "speed 0.98": lambda w, r: (sped(w, r, 0.98), r),
    "speed 1.01": lambda w, r: (sped(w, r, 1.01), r),
    "speed 1.1": lambda w, r: (sped(w, r, 1.1), r),
    "stretched, speed 0.95": lambda w, r: (stretched(w, 0.95), r),
    "pitch 5 % higher": lambda w, r: (sped(stretched(w, 1 / 1.05), r, 1.05), r),
}
"""Kinds of copies that the fingerprint is not made for."""


class Clock:
    """Seconds of audio and of CPU time spent on fingerprints."""

    def __init__(self) -> None:
        self.audio = self.spent = 0.0

    def words(self, wave: Tensor, rate: int) -> np.ndarray:
        """Compute a fingerprint and add its time."""
        started = time.thread_time()
        words = fingerprint(wave, rate)
        self.spent += time.thread_time() - started
        self.audio += len(wave) / rate
        return words


def sample(root: Path, name: str, share: float) -> tuple[list[Path], set[Path]]:
    """Select files of a corpus, and those to copy."""
    files, chosen = [], set()
    for part in CORPORA[name]:
        every = sorted(root.glob(part.pattern))
        some = random.Random(2).sample(every, min(round(part.files * share), len(every)))
        files += sorted(some)
        chosen |= set(random.Random(1).sample(some, min(max(5, round(part.copies * share)), len(some))))
    return files, chosen


def planted(
    files: list[Path], chosen: set[Path], clock: Clock, kinds: Kinds = KINDS
) -> Iterator[tuple[Path, str, np.ndarray]]:
    """Yield fingerprints of all files, and of altered copies of some."""
    for path in files:
        wave, rate = decode_audio(path)
        yield path, "", clock.words(wave, rate)
        if path in chosen:
            for kind, alter in kinds.items():
                yield path, kind, clock.words(*alter(wave, rate))


def search(entries: list[tuple[Path, str, np.ndarray]], limit: float) -> dict[str, object]:
    """Search files and copies of one kind for duplicates; returns the figures."""
    copies, files = sum(1 for _, kind, _ in entries if kind), sum(1 for _, kind, _ in entries if not kind)
    with tempfile.TemporaryDirectory() as folder:
        prints = Fingerprints(Path(folder))
        for _, _, words in entries:
            prints.add(words)
        started = time.perf_counter()
        near = prints.near(np.ones(len(entries), bool), limit)
        pairs = [(entries[i][0], entries[j][0]) for i, j in near[["first", "second"]].tolist()]
        seconds = time.perf_counter() - started
    recalled = {first for first, second in pairs if first == second}
    wrong = {tuple(sorted(pair)) for pair in pairs if pair[0] != pair[1]}
    return {
        "copies": copies,
        "recall": len(recalled) / copies,
        "wrong_pairs": len(wrong),
        "pairs": files * (files - 1) // 2,
        "wrongly_dropped": len({max(pair) for pair in wrong}) / files,
        "search_seconds": round(seconds, 2),
    }


def measure(root: Path, name: str, share: float = 1.0, kinds: Kinds = KINDS) -> dict[str, Any]:
    """Recall and false positives in one corpus by kind of copy; kinds are searched separately."""
    files, chosen = sample(root, name, share)
    clock, limit = Clock(), BIT_ERRORS
    everything = list(planted(files, chosen, clock, kinds))
    results = {wanted: search([entry for entry in everything if entry[1] in ("", wanted)], limit) for wanted in kinds}
    return {"corpus": name, "files": len(files), "audio_per_second": round(clock.audio / clock.spent), "kinds": results}


def main() -> None:
    """Measure every corpus and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="share of the default number of files")
    parser.add_argument("--corpora", nargs="*", default=list(CORPORA), choices=list(CORPORA))
    parser.add_argument("--others", action="store_true", help="kinds of copies that the fingerprint is not made for")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(os.environ["STARLING_SHARED_DATA"])
    rows = []
    for name in args.corpora:
        row = measure(root, name, args.share, OTHERS if args.others else KINDS)
        rows.append(row)
        if not args.json:
            print(f"{name}: {row['files']} files, fingerprints at {row['audio_per_second']} x real time", flush=True)
            for kind, result in row["kinds"].items():
                recall = f"{result['recall']:7.1%} of {result['copies']} found"
                wrong = f"{result['wrong_pairs']} wrong of {result['pairs']:,} pairs"
                dropped = f"{result['wrongly_dropped']:.2%} of the files"
                print(f"  {kind:28} {recall}; {wrong}, {dropped}; {result['search_seconds']} s", flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
