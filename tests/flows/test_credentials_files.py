"""Passwords of the production profile: created once, private, and given only to the servers that need them."""

import json
import os

import pytest

from flows.servers import services
from flows.servers.credentials import NAMES, RING_KEY, SecretError, client_environment, make_secrets, read_secret
from training.processes.keys import RingKey

VARIABLES = (
    *("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"),
    "STARLING_STUDIES_PASSWORD",
)
STUDIES = "postgresql+psycopg2://studies@127.0.0.1:4/studies"


@pytest.fixture
def secrets(tmp_path):
    folder = tmp_path / "secrets"
    make_secrets(folder)
    return folder


def test_each_secret_is_created_once_readable_by_its_owner_only(secrets):
    before = {name: (secrets / name).read_text() for name in NAMES}
    assert all(len(text) >= 20 for text in before.values())
    assert len(set(before.values())) == len(NAMES)
    assert before["prefect_auth"].startswith("starling:")
    RingKey.load(secrets / RING_KEY)
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in secrets.iterdir()} == {0o600}
    assert make_secrets(secrets) == []
    assert {name: (secrets / name).read_text() for name in NAMES} == before


def test_secrets_are_never_readable_by_other_users(tmp_path, monkeypatch):
    """Each file has its mode from the start, independent of the umask."""
    seen, real = {}, os.open

    def opened(*words, **more):
        descriptor = real(*words, **more)
        status = os.fstat(descriptor)
        seen[status.st_ino] = status.st_mode & 0o777
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    before = os.umask(0)
    try:
        make_secrets(tmp_path / "secrets", for_containers=True)
    finally:
        os.umask(before)
    assert {seen[(tmp_path / "secrets" / name).stat().st_ino] for name in NAMES} == {0o600}
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700


def test_only_a_removed_secret_is_created_again(secrets):
    (secrets / "prefect_auth").unlink()
    assert make_secrets(secrets) == ["prefect_auth"]


def test_secret_files_are_readable_but_their_folder_is_private(secrets):
    make_secrets(secrets, for_containers=True)
    assert {path.stat().st_mode & 0o777 for path in secrets.iterdir()} == {0o444}
    assert read_secret(secrets, "prefect_auth")
    secrets.chmod(0o755)
    with pytest.raises(SecretError, match="chmod 600"):
        read_secret(secrets, "prefect_auth")
    with pytest.raises(SecretError, match="chmod 700"):
        make_secrets(secrets)


def test_missing_or_empty_secret_is_named_with_a_remedy(secrets):
    (secrets / "s3_access_key").unlink()
    with pytest.raises(SecretError, match=r"s3_access_key is missing: `starling secrets"):
        client_environment(secrets)
    (secrets / "s3_access_key").write_text("\n")
    (secrets / "s3_access_key").chmod(0o600)
    with pytest.raises(SecretError, match="empty"):
        client_environment(secrets)


@pytest.fixture
def note(home, secrets, monkeypatch):
    """The note of servers that a production `starling up` writes."""
    names = (*VARIABLES, "AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "MLFLOW_TRACKING_USERNAME", "STARLING_OBJECTS")
    names = (*names, "STARLING_STUDIES")
    for name in (*names, "PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")  # what a test exports is taken back with it
        monkeypatch.delenv(name)
    home.mkdir()
    servers = {"prefect": "http://127.0.0.1:1", "mlflow": "http://127.0.0.1:2", "s3": "http://127.0.0.1:3"}
    more = {"AWS_ENDPOINT_URL": "http://127.0.0.1:3", "STARLING_OBJECTS": "s3://starling/objects"}
    more |= {"STARLING_STUDIES": STUDIES}
    text = json.dumps(servers | {"secrets": str(secrets), "environment": more})
    services.note_path().write_text(text)
    return secrets


def test_command_on_the_data_folder_gets_the_passwords(note):
    services.export_credentials()
    assert os.environ["PREFECT_API_AUTH_STRING"] == read_secret(note, "prefect_auth")
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == read_secret(note, "mlflow_admin_password")
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == read_secret(note, "s3_secret_key")
    assert os.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:3"
    assert os.environ["STARLING_STUDIES"] == STUDIES
    assert os.environ["STARLING_STUDIES_PASSWORD"] == read_secret(note, "studies_database_password")
    from tasks.config.home import objects_url

    assert objects_url("") == "s3://starling/objects"
    assert objects_url("s3://other/x") == "s3://other/x"


@pytest.mark.parametrize(
    ("name", "value", "withheld"),
    [
        ("PREFECT_API_URL", "https://prefect.example.com/api", "PREFECT_API_AUTH_STRING"),
        ("MLFLOW_TRACKING_URI", "https://mlflow.example.com", "MLFLOW_TRACKING_PASSWORD"),
        ("AWS_ENDPOINT_URL", "https://s3.example.com", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_ACCESS_KEY_ID", "of another store", "AWS_SECRET_ACCESS_KEY"),
        ("STARLING_STUDIES", "postgresql+psycopg2://me@db.example.com/studies", "STARLING_STUDIES_PASSWORD"),
    ],
)
def test_no_password_is_sent_to_other_servers(note, monkeypatch, name, value, withheld):
    monkeypatch.setenv(name, value)
    services.export_credentials()
    assert withheld not in os.environ
    assert sum(variable in os.environ for variable in VARIABLES) == len(VARIABLES) - 1


def test_configured_addresses_of_our_servers_get_the_passwords(note, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:3")
    monkeypatch.setenv("STARLING_STUDIES", STUDIES)
    services.export_credentials()
    assert set(VARIABLES) <= set(os.environ)


def test_nothing_is_exported_without_note_or_passwords(note):
    (note / "prefect_auth").unlink()
    services.export_credentials()
    services.note_path().write_text(json.dumps({"prefect": "http://127.0.0.1:1"}))
    services.export_credentials()
    services.note_path().unlink()
    services.export_credentials()
    assert not set(VARIABLES) & set(os.environ)
