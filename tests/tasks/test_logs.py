"""Logs without secrets, and for programs on request: every line of standard error is then a JSON object."""

import io
import json
import logging
from types import SimpleNamespace
from uuid import uuid4

import pytest
from mlflow.exceptions import MlflowException
from support import load_beside, starling, tiny_document, wait_until, write_config

from tasks.orchestration.logs import JsonConsole, install, secrets_kept

PLANTED = "planted-secret-value"
IN_URL = "http://somebody:hunter2@host/path"


def objects(text):
    return [json.loads(line) for line in text.splitlines()]


def test_log_format_is_unchanged_by_default(monkeypatch):
    monkeypatch.delenv("STARLING_LOG", raising=False)
    assert not install()


def test_error_of_a_command_is_a_json_object(home):
    done = starling("deploy", "--print", "--config", "missing.yaml", home=home, check=False, STARLING_LOG="json")
    assert done.returncode == 1
    lines = objects(done.stderr)
    assert any("missing.yaml" in line["message"] for line in lines)


def lines(handler, stream):
    """What a handler writes of a message, and of an error, with a secret in it."""
    logger = logging.getLogger("tests.careless")
    logger.propagate = False
    logger.addHandler(handler)
    try:
        logger.warning("the key is %s at %s", PLANTED, IN_URL)
        try:
            raise ValueError(f"no entry with {PLANTED}")
        except ValueError:
            logger.exception("it was %s", PLANTED)
    finally:
        logger.removeHandler(handler)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["plain", "prefect", "json", "another library's records"])
def test_no_handler_writes_a_secret(monkeypatch, kind):
    from prefect.logging.handlers import PrefectConsoleHandler

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED)
    before = logging.getLogRecordFactory()
    theirs = type("Theirs", (logging.LogRecord,), {})
    logging.setLogRecordFactory(theirs if kind.startswith("another") else logging.LogRecord)
    stream = io.StringIO()
    made = {"prefect": PrefectConsoleHandler, "json": JsonConsole}.get(kind, logging.StreamHandler)(stream)
    try:
        install()
        install()
        text = lines(made, stream)
        assert issubclass(logging.getLogRecordFactory(), theirs) == kind.startswith("another")
    finally:
        logging.setLogRecordFactory(before)
    assert PLANTED not in text
    assert "hunter2" not in text
    assert text.count("***") >= 4
    assert "Traceback" in text


def test_records_sent_to_prefect_contain_no_secret(monkeypatch):
    from prefect.logging.handlers import APILogHandler

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED)
    install()
    record = logging.getLogger("tests").makeRecord("tests", logging.INFO, "", 0, "the key is %s", (PLANTED,), None)
    record.flow_run_id = str(uuid4())
    assert APILogHandler().prepare(record)["message"] == "the key is ***"


@pytest.mark.parametrize(
    "error",
    [ValueError(f"no entry with {PLANTED}"), MlflowException(f"API request to {IN_URL} failed"), OSError(5, PLANTED)],
)
def test_error_raised_by_a_stage_contains_no_secret(monkeypatch, error):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED)
    with pytest.raises(type(error)) as raised, secrets_kept():
        raise error
    assert raised.value is error
    assert "***" in str(error)
    assert not any(secret in str(error) for secret in (PLANTED, "hunter2"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prefect_stores_no_secret_of_a_flows_logs_or_error(tmp_path, monkeypatch):
    from prefect import flow
    from prefect.logging import get_run_logger
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tasks.orchestration import stage_tasks

    def careless(run):
        get_run_logger().info("the key is %s at %s", PLANTED, IN_URL)
        raise ValueError(f"no entry with {PLANTED}")

    site_module = load_beside(__file__, "../flows/prefect_site.py")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED)
    run = SimpleNamespace(config=SimpleNamespace(name="careless"))
    monkeypatch.setattr(stage_tasks, "_runs", {"r": run})
    stage = stage_tasks.stage_task(SimpleNamespace(name="prepare", execute=careless))
    with site_module.prefect_site((tmp_path / "server").resolve()) as site:
        with temporary_settings({PREFECT_API_URL: site.api}), pytest.raises(ValueError, match="no entry"):
            flow(name="careless")(lambda: stage("r"))()

        def server_logs():
            entries = site.get("logs/filter", {})
            return entries if any("Finished in state" in entry["message"] for entry in entries) else None

        texts = [json.dumps(wait_until(server_logs))]
        texts += [json.dumps(site.get(f"{kind}/filter", {})) for kind in ("flow_runs", "task_runs", "artifacts")]
        events = site.get("events/filter", {"filter": {}})
        texts += [json.dumps(events)]
    assert "the key is *** at http://***@host/path" in texts[0]
    assert "no entry with ***" in texts[1]
    assert not any(secret in text for text in texts for secret in (PLANTED, "hunter2"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_logs_json_with_ids_and_without_secrets(home, tmp_path):
    config = write_config(tmp_path / "tiny.yaml", tiny_document())
    planted = {"AWS_SECRET_ACCESS_KEY": "planted-secret-value", "STARLING_LOG": "json"}
    done = starling("run", config, "--json", home=home, timeout=500, **planted)
    summary = json.loads(done.stdout.splitlines()[-1])
    lines = objects(done.stderr)
    staged = [line for line in lines if line["message"].startswith("shard:")]
    assert staged
    assert staged[0]["task_run_name"].startswith("shard")
    assert all(line["flow_run_id"] for line in staged)
    assert {line["run"] for line in lines if "stage" in line} <= {summary["run_id"]}
    texts = [path.read_bytes() for path in (home / "logs").rglob("*") if path.is_file()]
    texts += [path.read_bytes() for path in (home / "work").rglob("*.log")]
    assert not any(b"planted-secret-value" in text for text in [*texts, done.stdout.encode(), done.stderr.encode()])
