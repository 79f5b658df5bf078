"""Speaker 19 of one corpus and speaker 19 of another one were one speaker in the scores of their common test set.

The stage `prepare` counted two, as the documentation says: speakers are identified by corpus and name.
"""

from tasks.scores import summarize
from tasks.stages.score import score_rows


def row(name, hyp, speaker, corpus):
    return {"id": name, "ref": "a b", "hyp": hyp, "speaker": speaker, "domain": "", "corpus": corpus}


def test_speakers_are_told_apart_by_corpus():
    rows = [row("u1", "a b", "19", "read"), row("u2", "x y", "19", "phone"), row("u3", "a b", "ann", "read")]
    report = score_rows(rows)
    assert {name: counts.errors for name, counts in report.speakers.items()} == {"phone/19": 2, "read/19": 0, "ann": 0}
    assert summarize(report, 0)["speakers"] == 3


def test_unknown_speakers_stay_unknown():
    report = score_rows([row("u1", "a b", "", "read"), row("u2", "a b", "", "phone")])
    assert list(report.speakers) == [""]
    assert summarize(report, 0)["speakers"] is None
