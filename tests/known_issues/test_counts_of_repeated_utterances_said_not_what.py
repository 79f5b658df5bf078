"""The line of a training on a busy machine ended in "32 repeated", which nobody could make sense of."""

from tasks.stages.base import counts_text


def test_repeated_utterances_are_named_with_the_reason():
    counts = {"epochs": 8, "steps": 900, "utterances": 14432, "repeated": 32}
    assert counts_text(counts) == (
        "8 epochs, 900 steps, 14,432 utterances, 32 utterances repeated after a node was lost"
    )
    assert counts_text({"steps": 2, "repeated": 1}) == "2 steps, 1 utterance repeated after a node was lost"


def test_none_are_not_mentioned():
    assert counts_text({"epochs": 1, "repeated": 0}) == "1 epoch"
