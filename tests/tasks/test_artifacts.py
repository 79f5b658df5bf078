"""What the Prefect UI shows of a stage."""

from tasks.artifacts import _score_table
from tasks.stage import StageResult


def test_error_rates_of_corpora_and_domains_stand_below_their_set():
    rates = {"wer": 0.25, "wer_low": 0.2, "wer_high": 0.3, "cer": 0.1, "words": 40, "utterances": 9}
    by = {"digits": {"wer": 0.05, "ref_words": 20}, "": {"wer": 0.45, "ref_words": 20}}
    record = {"sets": {"test": rates}, "groups": {"test": {"domains": by}}}
    result = StageResult("score", "k", "memory://x", 1.0, False, {}, record)
    rows = _score_table(result)
    assert [row["set"] for row in rows] == ["test", "test, domain digits", "test, domain –"]
    assert [row["wer"] for row in rows] == ["25.00 %", "5.00 %", "45.00 %"]
    assert _score_table(StageResult("score", "k", "memory://x", 1.0, False, {}, {"sets": {"test": rates}})) == rows[:1]
