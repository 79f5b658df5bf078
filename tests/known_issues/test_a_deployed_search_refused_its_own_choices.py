"""A deployment names all fields, also those of a range beside choices, which were then refused."""

import pytest
from support import tiny_document

from tasks.config.pipeline import PipelineConfig, parse_config
from tasks.search.space import ParameterConfig

SPACE = {"train.max_batch": [16, 32], "train.optimizer.lr": {"low": 1e-4, "high": 0.1, "log": True}}


def test_a_search_is_read_again_as_it_is_deployed():
    config = parse_config(tiny_document() | {"search": {"space": SPACE}})
    assert PipelineConfig.model_validate(config.model_dump(mode="json", by_alias=True)) == config


def test_choices_with_fields_of_a_range_are_still_refused():
    with pytest.raises(ValueError, match="choices have no log and no low: leave it out"):
        ParameterConfig.model_validate({"choices": [1, 2], "log": True, "low": 1.0})
