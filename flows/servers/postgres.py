"""A PostgreSQL server in the data folder with databases for Prefect, MLflow and searches, protected by passwords.

It runs Debian's PostgreSQL, or another one on the PATH, on a loopback port without a Unix socket. The superuser's
password is set from its file at every start, in PostgreSQL's single-user mode, so that nothing listens before.
A password that was changed in its file, or came with a restored backup, applies after the next start.
"""

import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.servers.credentials import ADMIN, read_secret
from flows.servers.services import LOOPBACK, Service, ServiceError, spawn

if TYPE_CHECKING:
    from psycopg2.extensions import connection  # type: ignore[import-untyped]

STUDIES = "studies"
"""The database of the studies of searches, which their processes use themselves."""
DATABASES = ("prefect", "mlflow", STUDIES)
"""Databases; the role that owns each has the same name."""
_HBA = f"host all all {LOOPBACK}/32 scram-sha-256\n"
_INIT_S = 120
_LINE_S = 60


class PostgresError(ServiceError):
    """PostgreSQL is missing, or cannot work with the data folder."""


def find_postgres(program: str = "postgres", version: str = "") -> str:
    """Path of one of PostgreSQL's programs: Debian's newest, or the one on the PATH.

    Args:
        program: Name of the program.
        version: Preferred major version; used if Debian's package of it is installed.

    Raises:
        PostgresError: If it is not installed.
    """
    debian = Path("/usr/lib/postgresql")
    if version and (debian / version / "bin" / program).exists():
        return str(debian / version / "bin" / program)
    versions = sorted((p for p in debian.glob("*/bin") if p.parent.name.isdigit()), key=lambda p: int(p.parent.name))
    for folder in reversed(versions):
        if (folder / program).exists():
            return str(folder / program)
    path = shutil.which(program)
    if path is None:
        raise PostgresError(f"{program} is not installed: apt-get install postgresql (or put PostgreSQL on the PATH)")
    return path


def account(folder: Path) -> dict[str, Any]:
    """Arguments of `Popen` that run PostgreSQL as another user if this process is root, as which it refuses to run.

    Raises:
        PostgresError: If there is no such user, or it cannot enter the folder.
    """
    if os.geteuid() != 0:
        return {}
    users = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = users.get("postgres") or users.get("nobody")
    if user is None:
        raise PostgresError("PostgreSQL does not run as root, and there is no user postgres or nobody: create one")
    for parent in folder.parents:
        status = parent.stat()
        if not status.st_mode & (0o100 if status.st_uid == user.pw_uid else 0o001):
            raise PostgresError(
                f"PostgreSQL does not run as root but as user {user.pw_name}, who cannot enter {parent}: run this as a "
                f"user other than root, or choose a --folder (STARLING_HOME) that others may enter, or chmod o+x"
            )
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@dataclass(frozen=True, kw_only=True)
class PostgresServer:
    """A PostgreSQL server whose superuser's password is known."""

    host: str = LOOPBACK
    port: int
    secrets: Path
    """Folder of the passwords."""

    def program(self, name: str = "postgres") -> str:
        """Path of one of PostgreSQL's programs."""
        return find_postgres(name)

    def make_databases(self) -> None:
        """Create missing roles and databases, and set the roles' passwords."""
        with self.admin() as admin, admin.cursor() as cursor:
            for name in DATABASES:
                cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (name,))
                verb = "ALTER" if cursor.fetchone() else "CREATE"
                password = read_secret(self.secrets, f"{name}_database_password")
                cursor.execute(f'{verb} ROLE "{name}" LOGIN PASSWORD %s', (password,))
                cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
                if cursor.fetchone() is None:
                    cursor.execute(f'CREATE DATABASE "{name}" OWNER "{name}"')
                cursor.execute(f'REVOKE CONNECT ON DATABASE "{name}" FROM PUBLIC')  # the owner keeps the right

    @contextmanager
    def admin(self, database: str = "postgres", patience_s: float = 60.0) -> "Iterator[connection]":
        """Connect as superuser with autocommit; waits for a server that recovers from a crash."""
        password = read_secret(self.secrets, "postgres_password")
        with connected(self.host, self.port, "postgres", password, database, patience_s) as made:
            yield made

    def renew_mlflow_admin(self) -> None:
        """Set the password of MLflow's existing admin from its file, which MLflow itself does not do."""
        from werkzeug.security import check_password_hash, generate_password_hash

        wanted = read_secret(self.secrets, "mlflow_admin_password")
        with self.admin("mlflow") as admin, admin.cursor() as cursor:
            cursor.execute("SELECT to_regclass('public.users')")
            if cursor.fetchone() == (None,):
                return
            cursor.execute("SELECT password_hash FROM users WHERE username = %s", (ADMIN,))
            row = cursor.fetchone()
            if row is not None and not check_password_hash(row[0], wanted):
                hashed = generate_password_hash(wanted)
                cursor.execute("UPDATE users SET password_hash = %s WHERE username = %s", (hashed, ADMIN))

    def environment(self, name: str) -> Mapping[str, str]:
        """Environment with which PostgreSQL's programs connect to a database as superuser."""
        return {
            "PGHOST": self.host,
            "PGPORT": str(self.port),
            "PGUSER": "postgres",
            "PGDATABASE": name,
            "PGPASSWORD": read_secret(self.secrets, "postgres_password"),
        }


@dataclass(frozen=True, kw_only=True)
class PostgresCluster(PostgresServer):
    """A PostgreSQL server that this process starts, and its files."""

    folder: Path

    def program(self, name: str = "postgres") -> str:
        """Path of one of PostgreSQL's programs, in the version of the files if that is installed."""
        version = self.folder / "PG_VERSION"
        return find_postgres(name, version.read_text(encoding="ascii").strip() if version.exists() else "")

    def prepare(self) -> None:
        """Create the files if they are missing, and set the superuser's password.

        Raises:
            PostgresError: If PostgreSQL is missing, fails, or has another version than the files.
        """
        as_user = account(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if as_user:
            os.chown(self.folder, as_user["user"], as_user["group"])
        if not (self.folder / "PG_VERSION").exists():
            words = [self.program("initdb"), "-D", str(self.folder), "-U", "postgres", "-E", "UTF8", "--locale=C"]
            # reject connections until the password is set
            _call([*words, "--auth=reject", "--no-instructions"], "", as_user, _INIT_S)
        (self.folder / "pg_hba.conf").write_text(_HBA, encoding="ascii")
        line = f"ALTER ROLE postgres PASSWORD '{_quoted(read_secret(self.secrets, 'postgres_password'))}'\n"
        words = [self.program(), "--single", "-D", str(self.folder), "-c", "log_statement=none", "postgres"]
        output = _call(words, line, as_user, _LINE_S)
        if re.search(r"\b(ERROR|FATAL|PANIC):", output):
            raise PostgresError(f"PostgreSQL refuses {self.folder}: {_without_passwords(output)[-800:]}")

    def start(self) -> Service:
        """Start the server; call `prepare` first."""
        command = [self.program(), "-D", str(self.folder), "-c", f"listen_addresses={LOOPBACK}"]
        command += ["-c", f"port={self.port}", "-c", "unix_socket_directories="]
        health = f"tcp://{LOOPBACK}:{self.port}"
        # SIGINT is a fast shutdown; SIGTERM would wait until all clients have disconnected
        return spawn("postgres", command, health, health, account=account(self.folder), end=signal.SIGINT)


@contextmanager
def connected(
    host: str, port: int, user: str, password: str, database: str, patience_s: float = 60.0
) -> "Iterator[connection]":
    """Connect with autocommit; retries until the time limit.

    Raises:
        PostgresError: If the server does not accept the connection in time, or rejects the password.
    """
    import psycopg2  # type: ignore[import-untyped]

    deadline = time.monotonic() + patience_s
    while True:
        try:
            made = psycopg2.connect(
                host=host, port=port, user=user, password=password, dbname=database, connect_timeout=10
            )
            break
        except psycopg2.OperationalError as error:
            if time.monotonic() > deadline or "password" in str(error):
                raise PostgresError(f"PostgreSQL at {host}:{port}: {str(error).strip()}") from None
            time.sleep(0.3)
    try:
        made.autocommit = True
        yield made
    finally:
        made.close()


def _quoted(text: str) -> str:
    """Escape text for a quoted literal on one line."""
    if "\n" in text or "\0" in text or "\\" in text:
        raise PostgresError("a PostgreSQL password contains a line break or a backslash: choose another")
    return text.replace("'", "''")


def _without_passwords(text: str) -> str:
    return re.sub(r"PASSWORD '[^']*'", "PASSWORD '…'", text)


def _call(command: list[str], text: str, as_user: Mapping[str, Any], limit_s: float) -> str:
    """Run one of PostgreSQL's programs until it exits, and return its output.

    Raises:
        PostgresError: If it fails.
    """
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=limit_s, check=False, cwd="/", **as_user
    )
    output = done.stdout + done.stderr
    if done.returncode:
        name = Path(command[0]).name
        raise PostgresError(f"{name} ended with status {done.returncode}: {_without_passwords(output)[-800:].strip()}")
    return output
