"""Answers in the formats of OpenAI's API: json, text, srt, verbose_json, vtt."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import Any

from recognition.subtitles import cues, srt, vtt
from recognition.transcriber import Transcript
from speech.hypotheses import Word

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
TIMED = ("srt", "vtt")
GRANULARITIES = ("segment", "word")
_LEAST = 1e-10  # of a probability whose logarithm is taken


def body(kind: str, transcript: Transcript, granularities: Collection[str], language: str) -> dict[str, Any] | str:
    """The answer for a transcript: JSON, or text.

    Args:
        kind: One of `FORMATS`.
        transcript: With words, for formats with times.
        granularities: Some of `GRANULARITIES`, for verbose_json.
        language: Code of the language, if it is known.
    """
    if kind == "text":
        return transcript.text + "\n"
    if kind in TIMED:
        return {"srt": srt, "vtt": vtt}[kind]("", transcript)
    if kind == "json":
        return {"text": transcript.text}
    answer: dict[str, Any] = {
        "task": "transcribe",
        "language": language,
        "duration": round(transcript.seconds, 3),
        "text": transcript.text,
    }
    if "word" in granularities:
        answer["words"] = [word_content(word) for word in transcript.words]
    if "segment" in granularities:
        answer["segments"] = segments(transcript)
    return answer


def word_content(word: Word) -> dict[str, Any]:
    """A word as OpenAI gives it, and its confidence."""
    return {
        "word": word.word,
        "start": round(word.start, 3),
        "end": round(word.start + word.duration, 3),
        "confidence": round(word.confidence, 4),
    }


def segments(transcript: Transcript) -> list[dict[str, Any]]:
    """Segments of a transcript: those of its subtitles; all of it if there are no words with times."""
    if not transcript.text:
        return []
    parts = [
        (words[0].start, words[-1].start + words[-1].duration, " ".join(word.word for word in words), words)
        for words in cues(transcript.words)
    ] or [(0.0, transcript.seconds, transcript.text, [])]
    return [
        {
            "id": number,
            "seek": 0,
            "start": round(start, 3),
            "end": round(end, 3),
            "text": text,
            "tokens": [],
            "temperature": 0.0,
            "avg_logprob": _mean_log([word.confidence for word in words] or [transcript.confidence]),
            "compression_ratio": _compression(text),
            "no_speech_prob": 0.0,
        }
        for number, (start, end, text, words) in enumerate(parts)
    ]


def _mean_log(confidences: list[float]) -> float:
    return round(sum(math.log(max(_LEAST, value)) for value in confidences) / len(confidences), 4)


def _compression(text: str) -> float:
    """As Whisper computes it: large for text that repeats itself."""
    data = text.encode("utf-8")
    return round(len(data) / len(zlib.compress(data)), 4)
