"""kill -9 or a full disk while MLflow created its database left one that MLflow always refused."""

import os
import random
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
import sqlalchemy
from alembic import command
from alembic.script import ScriptDirectory
from forks import Forkable
from mlflow.store.db import utils
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from support import ROOT, copy_database, give_mlflow, small_disk
from typer.testing import CliRunner

from flows.cli.app import app
from tasks.config.home import mlflow_uri
from tasks.tracking import embedded_database
from tasks.tracking.embedded_database import EmbeddedDatabaseError, make_ready
from tasks.tracking.runs import client

HEAD = utils._get_latest_schema_revision()


def create_directly(path):
    """Create the database as MLflow does by itself."""
    engine = utils.create_sqlalchemy_engine(f"sqlite:///{path}")
    try:
        utils._initialize_tables(engine)
    finally:
        engine.dispose()


def killed_in(action, path, moment):
    """Run in a child that is killed before the so many-th statement, or the first that has a word; whether it was."""
    pid = os.fork()  # a new process would need seconds to import MLflow
    if not pid:
        seen = []

        def die(_connection, _cursor, statement, *_):
            seen.append(statement)
            if len(seen) > moment if isinstance(moment, int) else moment in statement:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sqlalchemy.event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", die)
            action(path)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def names():
    """MLflow's experiments, of the file that is there now: in a process MLflow keeps the one that it has opened."""
    client()
    SqlAlchemyStore._engine_map.clear()
    return {experiment.name for experiment in SqlAlchemyStore(mlflow_uri(), "artifacts").search_experiments()}


@pytest.fixture
def path(home):
    """Where MLflow's database of an empty data folder is to be."""
    return home / "mlflow" / "mlflow.db"


@pytest.fixture
def database(home, path):
    """One with an experiment in it."""
    give_mlflow(home)
    client().create_experiment("kept", artifact_location=(home / "kept").as_uri())
    embedded_database._ready.clear()
    return path


@pytest.fixture
def made_fast(home, monkeypatch):
    """Another database is a copy of an empty one: MLflow takes a second to make one, as other tests here have it do."""
    give_mlflow(home / "spare")
    monkeypatch.setattr(embedded_database, "_make", lambda draft: copy_database(home / "spare/mlflow/mlflow.db", draft))


def change(path, statement):
    embedded_database._ready.clear()
    with closing(sqlite3.connect(path)) as made, made:
        made.execute(statement)


def test_killed_creation_leaves_no_database(path):
    for statements in (3, 150, 600):
        assert killed_in(make_ready, path, statements), statements
        assert not path.exists()
    assert names() == {"Default"}
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["mlflow.db", "mlflow.db.lock"]


def test_unfinished_older_database_is_replaced_and_kept(path, caplog, made_fast):
    path.parent.mkdir(parents=True)
    for number, moment in enumerate(("INSERT INTO _alembic_tmp_", "webhook_events")):
        path.unlink(missing_ok=True)
        assert killed_in(create_directly, path, moment)
        unfinished = path.read_bytes()
        with pytest.raises(sqlalchemy.exc.OperationalError, match="already exists|duplicate column"):
            create_directly(path)
        path.write_bytes(unfinished)
        embedded_database._ready.clear()
        assert names() == {"Default"}
        kept = path.with_name("mlflow.db.unfinished" + (f"-{number}" if number else ""))
        assert kept.read_bytes() == unfinished
        assert str(kept) in caplog.text


def test_older_database_is_kept_and_a_copy_migrated(database):
    script = ScriptDirectory.from_config(utils._get_alembic_config(""))
    before = script.get_revision(HEAD).down_revision
    database.unlink()
    engine = utils.create_sqlalchemy_engine(f"sqlite:///{database}")
    utils.InitialBase.metadata.create_all(engine)
    with engine.begin() as connection:
        config = utils._get_alembic_config(f"sqlite:///{database}")
        config.attributes["connection"] = connection
        command.upgrade(config, before)
    engine.dispose()
    insert = "INSERT INTO experiments (name, lifecycle_stage, artifact_location) VALUES ('old', 'active', '/x')"
    change(database, insert)
    old = database.read_bytes()
    with open(database, "rb") as held, subprocess.Popen(["sleep", "60"], stdin=held) as server:
        with pytest.raises(EmbeddedDatabaseError, match=f"process {server.pid} uses it: stop it"):
            make_ready(database)
        server.kill()
    assert killed_in(make_ready, database, 5)
    assert database.read_bytes() == old
    assert "old" in names()
    assert database.with_name(f"mlflow.db.before-{before}").read_bytes() == old


def test_half_migrated_database_is_refused_with_a_working_remedy(database, home, made_fast):
    change(database, "CREATE TABLE _alembic_tmp_metrics (x int)")
    script = ScriptDirectory.from_config(utils._get_alembic_config(""))
    # its last migrations have been applied, but the version was not recorded
    change(database, f"UPDATE alembic_version SET version_num = '{script.get_revision(HEAD).down_revision}'")
    shown = CliRunner().invoke(app, ["rollback", "tiny", "--list"])
    assert shown.exit_code == 1
    assert shown.exception is None or isinstance(shown.exception, SystemExit)
    with pytest.raises(EmbeddedDatabaseError, match="is damaged") as refused:
        client()
    text = str(refused.value)
    assert "\n" not in text
    assert text.count("(mv ") == 1
    move = shlex.split(text.partition("(mv ")[2].partition(")")[0])
    os.rename(*move)
    assert names() == {"Default"}


def test_database_whose_migration_leaves_tables_missing_is_refused_if_it_holds_something(database, made_fast):
    change(database, "DROP TABLE trace_tags")
    before = database.read_bytes()
    with pytest.raises(
        EmbeddedDatabaseError, match=r"is damaged \(its migration was not completed: tables are missing"
    ):
        make_ready(database)
    assert database.read_bytes() == before
    change(database, "DELETE FROM experiments WHERE name = 'kept'")
    assert names() == {"Default"}


def test_destroyed_database_is_refused_and_restored_from_backup(database, home, tmp_path):
    copy_database(database, home / "prefect" / "prefect.db")  # any database will do
    made = CliRunner().invoke(app, ["backup", "--to", str(tmp_path / "backups")])
    assert made.exit_code == 0, made.output
    database.write_bytes(b"no database at all " * 500)
    for act in (client, lambda: make_ready(database)):
        with pytest.raises(EmbeddedDatabaseError, match="not a database.*starling restore --force --from FOLDER"):
            act()
    refused = CliRunner().invoke(app, ["backup", "--to", str(tmp_path / "more")])
    assert isinstance(refused.exception, SystemExit)
    assert f"error: {database} cannot be copied (file is not a database): restore it from a backup" in refused.output
    assert not list((tmp_path / "more").rglob("manifest.json"))
    told = CliRunner().invoke(app, ["restore", "--force", "--from", str(tmp_path / "backups")])
    assert told.exit_code == 0, told.output
    assert names() == {"Default", "kept"}


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (sqlite3.SQLITE_FULL, "free space in"),
        (sqlite3.SQLITE_IOERR_WRITE, "free space in"),
        (sqlite3.SQLITE_READONLY_DIRECTORY, "right to write into"),
        (sqlite3.SQLITE_CANTOPEN, "right to write into"),
        (sqlite3.SQLITE_PERM, "right to write into"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, "is in use .* stop what uses it"),
        (sqlite3.SQLITE_LOCKED, "is in use .* stop what uses it"),
        (sqlite3.SQLITE_CORRUPT, "is damaged .*: restore a backup"),
        (None, "is damaged .*: restore a backup"),
    ],
)
def test_errors_of_sqlite_name_their_remedy(path, code, remedy):
    error = sqlite3.DatabaseError("it failed")
    if code is not None:
        error.sqlite_errorcode = code
    with pytest.raises(EmbeddedDatabaseError, match=remedy), embedded_database._explained(path):
        raise error


def test_errors_of_the_system_name_their_remedy(path):
    for error, remedy in ((PermissionError("no"), "right to write into"), (OSError("no"), "free space in")):
        with pytest.raises(EmbeddedDatabaseError, match=remedy), embedded_database._explained(path):
            raise error


def test_only_files_are_embedded_databases():
    files = [embedded_database.database_of(uri) for uri in ("sqlite:////a/m.db?timeout=5", "sqlite:///m.db")]
    assert [str(path) for path in files] == ["/a/m.db", "m.db"]
    for uri in ("sqlite:///", "sqlite:///:memory:", "http://server:5000", "postgresql:///m.db"):
        assert embedded_database.database_of(uri) is None


def test_newer_mlflow_database_is_refused_with_a_working_remedy(database, made_fast):
    change(database, "UPDATE alembic_version SET version_num = 'ffff00000000'")
    with pytest.raises(EmbeddedDatabaseError, match="newer MLflow") as refused:
        client()
    os.rename(*shlex.split(str(refused.value).partition("(mv ")[2].partition(")")[0]))
    assert names() == {"Default"}


def test_full_disk_is_one_error_and_leaves_no_database(tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk", "1400k") as disk:
        monkeypatch.setenv("STARLING_HOME", str(disk))
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        (disk / "ballast").write_bytes(bytes(900_000))
        with pytest.raises(EmbeddedDatabaseError, match=f"free space in {disk}/mlflow, and run this again"):
            client()
        assert not (disk / "mlflow" / "mlflow.db").exists()
        (disk / "ballast").unlink()
        assert names() == {"Default"}


MAKE = "from tasks.tracking.runs import client; client().search_experiments()"


@pytest.mark.slow
def test_repeatedly_killed_concurrent_creations_end_in_a_valid_database(path, tmp_path):
    draw = random.Random(8)
    own = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start():
        return subprocess.Popen([sys.executable, "-c", Forkable(MAKE)], env=own, stderr=subprocess.PIPE, text=True)

    for _ in range(6):  # two are killed in each
        makers = [start(), start()]
        for _ in range(600):  # both import for seconds; what is to be hit comes then
            if path.exists() or list(path.parent.glob(".mlflow.db.making*")):
                break
            time.sleep(0.05)
        time.sleep(draw.uniform(0.0, 3.0))
        makers[0].kill()
        said = makers[1].communicate(timeout=300)[1]
        assert makers[1].returncode == 0, said
        makers[0].communicate()
        path.unlink()
        killed = start()
        while killed.poll() is None and not list(path.parent.glob(".mlflow.db.making*")) and not path.exists():
            time.sleep(0.02)
        time.sleep(draw.uniform(0.0, 2.0))
        killed.kill()
        killed.communicate()
        again = start()
        said = again.communicate(timeout=300)[1]
        assert again.returncode == 0, said
        assert not list(path.parent.glob("*.unfinished*"))
        path.unlink()
