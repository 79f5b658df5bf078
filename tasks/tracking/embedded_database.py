"""Atomic creation and migration of MLflow's embedded SQLite database.

MLflow creates and migrates a database in place, in many steps that are not one transaction: a process that is killed or
runs out of disk space in between leaves a file that MLflow can never use again. So a database is created, or a copy of
an older one migrated, in a temporary file, which is then renamed. MLflow always finds a complete database.
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configurable.files import publish_file
from storage.locks import file_lock

PREFIX = "sqlite:///"
_PATIENCE_S = 300.0
_BUSY_S = 30.0
_JOURNALS = ("-wal", "-shm", "-journal")
_log = logging.getLogger(__name__)
_ready: set[tuple[str, int]] = set()
"""Path and inode of databases that this process has checked."""
_looking = threading.Lock()


class EmbeddedDatabaseError(ValueError):
    """The database cannot be used; the message gives the reason and a remedy."""


@dataclass(frozen=True)
class Schema:
    """Schema of a database file."""

    tables: frozenset[str]
    revision: str
    """MLflow's revision of its schema; empty without one."""
    holds: bool
    """Whether it contains runs, models or experiments of users."""


def database_of(uri: str) -> Path | None:
    """File of a SQLite tracking URI; None for a server, another database, or one in memory."""
    if not uri.startswith(PREFIX):
        return None
    name = uri.removeprefix(PREFIX).partition("?")[0]
    return Path(name) if name and name != ":memory:" else None


def make_ready(path: Path) -> None:
    """Create a missing database, migrate one of an older MLflow, and check an existing one.

    Several processes may call it at the same time, and it may be killed at any point.

    Args:
        path: The file.

    Raises:
        EmbeddedDatabaseError: If the database is damaged, of a newer MLflow, in use during a migration, or cannot be
            created.
    """
    if _known(path):
        return
    with _looking, _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _whole(path):
            with file_lock(path.with_name(f"{path.name}.lock"), _PATIENCE_S):
                _mend(path)
        _ready.add((str(path), path.stat().st_ino))


def _known(path: Path) -> bool:
    try:
        return (str(path), path.stat().st_ino) in _ready
    except OSError:
        return False


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the system into an `EmbeddedDatabaseError` of one line."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = error.sqlite_errorcode & 0xFF if getattr(error, "sqlite_errorcode", None) else 0
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise EmbeddedDatabaseError(_no_space(path, error)) from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise EmbeddedDatabaseError(_not_writable(path, error)) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise EmbeddedDatabaseError(f"{path} is in use ({error}): stop what uses it, and run this again") from error
        raise EmbeddedDatabaseError(_damaged(path, str(error))) from error
    except PermissionError as error:
        raise EmbeddedDatabaseError(_not_writable(path, error)) from error
    except OSError as error:
        raise EmbeddedDatabaseError(_no_space(path, error)) from error


def _no_space(path: Path, error: Exception) -> str:
    return f"{path}, MLflow's database, cannot be written ({error}): free space in {path.parent}, and run this again"


def _not_writable(path: Path, error: Exception) -> str:
    return (
        f"{path}, MLflow's database, cannot be opened for writing ({error}): give this user the right to write into "
        f"{path.parent}, or set STARLING_HOME to a folder of its own"
    )


def _damaged(path: Path, why: str) -> str:
    return (
        f"{path}, MLflow's database, is damaged ({why}): restore a backup (starling restore --force --from FOLDER), "
        f"or move it away (mv {path} {path}.damaged) to start with an empty one, and run this again"
    )


def _whole(path: Path) -> bool:
    """Whether a file is a complete database with the schema of this MLflow."""
    if not path.exists() or not path.stat().st_size:
        return False
    return _complete(_schema(path))


def _complete(schema: Schema) -> bool:
    from mlflow.store.db import utils
    from mlflow.store.db.base_sql_model import Base

    if any(table.startswith("_alembic_tmp_") for table in schema.tables):
        return False
    return schema.revision == utils._get_latest_schema_revision() and set(Base.metadata.tables) <= schema.tables


def _schema(path: Path) -> Schema:
    """Read the schema of a database; opening it also rolls back the transaction of a killed process.

    Raises:
        sqlite3.DatabaseError: If the file is no database.
    """
    with closing(sqlite3.connect(path, timeout=_BUSY_S)) as made:
        tables = frozenset(row[0] for row in made.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))
        marks = (
            made.execute("SELECT version_num FROM alembic_version").fetchall() if "alembic_version" in tables else []
        )
        queries = {
            "runs": "SELECT 1 FROM runs",
            "registered_models": "SELECT 1 FROM registered_models",
            "experiments": "SELECT 1 FROM experiments WHERE name <> 'Default'",
        }
        holds = any(made.execute(query).fetchone() for table, query in queries.items() if table in tables)
        return Schema(tables, str(marks[0][0]) if marks else "", bool(holds))


def _mend(path: Path) -> None:
    """Create or migrate the database while its lock is held.

    Raises:
        EmbeddedDatabaseError: If it cannot be migrated.
    """
    _clear(draft := path.with_name(f".{path.name}.making"))
    if not path.exists() or not path.stat().st_size:
        _make(draft)
        _take_place(draft, path)
        return
    schema = _schema(path)
    if _complete(schema):  # another process was faster
        return
    if schema.revision and schema.revision not in _revisions():
        raise EmbeddedDatabaseError(
            f"{path} was written by a newer MLflow than this one (schema {schema.revision}): install that MLflow, or "
            f"move the file away (mv {path} {path}.newer) to start with an empty one"
        )
    if schema.revision:
        _check_unused(path)
        why = _migrate(path, draft)
        if not why:
            _replace(draft, path, f"before-{schema.revision}")
            return
    else:
        why = "its creation was not completed"
    if schema.holds:
        raise EmbeddedDatabaseError(_damaged(path, why))
    # MLflow itself was killed while it created the file, which contains no data
    _clear(draft)
    _make(draft)
    _replace(draft, path, "unfinished")


def _clear(draft: Path) -> None:
    for suffix in ("", *_JOURNALS):
        draft.with_name(draft.name + suffix).unlink(missing_ok=True)


def _revisions() -> set[str]:
    """Revisions of all schemas that this MLflow knows."""
    from alembic.script import ScriptDirectory
    from mlflow.store.db import utils

    script = ScriptDirectory.from_config(utils._get_alembic_config(""))
    return {revision.revision for revision in script.walk_revisions()}


def _make(draft: Path) -> None:
    """Have MLflow create its tables in a new file.

    Raises:
        sqlite3.DatabaseError: If there is no space.
        EmbeddedDatabaseError: If MLflow does not complete them.
    """
    from mlflow.store.db import utils

    _with_engine(draft, utils._initialize_tables)
    if not _whole(draft):
        raise EmbeddedDatabaseError(f"MLflow left {draft} unfinished: check the messages above, and report it")


def _migrate(path: Path, draft: Path) -> str:
    """Have MLflow migrate a copy; returns the reason of a failure, or an empty text."""
    from mlflow.store.db import utils

    with closing(sqlite3.connect(path, timeout=_BUSY_S)) as live, closing(sqlite3.connect(draft)) as copy:
        live.backup(copy)
    try:
        _with_engine(draft, utils._upgrade_db)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise
        return f"its migration was not completed: {error}"
    except Exception as error:  # after any error, the original file is unchanged
        return f"its migration was not completed: {str(error).splitlines()[0]}"
    return "" if _whole(draft) else "its migration was not completed: tables are missing"


def _with_engine(draft: Path, action: Any) -> None:
    """Call one of MLflow's functions with an engine on a file that no other process uses.

    Raises:
        sqlite3.DatabaseError: If SQLite fails.
    """
    import sqlalchemy
    from mlflow.store.db import utils

    engine = utils.create_sqlalchemy_engine(f"{PREFIX}{draft}")
    # the file is published only when it is complete and on disk, so its steps need not be durable
    sqlalchemy.event.listen(engine, "connect", lambda made, _: made.execute("PRAGMA synchronous = OFF"))
    try:
        action(engine)
    except sqlalchemy.exc.DBAPIError as error:
        if isinstance(error.orig, sqlite3.DatabaseError):
            raise error.orig from error
        raise
    finally:
        engine.dispose()


def _replace(draft: Path, path: Path, word: str) -> None:
    """Replace the database by a new file, and keep the old one beside it."""
    number = 0
    while (kept := path.with_name(f"{path.name}.{word}{f'-{number}' if number else ''}")).exists():
        number += 1
    os.link(path, kept)
    _take_place(draft, path)
    _log.warning("%s was created or migrated for this MLflow; the previous file is %s", path, kept)


def _take_place(draft: Path, path: Path) -> None:
    for suffix in _JOURNALS:  # SQLite would apply the old file's journal to the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    publish_file(draft, path)


def _check_unused(path: Path) -> None:
    """Check that no other process uses a file: what it writes after the copy would be lost.

    Raises:
        EmbeddedDatabaseError: If another process has the file open.
    """
    here = path.stat()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            about, owner = entry.stat(), entry.parts[2]
        except OSError:  # the process has ended, the file is closed, or the user is another one
            continue
        if (about.st_dev, about.st_ino) == (here.st_dev, here.st_ino) and int(owner) != os.getpid():
            raise EmbeddedDatabaseError(
                f"{path} must be migrated for this MLflow, but process {owner} uses it: stop it (`starling up`, runs), "
                "and run this again"
            )
