"""A model was chosen on voices that it knows (WER 0.6 %), failed on new ones (73.8 %), and nothing was said."""

import pytest

from tasks.config.data import DataConfig
from tasks.dataset.speakers import overlap_warnings

ALLOWED = DataConfig.model_validate(
    {"sources": [{"kind": "table", "path": "x.csv"}], "split_by": "utterance", "speaker_overlap": "allow"}
)


def record(shared, **unnamed):
    """Three speakers train, two validate, two test."""
    sets = {"train": 3, "valid": 2, "test": 2}
    entries = {name: {"speakers": n, "utterances": 9} for name, n in sets.items()}
    for name, count in unnamed.items():
        entries[name]["unnamed"] = count
    shared = {name: {"speakers": n, "utterances": 4, "names": ("a",)} for name, n in shared.items()}
    return {"sets": entries, "shared_speakers": shared}


def test_new_voices_are_only_in_the_test_set():
    (warning,) = overlap_warnings(record({"valid": 2}), ALLOWED)
    assert "all speakers of the validation set are trained on, and those of 'test' are new" in warning
    assert "data.split_by: speaker" in warning


@pytest.mark.parametrize(
    "known",
    [
        record({}),  # all voices of both are new
        record({"valid": 1}),
        record({"valid": 2, "test": 1}),
        record({"valid": 2}, test=1),  # whose voices these are is not known
        record({"valid": 2}, valid=1),
    ],
)
def test_otherwise_nothing_is_said(known):
    assert overlap_warnings(known, ALLOWED) == []


def test_a_corpus_without_a_validation_set_says_nothing():
    known = record({})
    del known["sets"]["valid"]
    assert overlap_warnings(known, ALLOWED) == []
