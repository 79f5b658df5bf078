"""Runs the command line in this process."""

from typer.testing import CliRunner

from flows.cli.app import app


def invoke(*words, code=0, stdin=None):
    result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result
