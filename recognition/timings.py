"""Alignments as files: NIST's CTM, and TextGrids of Praat; and utterances whose transcript is probably wrong."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from unicodedata import normalize

from speech.hypotheses import Word

_SMALLEST = 10
"""With fewer utterances, their scores and confidences are not compared: the spread is unknown."""
_LEAST_SPREAD = 0.02
"""Smallest robust standard deviation of scores, in nats per frame. A CTC model that is sure of nearly every frame has
scores of nearly 0 (the digits of docs/own-recordings.md: a spread of 0.0004), and one good utterance in eight would be
more than five deviations below the median. With this floor, five deviations are a posterior per frame that is 10 %
lower. Scores of GMMs spread more widely."""


@dataclass(frozen=True)
class TimedUtterance:
    """An aligned utterance.

    Attributes:
        id: Its name.
        speaker: Its speaker.
        duration: Seconds.
        words: Words with times from the start of the utterance.
        units: Phones, or tokens of a CTC model.
        score: Log-likelihood (GMM) or log posterior (CTC) per frame along the path.
    """

    id: str
    speaker: str
    duration: float
    words: Sequence[Word]
    units: Sequence[Word]
    score: float

    @property
    def confidence(self) -> float:
        """Mean confidence of the words, weighted by their durations."""
        total = sum(word.duration for word in self.words)
        return sum(word.confidence * word.duration for word in self.words) / total if total else 0.0


def ctm_label(name: str) -> str:
    """A name as CTM files have it: white space becomes underscores, since it separates columns."""
    return re.sub(r"\s", "_", name) or "_"


def scored_name(name: str) -> str:
    """What is left of a name when CTM files are scored: programs ignore case, and how accents are composed."""
    return normalize("NFC", ctm_label(name)).casefold()


def distinct_names(names: Iterable[str]) -> list[str]:
    """Adds -2, -3 and so on to names that a CTM file would not tell from an earlier one."""
    given = list(names)
    first = {scored_name(name): place for place, name in reversed(list(enumerate(given)))}
    taken, found = set(first), []
    for place, name in enumerate(given):
        longer, count = name, 1
        while place != first.get(scored_name(name)) and scored_name(longer) in taken:
            count += 1
            longer = f"{name}-{count}"
        taken.add(scored_name(longer))
        found.append(longer)
    return found


def ctm_lines(name: str, units: Sequence[Word]) -> str:
    """Lines of a CTM file: file, channel, start, duration, word, confidence; times in seconds.

    Args:
        name: Name of the utterance; see `distinct_names` if there are several.
        units: Words, or phones.
    """
    label = ctm_label(name)
    return "".join(f"{label} 1 {w.start:.3f} {w.duration:.3f} {w.word} {w.confidence:.4f}\n" for w in units)


def textgrid(duration: float, tiers: Mapping[str, Sequence[Word]]) -> str:
    """A TextGrid in Praat's long text format; gaps between units are intervals without text.

    Args:
        duration: Seconds.
        tiers: Units in order, by name of the tier. Units must not overlap.
    """
    end = max([duration, *(unit.start + unit.duration for units in tiers.values() for unit in units)])
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "xmin = 0", f"xmax = {end:.4f}"]
    lines += ["tiers? <exists>", f"size = {len(tiers)}", "item []:"]
    for number, (name, units) in enumerate(tiers.items(), start=1):
        intervals = _intervals(units, end)
        lines += [f"    item [{number}]:", '        class = "IntervalTier"', f"        name = {_quoted(name)}"]
        lines += ["        xmin = 0", f"        xmax = {end:.4f}", f"        intervals: size = {len(intervals)}"]
        for place, (start, stop, text) in enumerate(intervals, start=1):
            lines += [
                f"        intervals [{place}]:",
                f"            xmin = {start:.4f}",
                f"            xmax = {stop:.4f}",
            ]
            lines.append(f"            text = {_quoted(text)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'


def _intervals(units: Sequence[Word], end: float) -> list[tuple[float, float, str]]:
    """Start, end and text of the units and of the gaps between them; they fill the time from 0 to the end."""
    found: list[tuple[float, float, str]] = []
    now = 0.0
    for unit in units:
        start, stop = max(unit.start, now), unit.start + unit.duration
        if stop - start <= 1e-6:  # Praat has no empty intervals
            continue
        if start - now > 1e-6:
            found.append((now, start, ""))
        found.append((start, stop, unit.word))
        now = stop
    if end - now > 1e-6 or not found:
        found.append((now, end, ""))
    return found


def low_scores(scores: Mapping[str, float], deviations: float = 5.0) -> dict[str, float]:
    """Utterances whose score is far below the median: their transcripts are probably wrong.

    Args:
        scores: Score per frame of each utterance.
        deviations: How many robust standard deviations (1.4826 times the median absolute deviation, at least 0.02)
            below the median.

    Returns:
        The number of deviations below the median of each of them, the worst first; none if there are fewer than ten
        utterances.
    """
    if len(scores) < _SMALLEST:
        return {}
    median = statistics.median(scores.values())
    spread = max(_LEAST_SPREAD, 1.4826 * statistics.median(abs(score - median) for score in scores.values()))
    below = {name: (median - score) / spread for name, score in scores.items()}
    return dict(sorted(((n, d) for n, d in below.items() if d > deviations), key=lambda one: (-one[1], one[0])))


def low_confidences(confidences: Mapping[str, float], share: float = 0.5) -> dict[str, float]:
    """Utterances whose confidence is below a share of the median: few of their words are where the transcript has them.

    Args:
        confidences: Mean confidence of each utterance.
        share: The share.

    Returns:
        The confidence of each of them, the lowest first; none if there are fewer than ten utterances.
    """
    if len(confidences) < _SMALLEST:
        return {}
    limit = share * statistics.median(confidences.values())
    low = ((name, value) for name, value in confidences.items() if value < limit)
    return dict(sorted(low, key=lambda one: (one[1], one[0])))
