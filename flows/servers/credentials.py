"""Passwords and keys of the production profile: generated once, each in its own file, readable only by its owner.

`starling up --profile production` keeps them in the data folder; docker-compose mounts the same files as secrets. They
are never passed as arguments of a command: servers and clients get them through their environment.
"""

import os
import secrets
import stat
from pathlib import Path

from configurable.files import create_private_file
from tasks.config.home import home

ADMIN = "admin"
"""MLflow's first user."""
NAMES = (
    "postgres_password",
    "prefect_database_password",
    "mlflow_database_password",
    "studies_database_password",
    "prefect_auth",
    "mlflow_admin_password",
    "mlflow_secret_key",
    "s3_access_key",
    "s3_secret_key",
    "serve_token",
)
RING_KEY = "ring.key"
"""Key that the nodes of a training share."""
MOUNTED = Path("/run/secrets")
"""Folder of a container's secrets: readable by all users of this container, and not visible outside it."""
_READABLE_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class SecretError(ValueError):
    """A file with a password is missing, empty, or accessible to other users."""


def secrets_folder() -> Path:
    """Folder of the secrets: $STARLING_SECRETS, by default `secrets` in the data folder."""
    given = os.environ.get("STARLING_SECRETS")
    return Path(given).expanduser().resolve() if given else home() / "secrets"


def make_secrets(folder: Path, for_containers: bool = False) -> list[str]:
    """Generate missing passwords; existing ones are kept.

    Args:
        folder: Folder of the passwords; created if missing, without access for other users.
        for_containers: Make the files readable for all users, since a container runs as another user and mounts the
            files themselves. Other users of this machine still have no access, because of the folder.

    Returns:
        Names of the generated passwords.

    Raises:
        SecretError: If other users have access to the folder.
    """
    from training.processes.keys import RingKey

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_mode & _READABLE_BY_OTHERS:
        raise SecretError(f"{folder} is open to other users: chmod 700 {folder}")
    made = [name for name in NAMES if not (folder / name).exists()]
    for name in made:
        create_private_file(folder / name, _new(name).encode())
    if not (folder / RING_KEY).exists():
        RingKey.generate().save(folder / RING_KEY)
        made.append(RING_KEY)
    for name in (*NAMES, RING_KEY):
        (folder / name).chmod(0o444 if for_containers else 0o600)
    return made


def _new(name: str) -> str:
    token = secrets.token_urlsafe(32)
    if name == "prefect_auth":
        return f"starling:{token}"
    return secrets.token_hex(10) if name == "s3_access_key" else token


def read_secret(folder: Path, name: str) -> str:
    """Read a password from its file.

    Raises:
        SecretError: If the file is missing, empty, or readable by other users.
    """
    path = folder / name
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise SecretError(f"{path} is missing: `starling secrets {folder}` makes it") from None
    if not text:
        raise SecretError(f"{path} is empty: remove it, then `starling secrets {folder}` makes a new one")
    open_folder = folder != MOUNTED and folder.stat().st_mode & _READABLE_BY_OTHERS
    if open_folder and path.stat().st_mode & _READABLE_BY_OTHERS:
        raise SecretError(f"{path} can be read by other users: chmod 600 {path}")
    return text


def client_environment(folder: Path) -> dict[str, str]:
    """Environment variables with the credentials of clients: of Prefect, MLflow, S3 and the studies of searches."""
    return {
        "PREFECT_API_AUTH_STRING": read_secret(folder, "prefect_auth"),
        "MLFLOW_TRACKING_USERNAME": ADMIN,
        "MLFLOW_TRACKING_PASSWORD": read_secret(folder, "mlflow_admin_password"),
        "AWS_ACCESS_KEY_ID": read_secret(folder, "s3_access_key"),
        "AWS_SECRET_ACCESS_KEY": read_secret(folder, "s3_secret_key"),
        "STARLING_STUDIES_PASSWORD": read_secret(folder, "studies_database_password"),
    }
