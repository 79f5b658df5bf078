"""Dump and restore of databases in use: SQLite (small profile) and PostgreSQL (production profile)."""

import sqlite3
import subprocess
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from configurable.files import publish_file
from flows.servers.postgres import PostgresServer
from flows.servers.services import ServiceError

_DUMP_S = 3600.0
_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
)
"""Columns of MLflow's tables that contain locations of artifacts."""


class DatabaseError(ServiceError):
    """A database cannot be dumped or restored."""


class Database(ABC):
    """One database of a data folder."""

    name: str
    suffix: str

    @abstractmethod
    def dump(self, target: Path) -> None:
        """Write a consistent copy to a file; others may use the database meanwhile."""

    @abstractmethod
    def restore(self, source: Path) -> None:
        """Replace the database atomically by a file that `dump` wrote."""

    @abstractmethod
    def has_data(self) -> bool:
        """Whether the database contains anything that a restore would overwrite."""


@dataclass(frozen=True)
class SqliteDatabase(Database):
    """A SQLite file of the small profile."""

    name: str
    path: Path
    suffix: str = "sqlite"

    def dump(self, target: Path) -> None:
        """Copy the file by SQLite's online backup, and check the copy.

        Raises:
            DatabaseError: If there is no database, or it cannot be copied.
        """
        if not self.has_data():
            raise DatabaseError(
                f"there is no database {self.path}: run a pipeline with this data folder first, or choose another "
                "with STARLING_HOME"
            )
        try:
            with (
                closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True, timeout=60)) as live,
                closing(sqlite3.connect(target)) as copy,
            ):
                live.backup(copy, pages=1000, sleep=0.01)
        except sqlite3.Error as error:
            full = error.sqlite_errorcode in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
            remedy = f"free space in {target.parent}" if full else "restore it from a backup, or move it away"
            raise DatabaseError(f"{self.path} cannot be copied ({error}): {remedy}, and run this again") from error
        _check_sqlite(target)  # a damaged copy is no backup

    def restore(self, source: Path) -> None:
        """Publish the file by a rename, after a check.

        Raises:
            DatabaseError: If the file is damaged.
        """
        _check_sqlite(source)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for journal in ("-wal", "-shm", "-journal"):  # SQLite would apply the old file's journal to the new one
            self.path.with_name(self.path.name + journal).unlink(missing_ok=True)
        publish_file(source, self.path)

    @override
    def has_data(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0


def _check_sqlite(path: Path) -> None:
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as copy:
            answer = copy.execute("PRAGMA integrity_check").fetchone()
    except sqlite3.Error as error:
        raise DatabaseError(f"{path} is damaged: {error}") from error
    if answer != ("ok",):
        raise DatabaseError(f"{path} is damaged: {answer[0] if answer else 'empty'}")


def move_artifacts(path: Path, old: str, new: str) -> None:
    """Change the artifacts' location in MLflow's tables of a SQLite file, which contain absolute paths.

    Args:
        path: Copy of MLflow's database.
        old: Current URI of the artifacts' folder.
        new: Its new URI.
    """
    if old == new:
        return
    with closing(sqlite3.connect(path)) as copy, copy:
        tables = {row[0] for row in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table, column in _LOCATIONS:
            if table not in tables or column not in {row[1] for row in copy.execute(f"PRAGMA table_info({table})")}:
                continue
            query = f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # noqa: S608 - names of our own
            query += f"WHERE {column} = ? OR {column} LIKE ? ESCAPE '!'"
            like = old.replace("!", "!!").replace("%", "!%").replace("_", "!_") + "/%"
            copy.execute(query, (new, len(old) + 1, old, like))


@dataclass(frozen=True)
class PostgresDatabase(Database):
    """A database of the production profile."""

    name: str
    server: PostgresServer
    suffix: str = "dump"

    def dump(self, target: Path) -> None:
        """Run `pg_dump`.

        Raises:
            DatabaseError: If it fails.
        """
        self._call("pg_dump", self.name, "--format=custom", "--no-owner", "--no-privileges", f"--file={target}")

    def restore(self, source: Path) -> None:
        """Restore into a new database, and rename it when it is complete.

        Raises:
            DatabaseError: If the database is in use, or `pg_restore` fails.
        """
        fresh, old = f"{self.name}_restoring", f"{self.name}_replaced"
        self.server.make_databases()
        with self.server.admin() as admin, admin.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", (self.name,))
            if cursor.fetchone() != (0,):
                raise DatabaseError(f"database {self.name} is in use: stop the servers, and searches, first")
            cursor.execute(f'DROP DATABASE IF EXISTS "{fresh}"')
            cursor.execute(f'CREATE DATABASE "{fresh}" OWNER "{self.name}"')
            cursor.execute(f'REVOKE CONNECT ON DATABASE "{fresh}" FROM PUBLIC')
            words = ["--no-owner", "--no-privileges", "--exit-on-error", f"--role={self.name}", f"--dbname={fresh}"]
            self._call("pg_restore", fresh, *words, str(source))
            # dropping the old one first would leave no database after a crash between the two
            cursor.execute(f'DROP DATABASE IF EXISTS "{old}"')
            cursor.execute("BEGIN")
            cursor.execute(f'ALTER DATABASE "{self.name}" RENAME TO "{old}"')
            cursor.execute(f'ALTER DATABASE "{fresh}" RENAME TO "{self.name}"')
            cursor.execute("COMMIT")
            cursor.execute(f'DROP DATABASE "{old}"')

    @override
    def has_data(self) -> bool:
        with self.server.admin() as admin, admin.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (self.name,))
            if cursor.fetchone() is None:
                return False
        with self.server.admin(self.name) as admin, admin.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
            return bool(cursor.fetchone() != (0,))

    def _call(self, program: str, database: str, *words: str) -> None:
        command = [self.server.program(program), *words]
        env = {**self.server.environment(database)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_DUMP_S, check=False)
        if done.returncode:
            raise DatabaseError(f"{program} of {self.name} ended with {done.returncode}: {done.stderr[-800:].strip()}")
