"""Forced alignment of a corpus with a CTC model."""

from support import copy_finished

from tasks.alignment import CtcCorpusAligner, align_corpus
from tasks.config.home import home as home_folder
from tasks.dataset.sources import SourceConfig
from tasks.stages.bundles import fetch_bundle


def test_a_corpus_is_aligned_with_a_ctc_model(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    table = next((home_folder() / "corpora").glob("*/metadata.csv"))
    lines = table.read_text().splitlines()
    few = table.with_name("few.csv")
    few.write_text("\n".join([*lines[:9], lines[9].replace("audio/", "missing/")]) + "\n")
    bundle = fetch_bundle(finished.result("train").output, tmp_path / "bundle")
    done = []
    sources = [SourceConfig(kind="table", path=str(few))]
    corpus = align_corpus(CtcCorpusAligner(bundle), sources, lambda *counts: done.append(counts))
    assert corpus.units == "tokens"
    assert len(corpus.utterances) == 8
    assert corpus.quarantined == 1
    assert done[-1] == (8, 8)
    assert [utterance.id for utterance in corpus.utterances] == sorted(
        {utterance.id for utterance in corpus.utterances}
    )
    assert all(utterance.text and utterance.heard is not None for utterance in corpus.utterances)
    texts = {utterance.id: utterance.text for utterance in corpus.utterances}
    assert corpus.alignments
    for alignment in corpus.alignments:
        assert [word.label for word in alignment.words] == texts[alignment.id].split()
        words = alignment.timed(alignment.words)
        assert all(0 <= word.start <= alignment.duration and 0 <= word.confidence <= 1 for word in words)
        assert alignment.score < 0
