"""Any MLflow error while asking for the champion counted as "there is no champion", and promoted the challenger."""

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST, TEMPORARILY_UNAVAILABLE

from tasks.tracking.registry import champion_version


class Api:
    def __init__(self, error):
        self.error = error

    def get_model_version_by_alias(self, name, alias):
        raise self.error


@pytest.mark.parametrize("code", [RESOURCE_DOES_NOT_EXIST, INVALID_PARAMETER_VALUE])
def test_missing_model_or_alias_means_no_champion(code):
    assert champion_version(Api(MlflowException("none", code)), "m") is None


@pytest.mark.parametrize("error", [MlflowException("away"), MlflowException("busy", TEMPORARILY_UNAVAILABLE)])
def test_other_mlflow_errors_are_raised(error):
    with pytest.raises(MlflowException):
        champion_version(Api(error), "m")
