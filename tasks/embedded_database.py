"""MLflow's embedded SQLite database: there as a whole, with the schema that MLflow wants, or refused in one line.

MLflow makes and migrates a database in place, in many steps that SQLite does not undo together: a process that is
killed or runs out of disk between two of them leaves a file that MLflow can never use again. So a database is created,
or a copy of an older one migrated, in a temporary file that is then renamed. MLflow always finds a complete database.
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

from storage.locks import file_lock
from storage.publishing import publish_file

PREFIX = "sqlite:///"
_PATIENCE_S = 300.0
_BUSY_S = 30.0
_JOURNALS = ("-wal", "-shm", "-journal")
_log = logging.getLogger(__name__)
_ready: set[tuple[str, int]] = set()
"""Path and inode of databases that this process has looked at."""
_looking = threading.Lock()


class EmbeddedDatabaseError(ValueError):
    """The database cannot be used as it is; the message says why, and what to do."""


@dataclass(frozen=True)
class Schema:
    """What a file says of itself."""

    tables: frozenset[str]
    revision: str
    """MLflow's mark of its schema; empty without one."""
    holds: bool
    """Whether there are runs, models or experiments that somebody made."""


def database_of(uri: str) -> Path | None:
    """File of an SQLite tracking URI; None for a server, another database, or one in memory."""
    if not uri.startswith(PREFIX):
        return None
    name = uri.removeprefix(PREFIX).partition("?")[0]
    return Path(name) if name and name != ":memory:" else None


def make_ready(path: Path) -> None:
    """Make a database that is not there, migrate one of an older MLflow, and look at one that is.

    Safe to call by several processes at once, and to be killed in.

    Args:
        path: The file.

    Raises:
        EmbeddedDatabaseError: It is damaged, of a newer MLflow, in use by an older one, or cannot be made.
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
    """Say in one line what SQLite or the system refuses."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = error.sqlite_errorcode & 0xFF if getattr(error, "sqlite_errorcode", None) else 0
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise EmbeddedDatabaseError(_no_space(path, error)) from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise EmbeddedDatabaseError(_not_writable(path, error)) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise EmbeddedDatabaseError(f"{path} is in use ({error}): end what uses it, and run this again") from error
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
        f"{path}, MLflow's database, is damaged ({why}): bring back a backup (starling restore --force --from FOLDER), "
        f"or move it away (mv {path} {path}.damaged) to begin with an empty one, and run this again"
    )


def _whole(path: Path) -> bool:
    """Whether a file is a database as this MLflow wants it."""
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
    """Tables and version of a database, which takes back what a killed process has left undone.

    Raises:
        sqlite3.DatabaseError: It is none.
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
    """Under the lock: let the file be whole, or say why it cannot be."""
    _clear(draft := path.with_name(f".{path.name}.making"))
    if not path.exists() or not path.stat().st_size:
        _make(draft)
        _take_place(draft, path)
        return
    schema = _schema(path)
    if _complete(schema):  # another process has been faster
        return
    if schema.revision and schema.revision not in _revisions():
        raise EmbeddedDatabaseError(
            f"{path} was written by a newer MLflow than this one (schema {schema.revision}): install that MLflow, or "
            f"move the file away (mv {path} {path}.newer) to begin with an empty one"
        )
    if schema.revision:
        _check_unused(path)
        why = _migrate(path, draft)
        if not why:
            _replace(draft, path, f"before-{schema.revision}")
            return
    else:
        why = "it is half made"
    if schema.holds:
        raise EmbeddedDatabaseError(_damaged(path, why))
    # an older version was killed while it made it: there is nothing in it
    _clear(draft)
    _make(draft)
    _replace(draft, path, "unfinished")


def _clear(draft: Path) -> None:
    for suffix in ("", *_JOURNALS):
        draft.with_name(draft.name + suffix).unlink(missing_ok=True)


def _revisions() -> set[str]:
    """Marks of every schema that this MLflow knows."""
    from alembic.script import ScriptDirectory
    from mlflow.store.db import utils

    script = ScriptDirectory.from_config(utils._get_alembic_config(""))
    return {revision.revision for revision in script.walk_revisions()}


def _make(draft: Path) -> None:
    """Let MLflow make its tables in a new file.

    Raises:
        sqlite3.DatabaseError: There is no space.
    """
    from mlflow.store.db import utils

    _with_engine(draft, utils._initialize_tables)
    if not _whole(draft):
        raise EmbeddedDatabaseError(f"MLflow left {draft} unfinished: look at the messages above, and report it")


def _migrate(path: Path, draft: Path) -> str:
    """Let MLflow migrate a copy; returns why it cannot, or nothing."""
    from mlflow.store.db import utils

    with closing(sqlite3.connect(path, timeout=_BUSY_S)) as live, closing(sqlite3.connect(draft)) as copy:
        live.backup(copy)
    try:
        _with_engine(draft, utils._upgrade_db)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise
        return f"it is half migrated: {error}"
    except Exception as error:  # after any error of a migration, the file is as it was
        return f"it is half migrated: {str(error).splitlines()[0]}"
    return "" if _whole(draft) else "it is half migrated: tables are missing"


def _with_engine(draft: Path, action: Any) -> None:
    """Let one of MLflow's functions work on a file that no other process uses.

    Raises:
        sqlite3.DatabaseError: What SQLite refuses.
    """
    import sqlalchemy
    from mlflow.store.db import utils

    engine = utils.create_sqlalchemy_engine(f"{PREFIX}{draft}")
    # it counts for nothing before it is complete and on the disk, so that no step of it must be there by itself
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
    """Put a file in the place of another, which stays beside it."""
    number = 0
    while (kept := path.with_name(f"{path.name}.{word}{f'-{number}' if number else ''}")).exists():
        number += 1
    os.link(path, kept)
    _take_place(draft, path)
    _log.warning("%s was created or migrated for this MLflow; the previous file is %s", path, kept)


def _take_place(draft: Path, path: Path) -> None:
    for suffix in _JOURNALS:  # of the file that goes: they would be played into the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    publish_file(draft, path)


def _check_unused(path: Path) -> None:
    """What others write into a file after it was copied would be lost.

    Raises:
        EmbeddedDatabaseError: Another process has it open.
    """
    here = path.stat()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            about, owner = entry.stat(), entry.parts[2]
        except OSError:  # ended, closed, or another user's
            continue
        if (about.st_dev, about.st_ino) == (here.st_dev, here.st_ino) and int(owner) != os.getpid():
            raise EmbeddedDatabaseError(
                f"{path} is to be migrated for this MLflow, and process {owner} uses it: end it (`starling up`, runs), "
                "and run this again"
            )
