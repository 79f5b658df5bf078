"""`starling models` and `starling runs`."""

import json
from datetime import UTC, datetime

import pytest
from command_line import invoke
from support import give_mlflow

from tasks.tracking.listing import TrackedRun

pytestmark = pytest.mark.usefixtures("wide")


def test_registered_model_is_listed_with_aliases_and_error_rate(finished):
    shown = invoke("models").stdout
    assert "tiny" in shown
    assert "@challenger @champion" in shown
    assert "test " in shown
    (found,) = json.loads(invoke("models", "tiny", "--json").stdout)["versions"]
    assert (found["model"], found["version"], found["aliases"]) == ("tiny", "1", ["challenger", "champion"])
    assert found["wer"] == {"test": pytest.approx(finished.result("score").record["sets"]["test"]["wer"])}
    assert "the registry has no model 'tini'; it has: tiny" in invoke("models", "tini", code=1).stderr


def test_run_is_listed_with_error_rate_and_outcome(finished):
    (found,) = json.loads(invoke("runs", "--json").stdout)["runs"]
    assert (found["name"], found["experiment"], found["status"]) == ("tiny-run", "tiny", "finished")
    assert found["wer"] == {"test": pytest.approx(finished.result("score").record["sets"]["test"]["wer"])}
    assert found["decision"] == "there was no champion"
    shown = invoke("runs", "tiny", "-n", 5).stdout
    assert "tiny-run" in shown
    assert "there was no champion" in shown


def test_empty_lists_name_the_next_step(home):
    give_mlflow(home)
    assert "`starling run demo` registers one" in invoke("models").stderr
    assert "has no run of x yet: `starling run` makes one" in invoke("runs", "x").stderr


@pytest.mark.parametrize("width", [80, 120])
def test_names_are_not_cut_in_a_narrow_terminal(finished, monkeypatch, width):
    monkeypatch.setattr("flows.cli.common.out.width", width, raising=False)
    name = "a-rather-long-name-20261125-023017-91968"
    row = TrackedRun(name, "tiny", "finished", datetime.now(UTC), 139.0, {"test": 0.5}, "there was no champion")
    monkeypatch.setattr("tasks.tracking.listing.list_runs", lambda *_: [row])
    shown = invoke("runs").stdout
    first = "".join(line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│"))
    assert first == name
    assert (name in shown) == (width == 120)
    assert "champion" in shown
