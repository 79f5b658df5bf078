import base64
import io
import json
import logging
import sys

import pytest

from training.processes.logs import HIDDEN, JsonFormatter, PlainFormatter, fields, redact


@pytest.fixture
def secrets(monkeypatch):
    planted = {
        "AWS_SECRET_ACCESS_KEY": "planted/aws+secret",
        "PREFECT_API_AUTH_STRING": "admin:planted-prefect",
        "MLFLOW_TRACKING_PASSWORD": "planted-mlflow",
        "STARLING_NOTIFY_URL": "https://hooks.example.com/planted",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    return planted


def lines(formatter, *calls):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLogger("tests.log_lines")
    logger.propagate, logger.handlers = False, [handler]
    logger.setLevel(logging.INFO)
    for message, *arguments in calls:
        logger.info(message, *arguments)
    return stream.getvalue().splitlines()


def test_no_value_of_a_secret_variable_is_logged(secrets):
    for value in secrets.values():
        for formatter in (JsonFormatter(), PlainFormatter("%(message)s")):
            text = "\n".join(lines(formatter, ("given %s, and that was all", value)))
            assert "planted" not in text
            assert HIDDEN in text
    token = base64.b64encode(b"admin:planted-prefect").decode()
    assert token not in redact(f"sent {token}")
    assert redact("only planted-prefect was said") == f"only {HIDDEN} was said"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://prefect:hunter2hunter@db:5432/prefect", f"postgresql://{HIDDEN}@db:5432/prefect"),
        ("Authorization: Basic YWJjOmRlZg==", f"Authorization: Basic {HIDDEN}"),
        ("http://s3/b?X-Amz-Signature=abc123&x=1", f"http://s3/b?X-Amz-Signature={HIDDEN}&x=1"),
        ("http://127.0.0.1:4200/api and a:b@c", "http://127.0.0.1:4200/api and a:b@c"),
    ],
)
def test_credentials_are_removed_from_addresses_and_headers(text, shown):
    assert redact(text) == shown


def test_names_of_secret_files_are_not_redacted(monkeypatch):
    monkeypatch.setenv("STARLING_SECRETS", "/data/secrets")
    monkeypatch.setenv("STARLING_RING_KEY_FILE", "/data/ring.key")
    monkeypatch.setenv("SHORT_TOKEN", "a")
    text = "a key of /data/secrets, /data/ring.key"
    assert redact(text) == text


def test_log_line_is_a_json_object_with_the_fields_of_its_block():
    with fields(run="r-1", stage="shard"):
        (inside,) = lines(JsonFormatter(), ("three\nlines %s", "é"))
    (outside,) = lines(JsonFormatter(), ("after",))
    entry = json.loads(inside)
    assert (entry["run"], entry["stage"], entry["level"], entry["message"]) == (
        "r-1",
        "shard",
        "INFO",
        "three\nlines é",
    )
    assert entry["time"].endswith("+00:00")
    assert "stage" not in json.loads(outside)


def test_an_error_has_its_traceback_without_secrets(secrets):
    try:
        raise ValueError("planted-mlflow was wrong")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    entry = json.loads(JsonFormatter().format(record))
    assert entry["error"] == "ValueError"
    assert "Traceback" in entry["traceback"]
    assert "planted" not in json.dumps(entry)
