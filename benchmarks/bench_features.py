"""Speed of features and augmentations; log-mel also by torchaudio's Kaldi port and kaldi-native-fbank.

    python -m benchmarks.bench_features [--json] [--device cuda] [--minutes 20]

On a CPU: one thread, real speech if available (else noise), with equal definitions, which is checked first. The other
libraries get samples in their fastest format, converted beforehand. Rates are hours of audio per second of one core; on
a GPU, hours of audio per second, including the transfer of the samples.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import kaldi_native_fbank as knf
import torch
import torchaudio
from torch import Tensor

from benchmarks.common import compare
from speech.audio import decode_audio
from speech.features import (
    FEATURES,
    AugmentConfig,
    LogMelConfig,
    SpecAugment,
    WaveAugment,
    build_features,
)
from speech.features.augment import NoiseConfig, ReverbConfig, utterance_seeds

RATE, FILTERS, BATCH_SECONDS = 16000, 80, 240
Work = Callable[[], object]
OURS = "starling"


def speech(minutes: float) -> tuple[list[Tensor], str]:
    """Waveforms of about this many minutes, and a description of them."""
    folder = Path(os.environ.get("STARLING_SHARED_DATA", "../shared/data")) / "LibriSpeech" / "dev-clean-5"
    waves, seconds = [], 0.0
    for path in sorted(folder.rglob("*.flac")):
        if seconds < 60 * minutes:
            waves.append(decode_audio(path)[0])
            seconds += len(waves[-1]) / RATE
    if waves:
        return waves, "LibriSpeech dev-clean-5"
    generator = torch.Generator().manual_seed(0)
    return [0.1 * torch.randn(12 * RATE, generator=generator) for _ in range(int(5 * minutes))], "noise"


def batches(waves: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Padded batches of utterances of similar length, as in training."""
    ordered, padded = sorted(waves, key=len), []
    while ordered:
        count = max(1, min(len(ordered), BATCH_SECONDS * RATE // len(ordered[-1])))
        rows, ordered = ordered[-count:], ordered[:-count]
        lengths = torch.tensor([len(row) for row in rows])
        padded.append((torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths))
    return padded


def native_options() -> knf.FbankOptions:
    """Kaldi's defaults with 80 filters and without dither."""
    options = knf.FbankOptions()
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = FILTERS
    return options


def native(samples: list[float]) -> list[object]:
    """Features of one utterance by kaldi-native-fbank."""
    fbank = knf.OnlineFbank(native_options())
    fbank.accept_waveform(RATE, samples)
    fbank.input_finished()
    return [fbank.get_frame(i) for i in range(fbank.num_frames_ready)]


def ported(wave: Tensor) -> Tensor:
    """Features of one utterance, on the scale of 16-bit samples, by torchaudio."""
    features: Tensor = torchaudio.compliance.kaldi.fbank(wave, num_mel_bins=FILTERS, dither=0.0)
    return features


def check_definitions(wave: Tensor) -> None:
    """Check that all three libraries compute the same log-mel features."""
    ours = build_features(LogMelConfig(num_mels=FILTERS), RATE)(wave[None], torch.tensor([len(wave)]))[0][0]
    others = ported(wave[None] * 32768), torch.tensor([list(frame) for frame in native((wave * 32768).tolist())])
    for other in others:
        share = ((ours - other).abs() < 1e-3).float().mean()
        assert ours.shape == other.shape
        assert share > 0.999, f"the definitions differ: only {share:.4f} agree"


def log_mel_rivals(waves: list[Tensor]) -> dict[str, Work]:
    """Alternative ways to compute the same features."""
    ours, padded = build_features(LogMelConfig(num_mels=FILTERS), RATE), batches(waves)
    single = [(wave[None], torch.tensor([len(wave)])) for wave in waves]
    scaled = [wave[None] * 32768 for wave in waves]
    lists = [(wave[0]).tolist() for wave in scaled]
    return {
        OURS: lambda: [ours(*batch) for batch in padded],
        "starling, one utterance at a time": lambda: [ours(*item) for item in single],
        "torchaudio.compliance.kaldi.fbank": lambda: [ported(wave) for wave in scaled],
        "kaldi-native-fbank": lambda: [native(samples) for samples in lists],
    }


def kinds(waves: list[Tensor], device: str) -> dict[str, Work]:
    """Each kind of features, and each augmentation."""
    padded = batches(waves)
    works: dict[str, Work] = {}
    for kind, config in FEATURES.items():
        if config.adapted:  # one waveform is not enough for these
            continue
        extract = build_features(
            config.model_validate({"num_mels": FILTERS} if "num_mels" in config.model_fields else {}), RATE
        ).to(device)
        works[kind] = lambda extract=extract: [extract(w.to(device), n.to(device)) for w, n in padded]
    wanted = {
        "speed": AugmentConfig(speed_factors=(0.9, 1.0, 1.1)),
        "noise": AugmentConfig(noise=NoiseConfig()),
        "reverb": AugmentConfig(reverb=ReverbConfig(probability=1.0)),
        "gain": AugmentConfig(gain_db=6.0),
    }
    for name, config in wanted.items():
        augment = WaveAugment(config, RATE)
        works[name] = lambda augment=augment: [
            augment(w.to(device), n.to(device), utterance_seeds(1, 0, [str(i) for i in range(len(n))]))
            for w, n in padded
        ]
    logmel = build_features(LogMelConfig(num_mels=FILTERS), RATE)
    feats = [tuple(part.to(device) for part in logmel(*batch)) for batch in padded]
    spec = SpecAugment(AugmentConfig(time_warp_frames=40))
    works["time_warp and masks"] = lambda: [spec(f, n, list(range(len(n)))) for f, n in feats]
    return works


def synchronized(work: Work) -> Work:
    """Wrap work on a GPU to wait for its end."""

    def run() -> None:
        work()
        torch.cuda.synchronize()

    return run


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--minutes", type=float, default=10.0, help="audio per run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    waves, source = speech(options.minutes)
    hours = sum(map(len, waves)) / RATE / 3600
    check_definitions(waves[0])
    works = kinds(waves, options.device)
    if options.device == "cuda":
        works = {name: synchronized(work) for name, work in works.items()}
    tables = {"kinds and augmentations": compare(works)}
    if options.device == "cpu":
        tables = {"log-mel, 80 filters": compare(log_mel_rivals(waves))} | tables
    rates = {title: {name: hours / value for name, value in table.items()} for title, table in tables.items()}
    if options.json:
        print(json.dumps({"benchmark": "features", "device": options.device, "audio": source, "hours_per_s": rates}))
        return
    for title, rows in rates.items():
        print(f"{title}: hours of audio per second on {options.device} ({source}, {hours:.2f} h)")
        for name, rate in rows.items():
            ratio = f"starling is {rows[OURS] / rate:5.2f} x as fast" if OURS in rows and name != OURS else ""
            print(f"  {name:36} {rate:8.2f}  {ratio}")


if __name__ == "__main__":
    main()
