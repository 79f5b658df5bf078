"""Backup and restore: the databases of Prefect and MLflow, and MLflow's artifacts, of either profile.

    {to}/2026-11-21T02-15-00Z/databases/prefect.dump, mlflow.dump
                              artifacts/…
                              manifest.json

The manifest is written last: a folder without one is no backup. The databases are copied before the artifacts: MLflow
stores a model's files before it registers the model, so every model that a copied database names has its files in the
copy. Shards, features and checkpoints are no part of it: they can be made again from the corpora.

A backup holds what Prefect's blocks keep encrypted and the key to it, so it is as secret as the data folder. The
passwords of the servers are not in it: those of the data folder that it is restored to are set.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from flows.servers import production, services
from flows.servers.credentials import client_environment, make_secrets, secrets_folder
from flows.servers.databases import Database, PostgresDatabase, SqliteDatabase, move_artifacts
from flows.servers.postgres import DATABASES, PostgresServer
from flows.servers.supervisor import Supervisor
from storage.objects import ObjectMissingError, ObjectStore
from tasks.config.home import home, mlflow_artifacts

MANIFEST = "manifest.json"
FORMAT = 1
POSTGRES, ARTIFACTS = "STARLING_POSTGRES", "STARLING_ARTIFACTS"
"""Where servers run elsewhere, as in docker-compose: HOST:PORT of PostgreSQL, and URL of MLflow's artifacts."""
_VERSIONS = ("prefect", "mlflow", "starling")


class BackupError(ValueError):
    """There is no such backup, it is damaged, or it would overwrite what is there."""


@dataclass(frozen=True)
class Place:
    """What is backed up, or restored to."""

    kind: str
    """`sqlite` or `postgresql`."""
    databases: tuple[Database, ...]
    artifacts: ObjectStore
    location: str
    """URI of the artifacts as MLflow's database has it, where that is an absolute path."""


@contextmanager
def opened(kind: str = "") -> Iterator[Place]:
    """The databases and artifacts of the data folder, or those that the environment names, whether servers run or not.

    Args:
        kind: `sqlite` or `postgresql`; by default what the data folder has.
    """
    kind = kind or ("postgresql" if os.environ.get(POSTGRES) or production.postgres_folder().exists() else "sqlite")
    if kind == "sqlite":
        files = {"prefect": home() / "prefect" / "prefect.db", "mlflow": home() / "mlflow" / "mlflow.db"}
        databases = tuple(SqliteDatabase(name, path) for name, path in files.items())
        folder = mlflow_artifacts()
        yield Place(kind, databases, ObjectStore(str(folder)), folder.as_uri())
        return
    with _postgres() as server:
        url = os.environ.get(ARTIFACTS) or production.ARTIFACTS
        yield Place(kind, tuple(PostgresDatabase(name, server) for name in DATABASES), ObjectStore(url), "")


@contextmanager
def _postgres() -> Iterator[PostgresServer]:
    """PostgreSQL, with S3's address in the environment: servers elsewhere, those that run here, or started for this."""
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
    """Copy databases and artifacts; servers may run meanwhile.

    Args:
        to: Folder or s3:// URL; the backup becomes a folder of it, named after the time.
        say: Told what happens.

    Returns:
        The backup's URL and its manifest.
    """
    now = datetime.now(UTC)
    with opened() as place, tempfile.TemporaryDirectory(prefix=".backup-", dir=home()) as scratch:
        target = ObjectStore(to).child(now.strftime("%Y-%m-%dT%H-%M-%SZ"))
        if (manifest_file := target.local_path(MANIFEST)) is not None:  # as secret as the data folder
            manifest_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if target.list():
            raise BackupError(f"{target.url} is there already: wait a second")
        databases = {}
        for database in place.databases:
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
    return target.url, manifest


def _described(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened_file:
        digest = hashlib.file_digest(opened_file, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _copy(source: ObjectStore, target: ObjectStore, scratch: Path) -> dict[str, dict[str, Any]]:
    """Copy every object; one that is deleted meanwhile is no part of the copy."""
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
    """A backup and its manifest: the one at the URL, or the newest complete one below it.

    Raises:
        BackupError: There is none, or it is of a format or of versions that this one does not know.
    """
    store = ObjectStore(url)
    if not store.exists(MANIFEST):
        found = [name for name in store.list() if name.count("/") == 1 and name.endswith(f"/{MANIFEST}")]
        if not found:
            raise BackupError(f"{url} has no backup: no {MANIFEST} is there, nor in a folder of it")
        store = store.child(max(found).rpartition("/")[0])
    manifest = store.read_json(MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BackupError(f"{store.url} is no backup that this version of Starling reads (format {FORMAT})")
    _check_versions(store.url, manifest["versions"])
    return store, manifest


def _check_versions(url: str, versions: dict[str, str]) -> None:
    from packaging.version import Version

    for name in ("prefect", "mlflow"):
        here = metadata.version(name)
        if Version(versions[name]) > Version(here):
            raise BackupError(f"{url} was made with {name} {versions[name]}, and here is {here}: upgrade {name} first")


def restore(
    source: str, force: bool = False, say: Callable[[str], None] = lambda _: None
) -> tuple[str, dict[str, Any]]:
    """Bring back what a backup has; nothing is changed before the whole backup has been read and checked.

    Args:
        source: The backup, or the folder that has several: then the newest.
        force: Overwrite databases that have data. Artifacts that the backup does not have stay.
        say: Told what happens.

    Returns:
        The backup's URL and its manifest.

    Raises:
        BackupError: The backup is damaged, of the other profile, or data would be overwritten.
    """
    if running := services.running_services():
        raise BackupError(f"servers of this data folder run ({', '.join(running)}): end `starling up` first")
    store, manifest = find_backup(source)
    _check_kind(manifest["kind"])
    with opened(manifest["kind"]) as place, tempfile.TemporaryDirectory(prefix=".restore-", dir=home()) as scratch:
        full = [database.name for database in place.databases if database.has_data()]
        if full and not force:
            raise BackupError(f"there is data already (database {', '.join(full)}): --force overwrites it")
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
        for database in place.databases:
            say(f"writing database {database.name}")
            database.restore(files[database.name])
    return store.url, manifest


def _check_kind(kind: str) -> None:
    """A backup of one profile does not go into a data folder of the other."""
    small = (home() / "mlflow" / "mlflow.db").exists()
    elsewhere = bool(os.environ.get(POSTGRES))
    if (kind == "postgresql" and small) or (kind == "sqlite" and (elsewhere or production.postgres_folder().exists())):
        ours = "production" if kind == "sqlite" else "small"
        raise BackupError(f"this is a backup of a {kind} database, and the data folder is of the {ours} profile")


def _fetched(store: ObjectStore, name: str, entry: dict[str, Any], target: Path) -> Path:
    """A local copy of a part of a backup.

    Raises:
        BackupError: It is missing, or not what the manifest says.
    """
    try:
        store.fetch_into(name, target)
    except ObjectMissingError:
        raise BackupError(f"{store.url} is damaged: {name} is missing") from None
    if _described(target) != {"bytes": entry["bytes"], "sha256": entry["sha256"]}:
        raise BackupError(f"{store.url} is damaged: {name} is not what was written")
    return target


def summary(url: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """A backup in a few figures."""
    sizes = [entry["bytes"] for entry in (*manifest["databases"].values(), *manifest["artifacts"].values())]
    shown = {name: manifest[name] for name in ("created", "kind", "versions")}
    return {"backup": url, **shown, "artifacts": len(manifest["artifacts"]), "bytes": sum(sizes)}
