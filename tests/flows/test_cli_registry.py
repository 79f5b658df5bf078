"""Options of `starling promote` and `starling rollback` reach the functions that they configure."""

import json
from contextlib import contextmanager
from datetime import datetime

import pytest
from command_line import invoke
from support import tiny_document, write_config

from tasks.tracking.registry import Move
from tasks.tracking.significance import PromotionOptions

pytestmark = pytest.mark.usefixtures("wide")
SINCE = "2026-11-25T02:51:43+00:00"


# --- the registry


@pytest.fixture
def no_server(home, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture
def served(home, monkeypatch):
    """As if a Prefect server were running."""

    @contextmanager
    def orchestration(*_):
        yield "http://prefect"

    monkeypatch.setenv("PREFECT_API_URL", "http://prefect/api")
    monkeypatch.setattr("flows.servers.prefect_api.orchestration", orchestration)


FOUND = {"model": "m", "version": "3", "promoted": False, "reason": "it is [red]worse"}


@pytest.mark.parametrize(
    ("words", "version", "options"),
    [
        ([], "", PromotionOptions()),
        (["--version", "3"], "3", PromotionOptions()),
        (["--new-tests"], "", PromotionOptions(new_tests=True)),
        (["-v", "2", "--force", "--reason", "why not"], "2", PromotionOptions(force=True, reason="why not")),
    ],
)
def test_promote_options_select_version_and_mode(recorder, no_server, words, version, options):
    calls = recorder("tasks.tracking.promotion.promote_version", FOUND)
    shown = invoke("promote", "m", *words).stdout
    assert calls == [("m", version, options)]
    assert "m version 3: not promoted" in shown
    assert "it is [red]worse" in shown
    assert json.loads(invoke("promote", "m", *words, "--json").stdout) == FOUND


def test_model_name_comes_from_the_configuration_unless_given(recorder, no_server, tmp_path):
    config = write_config(tmp_path / "c.yaml", tiny_document(register={"model": "theirs"}))
    calls = recorder("tasks.tracking.promotion.promote_version", FOUND | {"promoted": True})
    assert "version 3: champion" in invoke("promote", "--config", config).stdout
    invoke("promote", "mine", "--config", config)
    assert [call[0] for call in calls] == ["theirs", "mine"]


def test_promotions_and_rollbacks_are_flows_if_prefect_runs(recorder, served):
    flows = recorder("flows.promote.promote", FOUND), recorder("flows.promote.rollback", {"champion": 1, "replaced": 2})
    plain = (
        recorder("tasks.tracking.promotion.promote_version", FOUND),
        recorder("tasks.tracking.registry.rollback", Move(*"mabc")),
    )
    invoke("promote", "m", "-v", "3", "--new-tests", "--force", "--reason", "r")
    invoke("rollback", "m", "--to", "1", "--reason", "s")
    assert flows[0] == [({"model": "m", "version": "3", "new_tests": True, "force": True, "reason": "r"},)]
    assert flows[1] == [({"model": "m", "to": "1", "reason": "s"},)]
    assert plain == ([], [])
    invoke("promote", "m", "--no-prefect")
    invoke("rollback", "m", "--no-prefect")
    assert [len(calls) for calls in (*flows, *plain)] == [1, 1, 1, 1]


def test_rollback_names_the_restored_champion(recorder, no_server):
    calls = recorder("tasks.tracking.registry.rollback", Move("m", "2", "5", "numbers are misheard"))
    shown = invoke("rollback", "m", "--to", "2", "--reason", "numbers").stdout
    assert calls == [("m", "2", "numbers")]
    assert shown == "m: version 2 is champion again, not 5\n"
    moved = json.loads(invoke("rollback", "m", "--json").stdout)
    assert moved == {"name": "m", "champion": "2", "replaced": "5", "reason": "numbers are misheard"}


def test_history_shows_why_a_version_was_rolled_back(recorder, no_server, monkeypatch):
    entry = {"version": "2", "aliases": ["champion"], "champion_since": SINCE, "replaced": "1", "decision": "beats"}
    versions = [
        entry | {"rolled_back": ""},
        entry | {"champion_since": None} | {"version": "3", "aliases": [], "rolled_back": "it was worse"},
    ]
    recorder("tasks.tracking.runs.client")
    recorder("tasks.tracking.registry.history", versions)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in invoke("rollback", "m", "--list").stdout.split("\n")
    ]
    assert [row for row in rows if row] == [
        ["2", "@champion", f"{datetime.fromisoformat(SINCE).astimezone():%Y-%m-%d %H:%M}", "1", "beats"],
        ["3", "", "", "1", "rolled back: it was worse"],
    ]
