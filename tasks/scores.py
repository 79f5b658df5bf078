"""Scores of a set, as the stage `score` records them and `starling score` shows them."""

from functools import partial
from typing import Any

from speech.scoring import ScoreReport, wer_interval
from tasks.figures import percent

GROUPS = {"corpora": "corpus", "domains": "domain", "languages": "language"}
"""Groups of a set's utterances besides speakers: plural in the record of the stage `score`, singular in metrics."""
SAMPLES = 1000
"""Bootstrap samples behind an interval; Bisani and Ney (2004) take 1,000 to 10,000."""


def summarize(report: ScoreReport, seed: int) -> dict[str, Any]:
    """Scores of one set: rates as fractions, counts, and 95 % intervals over utterances and over speakers.

    The interval over speakers is there if the set has several and all are known; with few speakers it is too narrow.
    The number of speakers is None if none is known.
    """
    total = report.total
    low, high, speaker_low, speaker_high = (None, None, None, None)
    if total.ref_words:
        bounds = partial(wer_interval, report.errors(), report.words(), samples=SAMPLES, seed=seed)
        low, high = bounds()
        if len(report.speakers) > 1 and "" not in report.speakers:
            speaker_low, speaker_high = bounds(speakers=report.speaker_of())
    return {
        "wer": total.wer,
        "wer_low": low,
        "wer_high": high,
        "wer_speaker_low": speaker_low,
        "wer_speaker_high": speaker_high,
        "cer": total.cer,
        "sub": total.sub,
        "ins": total.ins,
        "del": total.dele,
        "words": total.ref_words,
        "utterances": total.utterances,
        "speakers": len(report.speakers.keys() - {""}) or None,
    }


def interval(scores: dict[str, Any], name: str = "wer") -> str:
    """Format the interval of a set: `wer` over utterances, `wer_speaker` over speakers; a dash without one."""
    low, high = scores.get(f"{name}_low"), scores.get(f"{name}_high")
    return "–" if low is None else f"{percent(low)} – {percent(high)}"
