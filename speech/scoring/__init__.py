"""Scoring: error counts as in NIST's sclite, confidence intervals and tests, and reports.

report = score_sets([("id1", "the cat sat", "the hat sat", "speaker1", "read")])
report.wer                                          # 1/3
low, high = wer_interval(report.errors(), report.words())
"""

from __future__ import annotations

from speech.scoring.align import align, count_operations
from speech.scoring.bootstrap import Comparison, compare_systems, matched_pair_p_value, wer_interval
from speech.scoring.counts import (
    ErrorCounts,
    ScoreReport,
    ScoringError,
    ScoringRow,
    UtteranceScore,
    score_sets,
    score_utterance,
)
from speech.scoring.report import (
    Confusions,
    alignment_report,
    count_confusions,
    mark,
    text_report,
    worst_utterances,
)
from speech.scoring.trn import TrnError, format_trn, parse_trn, read_trn, write_trn

__all__ = [
    "Comparison",
    "Confusions",
    "ErrorCounts",
    "ScoreReport",
    "ScoringError",
    "ScoringRow",
    "TrnError",
    "UtteranceScore",
    "align",
    "alignment_report",
    "compare_systems",
    "count_confusions",
    "count_operations",
    "format_trn",
    "mark",
    "matched_pair_p_value",
    "parse_trn",
    "read_trn",
    "score_sets",
    "score_utterance",
    "text_report",
    "wer_interval",
    "worst_utterances",
    "write_trn",
]
