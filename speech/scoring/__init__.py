"""Scoring: transcripts of all formats, error counts as in NIST's sclite, intervals and tests, and reports.

pairs = load_pairs(Path("ref.stm"), Path("hyp.ctm"), ScoringRules(alternatives=True))
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
from speech.scoring.formats import FORMATS, TranscriptError, read_transcript
from speech.scoring.formats.trn import format_trn, parse_trn, read_trn, write_trn
from speech.scoring.glm import read_glm
from speech.scoring.mapsswe import MatchedPairs, matched_pairs
from speech.scoring.network import PLAIN, MarkupError, ScoringRules
from speech.scoring.pairing import PairingRules, Pairs, load_pairs, share_extra
from speech.scoring.report import (
    Confusions,
    alignment_report,
    count_confusions,
    mark,
    text_report,
    worst_utterances,
)
from speech.scoring.tracing import align_texts

__all__ = [
    "FORMATS",
    "PLAIN",
    "Comparison",
    "Confusions",
    "ErrorCounts",
    "MarkupError",
    "MatchedPairs",
    "PairingRules",
    "Pairs",
    "ScoreReport",
    "ScoringError",
    "ScoringRow",
    "ScoringRules",
    "TranscriptError",
    "UtteranceScore",
    "align",
    "align_texts",
    "alignment_report",
    "compare_systems",
    "count_confusions",
    "count_operations",
    "format_trn",
    "load_pairs",
    "mark",
    "matched_pair_p_value",
    "matched_pairs",
    "parse_trn",
    "read_glm",
    "read_transcript",
    "read_trn",
    "score_sets",
    "score_utterance",
    "share_extra",
    "text_report",
    "wer_interval",
    "worst_utterances",
    "write_trn",
]
