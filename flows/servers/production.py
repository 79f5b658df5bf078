"""The production profile: the topology of docker-compose.yml as plain processes, with files in the data folder.

PostgreSQL for Prefect, MLflow and searches, an S3 server, the Prefect server, an MLflow server that stores artifacts on
S3, and workers. All servers listen on loopback, require a password, and are restarted when they die.
"""

import importlib.util
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configurable.extras import install_remedy
from flows.servers.credentials import ADMIN, client_environment, make_secrets, read_secret, secrets_folder
from flows.servers.postgres import STUDIES, PostgresCluster
from flows.servers.services import LOOPBACK, Service, ServiceError, free_port, prefect_environment, spawn, start_prefect
from flows.servers.supervisor import Supervisor
from tasks.config.home import home

BUCKETS = ("starling", "mlflow")
OBJECTS = "s3://starling/objects"
"""Default location of stage outputs."""
ARTIFACTS = "s3://mlflow/artifacts"
"""Location of MLflow's artifacts; clients access them only through the MLflow server."""
REGION = "us-east-1"
RESTARTS = 8
STORES = 2
"""Number of servers that `start_stores` starts; the other servers depend on them."""
_NEEDED = {"psycopg2": "psycopg2-binary", "flask_wtf": "flask-wtf", "boto3": "boto3"}


@dataclass(frozen=True)
class Ports:
    """Ports on loopback; 0 takes a free one."""

    prefect: int = 4200
    mlflow: int = 5000
    postgres: int = 5433
    s3: int = 8333

    def chosen(self) -> "Ports":
        """These ports with each 0 replaced by a free port."""
        return Ports(*(port or free_port() for port in (self.prefect, self.mlflow, self.postgres, self.s3)))


def postgres_folder() -> Path:
    """Folder of PostgreSQL's files; it exists if the production profile was used."""
    return home() / "postgres"


def check_packages() -> None:
    """Check that the packages of the production profile are installed.

    Raises:
        ServiceError: If one is missing; the message says how to install it.
    """
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ServiceError(f"the production profile needs {', '.join(missing)}: {install_remedy('production')}")
    find_rclone()


def find_rclone() -> str:
    """Path of the S3 server's program.

    Raises:
        ServiceError: If it is not installed.
    """
    beside = Path(sys.executable).with_name("rclone")
    path = str(beside) if beside.exists() else shutil.which("rclone")
    if path is None:
        raise ServiceError(f"rclone, which serves S3, is not installed: {install_remedy('production')}")
    return path


def start_s3(port: int, secrets: Path) -> Service:
    """Start an S3 server on the folder `s3` of the data folder; its subfolders are the buckets."""
    root = home() / "s3"
    for bucket in BUCKETS:
        (root / bucket).mkdir(parents=True, exist_ok=True)
    health = f"tcp://{LOOPBACK}:{port}"
    command = [find_rclone(), "serve", "s3", "--config", os.devnull, "--addr", f"{LOOPBACK}:{port}", str(root)]
    key, secret = read_secret(secrets, "s3_access_key"), read_secret(secrets, "s3_secret_key")
    # the option is a CSV list; the quotes keep key and secret in one element
    return spawn("s3", command, f"http://{LOOPBACK}:{port}", health, {"RCLONE_AUTH_KEY": f'"{key},{secret}"'})


def make_buckets(patience_s: float = 60.0) -> None:
    """Create missing buckets on the S3 server configured in the environment.

    Args:
        patience_s: How long to wait for a server that is starting.

    Raises:
        ServiceError: If the server refuses, or does not answer in time.
    """
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import get_session

    settings = Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=20, retries={"max_attempts": 0})
    client = get_session().create_client("s3", region_name=REGION, config=settings)
    deadline = time.monotonic() + patience_s
    for bucket in BUCKETS:
        while True:
            try:
                client.create_bucket(Bucket=bucket)
                break
            except ClientError as error:
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                if error.response["Error"]["Code"] in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    break
                if status < 500 or time.monotonic() > deadline:
                    raise ServiceError(f"the S3 server does not create the bucket {bucket}: {error}") from error
            except BotoCoreError as error:
                if time.monotonic() > deadline:
                    raise ServiceError(f"the S3 server does not answer: {error}") from error
            time.sleep(0.5)


def s3_environment(url: str) -> dict[str, str]:
    """Environment of the S3 server's clients, without its keys."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": REGION,
        # not every server supports the checksums that newer clients send and require
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }


def prefect_database(cluster: PostgresCluster) -> dict[str, str]:
    """The Prefect server's environment: its database, and the password of its API."""
    auth = read_secret(cluster.secrets, "prefect_auth")
    return {
        "PREFECT_SERVER_DATABASE_DRIVER": "postgresql+asyncpg",
        "PREFECT_SERVER_DATABASE_HOST": LOOPBACK,
        "PREFECT_SERVER_DATABASE_PORT": str(cluster.port),
        "PREFECT_SERVER_DATABASE_USER": "prefect",
        "PREFECT_SERVER_DATABASE_NAME": "prefect",
        "PREFECT_SERVER_DATABASE_PASSWORD": read_secret(cluster.secrets, "prefect_database_password"),
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_API_AUTH_STRING": auth,
    }


def studies_url(postgres: str) -> str:
    """The database of studies at PostgreSQL's HOST:PORT, without its password."""
    return f"postgresql+psycopg2://{STUDIES}@{postgres}/{STUDIES}"


def start_mlflow(port: int, cluster: PostgresCluster, s3_url: str) -> Service:
    """Start an MLflow server on PostgreSQL that requires a password and proxies artifacts to S3."""
    database = f"postgresql+psycopg2://mlflow@{LOOPBACK}:{cluster.port}/mlflow"
    url = f"http://{LOOPBACK}:{port}"
    config = home() / "mlflow" / "auth.ini"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(auth_config(database), encoding="utf-8")
    command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    command += ["--app-name", "basic-auth", "--backend-store-uri", database]
    command += ["--serve-artifacts", "--artifacts-destination", ARTIFACTS]
    return spawn("mlflow", command, url, f"{url}/health", mlflow_environment(cluster.secrets, config, s3_url))


def auth_config(database: str) -> str:
    """MLflow's authentication settings; contains no password."""
    lines = ["[mlflow]", "default_permission = READ", f"database_uri = {database}", f"admin_username = {ADMIN}"]
    lines += ["authorization_function = mlflow.server.auth:authenticate_request_basic_auth"]
    # without the cache, every request takes 0.1 s longer to hash the password
    lines += ["auth_cache_ttl_seconds = 60"]
    return "\n".join(lines) + "\n"


def mlflow_environment(secrets: Path, config: Path, s3_url: str) -> dict[str, str]:
    """The MLflow server's environment: passwords of its database, its admin, its sessions and S3."""
    return s3_environment(s3_url) | {
        "PGPASSWORD": read_secret(secrets, "mlflow_database_password"),
        "MLFLOW_AUTH_CONFIG_PATH": str(config),
        "MLFLOW_AUTH_ADMIN_PASSWORD": read_secret(secrets, "mlflow_admin_password"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": read_secret(secrets, "mlflow_secret_key"),
        "AWS_ACCESS_KEY_ID": read_secret(secrets, "s3_access_key"),
        "AWS_SECRET_ACCESS_KEY": read_secret(secrets, "s3_secret_key"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def start_stores(
    supervisor: Supervisor, ports: Ports, secrets: Path, stop: threading.Event | None = None
) -> PostgresCluster:
    """Start PostgreSQL and the S3 server, wait for both, and create the databases unless `stop` is set by then."""
    cluster = PostgresCluster(port=ports.postgres, secrets=secrets, folder=postgres_folder())
    cluster.prepare()
    supervisor.add(cluster.start)
    supervisor.add(lambda: start_s3(ports.s3, secrets))
    supervisor.wait(stop=stop)
    if stop is not None and stop.is_set():
        return cluster
    cluster.make_databases()
    cluster.renew_mlflow_admin()
    return cluster


def start_servers(supervisor: Supervisor, ports: Ports, stop: threading.Event | None = None) -> dict[str, Any]:
    """Start all servers; does not wait for Prefect and MLflow.

    Args:
        supervisor: Supervises the servers.
        ports: Their ports.
        stop: Ends the waiting for the stores when it is set.

    Returns:
        Content of `services.json`: URLs, the folder of the passwords, and environment variables without secrets.
    """
    check_packages()
    secrets = secrets_folder()
    make_secrets(secrets)
    cluster = start_stores(supervisor, ports, secrets, stop)
    s3_url = f"http://{LOOPBACK}:{ports.s3}"
    supervisor.add(lambda: start_prefect(ports.prefect, prefect_database(cluster)))
    supervisor.add(lambda: start_mlflow(ports.mlflow, cluster, s3_url))
    return {
        "prefect": f"http://{LOOPBACK}:{ports.prefect}",
        "mlflow": f"http://{LOOPBACK}:{ports.mlflow}",
        "postgres": f"{LOOPBACK}:{ports.postgres}",
        "s3": s3_url,
        "secrets": str(secrets),
        "environment": s3_environment(s3_url)
        | {"STARLING_OBJECTS": OBJECTS, "STARLING_STUDIES": studies_url(f"{LOOPBACK}:{cluster.port}")},
    }


def environment_of(note: Mapping[str, Any]) -> dict[str, str]:
    """Environment of workers and clients of the servers in `services.json`."""
    environment = {
        **prefect_environment(),
        "PREFECT_API_URL": f"{note['prefect']}/api",
        "MLFLOW_TRACKING_URI": note["mlflow"],
    }
    if "secrets" in note:
        environment |= client_environment(Path(note["secrets"])) | note["environment"]
    return environment
