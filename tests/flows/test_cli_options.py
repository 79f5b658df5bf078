"""Command-line options reach the functions that they configure."""

import json
import os
import signal
import socket
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from support import tiny_document, write_config
from typer.testing import CliRunner

from flows.cli import deploy, run, serve
from flows.cli.app import app
from tasks.tracking.registry import Move
from tasks.tracking.significance import PromotionOptions


def invoke(*words, code=0, stdin=None):
    result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """A terminal that does not wrap lines."""
    for console in ("out", "err"):
        monkeypatch.setattr(f"flows.cli.common.{console}.width", 200, raising=False)


@pytest.fixture
def recorder(monkeypatch):
    """Replaces a function by one that records its arguments."""

    def record(name, answer=None):
        calls = []

        def called(*given, **named):
            calls.append((*given, named) if named else given)
            return answer

        monkeypatch.setattr(name, called)
        return calls

    return record


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "c.yaml", tiny_document())


# --- run and the stages


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run"], ([], "", "report", False)),
        (["run", "--set", "a=1", "--set", "b=2"], (["a=1", "b=2"], "", "report", False)),
        (["run", "--from", "train", "--until", "score", "--plain"], ([], "train", "score", True)),
        (["decode"], ([], "", "decode", False)),
        (["register", "--again", "--set", "a=1"], (["a=1"], "register", "register", False)),
        (["train"], ([], "", "train", False)),
        (["score"], ([], "", "score", False)),
        (["score", "--again", "--plain"], ([], "score", "score", True)),
    ],
)
@pytest.mark.parametrize("json_output", [False, True])
def test_what_is_run_from_where_to_where(recorder, config, words, expected, json_output):
    name, *options = words
    module = {"train": "node", "score": "score"}.get(name, "run")
    executed = recorder(f"flows.cli.{module}.execute", {"a": "summary"})
    finished = recorder(f"flows.cli.{module}.finish")
    invoke(name, config, *options, *(["--json"] if json_output else []))
    assert executed == [(config, *expected)]
    assert finished == [({"a": "summary"}, json_output)]


def test_what_is_cross_validated(recorder, config):
    executed = recorder("flows.cli.run.execute_folds", {"a": "result"})
    finished = recorder("flows.cli.run.finish_folds")
    invoke("run", config, "--folds", 3)
    invoke("run", config, "--folds", 4, "--from", "shard", "--plain", "--set", "a=1", "--json")
    assert executed == [(config, [], 3, "", False), (config, ["a=1"], 4, "shard", True)]
    assert finished == [({"a": "result"}, False), ({"a": "result"}, True)]
    invoke("run", config, "--folds", 3, "--until", "score", code=2)
    assert len(executed) == 2


def test_servers_are_looked_at_before_anything_is_done(recorder, config, monkeypatch):
    """Only what a run needs: one that ends before registration needs no MLflow."""
    asked = recorder("tasks.orchestration.reachable.check_servers")
    ran = recorder("tasks.orchestration.stage_tasks.run_plainly")
    folded = recorder("flows.folds.crossvalidate_plainly", {})
    monkeypatch.setattr("flows.summary.summarize", lambda run: {"run": run})
    made = run.execute(config, ["seed=7"], "shard", "features", True)["run"]
    assert (made.config.seed, made.force_from) == (7, "shard")
    assert ran == [(made, "features")]
    run.execute_folds(config, ["seed=8"], 3, "shard", True)
    assert [given[:2] for given in asked] == [(made.config, "features"), (folded[0][0], "register")]
    assert asked[1][-1] == {"can_stop": False}
    assert (folded[0][0].seed, *folded[0][1:]) == (8, 3, "shard")


# --- the registry


@pytest.fixture
def no_server(home, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture
def served(home, monkeypatch):
    """As if a Prefect server were running."""

    @contextmanager
    def orchestration(*_):
        yield "http://prefect"

    monkeypatch.setenv("PREFECT_API_URL", "http://prefect/api")
    monkeypatch.setattr("flows.servers.prefect_api.orchestration", orchestration)


FOUND = {"model": "m", "version": "3", "promoted": False, "reason": "it is [red]worse"}


@pytest.mark.parametrize(
    ("words", "version", "options"),
    [
        ([], "", PromotionOptions()),
        (["--version", "3"], "3", PromotionOptions()),
        (["--new-tests"], "", PromotionOptions(new_tests=True)),
        (["-v", "2", "--force", "--reason", "why not"], "2", PromotionOptions(force=True, reason="why not")),
    ],
)
def test_what_is_promoted_and_how(recorder, no_server, words, version, options):
    calls = recorder("tasks.tracking.promotion.promote_version", FOUND)
    shown = invoke("promote", "m", *words).stdout
    assert calls == [("m", version, options)]
    assert "m version 3: not promoted" in shown
    assert "it is [red]worse" in shown
    assert json.loads(invoke("promote", "m", *words, "--json").stdout) == FOUND


def test_a_configuration_names_the_model_unless_a_name_is_given(recorder, no_server, tmp_path):
    config = write_config(tmp_path / "c.yaml", tiny_document(register={"model": "theirs"}))
    calls = recorder("tasks.tracking.promotion.promote_version", FOUND | {"promoted": True})
    assert "version 3: champion" in invoke("promote", "--config", config).stdout
    invoke("promote", "mine", "--config", config)
    assert [call[0] for call in calls] == ["theirs", "mine"]


def test_with_a_prefect_server_promotions_and_rollbacks_are_flows_unless_they_are_to_be_plain(recorder, served):
    flows = recorder("flows.promote.promote", FOUND), recorder("flows.promote.rollback", {"champion": 1, "replaced": 2})
    plain = (
        recorder("tasks.tracking.promotion.promote_version", FOUND),
        recorder("tasks.tracking.registry.rollback", Move(*"mabc")),
    )
    invoke("promote", "m", "-v", "3", "--new-tests", "--force", "--reason", "r")
    invoke("rollback", "m", "--to", "1", "--reason", "s")
    assert flows[0] == [({"model": "m", "version": "3", "new_tests": True, "force": True, "reason": "r"},)]
    assert flows[1] == [({"model": "m", "to": "1", "reason": "s"},)]
    assert plain == ([], [])
    invoke("promote", "m", "--plain")
    invoke("rollback", "m", "--plain")
    assert [len(calls) for calls in (*flows, *plain)] == [1, 1, 1, 1]


def test_a_rollback_says_who_is_champion_again(recorder, no_server):
    calls = recorder("tasks.tracking.registry.rollback", Move("m", "2", "5", "numbers are misheard"))
    shown = invoke("rollback", "m", "--to", "2", "--reason", "numbers").stdout
    assert calls == [("m", "2", "numbers")]
    assert shown == "m: version 2 is champion again, not 5\n"
    found = json.loads(invoke("rollback", "m", "--json").stdout)
    assert found == {"name": "m", "champion": "2", "replaced": "5", "reason": "numbers are misheard"}


def test_the_history_shows_why_a_version_was_taken_down(recorder, no_server, monkeypatch):
    entry = {"version": "2", "aliases": ["champion"], "champion_since": "today", "replaced": "1", "decision": "beats"}
    versions = [entry | {"rolled_back": ""}, entry | {"version": "3", "aliases": [], "rolled_back": "it was worse"}]
    recorder("tasks.tracking.runs.client")
    recorder("tasks.tracking.registry.history", versions)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in invoke("rollback", "m", "--list").stdout.split("\n")
    ]
    assert [row for row in rows if row] == [
        ["2", "@champion", "today", "1", "beats"],
        ["3", "", "today", "1", "rolled back: it was worse"],
    ]


# --- servers and deployments


@pytest.fixture
def quiet_signals(monkeypatch):
    """`up` ends on Ctrl-C, these tests do as before."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve, "adopt_orphans", lambda: None)


def test_ports_of_up(recorder, home, quiet_signals, monkeypatch, tmp_path):
    seen = []

    def check(profile, ports):
        seen.append((profile.value, ports.prefect, ports.mlflow, ports.postgres, ports.s3))
        raise ValueError("seen")

    monkeypatch.setattr(serve, "_check_ports", check)
    monkeypatch.setenv("STARLING_HOME", str(home))
    invoke("up", code=1)
    names = ("prefect", "mlflow", "postgres", "s3")
    words = [word for number, name in enumerate(names, 1) for word in (f"--{name}-port", number)]
    invoke("up", *words, "--profile", "production", "--folder", tmp_path / "other", code=1)
    assert seen == [("small", 4200, 5000, 5433, 8333), ("production", 1, 2, 3, 4)]
    from tasks.config.home import home as data_folder

    assert data_folder() == tmp_path / "other"


class Keeper:
    """A supervisor that only records its calls."""

    def __init__(self, done, interrupt):
        self.done, self.interrupt, self.services = done, interrupt, []

    def __call__(self, restarts, say):
        return self

    def add(self, start):
        self.services.append(start())
        return self.services[-1]

    def wait(self, stop):
        self.done.append("wait")

    def check(self):
        self.done.append("check")
        self.interrupt()

    def reap(self):
        self.done.append("reap")

    def stop(self, *given):
        self.done.append(("stop", *given))


@pytest.mark.parametrize(("profile", "number"), [("small", signal.SIGINT), ("production", signal.SIGTERM)])
def test_up_lives_until_it_is_told_to_end_and_ends_in_order(recorder, home, monkeypatch, profile, number):
    from flows.servers import production, services

    def server(name, port=0):
        return SimpleNamespace(name=name, url=f"http://{name}:{port}", process=SimpleNamespace(pid=name))

    home.mkdir()
    handlers, done = {}, []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(serve, "adopt_orphans", lambda: done.append("adopt"))
    keeper = Keeper(done, lambda: (done.append(services.note_path().exists()), handlers[number](number, None)))
    monkeypatch.setattr("flows.servers.supervisor.Supervisor", keeper)
    for name in ("prefect", "mlflow"):
        monkeypatch.setattr(services, f"start_{name}", lambda port, name=name: server(name, port))

    def start_all(supervisor, ports, stop):
        return {name: supervisor.add(lambda name=name: server(name)).url for name in ("prefect", "mlflow")}

    monkeypatch.setattr(production, "start_servers", start_all)
    monkeypatch.setattr(serve, "_check_ports", lambda *_: None)
    monkeypatch.setattr(serve, "deploy_all", lambda configs: [{"deployment": "train/x", "schedule": ""}])
    workers = recorder("flows.cli.serve._workers", [lambda: server("worker")])
    monkeypatch.setattr(
        "flows.servers.local_runs.end_runs", lambda workers, _: done.append([one.name for one in workers])
    )
    monkeypatch.setattr("flows.servers.prefect_api.send_the_rest", lambda _: done.append("send"))
    monkeypatch.setattr(services, "end_orphans", lambda keep, _: done.append(("orphans", keep)))
    monkeypatch.setattr(serve, "end_now", lambda: done.append("end"))
    for name in {"PREFECT_API_URL", "MLFLOW_TRACKING_URI", *services.prefect_environment()} - {"STARLING_HOME"}:
        monkeypatch.setenv(name, "")  # taken back at the end
    found = json.loads(invoke("up", "--profile", profile, "--prefect-port", 1, "--mlflow-port", 2, "--json").stdout)
    ports = (1, 2) if profile == "small" else (0, 0)
    assert found["urls"] == {"prefect": f"http://prefect:{ports[0]}", "mlflow": f"http://mlflow:{ports[1]}"}
    assert os.environ["PREFECT_API_URL"] == f"{found['urls']['prefect']}/api"
    assert workers == [(["train/x"], None)]
    assert done[:4] == ["adopt", "wait", "check", True]
    workers_end = [["worker"], ("stop", 2, serve._WORKERS_S), ("orphans", {"prefect", "mlflow", "worker"}), "send"]
    stores = production.STORES if profile == "production" else 0
    assert done[4:] == ["reap", *workers_end, ("stop", stores, serve._SERVERS_S), ("stop", 0, 20.0), "end"]
    assert not services.note_path().exists()


@pytest.mark.parametrize("name", ["prefect", "mlflow", "postgres", "s3"])
def test_a_port_that_is_taken_is_named_with_its_option(home, quiet_signals, name):
    from flows.servers.production import Ports

    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ports = Ports(**{other: number if other == name else 0 for other in ("prefect", "mlflow", "postgres", "s3")})
        ports = ports.chosen()
        assert len({ports.prefect, ports.mlflow, ports.postgres, ports.s3} - {0}) == 4
        with pytest.raises(ValueError, match=rf"port {number} is taken: .* with --{name}-port"):
            serve._check_ports(serve.Profile.production, ports)
        if name in ("postgres", "s3"):
            serve._check_ports(serve.Profile.small, ports)


def test_up_announces_what_runs_where(capsys):
    note = {"prefect": "http://p", "mlflow": "http://m", "postgres": "h:1", "s3": "http://s", "secrets": "/secrets"}
    deployed = [
        {"deployment": "pipeline/x", "schedule": "15 2 * * *", "id": 1},
        {"deployment": "train/x", "schedule": ""},
    ]
    serve._announce(note | {"environment": {}}, deployed, True)
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "urls": {name: note[name] for name in ("prefect", "mlflow", "postgres", "s3")},
        "deployments": deployed,
        "secrets": "/secrets",
    }
    serve._announce({"prefect": "http://p", "mlflow": "http://m"}, [], True)
    assert json.loads(capsys.readouterr().out) == {
        "urls": {"prefect": "http://p", "mlflow": "http://m"},
        "deployments": [],
    }


def test_secrets_are_made_where_they_are_wanted(home, tmp_path):
    made = json.loads(invoke("secrets", tmp_path / "x", "--json").stdout)
    assert made["folder"] == str(tmp_path / "x")
    assert "prefect_auth" in made["made"]
    assert "made nothing, all exist" in invoke("secrets", tmp_path / "x", "--for-containers").stdout
    assert (tmp_path / "x" / "prefect_auth").stat().st_mode & 0o777 == 0o444
    assert f"{home / 'secrets'}: made postgres_password, " in invoke("secrets").stdout


@pytest.fixture
def prefect(recorder):
    return recorder("flows.cli.deploy.connect_prefect")


def test_what_is_deployed_and_where(recorder, prefect, config):
    from flows.deploy.deployments import Options
    from flows.deploy.pools import WorkPool

    deployed = [{"deployment": "train/x", "schedule": "", "id": 7}]
    calls = recorder("flows.cli.deploy.deploy_all", deployed)
    words = ["--pool", "p", "--pool-type", "docker", "--image", "i:1", "--timezone", "Asia/Tokyo"]
    words += ["--watch", "s3://a", "--watch", "s3://b", "--notify-url", "-", "--set", "seed=2", "--json"]
    found = invoke("deploy", "--config", config, *words, stdin="https://hook\n").stdout
    options = Options(WorkPool("p", "docker", "i:1"), "Asia/Tokyo", ("s3://a", "s3://b"))
    assert calls == [([config], ["seed=2"], options, "https://hook")]
    assert json.loads(found) == {"deployments": deployed}
    assert len(prefect) == 1
    assert "on demand" in invoke("deploy", "--config", config).stdout
    assert calls[1] == ([config], None, Options(), "")


def test_each_configuration_is_registered_and_watched(recorder, config, tmp_path, monkeypatch):
    from flows.deploy.deployments import Options

    monkeypatch.chdir(tmp_path)
    other = write_config(tmp_path / "d.yaml", tiny_document(name="other"))
    registered, applied = (
        recorder("flows.deploy.deployments.deploy", [{"id": 1}]),
        recorder("flows.deploy.automations.apply"),
    )
    assert deploy.deploy_all([config, other], ["seed=3"], notify_url="https://hook") == [{"id": 1}, {"id": 1}]
    assert [(given.name, given.seed, options) for given, options in registered] == [
        ("tiny", 3, Options()),
        ("other", 3, Options()),
    ]
    (configs, deployed, url) = applied[0]
    assert ([one.name for one in configs], deployed, url) == (["tiny", "other"], [{"id": 1}] * 2, "https://hook")
    assert deploy.deploy_all(None) == []
    assert "name a configuration with --config" in invoke("deploy", code=1).stderr
    (tmp_path / "configs").mkdir()
    write_config(tmp_path / "configs" / "demo.yaml", tiny_document(name="demo"))
    deploy.deploy_all(None)
    assert [given.name for given, _ in registered[2:]] == ["demo"]


def test_a_changed_corpus_is_announced(recorder, prefect):
    calls = recorder("flows.watch.announce")
    assert "the corpus of nightly has changed" in invoke("corpus", "changed", "nightly").stdout
    assert (calls, len(prefect)) == ([("nightly",)], 1)


# --- backups


def test_where_backups_go_and_come_from(recorder, home, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(home))
    entry = {"bytes": 2**20}
    manifest = {"created": "today", "kind": "sqlite", "versions": {}, "databases": {"a": entry}}
    manifest["artifacts"] = {"x": entry, "y": entry}
    written = recorder("flows.servers.backup.backup", ("u/1", manifest))
    restored = recorder("flows.servers.backup.restore", ("u/1", manifest))
    shown = invoke("backup", "--to", "u").stdout
    assert shown == "written: u/1\nmade today, 2 artifacts, 3.0 MiB\n"
    assert invoke("restore", "--from", "u").stdout.startswith("restored: u/1\n")
    found = json.loads(invoke("restore", "--from", "u/1", "--force", "--folder", tmp_path / "other", "--json").stdout)
    assert (found["backup"], found["artifacts"], found["bytes"]) == ("u/1", 2, 3 * 2**20)
    assert [given[0] for given in written] == ["u"]
    assert [given[:2] for given in restored] == [("u", False), ("u/1", True)]
    from tasks.config.home import home as data_folder

    assert data_folder() == tmp_path / "other"


# --- looking


def test_which_training_is_watched(recorder, monkeypatch, tmp_path):
    class Watched:
        closed = 0

        def poll(self):
            return polls.pop(0)

        def close(self):
            self.closed += 1

    watched, polls = Watched(), [True, True, False, True]
    found = recorder("tasks.tracking.training_lookup.find_training", watched)
    monkeypatch.setattr("flows.cli.live_table.picture", lambda _: {"name": "x"})
    slept = recorder("flows.cli.top.time.sleep")
    monkeypatch.setenv("STARLING_RING_KEY_FILE", str(tmp_path / "env.key"))
    shown = invoke("top", "h:1", "--every", 2, "--json").stdout
    assert [json.loads(line) for line in shown.splitlines()] == [
        {"name": "x", "running": running} for running in (True, True, False)
    ]
    assert slept == [(2.0,), (2.0,)]
    assert json.loads(invoke("top", "h:1", "--key-file", tmp_path / "own.key", "--once", "--json").stdout)["running"]
    polls += [False]
    invoke("top", "tiny", "--json")
    assert found == [("h:1", tmp_path / "env.key"), ("h:1", tmp_path / "own.key"), ("tiny", None)]
    assert watched.closed == 3


def test_what_gc_takes_for_garbage(recorder, tmp_path):
    from storage.garbage import Garbage, GarbagePlan

    garbage = [Garbage("train/x", 5000, "left over"), Garbage("train/y", 100, "left over")]
    plan = GarbagePlan(garbage, {"train/z": "it is used"})
    found = recorder("tasks.stages.housekeeping.find_garbage", plan)
    deleted = recorder("tasks.stages.housekeeping.delete_garbage", garbage[:1])
    assert "5.1 kB could be freed; nothing was deleted" in invoke("storage", "gc", "--url", tmp_path).stdout
    words = ["--min-age", 0.5, "--unregistered", "--delete"]
    assert "5.0 kB freed; 1 outputs stay" in invoke("storage", "gc", "--url", tmp_path, *words).stdout
    assert [given[1:] for given in found] == [(72 * 3600.0, False), (1800.0, True)]
    assert [given[1] for given in deleted] == [garbage]


def test_what_a_plan_is_made_for(recorder, config, monkeypatch):
    from flows.cli.step_time import Step

    class Planned(Exception):
        pass

    def make(request):
        raise Planned(request)

    def asked(*words):
        result = CliRunner().invoke(app, ["plan", *map(str, words)])
        assert isinstance(result.exception, Planned), (result.output, result.exception)
        return result.exception.args[0].model_dump()

    monkeypatch.setattr("training.simulation.planner.plan", make)
    model = {"parameters": 7, "step_s": 0.5}
    wanted = model | {"overhead_s": 0.1, "batch_seconds": 20.0, "data_hours": 3.0, "nodes": 4, "gpus_per_node": 5}
    wanted |= {"link_gbit": 6.0, "link_ms": 0.7, "local_gbit": 80.0, "losses_per_day": 9.0, "restart_s": 10.0}
    wanted |= {"layers": 11, "border_mb": 12.0}
    words = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert asked(*words, "--slow", 2, "--slow", 3) == wanted | {"slow": (2.0, 3.0)}
    plain = asked("--parameters", 7, "--step-s", 0.5)
    assert (plain["data_hours"], plain["batch_seconds"], plain["nodes"], plain["slow"]) == (100.0, 160.0, 1, ())
    measured = recorder("flows.cli.step_time.measure", Step(8, 0.25, "noise", 3, 4.0, 1.5))
    found = asked(config, "--measure", "--batch-seconds", 20, "--set", "seed=5")
    assert (measured[0][0].seed, measured[0][1]) == (5, 20.0)
    names = ("parameters", "step_s", "layers", "border_mb", "data_hours")
    assert [found[name] for name in names] == [8, 0.25, 3, 4.0, 1.5]
    found = asked(config, "--measure", "--layers", 9, "--border-mb", 5, "--data-hours", 2)
    assert [found[name] for name in names] == [8, 0.25, 9, 5.0, 2.0]


def test_what_is_downloaded_and_where_to(recorder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = {"a": {"present": True}, "b": {"present": False, "files": 1200, "bytes": 3e6}}
    answer = {"kind": "fsdd", "path": "/there", "parts": parts}
    calls = recorder("storage.corpora.download.download_corpus", answer)
    shown = invoke("corpus", "download", "x").stdout
    assert shown.splitlines() == [
        "x a: already there",
        "x b: 1,200 files, 3 MB",
        "Use it as a source: kind: fsdd, path: /there",
    ]
    words = ["--to", tmp_path / "t", "-p", "a", "-p", "b", "--keep-archives", "--json"]
    assert json.loads(invoke("corpus", "download", "y", *words).stdout) == answer
    assert [(*call[:3], call[3]["keep_archives"]) for call in calls] == [
        ("x", tmp_path / "corpora", (), False),
        ("y", tmp_path / "t", ["a", "b"], True),
    ]


def test_what_a_corpus_holds_in_figures():
    from collections import Counter

    from flows.cli.corpus import describe

    good = [
        SimpleNamespace(duration=seconds, sample_rate=rate, text="a b", utterance=SimpleNamespace(speaker=who))
        for seconds, rate, who in ((1800.0, 16000, "x"), (2.0, 8000, "y"), (3.0, 16000, "x"))
    ]
    assert describe("table", good, Counter({"unreadable": 2, "too-long": 3})) == {
        "kind": "table",
        "read": 8,
        "written": 3,
        "quarantined": 5,
        "reasons": {"unreadable": 2, "too-long": 3},
        "speakers": 2,
        "hours": 0.501,
        "median_seconds": 3.0,
        "longest_seconds": 1800.0,
        "words": 6,
        "sample_rates": {"8000": 1, "16000": 2},
    }
    empty = describe("table", [], Counter())
    assert (empty["median_seconds"], empty["longest_seconds"], empty["hours"]) == (0.0, 0.0, 0.0)
