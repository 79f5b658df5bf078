"""After runs with `--no-prefect` there is no database of Prefect, and `starling backup` refused to copy the others."""

import shutil
import sqlite3
from contextlib import closing

import pytest

from flows.servers.backup import backup, restore
from flows.servers.databases import DatabaseError
from tasks.config.home import studies_file


def table(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE notes (text)")


def test_models_and_searches_are_backed_up(home, tmp_path):
    table(home / "mlflow" / "mlflow.db")
    table(studies_file())
    _, manifest = backup(str(tmp_path / "backups"))
    assert set(manifest["databases"]) == {"mlflow", "studies"}
    shutil.rmtree(home)
    home.mkdir()
    restore(str(tmp_path / "backups"))
    assert (home / "mlflow" / "mlflow.db").is_file()
    assert studies_file().is_file()
    assert not (home / "prefect").exists()


def test_registry_must_be_there(home, tmp_path):
    table(home / "prefect" / "prefect.db")
    with pytest.raises(DatabaseError, match=r"there is no database .*mlflow\.db: run a pipeline"):
        backup(str(tmp_path / "backups"))
