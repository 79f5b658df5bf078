"""`starling promote` and `starling rollback`, without Prefect; the rules themselves have tests in tests/tasks."""

import json

import pytest
from support import tiny_document, write_config
from typer.testing import CliRunner

from flows.cli.app import app


def invoke(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def test_champion_is_named_and_listed(finished, tmp_path):
    found = json.loads(invoke("promote", "tiny", "--json").stdout)
    assert (found["model"], found["version"], found["promoted"]) == ("tiny", "1", True)
    assert found["reason"] == "it is already the champion"
    config = write_config(tmp_path / "c.yaml", tiny_document())
    assert "tiny version 1: champion" in invoke("promote", "--config", config, "--no-prefect").stdout
    listed = json.loads(invoke("rollback", "tiny", "--list", "--json").stdout)
    assert listed["versions"][0]["aliases"] == ["challenger", "champion"]
    assert "decision" in invoke("rollback", "tiny", "--list").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["promote"], "no model given"),
        (["promote", "nobody"], "no model 'nobody'; it has: tiny"),
        (
            ["promote", "tiny", "--version", "99"],
            "no version 99 in this registry; it has: 1 (@challenger, @champion)",
        ),
        (["promote", "tiny", "--force"], "needs a reason"),
        (["rollback", "tiny"], "replaced no champion"),
        (["rollback", "nobody"], "no model 'nobody'; it has: tiny"),
        (["rollback", "nobody", "--list"], "no model 'nobody'; it has: tiny"),
    ],
)
def test_user_error_is_one_message_with_a_remedy(finished, words, message):
    result = invoke(*words, code=1)
    assert message in result.stderr.replace("\n", " ")
    assert result.stdout == ""
