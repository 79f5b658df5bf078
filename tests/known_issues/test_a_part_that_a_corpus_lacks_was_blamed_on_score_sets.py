"""`starling evaluate --split test` of a corpus without sets complained of `score.sets`, which nobody had written."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.stages.base import StageError
from tasks.stages.run_sets import scored_sets


def _run(bundle):
    result = SimpleNamespace(record={"sets": {"train": {}}})
    config = SimpleNamespace(score=SimpleNamespace(sets=("test",)))
    return SimpleNamespace(bundle=bundle, config=config, result=lambda stage: result)


def test_the_message_of_an_evaluation_names_its_option():
    with pytest.raises(StageError, match="no part of its own that is called 'test', only train: leave out --split"):
        scored_sets(_run(Path("bundle")))


def test_the_message_of_a_run_names_the_field():
    with pytest.raises(StageError, match=r"score\.sets names 'test', but the data has only train"):
        scored_sets(_run(None))
