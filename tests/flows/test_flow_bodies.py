"""The flows' bodies, called as functions without a server: what they request and report."""

import logging
from types import SimpleNamespace

import pytest
from support import copy_finished, tiny_document

from flows import folds, pipeline, promote, verify, watch
from recognition.systems.ctc import CtcSystem
from speech.decoding import GreedyConfig
from storage.objects import ObjectStore
from tasks.config.pipeline import parse_config
from tasks.stages import progress
from tasks.tracking.registry import Move, RegistryError
from tasks.tracking.significance import PromotionOptions


@pytest.fixture
def config():
    return parse_config(tiny_document(register={"model": "theirs"}))


@pytest.fixture(autouse=True)
def no_flow(monkeypatch):
    """The flows' logs and artifacts, without a run that they belong to."""
    shown = []
    for module in (pipeline, promote, verify, watch):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(verify, "create_table_artifact", lambda **fields: shown.append(fields))
    monkeypatch.setattr(promote, "create_markdown_artifact", lambda text, **fields: shown.append((text, fields)))
    return shown


# --- watch


@pytest.fixture
def watched(monkeypatch):
    """Simulates a server that stores the listings; a killed check has stored nothing."""
    site = SimpleNamespace(kept={}, asked=[], digest="a", dies=False)

    def note(name, state):
        if site.dies:
            raise KeyboardInterrupt
        site.kept[name] = state

    def run_deployment(name, **options):
        site.asked.append((name, options))
        return SimpleNamespace(name="wise-owl")

    monkeypatch.setattr(watch, "look", lambda config, prefixes: site.digest + "".join(prefixes))
    monkeypatch.setattr(watch, "_recall", lambda name: dict(site.kept.get(name, {})))
    monkeypatch.setattr(watch, "_note", note)
    monkeypatch.setattr(watch, "run_deployment", run_deployment)
    return site


def test_settled_change_is_ingested_once(watched, config):
    states = [watch.watch.fn(config) for _ in range(4)]
    assert [state.name for state in states] == ["Settling", "Changed", "Unchanged", "Unchanged"]
    assert "wise-owl ingests them" in states[1].message
    assert "two checks" in states[0].message
    assert states[2].message == "the sources have not changed"
    options = {"timeout": 0, "idempotency_key": "tiny-a", "as_subflow": False}
    assert watched.asked == [("ingest/tiny", options)]
    assert list(watched.kept) == ["starling_watch_tiny"]


def test_check_killed_before_recording_requests_the_same_run_again(watched, config):
    watch.watch.fn(config, ["x"])
    watched.dies = True
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            watch.watch.fn(config, ["x"])
    watched.dies = False
    assert watch.watch.fn(config, ["x"]).name == "Changed"
    assert {options["idempotency_key"] for _, options in watched.asked} == {"tiny-ax"}
    assert watch.watch.fn(config, ["x"]).name == "Unchanged"
    watched.digest = "b"
    watch.watch.fn(config, ["x"])
    watch.watch.fn(config, ["x"])
    assert watched.asked[-1][1]["idempotency_key"] == "tiny-bx"


@pytest.mark.parametrize("challenger", [None, object()])
def test_evaluation_ends_at_once_without_a_waiting_challenger(config, monkeypatch, challenger):
    began = []
    monkeypatch.setattr("tasks.tracking.runs.client", lambda: "api")
    monkeypatch.setattr(
        "tasks.tracking.registry.waiting_challenger",
        lambda api, name: challenger if (api, name) == ("api", "theirs") else began,
    )
    monkeypatch.setattr(pipeline, "check_servers", lambda *given: began.append(given[1]))
    monkeypatch.setattr(
        pipeline,
        "open_run",
        lambda config, name, force: SimpleNamespace(config=config, initial=None, run_id=name, flow_run_url="x"),
    )
    monkeypatch.setattr(pipeline, "close_run", lambda name: began.append(name))
    monkeypatch.setattr(pipeline, "_stages", lambda run, names, until: began.append((tuple(names), until)))
    monkeypatch.setattr(pipeline, "summarize", lambda run: {"run": run.run_id})
    outcome = pipeline.evaluate.fn(config, only_waiting=True, until="score")
    if challenger is None:
        assert (outcome.name, began) == ("NothingWaits", [])
        assert "no challenger of theirs waits" in outcome.message
        return
    assert began == ["score", (pipeline.STAGES, "score"), outcome["run"]]
    began.clear()
    assert pipeline.evaluate.fn(config, run_id="mine") == {"run": "mine"}
    assert began == [(pipeline.STAGES, "report")]  # the flow that started the run ends it


def test_log_of_a_pipeline_has_the_lines_of_the_stages_that_nested_runs_execute(config, monkeypatch, caplog):
    run = SimpleNamespace(config=config, initial=None, flow_run_url="")
    monkeypatch.setattr(pipeline, "flow_run", SimpleNamespace(ui_url="http://ui/1"))
    monkeypatch.setattr(pipeline, "check_servers", lambda *_: None)
    monkeypatch.setattr(pipeline, "open_run", lambda *_: run)
    monkeypatch.setattr(pipeline, "publish_summary", lambda _: None)
    monkeypatch.setattr(pipeline, "summarize", lambda _: {})
    for name in ("ingest", "train", "evaluate"):
        monkeypatch.setattr(pipeline, name, lambda *_, of=name: progress.announce(of, "done"))
    with caplog.at_level(logging.INFO, "test"):
        pipeline.pipeline.fn(config)
        progress.announce("train", "of another run")
    assert [entry.message for entry in caplog.records] == ["ingest: done", "train: done", "evaluate: done"]
    assert run.flow_run_url.startswith("http://ui/1")


def test_run_is_linked_to_the_flow_run_that_opened_it_and_closed_by_it(config, monkeypatch):
    opened, closed = SimpleNamespace(run_id="a-run", flow_run_url=""), []
    monkeypatch.setattr(pipeline, "check_servers", lambda *_: None)
    monkeypatch.setattr(pipeline, "open_run", lambda *_: opened)
    monkeypatch.setattr(pipeline, "close_run", closed.append)
    monkeypatch.setattr(pipeline, "lasting_url", lambda url: f"{url}?lasting")
    monkeypatch.setattr(pipeline, "flow_run", SimpleNamespace(ui_url="http://ui/1"))
    with pipeline._run(config, "", "", "report") as run:
        assert (run.flow_run_url, closed) == ("http://ui/1?lasting", [])
    assert closed == ["a-run"]
    monkeypatch.setattr(pipeline, "flow_run", SimpleNamespace(ui_url="http://ui/2"))
    with pipeline._run(config, "a-run", "", "report") as run:
        assert run.flow_run_url == "http://ui/1?lasting"
    assert closed == ["a-run"]


def test_finished_and_later_stages_are_skipped(monkeypatch):
    done = []
    monkeypatch.setattr(pipeline, "run_stage", lambda name, run: done.append(name))
    features = SimpleNamespace(adapted=False)
    config = SimpleNamespace(
        align=None,
        realign=None,
        restore=None,
        lm=None,
        rescoring=None,
        system=CtcSystem(),
        decoder=GreedyConfig(),
        features=features,
    )
    run = SimpleNamespace(results={"shard": None}, config=config)
    pipeline._stages(run, pipeline.STAGES, "train")
    assert done == ["prepare", "features", "train"]
    done.clear()
    for config.align in (None, "a GMM-HMM"):  # an optional stage needs its section
        pipeline._stages(run, pipeline.INGEST, "align")
    assert done == ["prepare", "features", "prepare", "features", "align"]
    done.clear()
    for config.lm, config.rescoring in ((None, None), ("a language model", None), ("a language model", "a larger one")):
        pipeline._stages(run, pipeline.EVALUATE, "decode")
    assert done == ["decode", "lm", "decode", "lm", "rescoring", "decode"]


# --- promote and rollback


def test_promotion_flow_passes_its_parameters_and_shows_the_result(config, monkeypatch, no_flow):
    asked = []
    outcome = {"model": "theirs", "version": "3", "promoted": True, "reason": "it beats version 2", "mlflow_run": "r"}
    monkeypatch.setattr(promote, "promote_version", lambda *given, link: asked.append(given) or dict(outcome))
    monkeypatch.setattr(promote, "record_links", lambda record: {"Version": "http://m/3"})
    assert promote.promote.fn(config) == outcome
    outcome["promoted"] = False
    promote.promote.fn(config, "mine", "2", force=True, reason="why")
    promote.promote.fn(config, new_tests=True)
    assert asked == [
        ("theirs", "", PromotionOptions()),
        ("mine", "2", PromotionOptions(force=True, reason="why")),
        ("theirs", "", PromotionOptions(new_tests=True)),
    ]
    text, fields = no_flow[0]
    assert text == "**theirs version 3: promoted**\n\nit beats version 2\n\n[Version](http://m/3)"
    assert fields == {"key": "theirs-promotion", "description": "Promotion"}
    assert "**mine version 3: not promoted**" in no_flow[1][0]
    with pytest.raises(RegistryError, match="no model given"):
        promote.promote.fn()


def test_rollback_succeeds_although_its_artifact_cannot_be_written(monkeypatch, no_flow):
    asked = []
    move = Move("m", "2", "3", "rolled back from version 3")
    monkeypatch.setattr(promote, "roll_back", lambda *given, link: asked.append(given) or move)
    assert promote.rollback.fn("m", "2", "numbers") == vars(move)
    assert asked == [("m", "2", "numbers")]
    assert no_flow[0][0] == "**m: version 2 is champion again**\n\nrolled back from version 3"
    assert no_flow[0][1]["key"] == "m-rollback"

    def fails(*_, **__):
        raise OSError("no server")

    monkeypatch.setattr(promote, "create_markdown_artifact", fails)
    assert promote.rollback.fn("m")["champion"] == "2"


# --- verify


def test_verification_flow_names_damaged_objects(home, no_flow):
    config = parse_config(tiny_document())
    empty = verify.verify_storage.fn(config)
    assert (empty.name, empty.type.value) == ("Empty", "COMPLETED")
    store = ObjectStore(copy_finished(home) / "objects")
    assert "all intact" in verify.verify_storage.fn(config).message
    assert no_flow[-1]["table"] == [{"object": "all", "what is wrong": "nothing"}]
    assert no_flow[-1]["key"] == "storage-tiny"
    (name, *_) = [name for name in store.list() if name.endswith(".tar")]
    data = store.read(name)
    store.write(name, bytes([data[600] ^ 1]).join((data[:600], data[601:])))
    assert verify.verify_storage.fn(config, quick=True).message.endswith("all intact")
    with pytest.raises(verify.DamageError, match=rf"1 problems in .*the first: {name}.*storage verify --url"):
        verify.verify_storage.fn(config)
    assert [row["object"] for row in no_flow[-1]["table"]] == [name]


# --- folds


@pytest.mark.parametrize(
    ("stage", "expected"), [("", ["", "", ""]), ("shard", ["shard", "train", "train"]), ("train", ["train"] * 3)]
)
def test_every_fold_runs_and_shared_stages_are_forced_once(monkeypatch, stage, expected):
    config, runs, logged = parse_config(tiny_document()), [], []

    def run_fold(chosen, name):
        runs.append((chosen.data.fold, chosen.data.folds, name, folds._forced(chosen, stage)))
        return {"sets": {"number": len(runs)}, "training": {"identity": f"t{len(runs)}"}}

    monkeypatch.setattr(folds, "combine", lambda sets: {"combined": sets})
    monkeypatch.setattr(folds, "log_folds", lambda *given: logged.append(given) or "parent")
    result = folds.cross_validate(config, 3, "r", run_fold)
    assert [run[:3] for run in runs] == [(n, 3, f"r-{folds.fold_name(n)}") for n in (1, 2, 3)]
    assert [run[3] for run in runs] == expected
    combined = {"combined": [{"number": n} for n in (1, 2, 3)]}
    assert logged == [(config, "r", combined, ["t1", "t2", "t3"])]
    assert (result["mlflow_run"], result["run_id"], len(result["runs"])) == ("parent", "r", 3)
    assert result["combined"] == combined["combined"]


# --- links


def test_links_to_a_temporary_server_are_not_stored(monkeypatch):
    from contextlib import contextmanager

    from flows.servers import prefect_api

    @contextmanager
    def own_server(say):
        yield "http://127.0.0.1:5555"

    monkeypatch.setattr(prefect_api, "private_server", own_server)
    monkeypatch.setattr(prefect_api, "running_services", dict)
    monkeypatch.setattr(prefect_api, "connect_mlflow", lambda: None)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    temporary, lasting = "http://127.0.0.1:5555/runs/flow-run/1", "http://prefect.example.com/runs/flow-run/1"
    with prefect_api.orchestration():
        assert prefect_api.lasting_url(temporary) == ""
        assert prefect_api.lasting_url(lasting) == lasting
    assert prefect_api.lasting_url(temporary) == temporary  # such as one of `starling up`
    monkeypatch.setattr(prefect_api, "running_services", lambda: {"prefect": "http://127.0.0.1:5555"})
    with prefect_api.orchestration():
        assert prefect_api.lasting_url(temporary) == temporary
    assert prefect_api.lasting_url(None) == ""
