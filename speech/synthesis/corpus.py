"""A corpus of synthetic spoken commands with many voices, noise, and disjoint speakers for testing.

    corpus = synthesize_corpus(SynthesisConfig(), Path("corpora/commands"))

writes `audio/<id>.flac` and, last and atomically, `metadata.csv` with the columns id, path, text, speaker, split,
duration. The same configuration gives the same bytes. Utterances are synthesized in small groups, each with a new
engine; a log of finished groups allows an interrupted synthesis to resume.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from configurable.addresses import address_content
from configurable.configuration import Configuration
from configurable.files import replace_file
from configurable.former_fields import former_fields
from configurable.lazy import torch
from devices.compute_threads import one_thread, usable_cores
from speech.audio import encode_flac, resample
from speech.synthesis.commands import random_command
from speech.synthesis.espeak import Engine, Voice

_VERSION = 1  # raise it if the same configuration gives different audio
_GROUP_SIZE = 16
_PITCH, _PITCH_RANGE = (35, 65), (30, 70)
"""Ranges of the pitch relative to the voice's register, and of intonation, within 0 to 99: about eSpeak NG's defaults
of 50, as far as all voices sound natural."""
_LEVEL_DB = (-32.0, -20.0)
"""Range of the level of the speech in dB relative to full scale: no sample is clipped."""
_COLUMNS = ("id", "path", "text", "speaker", "split", "duration")
_TRAIN = (
    "f1 f2 f3 m1 m2 m3 m4 m5 m6 Alex Alicia Andrea Andy Gene Marco Mario Michael Mike adam anika aunty boris david "
    "edward grandma linda max quincy rob shelby"
)


class SynthesisConfig(Configuration):
    """Configuration of a corpus of synthetic commands."""

    train: int = Field(default=1200, ge=0, le=99_999)
    """Number of training utterances."""
    valid: int = Field(default=100, ge=0, le=99_999)
    """Number of validation utterances."""
    test: int = Field(default=200, ge=0, le=99_999)
    """Number of test utterances."""
    train_voices: tuple[str, ...] = tuple(_TRAIN.split())
    """Voice variants of eSpeak NG for the training set; each is a speaker."""
    valid_voices: tuple[str, ...] = ("f5", "m8", "Lee", "belinda")
    """Voices of the validation set."""
    test_voices: tuple[str, ...] = ("f4", "m7", "Annie", "john", "grandpa", "steph")
    """Voices of the test set."""
    rate: tuple[int, int] = (140, 200)
    """Range of the speaking rate in words per minute."""
    snr_db: tuple[float, float] = (10.0, 30.0)
    """Range of the signal-to-noise ratio in dB; noise colours range from white to pink."""
    sample_rate: int = Field(default=16000, ge=4000, le=48000)
    """Sample rate of the files in Hz."""
    seed: int = 0
    """Seed of the sentences, voice properties and noise."""

    _former = former_fields(pitch=[35, 65], pitch_range=[30, 70], level_db=[-32.0, -20.0])

    @model_validator(mode="after")
    def _check(self) -> SynthesisConfig:
        seen: dict[str, str] = {}
        for split in ("train", "valid", "test"):
            voices = getattr(self, f"{split}_voices")
            if getattr(self, split) and not voices:
                raise ValueError(f"{split}_voices is empty: name a voice, or set {split} to 0")
            for voice in voices:
                if not voice.replace("_", "a").isalnum():
                    raise ValueError(f"{split}_voices: {voice!r} is not a name of letters and digits: correct it")
                if voice in seen:
                    raise ValueError(
                        f"voice {voice!r} is in {seen[voice]}_voices and {split}_voices: speakers are disjoint"
                    )
                seen[voice] = split
        for name in ("rate", "snr_db"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: the lower end {low} exceeds the upper end {high}: swap them")
        for rate in self.rate:
            Voice(rate=rate)
        return self


@dataclass(frozen=True)
class PlannedUtterance:
    """Text, voice and acoustic conditions of an utterance."""

    id: str
    split: str
    text: str
    voice: Voice
    snr_db: float
    tilt: float
    level_db: float


def plan_corpus(config: SynthesisConfig) -> list[PlannedUtterance]:
    """Draw all utterances of a corpus, each with its own random state (from its id and the seed)."""
    return [
        _plan_utterance(config, split, voices[index % len(voices)], index)
        for split, count, voices in (
            ("train", config.train, config.train_voices),
            ("valid", config.valid, config.valid_voices),
            ("test", config.test, config.test_voices),
        )
        for index in range(count)
    ]


def _plan_utterance(config: SynthesisConfig, split: str, variant: str, index: int) -> PlannedUtterance:
    name = f"{split}-{index:05d}-{variant}"
    rng = random.Random(f"{config.seed}/{name}")
    voice = Voice(
        variant,
        rate=rng.randint(*config.rate),
        pitch=rng.randint(*_PITCH),
        pitch_range=rng.randint(*_PITCH_RANGE),
    )
    return PlannedUtterance(
        id=name,
        split=split,
        text=random_command(rng),
        voice=voice,
        snr_db=rng.uniform(*config.snr_db),
        tilt=rng.random(),
        level_db=rng.uniform(*_LEVEL_DB),
    )


def synthesize_corpus(
    config: SynthesisConfig, folder: Path, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Synthesize a corpus into a folder, or resume an interrupted synthesis.

    Args:
        config: configuration of the corpus.
        folder: target folder; created if absent.
        progress: called with the number of finished utterances and their total.

    Returns:
        The path of `metadata.csv`.

    Raises:
        ValueError: the folder contains files that this function did not write, or a voice is unknown.
        SynthesizerMissingError: eSpeak NG is not installed.
    """
    folder = Path(folder)
    plan = plan_corpus(config)
    metadata, log = folder / "metadata.csv", folder / "synthesis.jsonl"
    finished = _open_folder(config, folder)
    groups = [plan[start : start + _GROUP_SIZE] for start in range(0, len(plan), _GROUP_SIZE)]
    missing = [group for group in groups if not all(_is_whole(folder, item.id, finished) for item in group)]
    if missing:
        metadata.unlink(missing_ok=True)
    done = len(plan) - sum(map(len, missing))
    with ThreadPoolExecutor(usable_cores()) as pool:
        for group in missing:
            written = _write_group(config, group, folder, pool)
            finished.update(written)
            with log.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(written) + "\n")
            done += len(group)
            if progress is not None:
                progress(done, len(plan))
    if not metadata.exists():
        replace_file(metadata, _metadata_csv(config, plan, finished))
    return metadata


def _open_folder(config: SynthesisConfig, folder: Path) -> dict[str, list[int]]:
    """Prepare the folder; returns bytes and samples of each file finished by an earlier run of this configuration."""
    with Engine() as engine:
        identity = {"version": _VERSION, "engine": engine.version, "config": address_content(config)}
    expected = json.dumps(identity, indent=1, sort_keys=True).encode()
    record, log, metadata = folder / "synthesis.json", folder / "synthesis.jsonl", folder / "metadata.csv"
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    if record.exists():
        if record.read_bytes() == expected:
            return _read_log(log)
        metadata.unlink(missing_ok=True)  # first: a corpus without metadata does not count as complete
        log.unlink(missing_ok=True)
        for path in (folder / "audio").glob("*.flac"):
            path.unlink()
    elif metadata.exists() or any((folder / "audio").iterdir()):
        raise ValueError(f"{folder} contains a corpus that was not synthesized here: choose an empty folder")
    replace_file(record, expected)
    return {}


def _read_log(path: Path) -> dict[str, list[int]]:
    """Bytes and samples of finished files by id; ignores a last line truncated by a crash."""
    finished: dict[str, list[int]] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            finished.update(json.loads(line))
        except ValueError:
            continue
    return finished


def _is_whole(folder: Path, name: str, finished: dict[str, list[int]]) -> bool:
    path = folder / "audio" / f"{name}.flac"
    return name in finished and path.exists() and path.stat().st_size == finished[name][0]


def _write_group(
    config: SynthesisConfig, group: list[PlannedUtterance], folder: Path, pool: ThreadPoolExecutor
) -> dict[str, list[int]]:
    """Synthesize a group and write its files: bytes and samples of each by id.

    The engine speaks in this thread, since a process has one. What follows takes longer, and the pool does it.
    """

    def write(item: PlannedUtterance, spoken: NDArray[np.int16], sample_rate: int) -> list[int]:
        with one_thread():
            wave = _record(config, item, spoken, sample_rate)
            data = encode_flac(wave, config.sample_rate)
        replace_file(folder / "audio" / f"{item.id}.flac", data)
        return [len(data), len(wave)]

    with Engine() as engine:
        written = {
            item.id: pool.submit(write, item, engine.speak(item.text, item.voice), engine.sample_rate) for item in group
        }
    return {name: answer.result() for name, answer in written.items()}


def _record(
    config: SynthesisConfig, item: PlannedUtterance, spoken: NDArray[np.int16], sample_rate: int
) -> torch.Tensor:
    """Resample, set the level and add noise: float32 `[num_samples]`."""
    wave = torch.from_numpy(spoken.astype(np.float32) / 32768)
    speech = resample(wave, sample_rate, config.sample_rate).numpy()
    speech = speech * (10 ** (item.level_db / 20) / _rms(speech))
    seed = hashlib.sha256(f"{config.seed}/{item.id}".encode()).digest()
    noise = _noise(len(speech), item.tilt, np.random.default_rng(int.from_bytes(seed[:8], "big")))
    noise = noise * (10 ** ((item.level_db - item.snr_db) / 20) / _rms(noise))
    return torch.from_numpy((speech + noise).astype(np.float32))


def _rms(wave: NDArray[np.float32]) -> float:
    return max(float(np.sqrt(np.mean(np.square(wave, dtype=np.float64)))), 1e-9)


def _noise(num_samples: int, tilt: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Noise with a power spectrum of 1 / f^tilt above a hundredth of the band: 0 is white, 1 is pink."""
    size = -(-num_samples // 4096) * 4096  # FFTs of sizes with large prime factors are slow
    white = rng.standard_normal(size, dtype=np.float32)
    shape = np.maximum(np.linspace(0, 1, size // 2 + 1, dtype=np.float32), 0.01) ** np.float32(-tilt / 2)
    return np.asarray(np.fft.irfft(np.fft.rfft(white) * shape, size)[:num_samples], dtype=np.float32)


def _metadata_csv(config: SynthesisConfig, plan: list[PlannedUtterance], finished: dict[str, list[int]]) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for item in plan:
        seconds = f"{finished[item.id][1] / config.sample_rate:.4f}"
        writer.writerow((item.id, f"audio/{item.id}.flac", item.text, item.voice.variant, item.split, seconds))
    return buffer.getvalue().encode()
