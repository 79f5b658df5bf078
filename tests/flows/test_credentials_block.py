"""A real Prefect server stores the block and another process loads it: the secret appears nowhere else."""

import os
import subprocess
import sys

import pytest
from support import ROOT, environment

from flows.servers.services import start_prefect
from tasks.config.credentials import CredentialsError, export_credentials
from tasks.config.pipeline import StorageConfig

SAVE = """
from tasks.config.credentials_block import StorageCredentials
StorageCredentials(access_key_id="planted-key", secret_access_key="planted-secret", region="x").save("lab")
"""
LOAD = """
import os
from tasks.config.pipeline import StorageConfig
from tasks.config.credentials import export_credentials
export_credentials(StorageConfig(credentials="lab"))
print(sorted(name for name in os.environ if name.startswith("AWS_")), len(os.environ["AWS_SECRET_ACCESS_KEY"]))
"""


@pytest.mark.slow
def test_block_on_a_server_reaches_the_environment_of_a_process(home):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PREFECT_"))}
    with environment(PREFECT_API_URL=None):
        server = start_prefect()
    try:
        server.wait()
        clean |= {"PREFECT_API_URL": f"{server.url}/api", "STARLING_HOME": str(home)}
        outputs = [
            subprocess.run(
                [sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=120
            )
            for code in (SAVE, LOAD)
        ]
    finally:
        server.stop()
    assert [done.returncode for done in outputs] == [0, 0], [done.stderr[-2000:] for done in outputs]
    names = ["AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION", "AWS_SECRET_ACCESS_KEY"]
    assert outputs[1].stdout.strip().splitlines()[-1] == f"{names} 14"
    texts = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    texts += [f"{done.stdout}{done.stderr}".encode() for done in outputs]
    assert not any(b"planted-secret" in text for text in texts)  # Prefect's database has it encrypted


@pytest.mark.slow
def test_error_without_a_server_names_the_requirement(monkeypatch):
    monkeypatch.setattr("tasks.config.credentials._loaded", set())
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
    with pytest.raises(CredentialsError, match="PREFECT_API_URL"):
        export_credentials(StorageConfig(credentials="nowhere"))
