"""Command-line options reach the functions that they configure."""

import json
from types import SimpleNamespace

import pytest
from command_line import invoke
from support import tiny_bundle, tiny_document, write_config
from typer.testing import CliRunner

from flows.cli import deploy, run
from flows.cli.app import app
from tasks import STAGES

pytestmark = pytest.mark.usefixtures("wide")


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "c.yaml", tiny_document())


# --- run and the stages


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run"], ([], "", "report", False)),
        (["run", "--set", "a=1", "--set", "b=2"], (["a=1", "b=2"], "", "report", False)),
        (["run", "--from", "train", "--until", "score", "--no-prefect"], ([], "train", "score", True)),
        (["run", "--until", "lm"], ([], "", "lm", False)),
        (["run", "--from", "@champion"], (['train.init="@champion"'], "", "report", False)),
        (
            ["run", "--from", "m/3", "--from", "train", "--set", "a=1"],
            (["a=1", 'train.init="m/3"'], "train", "report", False),
        ),
    ],
)
@pytest.mark.parametrize("json_output", [False, True])
def test_run_options_select_the_stages(recorder, config, words, expected, json_output):
    name, *options = words
    executed = recorder("flows.cli.run.execute", {"a": "summary"})
    finished = recorder("flows.cli.run.finish")
    invoke(name, config, *options, *(["--json"] if json_output else []))
    assert executed == [(config, *expected)]
    assert finished == [({"a": "summary"}, json_output)]


@pytest.mark.parametrize("stage", ["shard", "features", "train", "decode", "score", "register"])
def test_former_commands_of_single_stages_name_the_command_to_use(recorder, stage, config):
    executed = recorder("flows.cli.run.execute", {})
    recorder("flows.cli.run.finish")
    told = invoke(stage, config, code=1).stderr
    assert f"starling run {config} --until {stage}\n" in told
    told = invoke(stage, config, "--no-prefect", "--force", "--set", "train.epochs=1", code=1).stderr
    command = f"starling run {config} --no-prefect --set train.epochs=1 --from {stage} --until {stage}"
    assert command in told
    assert executed == []
    invoke(*command.split()[1:])
    assert executed == [(config, ["train.epochs=1"], stage, stage, True)]


def test_help_of_run_lists_every_stage():
    told = " ".join(invoke("run", "--help").stdout.split())
    assert f"as far as the configuration has them: {', '.join(STAGES)}." in told


def test_a_model_to_begin_with_is_told_from_a_stage(recorder, config, tmp_path):
    executed = recorder("flows.cli.run.execute", {"a": "summary"})
    recorder("flows.cli.run.finish")
    tiny_bundle(tmp_path / "bundle")
    invoke("run", config, "--from", tmp_path / "bundle")
    assert executed == [(config, [f'train.init="{tmp_path}/bundle"'], "", "report", False)]
    assert "is not a stage; did you mean 'train'?" in invoke("run", config, "--from", "traim", code=2).stderr
    assert "a stage, a model, or one of each" in invoke("run", config, "--from", "m/1", "--from", "m/2", code=2).stderr
    assert "is neither a stage" in invoke("run", config, "--from", "a/folder", code=1).stderr


def test_deployments_begin_with_the_model_that_is_named(config):
    text = invoke("deploy", "--config", config, "--from", "@champion", "--print").stdout
    assert "init: '@champion'" in text


def test_run_options_of_cross_validation(recorder, config):
    executed = recorder("flows.cli.run.execute_folds", {"a": "result"})
    finished = recorder("flows.cli.run.finish_folds")
    invoke("run", config, "--folds", 3)
    invoke("run", config, "--folds", 4, "--from", "shard", "--no-prefect", "--set", "a=1", "--json")
    assert executed == [(config, [], 3, "", False), (config, ["a=1"], 4, "shard", True)]
    assert finished == [({"a": "result"}, False), ({"a": "result"}, True)]
    invoke("run", config, "--folds", 3, "--until", "score", code=2)
    assert len(executed) == 2


def test_servers_are_checked_before_any_work(recorder, config, monkeypatch):
    """Only what a run needs: one that ends before registration needs no MLflow."""
    asked = recorder("tasks.orchestration.reachable.check_servers")
    ran = recorder("flows.plain.run_plainly")
    folded = recorder("flows.folds.crossvalidate_plainly", {})
    monkeypatch.setattr("flows.plain.summarize", lambda run: {"run": run})
    made = run.execute(config, ["seed=7"], "shard", "features", True)["run"]
    assert (made.config.seed, made.force_from) == (7, "shard")
    assert ran == [(made, "features")]
    run.execute_folds(config, ["seed=8"], 3, "shard", True)
    assert [given[:2] for given in asked] == [(made.config, "features"), (folded[0][0], "register")]
    assert asked[1][-1] == {"can_stop": False}
    assert (folded[0][0].seed, *folded[0][1:]) == (8, 3, "shard")


@pytest.fixture
def prefect(recorder):
    return recorder("flows.cli.deploy.connect_prefect")


def test_deploy_options_select_flows_and_pools(recorder, prefect, config):
    from flows.deploy.deployments import Options
    from flows.deploy.pools import WorkPool

    deployed = [{"deployment": "train/x", "schedule": "", "id": 7}]
    calls = recorder("flows.cli.deploy.deploy_all", deployed)
    words = ["--pool", "p", "--pool-type", "docker", "--image", "i:1", "--timezone", "Asia/Tokyo"]
    words += ["--watch", "s3://a", "--watch", "s3://b", "--notify-url", "-", "--set", "seed=2", "--json"]
    printed = invoke("deploy", "--config", config, *words, stdin="https://hook\n").stdout
    options = Options(WorkPool("p", "docker", "i:1"), "Asia/Tokyo", ("s3://a", "s3://b"))
    assert calls == [([config], ["seed=2"], options, "https://hook")]
    assert json.loads(printed) == {"deployments": deployed}
    assert len(prefect) == 1
    assert "on demand" in invoke("deploy", "--config", config).stdout
    assert calls[1] == ([config], [], Options(), "")


def test_deploy_registers_each_configuration_and_its_automations(recorder, config, tmp_path, monkeypatch):
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
    assert ([config_given.name for config_given in configs], deployed, url) == (
        ["tiny", "other"],
        [{"id": 1}] * 2,
        "https://hook",
    )
    assert deploy.deploy_all(None) == []
    assert "name a configuration with --config" in invoke("deploy", code=1).stderr
    (tmp_path / "configs").mkdir()
    write_config(tmp_path / "configs" / "demo.yaml", tiny_document(name="demo"))
    deploy.deploy_all(None)
    assert [given.name for given, _ in registered[2:]] == ["demo"]


def test_changed_corpus_is_announced(recorder, prefect):
    calls = recorder("flows.watch.announce")
    assert "the corpus of nightly has changed" in invoke("corpus", "changed", "nightly").stdout
    assert (calls, len(prefect)) == ([("nightly",)], 1)


# --- backups


def test_backup_and_restore_options_name_the_folders(recorder, home, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(home))
    entry = {"bytes": 2**20}
    manifest = {"created": "today", "kind": "sqlite", "versions": {}, "databases": {"a": entry}}
    manifest["artifacts"] = {"x": entry, "y": entry}
    written = recorder("flows.servers.backup.backup", ("u/1", manifest))
    restored = recorder("flows.servers.backup.restore", ("u/1", manifest))
    shown = invoke("backup", "--to", "u").stdout
    assert shown == "written: u/1\nmade today, 2 artifacts, 3.0 MiB\n"
    assert invoke("restore", "--from", "u").stdout.startswith("restored: u/1\n")
    restoration = json.loads(
        invoke("restore", "--from", "u/1", "--force", "--folder", tmp_path / "other", "--json").stdout
    )
    assert (restoration["backup"], restoration["artifacts"], restoration["bytes"]) == ("u/1", 2, 3 * 2**20)
    assert [given[0] for given in written] == ["u"]
    assert [given[:2] for given in restored] == [("u", False), ("u/1", True)]
    from tasks.config.home import home as data_folder

    assert data_folder() == tmp_path / "other"


# --- looking


def test_top_options_select_the_training(recorder, monkeypatch, tmp_path):
    class Watched:
        closed = 0

        def poll(self):
            return polls.pop(0)

        def close(self):
            self.closed += 1

    watched, polls = Watched(), [True, True, False, True]
    lookups = recorder("tasks.tracking.training_lookup.find_training", watched)
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
    assert lookups == [("h:1", tmp_path / "env.key"), ("h:1", tmp_path / "own.key"), ("tiny", None)]
    assert watched.closed == 3


def test_gc_options_define_garbage(recorder, tmp_path):
    from storage.garbage import Garbage, GarbagePlan

    garbage = [Garbage("train/x", 5000, "left over"), Garbage("train/y", 100, "left over")]
    plan = GarbagePlan(garbage, {"train/z": "it is used"})
    calls = recorder("tasks.stages.housekeeping.find_garbage", plan)
    deleted = recorder("tasks.stages.housekeeping.delete_garbage", garbage[:1])
    assert "5.1 kB could be freed; nothing was deleted" in invoke("storage", "gc", "--url", tmp_path).stdout
    words = ["--min-age", 0.5, "--unregistered", "--delete"]
    assert "5.0 kB freed; 1 outputs stay" in invoke("storage", "gc", "--url", tmp_path, *words).stdout
    assert [given[1:] for given in calls] == [(72 * 3600.0, False), (1800.0, True)]
    assert [given[1] for given in deleted] == [garbage]


def test_plan_options_define_the_cluster(recorder, config, monkeypatch):
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
    request = asked(config, "--measure", "--batch-seconds", 20, "--set", "seed=5")
    assert (measured[0][0].seed, measured[0][1]) == (5, 20.0)
    names = ("parameters", "step_s", "layers", "border_mb", "data_hours")
    assert [request[name] for name in names] == [8, 0.25, 3, 4.0, 1.5]
    request = asked(config, "--measure", "--layers", 9, "--border-mb", 5, "--data-hours", 2)
    assert [request[name] for name in names] == [8, 0.25, 9, 5.0, 2.0]
    # a learner's share of the configured batch, unless --batch-seconds says otherwise
    sets = ("batch_seconds=60", "strategy.kind=h-adpsgd", "nodes=2", "learners_per_node=3")
    shares = [word for setting in sets for word in ("--set", f"train.{setting}")]
    assert asked(config, "--measure", *shares)["batch_seconds"] == 10.0
    assert measured[-1][1] == 10.0
    assert asked(config, "--measure", *shares, "--batch-seconds", 20)["batch_seconds"] == 20.0
    assert asked(config, "--parameters", 7, "--step-s", 0.5, "--set", "train.batch_seconds=60")["batch_seconds"] == 60.0


def test_download_options_name_corpus_and_folder(recorder, tmp_path, monkeypatch):
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


def test_corpus_description_has_counts_and_durations():
    from collections import Counter

    from flows.cli.corpus import describe

    def utterance(seconds, rate, who, name, text="a b"):
        about = SimpleNamespace(speaker=who, split=name)
        return SimpleNamespace(duration=seconds, sample_rate=rate, text=text, utterance=about)

    good = [
        utterance(1800.0, 16000, "x", "train"),
        utterance(2.0, 8000, "y", "train", "b c"),
        utterance(3.0, 16000, "x", None),
    ]
    described = describe("table", good, Counter({"unreadable": 2, "too-long": 3}))
    sets = described.pop("sets")
    assert described == {
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
        "different_words": 3,
        "sample_rates": {"8000": 1, "16000": 2},
    }
    assert list(sets) == ["", "train"]
    names = ("utterances", "speakers", "longest_seconds", "words", "sample_rates")
    assert [sets[""][name] for name in names] == [1, 1, 3.0, 2, {"16000": 1}]
    assert [sets["train"][name] for name in names] == [2, 2, 1800.0, 4, {"8000": 1, "16000": 1}]
    empty = describe("table", [], Counter())
    assert (empty["median_seconds"], empty["longest_seconds"], empty["hours"]) == (0.0, 0.0, 0.0)
    assert empty["sets"] == {}
