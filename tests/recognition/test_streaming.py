"""Streams: finals equal those of files, partial results before them, and bounded memory."""

import numpy as np
import pytest
from support import load_beside

from recognition.streaming import SegmentStream, SpeechStream, StreamConfig, open_stream
from recognition.transcriber import Transcript
from speech.audio import AudioError
from speech.decoding import DecodeError
from speech.vad import EnergyConfig, EverythingConfig, build_vad

tones = load_beside(__file__, "running_server.py")
RATE, speak, silence = tones.RATE, tones.speak, tones.silence
SPEECH = np.concatenate([silence(1), speak("delta alpha"), silence(1.5), speak("echo echo bravo"), silence(1.2)])


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    return tones.tone_transcriber(tmp_path_factory.mktemp("tones"))


def opened(transcriber, **settings):
    def transcribe(wave, rate):
        return transcriber.transcribe(wave, rate, words=True)[0]

    cfg = StreamConfig(**settings)
    stream: SpeechStream = open_stream(transcriber.recognizer, transcribe, transcriber.vad, RATE, cfg)
    return stream


def heard(stream, wave, sizes):
    results, start = [], 0
    while start < len(wave):
        size = next(sizes)
        results += stream.accept(wave[start : start + size])
        start += size
    return results + stream.finish()


def steps(size):
    while True:
        yield size


@pytest.mark.parametrize("size", [80, 1111, 8000, 10**6])
def test_finals_are_those_of_the_file_for_blocks_of_any_size(transcriber, size):
    results = heard(opened(transcriber, partial_s=0.3), SPEECH, steps(size))
    finals = [result for result in results if result.final]
    assert [result.text for result in finals] == ["delta alpha", "echo echo bravo"]
    assert [result.segment for result in finals] == [0, 1]
    (whole,) = transcriber.transcribe(SPEECH, RATE, words=True)
    words = [word for result in finals for word in result.words]
    assert [word.word for word in words] == whole.text.split()
    for word, same in zip(words, whole.words, strict=True):
        assert word.start == pytest.approx(same.start, abs=0.05)
    for result in finals:
        assert result.start_s <= result.words[0].start <= result.end_s


def test_partial_results_come_before_the_end_of_a_segment_and_grow(transcriber):
    results = heard(opened(transcriber, partial_s=0.3), SPEECH, steps(400))
    first = [result for result in results if result.segment == 0]
    assert [result.final for result in first] == [False] * (len(first) - 1) + [True]
    assert len(first) > 1
    assert first[0].text.split()[0] == "delta"
    assert first[0].end_s < first[-1].end_s


def test_there_are_no_partial_results_unless_wanted(transcriber):
    results = heard(opened(transcriber, partial_s=0), SPEECH, steps(400))
    assert [result.text for result in results] == ["delta alpha", "echo echo bravo"]


def test_speech_at_the_end_is_recognized(transcriber):
    wave = speak("foxtrot")
    results = heard(opened(transcriber), wave, steps(333))
    assert [result.text for result in results if result.final] == ["foxtrot"]


def test_silence_and_nothing_give_nothing(transcriber):
    assert heard(opened(transcriber), silence(9), steps(400)) == []
    assert opened(transcriber).finish() == []


def test_speech_without_a_pause_is_cut_and_none_of_it_is_lost(transcriber):
    words = " ".join(tones.WORDS * 4)
    results = heard(opened(transcriber, longest_s=3.0, partial_s=0), speak(words), steps(700))
    assert len(results) > 2
    assert " ".join(result.text for result in results) == words


def test_an_hour_takes_bounded_memory():
    sizes = []

    def transcribe(wave, rate):
        sizes.append(len(wave))
        return Transcript("words", len(wave) / rate, 1.0)

    stream = SegmentStream(transcribe, build_vad(EverythingConfig()), 1000, StreamConfig(partial_s=0, longest_s=10.0))
    noise = np.random.default_rng(1).normal(0, 0.05, 60_000).astype(np.float32)
    for _ in range(60):
        stream.accept(noise)
        assert len(stream._wave) <= 11_000
    assert max(sizes) <= 11_000
    assert sum(sizes) + len(stream._wave) == pytest.approx(3_600_000, abs=5000)


def test_what_is_no_audio_is_refused(transcriber):
    with pytest.raises(AudioError, match="not finite"):
        opened(transcriber).accept(np.array([0.0, np.nan]))
    with pytest.raises(ValueError, match="one channel"):
        opened(transcriber).accept(np.zeros((2, 100)))
    with pytest.raises(AudioError, match="sample rate of 7 Hz"):
        open_stream(transcriber.recognizer, None, transcriber.vad, 7)
    for settings in ({"partial_s": -1}, {"silence_s": float("nan")}, {"longest_s": 100}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            StreamConfig(**settings)


def test_a_failure_of_the_model_is_raised():
    def transcribe(wave, rate):
        return Transcript("", 0.0, 0.0, error="no usable scores")

    stream = SegmentStream(transcribe, build_vad(EnergyConfig()), RATE)
    with pytest.raises(DecodeError, match="no usable scores"):
        heard(stream, SPEECH, steps(400))
