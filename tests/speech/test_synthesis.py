"""The synthesizer, the language of commands and the synthetic corpus."""

import csv
import hashlib
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import Forkable
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from speech.audio import decode_audio, level_db
from speech.synthesis import VOCABULARY, SynthesisConfig, Voice, list_variants, random_command, spell_number
from speech.synthesis.corpus import plan_corpus, synthesize_corpus
from speech.synthesis.espeak import Engine, VoiceError, speak

pytest.importorskip("espeakng_loader")

SMALL = SynthesisConfig(train=34, valid=4, test=6, seed=7)
ROOT = Path(__file__).resolve().parents[2]


@settings(max_examples=200)
@given(seed=st.integers())
def test_commands_use_the_vocabulary(seed):
    command = random_command(random.Random(seed))
    words = command.split(" ")
    assert 3 <= len(words) <= 9
    assert set(words) <= set(VOCABULARY)
    assert command == random_command(random.Random(seed))


def test_commands_cover_the_vocabulary_in_many_sentences():
    rng = random.Random(0)
    commands = [random_command(rng) for _ in range(3000)]
    assert {word for command in commands for word in command.split()} == set(VOCABULARY)
    assert 60 <= len(VOCABULARY) <= 90
    assert len(set(commands)) > 1500


def test_numbers_are_spelled_as_separate_words():
    spelled = [spell_number(number) for number in range(100)]
    assert len(set(spelled)) == 100
    assert spelled[0] == "zero"
    assert spelled[19] == "nineteen"
    assert spelled[40] == "forty"
    assert spelled[99] == "ninety nine"
    assert {word for number in spelled for word in number.split()} <= set(VOCABULARY)
    for number in (-1, 100):
        with pytest.raises(ValueError, match=r"0 to 99"):
            spell_number(number)


def test_speech_is_audible_and_of_plausible_length():
    samples, rate = speak("turn the kitchen lights on", Voice("f3"))
    assert rate == 22050
    assert samples.dtype == np.int16
    assert 0.8 < len(samples) / rate < 3
    assert level_db(torch.from_numpy(samples / 32768)) > -35


def fundamental(samples, rate=22050, size=2048):
    """Median frequency in Hz of the strongest period between 60 and 400 Hz, over loud frames."""
    frequencies = []
    for start in range(0, len(samples) - size, size // 2):
        frame = samples[start : start + size].astype(np.float64)
        correlation = np.fft.irfft(np.abs(np.fft.rfft(frame * np.hanning(size), 2 * size)) ** 2)
        period = rate // 400 + int(correlation[rate // 400 : rate // 60].argmax())
        if frame.std() > 800 and correlation[period] > 0.5 * correlation[0]:
            frequencies.append(rate / period)
    return float(np.median(frequencies))


def test_rate_and_pitch_change_the_speech():
    text = "set a timer for twenty five minutes"
    slow, _ = speak(text, Voice("m3", rate=120))
    fast, _ = speak(text, Voice("m3", rate=240))
    assert len(slow) > 1.5 * len(fast)

    low, _ = speak(text, Voice("m3", pitch=10))
    high, _ = speak(text, Voice("m3", pitch=90))
    assert 60 < fundamental(low) < 0.8 * fundamental(high) < 320


def test_engines_start_from_the_same_state():
    def say():
        with Engine() as engine:
            return [engine.speak(text, Voice("f2")) for text in ("play track seven", "close the garage door")]

    first = say()
    speak("something else altogether", Voice("m5"))
    for sample, other in zip(first, say(), strict=True):
        np.testing.assert_array_equal(sample, other)


@pytest.mark.parametrize("text", ["", "  ", "hello\x01200p", "lights\x00off"])
def test_unspeakable_texts_are_refused(text):
    with pytest.raises(VoiceError, match=r"control characters"):
        speak(text)


def test_unknown_voices_are_refused_by_name():
    with pytest.raises(VoiceError, match=r"'f99'.*f1"):
        speak("hello", Voice("f99"))
    with pytest.raises(VoiceError, match=r"xx-zz"):
        speak("hello", Voice(language="xx-zz"))
    with pytest.raises(VoiceError, match=r"rate 5"):
        Voice(rate=5)
    assert len(speak("hello")[0])  # an engine that failed lets the next one in


def test_closed_engine_does_not_speak():
    with pytest.raises(RuntimeError, match=r"with statement"):
        Engine().speak("hello")


def test_nested_engine_is_refused():
    with Engine() as engine:
        with pytest.raises(RuntimeError, match=r"has an engine already"):
            speak("hello")
        assert len(engine.speak("hello"))


def test_threads_take_turns():
    expected, _ = speak("play track seven", Voice("m1"))
    with ThreadPoolExecutor(4) as pool:
        for samples, _ in pool.map(lambda _: speak("play track seven", Voice("m1")), range(8)):
            np.testing.assert_array_equal(samples, expected)


def test_default_voices_exist_and_are_disjoint():
    config = SynthesisConfig()
    voices = [*config.train_voices, *config.valid_voices, *config.test_voices]
    assert len(set(voices)) == len(voices)
    assert set(voices) <= set(list_variants())
    assert len(config.train_voices) >= 24
    assert (len(config.valid_voices), len(config.test_voices)) == (4, 6)


def test_default_voices_sound_different():
    config = SynthesisConfig()
    prints = set()
    with Engine() as engine:
        for variant in (*config.train_voices, *config.valid_voices, *config.test_voices):
            samples = engine.speak("call room three zero nine", Voice(variant)).astype(np.float64)
            power = np.abs(np.fft.rfft(samples, 1 << 17)) ** 2
            bands = power[: 1 << 15].reshape(32, -1).sum(1)
            prints.add(tuple(np.round(10 * np.log10(bands / bands.sum() + 1e-9), 1)))
    assert len(prints) == 40


def test_half_of_the_test_sentences_are_new():
    plan = plan_corpus(SynthesisConfig())
    trained = {item.text for item in plan if item.split == "train"}
    tested = [item.text for item in plan if item.split == "test"]
    assert sum(text in trained for text in tested) < 0.5 * len(tested)
    assert len({item.id for item in plan}) == len(plan) == 1500


def rows_of(metadata):
    with metadata.open(newline="") as stream:
        return list(csv.DictReader(stream))


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.suffix in {".flac", ".csv"})
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    synthesize_corpus(SMALL, folder)
    return folder


def test_corpus_matches_its_table(corpus):
    rows = rows_of(corpus / "metadata.csv")
    assert list(rows[0]) == ["id", "path", "text", "speaker", "split", "duration"]
    assert [row["split"] for row in rows] == ["train"] * 34 + ["valid"] * 4 + ["test"] * 6
    speakers = {
        split: {row["speaker"] for row in rows if row["split"] == split} for split in ("train", "valid", "test")
    }
    assert not speakers["train"] & speakers["test"]
    assert not speakers["valid"] & (speakers["train"] | speakers["test"])
    for row in rows:
        wave, rate = decode_audio(corpus / row["path"])
        assert rate == 16000
        assert len(wave) / rate == pytest.approx(float(row["duration"]), abs=1e-4)
        assert 0.5 < len(wave) / rate < 5
        assert -33 < level_db(wave) < -18
    assert len(list((corpus / "audio").iterdir())) == len(rows)


def test_same_configuration_gives_same_bytes_in_another_process(corpus, tmp_path):
    code = (
        "import sys; from pathlib import Path; from speech.synthesis import *\n"
        "synthesize_corpus(SynthesisConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", Forkable(code), SMALL.model_dump_json(), str(tmp_path)], check=True, cwd=ROOT)
    assert digest(tmp_path) == digest(corpus)


def test_interrupted_synthesis_continues(corpus, tmp_path):
    class Interrupted(Exception):
        pass

    def interrupt(done, total):
        raise Interrupted

    with pytest.raises(Interrupted):
        synthesize_corpus(SMALL, tmp_path, interrupt)
    assert not (tmp_path / "metadata.csv").exists()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "audio").iterdir()}
    assert len(before) == 16
    with (tmp_path / "synthesis.jsonl").open("a") as stream:
        stream.write('{"train-000')  # a line that a crash cut off
    seen = []
    synthesize_corpus(SMALL, tmp_path, lambda done, total: seen.append((done, total)))
    assert seen == [(32, 44), (44, 44)]
    assert {name: (tmp_path / "audio" / name).stat().st_mtime_ns for name in before} == before
    assert digest(tmp_path) == digest(corpus)


def test_finished_corpus_is_kept_and_a_damaged_one_repaired(tmp_path):
    config = SMALL.model_copy(update={"train": 20, "valid": 0, "test": 0})
    metadata = synthesize_corpus(config, tmp_path)
    expected, stamp = digest(tmp_path), metadata.stat().st_mtime_ns
    synthesize_corpus(config, tmp_path, lambda done, total: pytest.fail("synthesized again"))
    assert metadata.stat().st_mtime_ns == stamp
    broken = next((tmp_path / "audio").iterdir())
    broken.write_bytes(broken.read_bytes()[:100])
    synthesize_corpus(config, tmp_path)
    synthesize_corpus(config, tmp_path)
    assert digest(tmp_path) == expected


def test_another_configuration_replaces_the_corpus(tmp_path):
    config = SMALL.model_copy(update={"train": 3, "valid": 0, "test": 0})
    synthesize_corpus(config, tmp_path)
    first = digest(tmp_path)
    synthesize_corpus(config.model_copy(update={"train": 2, "seed": 8}), tmp_path)
    assert len(list((tmp_path / "audio").iterdir())) == len(rows_of(tmp_path / "metadata.csv")) == 2
    assert digest(tmp_path) != first


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "metadata.csv").write_text("id,path\n")
    with pytest.raises(ValueError, match=r"empty folder"):
        synthesize_corpus(SMALL, tmp_path)
    assert (tmp_path / "metadata.csv").read_text() == "id,path\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_voices": ("f1",)}, r"'f1' is in train_voices and test_voices"),
        ({"train_voices": ()}, r"train_voices is empty"),
        ({"train_voices": ("../evil",)}, r"letters and digits"),
        ({"snr_db": (20, 10)}, r"snr_db.*swap"),
        ({"voices": 3}, r"voices"),
    ],
)
def test_impossible_configurations_name_their_field(changes, message):
    with pytest.raises(ValidationError, match=message):
        SynthesisConfig(**changes)
