"""Copies that are inserted into real speech are found, without false alarms; benchmarks/bench_duplicates has more."""

import pytest

from benchmarks.bench_duplicates import CORPORA, measure

_SLOW = {name: [pytest.mark.slow] for name in ("LibriSpeech", "speechocean762")}


@pytest.mark.parametrize("corpus", [pytest.param(name, marks=_SLOW.get(name, [])) for name in CORPORA])
def test_inserted_copies_of_real_speech_are_found_without_false_alarms(shared_data, corpus):
    measured = measure(shared_data, corpus, share=0.1)
    recall = {kind: part["recall"] for kind, part in measured["kinds"].items()}
    assert min(recall.values()) >= 0.9, recall
    assert {part["wrong_pairs"] for part in measured["kinds"].values()} == {0}
