"""Backup and restore of the databases of Prefect, MLflow and searches, and of MLflow's artifacts, for both profiles.

    {to}/2026-11-21T02-15-00Z/databases/prefect.dump, mlflow.dump, studies.dump
                              artifacts/…
                              manifest.json

The manifest is written last: a folder without one is no backup. The databases are copied before the artifacts: MLflow
stores a model's files before it registers the model, so the backup contains the files of every model in its database.
Shards, features and checkpoints are left out: they can be recreated from the corpora.

A backup contains the encrypted contents of Prefect's blocks and their key, so it is as secret as the data folder. It
does not contain the servers' passwords: after a restore, those of the data folder apply.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from configurable.files import file_sha256
from flows.servers import production, services
from flows.servers.credentials import client_environment, make_secrets, secrets_folder
from flows.servers.databases import Database, PostgresDatabase, SqliteDatabase, move_artifacts
from flows.servers.postgres import DATABASES, STUDIES, PostgresServer
from flows.servers.supervisor import Supervisor
from storage.objects import ObjectMissingError, ObjectStore
from tasks.config.home import home, mlflow_artifacts, studies_file

MANIFEST = "manifest.json"
FORMAT = 1
POSTGRES, ARTIFACTS = "STARLING_POSTGRES", "STARLING_ARTIFACTS"
"""Variables for servers that run elsewhere, as in docker-compose: PostgreSQL's HOST:PORT, and the artifacts' URL."""
_OPTIONAL = (STUDIES, "prefect")
"""Databases that a data folder may lack: nothing was searched there, or all runs had `--no-prefect`."""
_VERSIONS = ("prefect", "mlflow", "starling")


class BackupError(ValueError):
    """A backup does not exist, is damaged, or would overwrite existing data."""


@dataclass(frozen=True)
class Place:
    """Source of a backup, or target of a restore."""

    kind: str
    """`sqlite` or `postgresql`."""
    databases: tuple[Database, ...]
    artifacts: ObjectStore
    location: str
    """URI of the artifacts in MLflow's database, if that is an absolute path; else empty."""


@contextmanager
def opened(kind: str = "") -> Iterator[Place]:
    """Open the databases and artifacts of the data folder, or of the environment, whether servers are running or not.

    Args:
        kind: `sqlite` or `postgresql`; by default the kind of the data folder.
    """
    kind = kind or ("postgresql" if os.environ.get(POSTGRES) or production.postgres_folder().exists() else "sqlite")
    if kind == "sqlite":
        files = {"prefect": home() / "prefect" / "prefect.db", "mlflow": home() / "mlflow" / "mlflow.db"}
        files[STUDIES] = studies_file()
        databases = tuple(SqliteDatabase(name, path) for name, path in files.items())
        folder = mlflow_artifacts()
        yield Place(kind, databases, ObjectStore(str(folder)), folder.as_uri())
        return
    with _postgres() as server:
        url = os.environ.get(ARTIFACTS) or production.ARTIFACTS
        yield Place(kind, tuple(PostgresDatabase(name, server) for name in DATABASES), ObjectStore(url), "")


@contextmanager
def _postgres() -> Iterator[PostgresServer]:
    """Provide PostgreSQL, and S3 through the environment: configured servers, running ones, or temporary ones."""
    secrets = secrets_folder()
    if given := os.environ.get(POSTGRES):
        host, _, port = given.rpartition(":")
        yield PostgresServer(host=host, port=int(port), secrets=secrets)
        return
    note = services.services_note()
    if "postgres" in note and services.answers(f"tcp://{note['postgres']}"):
        services.export_credentials()
        yield PostgresServer(port=int(note["postgres"].rpartition(":")[2]), secrets=Path(note["secrets"]))
        return
    production.check_packages()
    make_secrets(secrets)
    supervisor, ports = Supervisor(), production.Ports(postgres=0, s3=0).chosen()
    before = dict(os.environ)
    try:
        server = production.start_stores(supervisor, ports, secrets)
        os.environ.update(production.s3_environment(f"http://{services.LOOPBACK}:{ports.s3}"))
        os.environ.update(client_environment(secrets))
        yield server
    finally:
        supervisor.stop()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def backup(to: str, say: Callable[[str], None] = lambda _: None) -> tuple[str, dict[str, Any]]:
    """Copy databases and artifacts; the servers may be running.

    Args:
        to: Folder or s3:// URL; the backup is written to a subfolder named after the time.
        say: Called with progress messages.

    Returns:
        The backup's URL and its manifest.
    """
    now = datetime.now(UTC)
    with opened() as place, tempfile.TemporaryDirectory(prefix=".backup-", dir=home()) as scratch:
        target = ObjectStore(to).child(now.strftime("%Y-%m-%dT%H-%M-%SZ"))
        if (manifest_file := target.local_path(MANIFEST)) is not None:  # as secret as the data folder
            manifest_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if target.list():
            raise BackupError(f"{target.url} already exists: try again in a second")
        databases = {}
        for database in place.databases:
            if database.name in _OPTIONAL and not database.has_data():
                continue
            say(f"database {database.name}")
            file = Path(scratch) / f"{database.name}.{database.suffix}"
            database.dump(file)
            databases[database.name] = {"file": f"databases/{file.name}", **_described(file)}
            target.write_file(f"databases/{file.name}", file)
        say("artifacts")
        artifacts = _copy(place.artifacts, target.child("artifacts"), Path(scratch))
        manifest = {
            "format": FORMAT,
            "created": now.isoformat(timespec="seconds"),
            "kind": place.kind,
            "versions": {name: metadata.version(name) for name in _VERSIONS},
            "location": place.location,
            "databases": databases,
            "artifacts": artifacts,
        }
        target.write_json(MANIFEST, manifest)
        _check_stored(target, manifest)
    return target.url, manifest


def _check_stored(target: ObjectStore, manifest: dict[str, Any]) -> None:
    """Compare what the store lists after the backup with the manifest.

    Raises:
        BackupError: If a file is missing or has another size, or the manifest differs.
    """
    expected = {entry["file"]: entry["bytes"] for entry in manifest["databases"].values()}
    expected |= {f"artifacts/{name}": entry["bytes"] for name, entry in manifest["artifacts"].items()}
    sizes = {entry.path: entry.size for entry in target.entries()}
    lost = sorted(name for name, size in expected.items() if sizes.get(name) != size)
    if not lost and target.read_json(MANIFEST) != manifest:
        lost = [MANIFEST]
    if lost:
        raise BackupError(
            f"{target.url} is no backup: the store accepted every file, but {len(lost)} of {len(expected) + 1} are "
            f"missing or differ there ({', '.join(lost[:3])}): check the endpoint, and what deletes objects there"
        )


def _described(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def _copy(source: ObjectStore, target: ObjectStore, scratch: Path) -> dict[str, dict[str, Any]]:
    """Copy every object, except those that are deleted meanwhile; returns size and digest by name."""
    copied: dict[str, dict[str, Any]] = {}
    for name in source.list():
        file = scratch / "object"
        try:
            source.fetch_into(name, file)
        except ObjectMissingError:
            continue
        copied[name] = _described(file)
        target.write_file(name, file)
    return copied


def find_backup(url: str) -> tuple[ObjectStore, dict[str, Any]]:
    """Find the backup at a URL, or the newest complete one in this folder.

    Returns:
        Its store and its manifest.

    Raises:
        BackupError: If there is none, or its format or versions are not supported.
    """
    store = ObjectStore(url)
    if not store.exists(MANIFEST):
        manifests = [name for name in store.list() if name.count("/") == 1 and name.endswith(f"/{MANIFEST}")]
        if not manifests:
            raise BackupError(f"{url} has no backup: neither it nor a subfolder contains {MANIFEST}; check --from")
        store = store.child(max(manifests).rpartition("/")[0])
    manifest = store.read_json(MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BackupError(f"{store.url} is no backup that this version of Starling can read (format {FORMAT})")
    _check_versions(store.url, manifest["versions"])
    return store, manifest


def _check_versions(url: str, versions: dict[str, str]) -> None:
    from packaging.version import Version

    for name in ("prefect", "mlflow"):
        here = metadata.version(name)
        if Version(versions[name]) > Version(here):
            raise BackupError(
                f"{url} was made with {name} {versions[name]}, but {here} is installed: upgrade {name} first"
            )


def restore(
    source: str, force: bool = False, say: Callable[[str], None] = lambda _: None
) -> tuple[str, dict[str, Any]]:
    """Restore a backup; changes nothing until the whole backup has been read and checked.

    Args:
        source: The backup, or a folder of several, of which the newest is restored.
        force: Overwrite databases that have data. Artifacts that are not in the backup are kept.
        say: Called with progress messages.

    Returns:
        The backup's URL and its manifest.

    Raises:
        BackupError: If servers are running, the backup is damaged or of the other profile, or data would be
            overwritten.
    """
    if running := services.running_services():
        raise BackupError(f"servers of this data folder are running ({', '.join(running)}): stop `starling up` first")
    store, manifest = find_backup(source)
    _check_kind(manifest["kind"])
    with opened(manifest["kind"]) as place, tempfile.TemporaryDirectory(prefix=".restore-", dir=home()) as scratch:
        written = [database for database in place.databases if database.name in manifest["databases"]]
        full = [database.name for database in written if database.has_data()]
        if full and not force:
            raise BackupError(f"there are data already (database {', '.join(full)}): --force overwrites them")
        files = {}
        for name, entry in manifest["databases"].items():
            say(f"reading database {name}")
            files[name] = _fetched(store, entry["file"], entry, Path(scratch) / Path(entry["file"]).name)
        say(f"checking {len(manifest['artifacts'])} artifacts")
        copies = store.child("artifacts")
        for name, entry in manifest["artifacts"].items():
            _fetched(copies, name, entry, Path(scratch) / "object")
        say("writing artifacts")
        for name, entry in manifest["artifacts"].items():
            place.artifacts.write_file(name, _fetched(copies, name, entry, Path(scratch) / "object"))
        if place.kind == "sqlite":
            move_artifacts(files["mlflow"], manifest["location"], place.location)
        for database in written:
            say(f"writing database {database.name}")
            database.restore(files[database.name])
    return store.url, manifest


def _check_kind(kind: str) -> None:
    """Check that the data folder is not of the other profile."""
    small = (home() / "mlflow" / "mlflow.db").exists()
    elsewhere = bool(os.environ.get(POSTGRES))
    if (kind == "postgresql" and small) or (kind == "sqlite" and (elsewhere or production.postgres_folder().exists())):
        ours = "production" if kind == "sqlite" else "small"
        raise BackupError(
            f"this is a backup of a {kind} database, but the data folder is of the {ours} profile: choose another "
            "with --folder"
        )


def _fetched(store: ObjectStore, name: str, entry: dict[str, Any], target: Path) -> Path:
    """Fetch a local copy of a file of a backup.

    Raises:
        BackupError: If the file is missing, or differs from the manifest.
    """
    try:
        store.fetch_into(name, target)
    except ObjectMissingError:
        raise BackupError(f"{store.url} is damaged: {name} is missing") from None
    if _described(target) != {"bytes": entry["bytes"], "sha256": entry["sha256"]}:
        raise BackupError(f"{store.url} is damaged: {name} differs from the manifest")
    return target


def summary(url: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Summary of a backup: URL, time, kind, versions, number of artifacts, bytes."""
    sizes = [entry["bytes"] for entry in (*manifest["databases"].values(), *manifest["artifacts"].values())]
    shown = {name: manifest[name] for name in ("created", "kind", "versions")}
    return {"backup": url, **shown, "artifacts": len(manifest["artifacts"]), "bytes": sum(sizes)}
