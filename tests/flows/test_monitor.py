"""The flow and the command `monitor`: what they pass on, their states and exit status."""

import json
import logging

import pytest
from command_line import invoke
from support import tiny_document, write_config

from flows import monitor as flow
from flows.deploy.automations import NOTIFIED_EVENTS, QUIET_STATES
from tasks.config.pipeline import MonitorConfig, parse_config
from tasks.orchestration.events import RECOGNITION_CHANGED
from tasks.tracking import monitoring
from tasks.tracking.monitoring import MeasureComparison, MonitorReport
from tasks.tracking.registry import RegistryError

ENTRY = MeasureComparison("confidence", 200, 300, 0.45, 0.002, 0.7, 0.9, True)
REPORTS = {
    "Changed": MonitorReport("m", "Changed", "not as on the test sets", "3", comparisons=[ENTRY]),
    "Unchanged": MonitorReport("m", "Unchanged", "as on the test sets", "3", hours=[]),
    "TooFew": MonitorReport("m", "TooFew", "too few", "3"),
    "Empty": MonitorReport("m", "Empty", "no log"),
}


@pytest.fixture
def asked(monkeypatch):
    """What `monitor_model` is asked; it gives the report of the model's name."""
    calls = []

    def answer(name, settings):
        calls.append((name, settings))
        return REPORTS.get(name, REPORTS["Empty"])

    monkeypatch.setattr(monitoring, "monitor_model", answer)
    monkeypatch.setattr(flow, "monitor_model", answer)
    return calls


@pytest.fixture
def shown(monkeypatch):
    tables = []
    monkeypatch.setattr(flow, "create_table_artifact", lambda **fields: tables.append(fields))
    monkeypatch.setattr(flow, "get_run_logger", lambda: logging.getLogger("test"))
    return tables


@pytest.mark.parametrize("outcome", REPORTS)
def test_the_state_of_a_run_is_its_outcome(asked, shown, outcome):
    state = flow.monitor.fn(model=outcome)
    assert (state.name, state.message) == (outcome, REPORTS[outcome].message)
    assert outcome in QUIET_STATES
    (table,) = shown
    assert table["table"]
    assert table["key"] == "m-monitor"


def test_the_flow_watches_the_configurations_model_as_it_says(asked, shown):
    config = parse_config(tiny_document(register={"model": "theirs"}, monitor={"hours": 3, "logs": ["/x"]}))
    flow.monitor.fn(config)
    flow.monitor.fn(config, model="other", settings=MonitorConfig(hours=5))
    (name, first), (other, second) = asked
    assert (name, first.hours, first.logs) == ("theirs", 3, ("/x",))
    assert (other, second.hours) == ("other", 5)
    with pytest.raises(RegistryError, match="no model given"):
        flow.monitor.fn()


def test_changes_are_notified():
    assert RECOGNITION_CHANGED in NOTIFIED_EVENTS


@pytest.mark.parametrize(("outcome", "code"), [("Changed", 3), ("Unchanged", 0), ("TooFew", 0), ("Empty", 0)])
def test_exit_status_tells_a_change(asked, home, outcome, code):
    printed = json.loads(invoke("monitor", outcome, "--no-prefect", "--json", code=code).stdout)
    assert printed["outcome"] == outcome
    assert REPORTS[outcome].message in invoke("monitor", outcome, "--no-prefect", code=code).stdout


def test_options_replace_the_configurations(asked, home, tmp_path):
    config = write_config(tmp_path / "c.yaml", tiny_document(monitor={"hours": 3, "utterances": 50}))
    for name in "ab":
        (tmp_path / name).mkdir()
    invoke("monitor", "--config", config, "--log", tmp_path / "a", "--log", tmp_path / "b", "--no-prefect")
    ((name, settings),) = asked
    assert (name, settings.hours, settings.utterances) == ("tiny", 3, 50)
    assert settings.logs == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert "no model given" in invoke("monitor", code=1).stderr
    assert "--log" in invoke("monitor", "m", "--log", tmp_path / "c", code=1).stderr
    assert "hours" in invoke("monitor", "m", "--hours", 0, code=1).stderr
