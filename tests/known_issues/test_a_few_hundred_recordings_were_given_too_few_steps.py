"""For 320 recordings of digits `starling init` chose 30 epochs of six batches: the model recognized no word.

About 800 steps are enough: 95 % of the words of such a set were right.
"""

from pathlib import Path

import pytest
import yaml

from tasks.dataset.discovery import FoundSource
from tasks.stages.starter import Starter, Survey


def train_section(hours, longest_s=1.0):
    """What it writes for so many hours of training data."""
    counts = {"utterances": 320, "sets": {"train": 320}, "speakers": 4, "words": 320, "different_words": 10}
    audio = {"hours": hours, "sample_rates": {8000: 200}, "long_s": longest_s, "sample": 200}
    survey = Survey("en", "", **counts, **audio, refused={}, refused_examples={}, lost=0)
    text = Starter("digits", [FoundSource("sidecar", Path("digits"), "train")], survey).text(Path(), "digits.yaml")
    return yaml.safe_load(text)["train"]


@pytest.mark.parametrize("hours", [0.02, 0.042, 0.1, 0.5, 1.9])
def test_small_corpora_have_enough_steps(hours):
    train = train_section(hours)
    assert 3600 * hours / train["batch_seconds"] * train["epochs"] > 750
    assert train["epochs"] <= 100


def test_a_batch_holds_the_longest_utterances():
    assert train_section(0.05, longest_s=14.0)["batch_seconds"] == 28


def test_larger_corpora_have_the_batches_of_their_model():
    assert [train_section(hours)["batch_seconds"] for hours in (0.23, 5, 50)] == [30, 60, 160]
    assert [train_section(hours)["epochs"] for hours in (0.23, 5, 50)] == [30, 30, 30]
