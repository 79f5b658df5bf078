"""Near-duplicates in real speech: copies are planted, and the fingerprints have to find them and nothing else.

    STARLING_SHARED_DATA=… python -m benchmarks.bench_duplicates [--files 200] [--json]

Each corpus is searched as a whole, once for every kind of alteration, with one altered copy of each of `--files`
recordings.
"""

import argparse
import io
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from speech.audio import decode_audio, resample
from speech.fingerprint import fingerprint
from tasks.duplicates import Fingerprints
from tasks.policies import DuplicatesConfig

CORPORA = {
    "LibriSpeech": "LibriSpeech/**/*.[of][pl]*",
    "speechocean762": "speechocean762/**/*.opus",
    "fsdd": "fsdd/recordings/*.flac",
}
Audio = tuple[Tensor, int]


def coded(wave: Tensor, rate: int, kind: str, subtype: str) -> Audio:
    """The recording after encoding and decoding."""
    buffer = io.BytesIO()
    soundfile.write(buffer, wave.numpy(), rate, format=kind, subtype=subtype)
    return decode_audio(buffer.getvalue())


def padded(wave: Tensor, rate: int, before: float = 0.317, after: float = 0.6) -> Tensor:
    """The recording between two pieces of silence, s."""
    return torch.cat([torch.zeros(int(before * rate)), wave, torch.zeros(int(after * rate))])


KINDS: dict[str, Callable[[Tensor, int], Audio]] = {
    "opus": lambda w, r: coded(w, r, "OGG", "OPUS"),
    "vorbis": lambda w, r: coded(w, r, "OGG", "VORBIS"),
    "mp3": lambda w, r: coded(resample(w, r, 16000), 16000, "MP3", "MPEG_LAYER_III"),
    "mu-law 8 kHz": lambda w, r: coded(resample(w, r, 8000), 8000, "WAV", "ULAW"),
    "padded": lambda w, r: (padded(w, r), r),
    "other rate": lambda w, r: (resample(w, r, 22050), 22050),
    "gain -20 dB": lambda w, r: (w * 0.1, r),
    "padded, 8 kHz, gain, opus": lambda w, r: coded(padded(resample(w, r, 8000), 8000) * 0.2, 8000, "OGG", "OPUS"),
}


def planted(files: list[Path], chosen: set[Path]) -> Iterator[tuple[Path, str, np.ndarray]]:
    """Fingerprints of all files, and of the altered copies of some."""
    for path in files:
        wave, rate = decode_audio(path)
        yield path, "", fingerprint(wave, rate)
        if path in chosen:
            for kind, alter in KINDS.items():
                yield path, kind, fingerprint(*alter(wave, rate))


def measure(name: str, root: Path, count: int, limit: float) -> dict[str, object]:
    """Recall by kind and false positives in one corpus."""
    files = sorted(path for path in root.glob(CORPORA[name]) if path.suffix in (".flac", ".opus"))
    chosen = set(random.Random(1).sample(files, min(count, len(files))))
    everything = list(planted(files, chosen))
    recall: dict[str, float] = {}
    wrong: set[tuple[Path, ...]] = set()
    seconds = 0.0
    for wanted in KINDS:  # one kind at a time: copies must not be found by way of other copies
        entries = [(path, words) for path, kind, words in everything if kind in ("", wanted)]
        with tempfile.TemporaryDirectory() as folder:
            prints = Fingerprints(Path(folder))
            for _, words in entries:
                prints.add(words)
            started = time.perf_counter()
            pairs = [(entries[i][0], entries[j][0]) for i, j, _ in prints.near(np.ones(len(entries), bool), limit)]
            seconds += time.perf_counter() - started
        recall[wanted] = len({one for one, two in pairs if one == two}) / len(chosen)
        wrong |= {tuple(sorted(pair)) for pair in pairs if pair[0] != pair[1]}
    return {
        "corpus": name, "files": len(files), "copies_of_each_kind": len(chosen), "recall": recall,
        "wrong_pairs": len(wrong), "pairs_of_files": len(files) * (len(files) - 1) // 2,
        "search_seconds": round(seconds / len(KINDS), 2), "fingerprints": len(files) + len(chosen),
    }  # fmt: skip


def main() -> None:
    """Measure every corpus and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--corpora", nargs="*", default=list(CORPORA), choices=list(CORPORA))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(os.environ["STARLING_SHARED_DATA"])
    rows = [measure(name, root, args.files, DuplicatesConfig().bit_errors) for name in args.corpora]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['corpus']}: {row['files']} files, {row['fingerprints']} fingerprints in {row['search_seconds']} s;"
              f" {row['wrong_pairs']} wrong of {row['pairs_of_files']:,} pairs")  # fmt: skip
        for kind, share in row["recall"].items():
            print(f"  {kind:28} {share:7.1%} of {row['copies_of_each_kind']} found")


if __name__ == "__main__":
    main()
