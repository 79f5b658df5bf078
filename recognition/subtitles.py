"""Formats of a transcript with times: NIST's CTM, and subtitles as SubRip (SRT) and WebVTT."""

import html
from collections.abc import Iterator, Sequence

from recognition.transcriber import Transcript
from speech.alignments import ctm_lines
from speech.hypotheses import Word

_PAUSE_S, _CUE_S = 0.8, 6.0
_CUE_LETTERS = 74
"""Two lines of 37 letters, the customary size of subtitles."""


def ctm(name: str, transcript: Transcript) -> str:
    """A transcript in NIST's CTM format: file, channel, start, duration, word, confidence; times in seconds.

    Args:
        name: Name of the recording; white space becomes underscores, since it separates CTM's columns.
        transcript: Transcript with words.
    """
    return ctm_lines(name, transcript.words)


def srt(name: str, transcript: Transcript) -> str:
    """A transcript as SubRip subtitles; arguments as for `ctm`."""
    numbered = enumerate(cues(transcript.words), 1)
    return "".join(f"{number}\n{_span(words, ',')}\n{_text(words)}\n\n" for number, words in numbered)


def vtt(name: str, transcript: Transcript) -> str:
    """A transcript as WebVTT (https://www.w3.org/TR/webvtt1/); arguments as for `ctm`."""
    shown = [f"{_span(words, '.')}\n{html.escape(_text(words), quote=False)}\n\n" for words in cues(transcript.words)]
    return "".join(["WEBVTT\n\n", *shown])


def cues(words: Sequence[Word]) -> Iterator[list[Word]]:
    """Words that are shown together: they end at a pause, after six seconds, or when two lines are full.

    Args:
        words: The words of a recording, in order.
    """
    shown: list[Word] = []
    for word in words:
        if shown and (
            word.start - _end(shown[-1]) > _PAUSE_S
            or _end(word) - shown[0].start > _CUE_S
            or len(_text([*shown, word])) > _CUE_LETTERS
        ):
            yield shown
            shown = []
        shown.append(word)
    if shown:
        yield shown


def _end(word: Word) -> float:
    return word.start + word.duration


def _text(words: Sequence[Word]) -> str:
    return " ".join(word.word for word in words)


def _span(words: Sequence[Word], point: str) -> str:
    return f"{_clock(words[0].start, point)} --> {_clock(_end(words[-1]), point)}"


def _clock(seconds: float, point: str) -> str:
    """HH:MM:SS and milliseconds."""
    whole, thousandths = divmod(max(0, round(1000 * seconds)), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{thousandths:03}"
