"""Runs the command line in this process."""

from functools import cache

from typer import testing

from flows.cli.app import app

# Typer builds all commands for each run, which takes longer than most of the runs.
testing._get_command = cache(testing._get_command)


def invoke(*words, code=0, stdin=None):
    result = testing.CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result
