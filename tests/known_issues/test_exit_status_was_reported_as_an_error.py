"""`typer.Exit` is a RuntimeError: the command line caught its own exit and printed "error Exit"."""

import pytest
import typer
from mlflow.exceptions import MlflowException

from flows.cli.common import friendly


def raising(error):
    @friendly
    def command():
        raise error

    return command


@pytest.mark.parametrize("code", [0, 1, 3])
def test_typer_exit_keeps_its_status_and_prints_nothing(code, capsys):
    with pytest.raises(typer.Exit) as caught:
        raising(typer.Exit(code))()
    assert caught.value.exit_code == code
    assert capsys.readouterr().err == ""


def test_server_error_is_one_message(capsys):
    with pytest.raises(typer.Exit):
        raising(MlflowException("the registry is away"))()
    assert "error: the registry is away" in capsys.readouterr().err


def test_internal_errors_keep_their_traceback():
    with pytest.raises(KeyError):
        raising(KeyError("ours"))()
