"""Forced alignment of a corpus with a CTC model."""

from support import copy_finished

from recognition.timings import TimedUtterance
from speech.hypotheses import Word
from tasks.config.home import home as home_folder
from tasks.dataset.sources import SourceConfig
from tasks.forced_alignment import Alignments, align_with_ctc
from tasks.stages.bundles import fetch_bundle


def test_a_corpus_is_aligned_with_a_ctc_model(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    table = next((home_folder() / "corpora").glob("*/metadata.csv"))
    lines = table.read_text().splitlines()
    few = table.with_name("few.csv")
    few.write_text("\n".join([*lines[:9], lines[9].replace("audio/", "missing/")]) + "\n")
    bundle = fetch_bundle(finished.result("train").output, tmp_path / "bundle")
    done = []
    found = align_with_ctc(
        bundle, [SourceConfig(kind="table", path=str(few))], "cpu", lambda *counts: done.append(counts)
    )
    assert found.units == "tokens"
    assert len(found.found) + len(found.failures) == 8
    assert found.quarantined == 1
    assert done[-1] == (8, 8)
    assert found.texts.keys() == found.heard.keys() == {one.id for one in found.found} | found.failures.keys()
    assert all(found.texts.values())
    for one in found.found:
        assert [unit.word for unit in one.words] == found.texts[one.id].split()
        assert all(0 <= word.start <= one.duration and 0 <= word.confidence <= 1 for word in one.words)
        assert one.score < 0


def test_reasons_for_suspicion_are_sentences():
    def one(name, score, confidence=1.0):
        return TimedUtterance(name, "s", 1.0, [Word("w", 0.0, 1.0, confidence)], [], score)

    found = Alignments([one(f"u{n}", 0.0) for n in range(20)] + [one("low", -0.619), one("unsure", 0.0, 0.25)])
    found.failures["failed"] = "the transcript is empty"
    assert [(name, reason) for name, reason, _ in found.suspicious(5.0)] == [
        ("failed", "the transcript is empty"),
        ("low", "score 30.9 times the usual spread below the median"),
        ("unsure", "confidence 0.25, less than half the median"),
    ]
