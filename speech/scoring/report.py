"""Text reports: every utterance with its errors marked, and tables of confusions.

    7447-91187-0003  2 errors, 6 words
      the (cat->hat) sat (-down) on the mat (+now)

Deletions are `(-word)`, insertions `(+word)`, substitutions `(reference->recognized)`. Of alternatives, those that fit
best are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from configurable.wording import counted
from speech.scoring.align import Step
from speech.scoring.counts import ErrorCounts, ScoreReport, UtteranceScore
from speech.scoring.tracing import align_texts


@dataclass(frozen=True)
class Confusions:
    """Confused words, most frequent first, ties in alphabetical order."""

    substitutions: list[tuple[str, str, int]]
    """(reference word, recognized word, count)."""
    deletions: list[tuple[str, int]]
    """(deleted word, count)."""
    insertions: list[tuple[str, int]]
    """(inserted word, count)."""

    def to_dict(self, limit: int | None = None) -> dict[str, Any]:
        """Returns a JSON value of the first `limit` lines of each table."""
        return {
            "substitutions": [{"ref": ref, "hyp": hyp, "count": n} for ref, hyp, n in self.substitutions[:limit]],
            "deletions": [{"ref": ref, "count": n} for ref, n in self.deletions[:limit]],
            "insertions": [{"hyp": hyp, "count": n} for hyp, n in self.insertions[:limit]],
        }


@dataclass(frozen=True)
class AlikeUtterances:
    """A speaker's utterances of the same words, some of which have errors."""

    worst: UtteranceScore
    """One of those with the most errors, recognized as most of these are."""
    wrong: int
    """Number of utterances with errors."""
    spoken: int
    """Number of all of them."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value: the worst one's, with both numbers."""
        return {**self.worst.to_dict(), "wrong": self.wrong, "spoken": self.spoken}


def mark(steps: Iterable[Step]) -> str:
    """Writes an alignment as one line of text with the errors marked."""
    return " ".join(_mark(step) for step in steps)


def count_confusions(report: ScoreReport) -> Confusions:
    """Counts substituted, deleted and inserted words over a test set."""
    counts: dict[str, Counter[tuple[str, ...]]] = {"sub": Counter(), "del": Counter(), "ins": Counter()}
    for utterance in report.utterances:
        if utterance.counts.errors:
            for operation, ref, hyp in _steps(utterance):
                if operation != "cor":
                    counts[operation][tuple(word for word in (ref, hyp) if word is not None)] += 1
    return Confusions(
        [(words[0], words[1], count) for words, count in _sorted(counts["sub"])],
        [(words[0], count) for words, count in _sorted(counts["del"])],
        [(words[0], count) for words, count in _sorted(counts["ins"])],
    )


def worst_utterances(report: ScoreReport, limit: int = 20) -> list[AlikeUtterances]:
    """Returns the utterances with the most errors, of each speaker and text one.

    Ties are sorted by the number of utterances that are alike, then by error rate (highest first), then by id.
    """
    kinds: dict[tuple[str, str], list[UtteranceScore]] = {}
    for utterance in report.utterances:
        kinds.setdefault((utterance.speaker, " ".join(utterance.ref.split())), []).append(utterance)
    alike = [_alike(utterances) for utterances in kinds.values() if any(u.counts.errors for u in utterances)]
    return sorted(alike, key=lambda a: (-a.worst.counts.errors, -a.wrong, a.worst.counts.ref_words, a.worst.id))[:limit]


def _alike(utterances: Sequence[UtteranceScore]) -> AlikeUtterances:
    most = max(utterance.counts.errors for utterance in utterances)
    worst = [utterance for utterance in utterances if utterance.counts.errors == most]
    heard = Counter(utterance.hyp for utterance in worst)
    shown = min(worst, key=lambda utterance: (-heard[utterance.hyp], utterance.id))
    return AlikeUtterances(shown, sum(u.counts.errors > 0 for u in utterances), len(utterances))


def alignment_report(utterances: Sequence[UtteranceScore]) -> str:
    """Writes each utterance's id, number of errors and marked alignment."""
    return "".join(
        f"{utterance.id}  {_errors(utterance.counts)}\n  {mark(_steps(utterance))}\n" for utterance in utterances
    )


def text_report(report: ScoreReport, *, limit: int = 20) -> str:
    """Writes a full report: rates in total and by domain and speaker, confusions, and all alignments.

    Args:
        report: The scored set.
        limit: Number of lines in each table of confusions, and of worst utterances.
    """
    parts = [_rates("set", {"all": report.total})]
    if len(report.domains) > 1:
        parts.append(_rates("domain", report.domains))
    if report.labels:
        parts.append(_rates("label", report.labels))
    if len(report.speakers) > 1:
        parts.append(_rates("speaker", {name or "unknown": counts for name, counts in report.speakers.items()}))
    confusions = count_confusions(report)
    parts.append(_table("Substitutions", [(n, f"{ref} -> {hyp}") for ref, hyp, n in confusions.substitutions[:limit]]))
    parts.append(_table("Deletions", [(n, ref) for ref, n in confusions.deletions[:limit]]))
    parts.append(_table("Insertions", [(n, hyp) for hyp, n in confusions.insertions[:limit]]))
    worst = worst_utterances(report, limit)
    parts.append("Worst utterances, of each speaker and text one\n" + "".join(_worst_lines(alike) for alike in worst))
    parts.append("All utterances\n" + alignment_report(report.utterances))
    return "\n".join(parts)


def _steps(utterance: UtteranceScore) -> list[Step]:
    return align_texts(utterance.ref, utterance.hyp, utterance.rules)


def _worst_lines(alike: AlikeUtterances) -> str:
    others = f"; {alike.wrong} of {alike.spoken} alike have errors" if alike.spoken > 1 else ""
    utterance = alike.worst
    return f"{utterance.id}  {_errors(utterance.counts)}{others}\n  {mark(_steps(utterance))}\n"


def _mark(step: Step) -> str:
    operation, ref, hyp = step
    marks = {"cor": f"{hyp if ref is None else ref}", "sub": f"({ref}->{hyp})", "del": f"(-{ref})", "ins": f"(+{hyp})"}
    return marks[operation]


def _errors(counts: ErrorCounts) -> str:
    return f"{counted(counts.errors, 'error')}, {counted(counts.ref_words, 'word')}"


def _sorted(counts: Counter[tuple[str, ...]]) -> list[tuple[tuple[str, ...], int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _rates(name: str, sets: dict[str, ErrorCounts]) -> str:
    width = max(len(name), *(len(key) for key in sets))
    lines = [f"{name:<{width}}  utts   words    WER %   sub   ins   del    CER %    SER %"]
    for key, counts in sets.items():
        lines.append(
            f"{key:<{width}}  {counts.utterances:4d}  {counts.ref_words:6d}  {_percent(counts.wer)}"
            f"  {counts.sub:4d}  {counts.ins:4d}  {counts.dele:4d}  {_percent(counts.cer)}  {_percent(counts.ser)}"
        )
    return "\n".join(lines) + "\n"


def _percent(rate: float | None) -> str:
    return "      -" if rate is None else f"{100 * rate:7.2f}"


def _table(title: str, lines: list[tuple[int, str]]) -> str:
    body = "".join(f"{count:6d}  {text}\n" for count, text in lines) or "  none\n"
    return f"{title}\n{body}"
