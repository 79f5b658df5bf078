"""Backup and restore of the small profile, and what they refuse; the production profile's is in test_production.py."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
from support import environment, starling

from flows.servers import backup as module
from flows.servers.backup import MANIFEST, BackupError, backup, find_backup, restore
from flows.servers.databases import DatabaseError, SqliteDatabase, move_artifacts
from storage.objects import ObjectStore
from tasks.config.home import mlflow_artifacts


def table(path, text="kept"):
    """A database with one row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE IF NOT EXISTS notes (text)")
        made.execute("INSERT INTO notes VALUES (?)", (text,))
    return path


def rows(path):
    with closing(sqlite3.connect(path)) as made:
        return [row[0] for row in made.execute("SELECT text FROM notes")]


@pytest.fixture
def filled(home):
    """A data folder with both databases and two artifacts."""
    for name in ("prefect", "mlflow"):
        table(home / name / f"{name}.db")
    for name in ("1/model/weights.safetensors", "1/model/MLmodel"):
        path = mlflow_artifacts() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 100)
    return home


def empty_folder(home):
    shutil.rmtree(home)
    home.mkdir()


def test_backup_and_restore_recover_everything(filled, tmp_path):
    url, manifest = backup(str(tmp_path / "backups"))
    assert set(manifest["databases"]) == {"prefect", "mlflow"}
    assert set(manifest["artifacts"]) == {"1/model/weights.safetensors", "1/model/MLmodel"}
    assert manifest["versions"]["mlflow"] == mlflow.__version__
    empty_folder(filled)
    assert restore(str(tmp_path / "backups")) == (url, manifest)
    assert rows(filled / "prefect" / "prefect.db") == ["kept"]
    assert (mlflow_artifacts() / "1/model/MLmodel").read_bytes() == b"1/model/MLmodel" * 100
    assert not list(filled.glob(".restore-*"))


def test_backup_and_restore_have_the_studies_of_searches(filled, tmp_path):
    path = table(filled / "search" / "studies.db")
    _, manifest = backup(str(tmp_path / "backups"))
    assert set(manifest["databases"]) == {"prefect", "mlflow", "studies"}
    empty_folder(filled)
    restore(str(tmp_path / "backups"))
    assert rows(path) == ["kept"]


def test_backup_without_studies_leaves_those_of_the_data_folder_alone(filled, tmp_path):
    backup(str(tmp_path / "backups"))
    empty_folder(filled)
    path = table(filled / "search" / "studies.db", "newer")
    restore(str(tmp_path / "backups"))
    assert rows(path) == ["newer"]
    assert rows(filled / "prefect" / "prefect.db") == ["kept"]


def test_database_can_be_copied_during_writes(filled, tmp_path):
    with closing(sqlite3.connect(filled / "prefect" / "prefect.db")) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("INSERT INTO notes VALUES ('committed')")
        writer.commit()
        writer.execute("INSERT INTO notes VALUES ('not yet')")
        SqliteDatabase("prefect", filled / "prefect" / "prefect.db").dump(tmp_path / "copy")
    assert rows(tmp_path / "copy") == ["kept", "committed"]


def test_restore_overwrites_only_by_force_and_drops_the_old_journal(filled, tmp_path):
    backup(str(tmp_path / "backups"))
    path = table(filled / "prefect" / "prefect.db", "newer")
    with pytest.raises(BackupError, match=r"database prefect, mlflow\): --force"):
        restore(str(tmp_path / "backups"))
    assert rows(path) == ["kept", "newer"]
    path.with_name("prefect.db-wal").write_bytes(b"left by a crash")
    restore(str(tmp_path / "backups"), force=True)
    assert rows(path) == ["kept"]


def test_journal_left_by_a_crash_is_not_applied_to_restored_database(filled, tmp_path):
    path = filled / "prefect" / "prefect.db"
    journal = path.with_name("prefect.db-wal")
    with closing(sqlite3.connect(path)) as made:
        made.execute("PRAGMA journal_mode = WAL")
    url, _ = backup(str(tmp_path / "backups"))
    with closing(sqlite3.connect(path)) as made:
        made.execute("INSERT INTO notes VALUES ('newer')")
        made.commit()
        left = journal.read_bytes()
    journal.write_bytes(left)  # as after a kill: the journal was not closed
    restore(url, force=True)
    assert not journal.exists()
    assert rows(path) == ["kept"]


def test_damaged_database_is_neither_backed_up_nor_restored(filled, tmp_path):
    path = filled / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(path)) as made, made:
        made.executemany("INSERT INTO notes VALUES (?)", [("x" * 500,) for _ in range(200)])
    sound = path.read_bytes()
    path.write_bytes(sound[:20480] + b"?" * 4096 + sound[24576:])
    database = SqliteDatabase("mlflow", path)
    with pytest.raises(DatabaseError, match="damaged"):
        database.dump(tmp_path / "copy")
    (tmp_path / "damaged").write_bytes(path.read_bytes())
    path.write_bytes(sound)
    with pytest.raises(DatabaseError, match="damaged"):
        database.restore(tmp_path / "damaged")
    assert path.read_bytes() == sound


def test_restored_models_are_found_in_the_new_data_folder(filled, tmp_path, monkeypatch):
    before = mlflow_artifacts().as_uri()
    with closing(sqlite3.connect(filled / "mlflow" / "mlflow.db")) as made, made:
        made.execute("CREATE TABLE runs (artifact_uri)")
        made.execute("INSERT INTO runs VALUES (?)", (f"{before}/1/model",))
    url, _ = backup(str(tmp_path / "backups"))
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("STARLING_HOME", str(other))
    restore(url)
    with closing(sqlite3.connect(other / "mlflow" / "mlflow.db")) as made:
        assert made.execute("SELECT artifact_uri FROM runs").fetchall() == [(f"{mlflow_artifacts().as_uri()}/1/model",)]
    assert str(other) in mlflow_artifacts().as_uri() != before
    assert (mlflow_artifacts() / "1/model/MLmodel").is_file()


def test_artifact_deleted_during_backup_is_left_out(filled, tmp_path, monkeypatch):
    listed = ObjectStore.list
    monkeypatch.setattr(ObjectStore, "list", lambda self: [*listed(self), *(["gone"] if self.url == artifacts else [])])
    artifacts = ObjectStore(str(mlflow_artifacts())).url
    url, manifest = backup(str(tmp_path / "backups"))
    assert set(manifest["artifacts"]) == {"1/model/weights.safetensors", "1/model/MLmodel"}
    empty_folder(filled)
    assert restore(url)[1] == manifest


@pytest.mark.parametrize("part", ["databases/prefect.sqlite", "artifacts/1/model/MLmodel"])
@pytest.mark.parametrize("damage", ["altered", "missing"])
def test_restoring_a_damaged_backup_changes_nothing(filled, tmp_path, part, damage):
    url, _ = backup(str(tmp_path / "backups"))
    store = ObjectStore(url)
    if damage == "missing":
        store.delete(part)
    else:
        store.write(part, store.read(part)[:-1] + b"x")
    empty_folder(filled)
    with pytest.raises(BackupError, match="is damaged: .*" + part.rpartition("/")[2]):
        restore(url)
    assert not (filled / "prefect" / "prefect.db").exists()
    assert not (filled / "mlflow" / "mlflow.db").exists()
    assert not ObjectStore(str(mlflow_artifacts())).list()


@pytest.mark.parametrize("lost", ["databases/prefect.sqlite", "artifacts/1/model/MLmodel"])
def test_backup_that_the_store_has_not_kept_is_an_error(filled, tmp_path, monkeypatch, lost):
    listed = ObjectStore.entries
    monkeypatch.setattr(
        ObjectStore,
        "entries",
        lambda store, prefix="": [entry for entry in listed(store, prefix) if entry.path != lost],
    )
    with pytest.raises(BackupError, match=rf"1 of 5 are missing or differ there \({lost}\)"):
        backup(str(tmp_path / "backups"))


def test_incomplete_backup_is_ignored_for_the_previous_one(filled, tmp_path, monkeypatch):
    with pytest.raises(BackupError, match="no backup"):
        find_backup(str(tmp_path / "backups"))
    url, _ = backup(str(tmp_path / "backups"))
    cut = ObjectStore(str(tmp_path / "backups")).child("2999-01-01T00-00-00Z")
    cut.write("databases/prefect.sqlite", b"half")
    assert find_backup(str(tmp_path / "backups"))[0].url == url
    with pytest.raises(BackupError, match="no backup"):
        find_backup(cut.url)


def test_newest_of_several_backups_is_restored(tmp_path):
    versions = {"prefect": "0", "mlflow": "0"}
    for day in ("02", "09", "05"):
        manifest = {"format": module.FORMAT, "versions": versions, "day": day}
        ObjectStore(str(tmp_path)).write_json(f"2026-11-{day}T02-15-00Z/{MANIFEST}", manifest)
    store, manifest = find_backup(str(tmp_path))
    assert (store.url.rpartition("/")[2], manifest["day"]) == ("2026-11-09T02-15-00Z", "09")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_backup_folder_is_private_and_in_the_expected_place(filled, tmp_path, monkeypatch, scheme):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    url, _ = backup(f"{scheme}{tmp_path}/backups")
    folder = Path(url.removeprefix("file://"))
    assert folder.parent == tmp_path / "backups"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "cwd").iterdir()) == []


def test_backup_has_files_of_every_model_in_its_database(filled, tmp_path):
    """Models are registered during the backup: MLflow stores a model's files first, then its name."""
    made = []

    def register(_):
        made.append(f"{len(made)}/model/MLmodel")
        ObjectStore(str(mlflow_artifacts())).write(made[-1], b"x")
        table(filled / "mlflow" / "mlflow.db", made[-1])

    url, manifest = backup(str(tmp_path / "backups"), register)
    empty_folder(filled)
    restore(url)
    named = set(rows(filled / "mlflow" / "mlflow.db")) & set(made)
    assert named
    assert named <= set(manifest["artifacts"])
    assert all((mlflow_artifacts() / name).is_file() for name in named)


def test_backup_of_a_newer_version_is_refused(filled, tmp_path):
    url, manifest = backup(str(tmp_path / "backups"))
    newer = manifest | {"versions": manifest["versions"] | {"mlflow": "99.1"}}
    ObjectStore(url).write_json(MANIFEST, newer)
    with pytest.raises(BackupError, match=r"made with mlflow 99\.1.*upgrade mlflow first"):
        restore(url, force=True)
    ObjectStore(url).write_json(MANIFEST, manifest | {"format": 2})
    with pytest.raises(BackupError, match="format 1"):
        restore(url, force=True)


def test_backup_of_the_other_profile_is_refused(filled, tmp_path, monkeypatch):
    url, manifest = backup(str(tmp_path / "backups"))
    ObjectStore(url).write_json(MANIFEST, manifest | {"kind": "postgresql"})
    with pytest.raises(BackupError, match="postgresql database, but the data folder is of the small profile"):
        restore(url, force=True)
    ObjectStore(url).write_json(MANIFEST, manifest)
    monkeypatch.setenv(module.POSTGRES, "127.0.0.1:1")
    with pytest.raises(BackupError, match="sqlite database, but the data folder is of the production profile"):
        restore(url, force=True)


@pytest.mark.parametrize(
    ("profile", "allowed", "refused"),
    [
        ("", ["sqlite", "postgresql"], []),
        ("small", ["sqlite"], ["postgresql"]),
        ("production", ["postgresql"], ["sqlite"]),
        ("production elsewhere", ["postgresql"], ["sqlite"]),
    ],
)
def test_backup_fits_data_folders_of_its_profile_and_new_ones(home, monkeypatch, profile, allowed, refused):
    if profile == "small":
        (home / "mlflow").mkdir(parents=True)
        (home / "mlflow" / "mlflow.db").touch()
    elif profile == "production":
        module.production.postgres_folder().mkdir(parents=True)
    elif profile:
        monkeypatch.setenv(module.POSTGRES, "127.0.0.1:1")
    for kind in allowed:
        module._check_kind(kind)
    for kind in refused:
        with pytest.raises(BackupError, match=f"{kind} database, .* is of the {profile.split()[0]} profile"):
            module._check_kind(kind)


def test_restore_is_refused_while_servers_run(filled, tmp_path, monkeypatch):
    url, _ = backup(str(tmp_path / "backups"))
    monkeypatch.setattr(module.services, "running_services", lambda: {"prefect": "http://127.0.0.1:4200"})
    with pytest.raises(BackupError, match="stop `starling up` first"):
        restore(url, force=True)


def test_backup_without_databases_is_refused(home, tmp_path):
    with pytest.raises(DatabaseError, match="run a pipeline with this data folder first"):
        backup(str(tmp_path / "backups"))
    with pytest.raises(BackupError, match="no backup"):
        find_backup(str(tmp_path / "backups"))


def test_only_locations_below_the_data_folder_are_moved(tmp_path):
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE experiments (artifact_location)")
        places = ["file:///a_b", "file:///a_b/1", "file:///axb/1", "file:///a_bc", "s3://bucket/x", None]
        made.executemany("INSERT INTO experiments VALUES (?)", [(place,) for place in places])
    move_artifacts(path, "file:///a_b", "file:///new")
    with closing(sqlite3.connect(path)) as made:
        locations = [row[0] for row in made.execute("SELECT artifact_location FROM experiments")]
    assert locations == ["file:///new", "file:///new/1", "file:///axb/1", "file:///a_bc", "s3://bucket/x", None]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_champion_is_restored_into_another_data_folder(finished, tmp_path):
    """The command line, and a registry whose files were at another path."""
    import support

    old, name = support.finished()[0], finished.config.name
    copied = tmp_path / "first"
    shutil.copytree(old, copied)
    table(copied / "prefect" / "prefect.db")
    with closing(sqlite3.connect(copied / "mlflow" / "mlflow.db")) as made, made:
        made.commit()
    move_artifacts(
        copied / "mlflow" / "mlflow.db", (old / "mlflow/artifacts").as_uri(), (copied / "mlflow/artifacts").as_uri()
    )
    kept = tmp_path / "kept"
    written = json.loads(starling("backup", "--to", kept, "--json", home=copied).stdout)
    assert written["kind"] == "sqlite"
    shutil.rmtree(copied)
    second = tmp_path / "second"
    starling("restore", "--from", kept, "--folder", second, home=copied)
    uri = f"sqlite:///{second}/mlflow/mlflow.db"
    with environment(STARLING_HOME=second, MLFLOW_TRACKING_URI=uri):
        mlflow.set_tracking_uri(uri)
        model = mlflow.pyfunc.load_model(f"models:/{name}@champion")
    assert model.metadata.signature is not None
