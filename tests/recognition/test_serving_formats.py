"""Formats of OpenAI's API, as whole texts."""

from recognition.serving.formats import body
from recognition.transcriber import Transcript
from speech.hypotheses import Word

WORDS = (
    Word("one", 0.5, 0.25, 0.5),
    Word("<two>", 0.8, 0.2, 1.0),
    Word("three", 3661.5, 0.5, 0.25),
)
TRANSCRIPT = Transcript("one <two> three", 3662.25, 0.5, words=WORDS)
SRT = """1
00:00:00,500 --> 00:00:01,000
one <two>

2
01:01:01,500 --> 01:01:02,000
three

"""
VTT = """WEBVTT

00:00:00.500 --> 00:00:01.000
one &lt;two&gt;

01:01:01.500 --> 01:01:02.000
three

"""


def test_srt():
    assert body("srt", TRANSCRIPT, ["segment"], "") == SRT


def test_vtt():
    assert body("vtt", TRANSCRIPT, ["segment"], "") == VTT


def test_text_and_json():
    assert body("text", TRANSCRIPT, ["segment"], "") == "one <two> three\n"
    assert body("json", TRANSCRIPT, ["segment"], "en") == {"text": "one <two> three"}


def test_verbose_json():
    answer = body("verbose_json", TRANSCRIPT, ["segment", "word"], "en")
    segments = answer.pop("segments")
    assert answer == {
        "task": "transcribe",
        "language": "en",
        "duration": 3662.25,
        "text": "one <two> three",
        "words": [
            {"word": "one", "start": 0.5, "end": 0.75, "confidence": 0.5},
            {"word": "<two>", "start": 0.8, "end": 1.0, "confidence": 1.0},
            {"word": "three", "start": 3661.5, "end": 3662.0, "confidence": 0.25},
        ],
    }
    assert [(part["id"], part["start"], part["end"], part["text"]) for part in segments] == [
        (0, 0.5, 1.0, "one <two>"),
        (1, 3661.5, 3662.0, "three"),
    ]
    assert segments[0]["avg_logprob"] == -0.3466  # half of log 0.5
    assert "words" not in body("verbose_json", TRANSCRIPT, ["segment"], "")
    assert "segments" not in body("verbose_json", TRANSCRIPT, ["word"], "")


def test_without_times_all_is_one_segment_and_without_words_there_is_none():
    (segment,) = body("verbose_json", Transcript("a b", 2.0, 0.5), ["segment"], "")["segments"]
    assert (segment["start"], segment["end"], segment["text"]) == (0.0, 2.0, "a b")
    assert body("verbose_json", Transcript("", 2.0, 0.5), ["segment"], "")["segments"] == []
    assert body("srt", Transcript("", 2.0, 0.5), ["segment"], "") == ""
