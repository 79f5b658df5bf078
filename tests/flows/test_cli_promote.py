"""`starling promote` and `starling rollback`, without Prefect; the rules themselves have tests in tests/tasks."""

import json
from contextlib import nullcontext

import pytest
from support import tiny_document, write_config
from typer.testing import CliRunner

from flows.cli import promote
from flows.cli.app import app
from tasks.tracking.registry import Move
from tasks.tracking.significance import PromotionOptions


def invoke(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def test_champion_is_named_and_listed(finished, tmp_path):
    outcome = json.loads(invoke("promote", "tiny", "--json").stdout)
    assert (outcome["model"], outcome["version"], outcome["promoted"]) == ("tiny", "1", True)
    assert outcome["reason"] == "it is already the champion"
    config = write_config(tmp_path / "c.yaml", tiny_document())
    assert "tiny version 1: champion" in invoke("promote", "--config", config, "--no-prefect").stdout
    listed = json.loads(invoke("rollback", "tiny", "--list", "--json").stdout)
    assert listed["versions"][0]["aliases"] == ["challenger", "champion"]
    assert "decision" in invoke("rollback", "tiny", "--list").stdout


def test_options_reach_the_promotion_and_the_rollback(monkeypatch):
    asked = []
    outcome = {"model": "tiny", "version": "2", "promoted": False, "reason": "it is worse"}
    monkeypatch.setattr(promote, "_promote", lambda *given: asked.append(given) or outcome)
    monkeypatch.setattr(promote, "_rollback", lambda *given: asked.append(given) or {"champion": "1", "replaced": "2"})
    assert invoke("promote", "tiny").stdout == "tiny version 2: not promoted\n  it is worse\n"
    options = ("--version", 2, "--new-tests", "--force", "--reason", "why", "--no-prefect", "--json")
    assert json.loads(invoke("promote", "tiny", *options).stdout) == outcome
    assert invoke("rollback", "tiny").stdout.strip() == "tiny: version 1 is champion again, not 2"
    options = ("--to", 1, "--reason", "why", "--no-prefect", "--json")
    assert json.loads(invoke("rollback", "tiny", *options).stdout)["champion"] == "1"
    assert asked == [
        ("tiny", "", False, False, "", False),
        ("tiny", "2", True, True, "why", True),
        ("tiny", "", "", False),
        ("tiny", "1", "why", True),
    ]


@pytest.mark.parametrize("served", ["", "http://127.0.0.1:1/api"])
def test_champions_change_in_a_flow_run_if_there_is_a_server_and_here_otherwise(monkeypatch, home, served):
    asked = []

    def take(where):
        return lambda *given, **named: asked.append((where, given, named)) or Move("tiny", "1", "2", "why")

    monkeypatch.setenv("PREFECT_API_URL", served)
    monkeypatch.setattr("flows.servers.prefect_api.orchestration", nullcontext)
    monkeypatch.setattr("flows.servers.services.connect_mlflow", lambda: asked.append("connect"))
    for name in ("promote", "rollback"):
        monkeypatch.setattr(f"flows.promote.{name}", take("flow"))
    monkeypatch.setattr("tasks.tracking.promotion.promote_version", take("here"))
    monkeypatch.setattr("tasks.tracking.registry.rollback", take("here"))
    assert vars(promote._promote("tiny", "2", True, False, "why", False)) == vars(Move("tiny", "1", "2", "why"))
    promote._rollback("tiny", "1", "why", False)
    options = PromotionOptions(force=False, new_tests=True, reason="why")
    here = ["connect", ("here", ("tiny", "2", options), {}), "connect", ("here", ("tiny", "1", "why"), {})]
    named = {"model": "tiny", "version": "2", "new_tests": True, "force": False, "reason": "why"}
    flow = [("flow", (), named), ("flow", (), {"model": "tiny", "to": "1", "reason": "why"})]
    assert asked == (flow if served else here)
    asked.clear()
    promote._promote("tiny", "2", True, False, "why", True)
    promote._rollback("tiny", "1", "why", True)
    assert asked == here


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
        (["rollback", "tiny"], "is its first champion: there is none to return to"),
        (["rollback", "nobody"], "no model 'nobody'; it has: tiny"),
        (["rollback", "nobody", "--list"], "no model 'nobody'; it has: tiny"),
    ],
)
def test_user_error_is_one_message_with_a_remedy(finished, words, message):
    result = invoke(*words, code=1)
    assert message in result.stderr.replace("\n", " ")
    assert result.stdout == ""
