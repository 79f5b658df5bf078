"""`starling models` and `starling runs`."""

import json
from datetime import UTC, datetime

import pytest
from command_line import invoke
from support import give_mlflow

from tasks.figures import LEARN_MORE
from tasks.tracking.listing import RegisteredVersion, TrackedRun

pytestmark = pytest.mark.usefixtures("wide")


def test_registered_model_is_listed_with_aliases_and_error_rate(finished):
    shown = invoke("models").stdout
    assert "tiny" in shown
    assert "@challenger @champion" in shown
    assert "test " in shown
    (version,) = json.loads(invoke("models", "tiny", "--json").stdout)["versions"]
    assert (version["model"], version["version"], version["aliases"]) == ("tiny", "1", ["challenger", "champion"])
    assert version["wer"] == {"test": pytest.approx(finished.result("score").record["sets"]["test"]["wer"])}
    assert "the registry has no model 'tini'; it has: tiny" in invoke("models", "tini", code=1).stderr


def test_run_is_listed_with_error_rate_and_outcome(finished):
    runs = json.loads(invoke("runs", "--json").stdout)["runs"]
    (run,) = [entry for entry in runs if entry["name"] == "tiny-run"]  # others of this process may have added runs
    assert (run["name"], run["experiment"], run["status"]) == ("tiny-run", "tiny", "finished")
    assert run["wer"] == {"test": pytest.approx(finished.result("score").record["sets"]["test"]["wer"])}
    assert run["decision"] == "became champion: there was none before"
    assert 0 <= run["training_seconds"] <= finished.result("train").record["result"]["elapsed"]
    shown = invoke("runs", "tiny", "-n", 50).stdout
    assert "tiny-run" in shown
    assert "became champion: there was none before" in shown


def test_list_has_decisions_without_their_remedies(monkeypatch):
    decision = f"stays challenger: it has learned nothing yet. {LEARN_MORE}. `starling promote tiny --force`"
    row = RegisteredVersion("tiny", "1", (), {}, datetime.now(UTC), decision)
    monkeypatch.setattr("flows.cli.listing._connected", lambda: None)
    monkeypatch.setattr("tasks.tracking.listing.list_versions", lambda *_: [row])
    shown = invoke("models").stdout
    assert "it has learned nothing yet" in shown
    assert "--force" not in shown


def test_empty_lists_name_the_next_step(home):
    give_mlflow(home)
    assert "`starling run demo` registers one" in invoke("models").stderr
    assert "has no run of x yet: `starling run` makes one" in invoke("runs", "x").stderr


def terminal(monkeypatch, width):
    """Take standard output for a terminal of some columns."""
    monkeypatch.setattr("flows.cli.common.out._force_terminal", True)
    monkeypatch.setattr("flows.cli.common.out.width", width, raising=False)


def test_a_pipe_gets_every_row_on_one_line_with_all_columns(finished, monkeypatch):
    monkeypatch.setattr("flows.cli.common.out.width", 80, raising=False)
    outcome = "became champion: " + 10 * "there was none before "
    row = TrackedRun(NAME, "tiny", "finished", datetime.now(UTC), 139.0, {"test": 0.5}, outcome.strip())
    monkeypatch.setattr("tasks.tracking.listing.list_runs", lambda *_: [row])
    result = invoke("runs")
    [line] = [line for line in result.stdout.splitlines() if NAME in line]
    assert outcome.strip() in line
    assert result.stderr == ""


@pytest.mark.parametrize("width", [80, 100, 250])
def test_layouts_and_downloads_have_no_broken_words(monkeypatch, width):
    terminal(monkeypatch, width)
    result = invoke("corpus", "list")
    assert "…" not in result.stdout.replace("split, …", "").replace("mp3, …", "")
    assert "mls_LANGUAGE/{train,dev,test}/transcripts.txt" in result.stdout
    assert "SPEAKER-CHAPTER.trans.txt" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= width
    assert ("not shown in 80 columns: options" in result.stderr) == (width == 80)


NAME = "a-rather-long-name-20261125-023017-91968"


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (30, ["run", "status", "WER"]),
        (80, ["run", "status", "logged", "WER"]),
        (120, ["run", "status", "logged", "training", "WER", "decision"]),
    ],
)
def test_name_of_a_run_is_on_one_line_and_other_columns_make_room(finished, monkeypatch, width, heads):
    terminal(monkeypatch, width)
    row = TrackedRun(
        NAME, "tiny", "finished", datetime.now(UTC), 139.0, {"test": 0.5}, "became champion: there was none before"
    )
    monkeypatch.setattr("tasks.tracking.listing.list_runs", lambda *_: [row])
    result = invoke("runs")
    lines = result.stdout.splitlines()
    assert [head.strip() for head in lines[1].strip("┃").split("┃")] == heads
    assert NAME in result.stdout
    assert "50.00 %" in result.stdout
    assert max(map(len, lines)) <= max(width, len(NAME) + 30)
    assert ("decision" in result.stderr) == ("decision" not in heads)


def test_name_of_a_model_is_on_one_line(finished, monkeypatch):
    terminal(monkeypatch, 80)
    row = RegisteredVersion(NAME, "1", ("champion", "challenger"), {"test": 0.5}, datetime.now(UTC), "a [b] reason")
    monkeypatch.setattr("tasks.tracking.listing.list_versions", lambda *_: [row])
    result = invoke("models")
    assert NAME in result.stdout
    assert "@champion" in result.stdout
    assert "not shown in 80 columns: decision" in result.stderr
    terminal(monkeypatch, 160)
    assert "a [b] reason" in invoke("models").stdout
