"""A wrong stage in Prefect's parameter form ended with "tuple.index(x): x not in tuple"."""

import pytest

from tasks.stages.base import STAGES, StageError, position


def test_error_for_wrong_stage_lists_valid_stages():
    with pytest.raises(StageError, match="'shrad' is not a stage; stages are: prepare, shard"):
        position("shrad")
    assert [position(name) for name in STAGES] == list(range(len(STAGES)))
