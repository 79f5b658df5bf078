"""PostgreSQL in the data folder: its user, what is refused, and the passwords that a start sets."""

import itertools
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from support import environment, wait_until

from flows.servers import postgres, prepare_servers, production
from flows.servers.credentials import make_secrets, read_secret
from flows.servers.databases import DatabaseError, PostgresDatabase
from flows.servers.postgres import (
    PostgresCluster,
    PostgresError,
    _quoted,
    _without_passwords,
    account,
    connected,
    find_postgres,
)
from flows.servers.services import ServiceError, free_port
from flows.servers.supervisor import Supervisor
from storage.objects import ObjectStore
from tasks.search.config import SearchConfig
from tasks.search.driver import SearchDriver
from tasks.search.seeds import SeedTrainings
from tasks.search.study import Studies, StudyError, TrialOutcome


def test_missing_program_is_named_with_its_package():
    with pytest.raises(PostgresError, match=r"pg_nothing is not installed: apt-get install postgresql"):
        find_postgres("pg_nothing")


def test_ordinary_user_runs_postgres_under_its_own_account(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert account(tmp_path) == {}


def test_root_runs_postgres_as_a_user_with_access_to_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(PostgresError, match=r"cannot enter .*user other than root.*--folder"):
        account(closed / "postgres")
    options = account(Path(tempfile.gettempdir()) / "postgres")
    assert options["user"] != 0
    assert options["extra_groups"] == []


def test_passwords_are_quoted_and_left_out_of_messages():
    assert _quoted("it's") == "it''s"
    for text in ("a\nb", "a\\b", "a\0b"):
        with pytest.raises(PostgresError, match="choose another"):
            _quoted(text)
    assert "secret" not in _without_passwords("ERROR: ALTER ROLE postgres PASSWORD 'secret'")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(production, "_NEEDED", {"no_such_module": "such-a-package"})
    with pytest.raises(ServiceError, match=r"needs such-a-package: pip install '\.\[production\]'"):
        production.check_packages()


def test_ports_are_the_given_ones_or_free_ones():
    chosen = production.Ports(prefect=0, s3=1234).chosen()
    assert chosen.prefect > 0
    assert (chosen.mlflow, chosen.s3) == (5000, 1234)


@pytest.mark.parametrize("value", ["", "postgres", "postgres:x", ":5432"])
def test_preparing_servers_requires_their_addresses(monkeypatch, value):
    monkeypatch.setenv("STARLING_POSTGRES", value)
    with pytest.raises(ServiceError, match="STARLING_POSTGRES is .*HOST:PORT"):
        prepare_servers.main()


@pytest.fixture
def place(monkeypatch):
    """A data folder that PostgreSQL's user may enter; pytest's own may not be."""
    folder = Path(tempfile.mkdtemp(prefix="starling-postgres-")).resolve()
    folder.chmod(0o755)
    monkeypatch.setenv("STARLING_HOME", str(folder / "home"))
    (folder / "home").mkdir()
    try:
        find_postgres()
    except PostgresError as error:
        pytest.skip(str(error))
    pytest.importorskip("psycopg2")
    yield folder / "home"
    shutil.rmtree(folder)


@pytest.fixture
def cluster(place):
    make_secrets(place / "secrets")
    return PostgresCluster(port=free_port(), secrets=place / "secrets", folder=place / "postgres")


def test_server_listens_on_loopback_and_ends_despite_clients(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(postgres, "spawn", lambda *given, **more: started.append((given, more)))
    monkeypatch.setattr(postgres, "account", lambda folder: {"user": 7})
    monkeypatch.setattr(postgres, "find_postgres", lambda name, version: f"/{version}/{name}")
    cluster = PostgresCluster(port=5433, secrets=tmp_path, folder=tmp_path)
    (tmp_path / "PG_VERSION").write_text("15\n")
    cluster.start()
    ((name, command, url, health), more) = started[0]
    assert (name, url, health) == ("postgres", "tcp://127.0.0.1:5433", "tcp://127.0.0.1:5433")
    settings = [word for before, word in itertools.pairwise(command) if before == "-c"]
    assert command[:3] == ["/15/postgres", "-D", str(tmp_path)]
    assert settings == ["listen_addresses=127.0.0.1", "port=5433", "unix_socket_directories="]
    assert more == {"account": {"user": 7}, "end": signal.SIGINT}


def query(cluster, database, text):
    with cluster.admin(database) as admin, admin.cursor() as cursor:
        cursor.execute(text)
        return cursor.fetchall() if cursor.description else None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_changed_passwords_take_effect_and_a_crash_loses_nothing(cluster):
    cluster.prepare()
    server = cluster.start().wait()
    cluster.make_databases()
    query(cluster, "mlflow", "CREATE TABLE kept AS SELECT 42 AS number")
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(20)
    for name in ("postgres_password", "mlflow_database_password"):
        (cluster.secrets / name).unlink()
    assert make_secrets(cluster.secrets) == ["postgres_password", "mlflow_database_password"]
    # the killed server's children leave when they notice
    wait_until(lambda: _prepared(cluster))
    server = cluster.start().wait()
    try:
        cluster.make_databases()
        assert query(cluster, "mlflow", "SELECT number FROM kept") == [(42,)]
        password = read_secret(cluster.secrets, "mlflow_database_password")
        with connected("127.0.0.1", cluster.port, "mlflow", password, "mlflow"):
            pass
        with (
            pytest.raises(PostgresError, match="password"),
            connected("127.0.0.1", cluster.port, "mlflow", "x", "mlflow"),
        ):
            pass
    finally:
        server.stop(30)
    assert server.process.returncode == 0


def _prepared(cluster):
    try:
        cluster.prepare()
    except PostgresError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_servers_are_prepared_and_databases_restored_atomically(place, tmp_path):
    make_secrets(place / "secrets")
    supervisor, ports = Supervisor(), production.Ports(postgres=0, s3=0).chosen()
    try:
        cluster = production.start_stores(supervisor, ports, place / "secrets")
        values = {name: read_secret(cluster.secrets, f"s3_{name}_key") for name in ("access", "secret")}
        env = production.s3_environment(f"http://127.0.0.1:{ports.s3}")
        env |= {"AWS_ACCESS_KEY_ID": values["access"], "AWS_SECRET_ACCESS_KEY": values["secret"]}
        env |= {"STARLING_POSTGRES": f"127.0.0.1:{ports.postgres}", "STARLING_SECRETS": str(place / "secrets")}
        shutil.rmtree(place / "s3" / "mlflow")
        with environment(**env):
            prepare_servers.main()
            prepare_servers.main()  # safe to repeat
            ObjectStore("s3://mlflow/artifacts").write("x", b"1")
        check_drop_and_restore(cluster, tmp_path)
    finally:
        supervisor.stop()


def check_drop_and_restore(cluster, folder):
    database = PostgresDatabase("prefect", cluster)
    assert not database.has_data()
    query(cluster, "prefect", "SET ROLE prefect; CREATE TABLE kept AS SELECT 42 AS number")
    database.dump(folder / "prefect.dump")
    query(cluster, "prefect", "UPDATE kept SET number = 7")
    assert database.has_data()
    with cluster.admin("prefect"), pytest.raises(DatabaseError, match="database prefect is in use"):
        database.restore(folder / "prefect.dump")
    (folder / "torn.dump").write_bytes((folder / "prefect.dump").read_bytes()[:-40])
    (folder / "no.dump").write_bytes(b"no dump")
    for name in ("torn.dump", "no.dump"):
        try:
            database.restore(folder / name)
        except DatabaseError:
            assert query(cluster, "prefect", "SELECT number FROM kept") == [(7,)]
    database.restore(folder / "prefect.dump")
    assert query(cluster, "prefect", "SELECT number FROM kept") == [(42,)]
    password = read_secret(cluster.secrets, "prefect_database_password")
    with connected("127.0.0.1", cluster.port, "prefect", password, "prefect") as owner, owner.cursor() as cursor:
        cursor.execute("INSERT INTO kept VALUES (1)")  # its role owns it again
    assert postgres.DATABASES == ("prefect", "mlflow", "studies")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_searches_keep_their_studies_in_postgresql_and_a_backup_restores_them(cluster, tmp_path, monkeypatch):
    cluster.prepare()
    server = cluster.start().wait()
    try:
        cluster.make_databases()
        url = production.studies_url(f"127.0.0.1:{cluster.port}")
        monkeypatch.setenv("STARLING_STUDIES", url)
        monkeypatch.setenv("STARLING_STUDIES_PASSWORD", "wrong")
        with pytest.raises(StudyError, match="password authentication failed") as refused:
            Studies()
        assert "wrong" not in str(refused.value)
        monkeypatch.setenv("STARLING_STUDIES_PASSWORD", read_secret(cluster.secrets, "studies_database_password"))
        searched = search_in(Studies())
        monkeypatch.delenv("STARLING_STUDIES")
        assert searched == search_in(Studies(f"sqlite:///{tmp_path}/studies.db"))
        database = PostgresDatabase("studies", cluster)
        database.dump(tmp_path / "studies.dump")
        query(cluster, "studies", "DELETE FROM starling_results; DELETE FROM starling_trials")
        wait_until(lambda: connections(cluster, "studies") == 0)
        database.restore(tmp_path / "studies.dump")
        monkeypatch.setenv("STARLING_STUDIES", url)
        assert kept(Studies().open("s")) == searched
    finally:
        server.stop(30)


def connections(cluster, database):
    """Number of its clients; one that has left may be there for a moment."""
    text = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}'"
    return query(cluster, "postgres", text)[0][0]


def search_in(studies):
    """What a search, killed once, has in a database."""
    search = SearchConfig.model_validate({"method": "hyperband", "space": {"lr": {"low": 0.1, "high": 1.0}}})

    def trained(job, watch):
        return TrialOutcome(job.values["lr"] + 1 / job.budget, {"training": "0123"})

    def killed(job, watch):
        if job.number == 4:
            raise KeyboardInterrupt
        return trained(job, watch)

    for train in (killed, trained):
        study = studies.create("s", {"space": 1})
        with suppress(KeyboardInterrupt):
            SearchDriver(study, search.build(9), search, 9, train).run()
    study.make_seeds(study.best.number, SeedTrainings(1, 2, 9), 9)
    assert studies.names() == ["s"]
    everything = kept(study)
    studies.engine.dispose()  # its connections would hinder a restore
    return everything


def kept(study):
    study.read()
    trials = [(t.number, t.values, t.state, t.budget, t.trained, t.losses, t.figures) for t in study.trials]
    return trials, study.seeds_of(study.best.number).about
