"""One MLflow run for a training and its registration; a stand-in for the training writes what a real one does."""

import json
import tempfile
from pathlib import Path

import pytest
from support import copy_outputs, finished, give_mlflow, tiny_document

from recognition.bundle import save_bundle
from storage.objects import ObjectStore
from tasks.config.home import work_folder
from tasks.config.pipeline import parse_config
from tasks.stages import train as module
from tasks.stages.base import Run, get_stage, position, stages_of
from tasks.stages.register import REGISTER
from tasks.stages.reporter import Reporter
from tasks.stages.train import TRAIN
from tasks.tracking.forwarding import Forwarder
from tasks.tracking.listing import list_runs
from tasks.tracking.provenance import provenance
from tasks.tracking.runs import DECISION_TAG, ENDED_TAG, KEY_TAG, NOTE_TAG, TRAINING_TAG, client, experiment_id
from training.config import TrainConfig
from training.coordinator.journal import Journal
from training.launch.training_process import TrainingFailedError


def write(journal, kind, **values):
    with Path(journal).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **values}) + "\n")


def train_steps(job, first, last):
    for n in range(first, last + 1):
        for learner in ("0.0", "1.0"):
            write(
                job.journal,
                "step",
                **{"learner": learner, "step": n, "epoch": n / 4, "epochs": 2, "loss": 9.0 / n, "lr": 0.1},
                **{"elapsed": float(n), "audio_seconds": 2.0 * n, "utterances": 4 * n, "nodes": 2, "staleness": 1.0},
            )


def finish(job, steps):
    """Write what a finished training writes: an untrained model."""
    store, model = ObjectStore(job.output_url), job.task.spec.build_model()
    with tempfile.TemporaryDirectory() as folder:
        save_bundle(Path(folder), job.task.spec, model.state_dict())
        for name in ("model.safetensors", "bundle.json"):
            store.write_file(f"model/{name}", Path(folder) / name)
    write(job.journal, "valid", epoch=2, epochs=2, step=2 * steps, train_loss=1.0, valid_loss=2.0, valid_wer=0.9,
          replicas={"0": 2.1, "1": 2.2}, elapsed=float(steps), audio_seconds=1.0, unalignable=0)  # fmt: skip
    write(job.journal, "end", step=2 * steps, valid_loss=2.0, valid_wer=0.9)
    result = {"epoch": 2, "step": 2 * steps, "utterances": 48, "unalignable": 0, "repeated": 3, "elapsed": float(steps)}
    store.write_json("result.json", result | {"parameters": model.num_parameters(), "device": "cpu"})


def whole(job, folder, on_poll):
    Journal(job.journal).write("start", step=0, run=job.run)
    train_steps(job, 1, 8)
    on_poll()
    finish(job, 8)
    on_poll()


def a_run(name="r", force_from="", **fields):
    document = tiny_document(**fields)
    document["train"] |= {"strategy": "adpsgd", "nodes": 2}
    return Run(parse_config(document), name, force_from)


def until(run, last):
    for name in stages_of(run.config):
        if position(name) <= position(last):
            get_stage(name).execute(run)
    return run


def runs(api=None):
    api = api or client()
    return api.search_runs([experiment_id(api, "tiny")])


def history(run_id, name):
    return sorted((m.step, m.value) for m in client().get_metric_history(run_id, name))


@pytest.fixture(autouse=True)
def patience(home, monkeypatch):
    """MLflow's database is there, and a stage that ends waits for it as long as a busy machine needs.

    The stages before the training, which every test needs, are those of the finished run.
    """
    copy_outputs(finished()[0], home, "train", "decode", "score", "register", "report")
    give_mlflow(home)
    stop = Forwarder.stop
    monkeypatch.setattr(Forwarder, "stop", lambda self, status, patience_s, reason="": stop(self, status, 90, reason))


@pytest.fixture
def trained(home, monkeypatch):
    monkeypatch.setattr(module, "run_training", whole)
    return until(a_run(), "train")


def test_training_and_registration_share_a_run_without_duplicate_metrics(trained):
    [before] = runs()
    assert before.info.status == "FINISHED"
    assert before.data.params["train.strategy.kind"] == "adpsgd"
    assert "decode.kind" not in before.data.params
    assert history(before.info.run_id, "training-single-learners/loss.1.0") == [(n, 9.0 / n) for n in range(1, 9)]
    assert history(before.info.run_id, "training/loss") == [(2 * n, 9.0 / n) for n in range(1, 9)]
    until(trained, "report")
    [run] = runs()
    assert run.info.run_id == before.info.run_id == trained.result("register").record["mlflow_run"]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "r")
    assert run.data.tags[KEY_TAG] == trained.result("register").key
    assert run.data.tags[DECISION_TAG] == "became champion: there was none before"
    assert "decode.kind" in run.data.params
    assert run.data.params["train.nodes"] == "2"
    assert history(run.info.run_id, "training/loss") == [(2 * n, 9.0 / n) for n in range(1, 9)]
    assert history(run.info.run_id, "training-single-learners/valid_loss.1") == [(16, 2.2)]
    assert [step for step, _ in history(run.info.run_id, "test.wer")] == [16]
    names = {file.path for file in client().list_artifacts(run.info.run_id)}
    assert {"config.yaml", "environment.json", "journal.jsonl", "learning_curves.png"} <= names


def test_run_names_data_source_and_experiment_kind(trained):
    def inputs(run):
        inputs_of_run = run.inputs.dataset_inputs
        return {entry.dataset.name: ([tag.value for tag in entry.tags], entry.dataset) for entry in inputs_of_run}

    [before] = runs()
    assert {name: context for name, (context, _) in inputs(before).items()} == {
        "synthetic: train": ["training"],
        "synthetic: valid": ["validation"],
    }
    until(trained, "register")
    [run] = runs()
    assert {name.split()[-1] for name in inputs(run)} == {"train", "valid", "test"}
    shards = trained.result("shard")
    [context], test = inputs(run)["synthetic: test"]
    assert (context, test.source_type) == ("test", "local")
    assert test.digest == shards.record["sets"]["test"]["digest"][:36]
    assert json.loads(test.source)["uri"] == shards.store.child("test").url
    assert json.loads(test.profile)["num_rows"] == shards.record["sets"]["test"]["utterances"]
    commit = provenance()["commit"]
    assert run.data.tags["mlflow.source.name"].startswith("starling ")
    assert run.data.tags.get("mlflow.source.git.commit", "unknown") == commit.removesuffix("+")
    version = client().get_model_version("tiny", trained.result("register").record["version"])
    assert not [name for name in version.tags if name.startswith("mlflow.source")]
    experiment = client().get_experiment_by_name("tiny")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_experiment_kind_chosen_by_a_user_is_kept(home):
    api = client()
    chosen = experiment_id(api, "tiny")
    api.set_experiment_tag(chosen, "mlflow.experimentKind", "genai_development")
    assert experiment_id(api, "tiny") == chosen
    assert api.get_experiment(chosen).tags["mlflow.experimentKind"] == "genai_development"


@pytest.mark.parametrize(
    ("wanted", "nodes", "shown"), [("auto", 8, True), ("auto", 9, False), ("always", 9, True), ("never", 1, False)]
)
def test_curves_of_many_learners_are_shown_on_request(wanted, nodes, shown):
    train = TrainConfig.model_validate({"learner_metrics": wanted, "strategy": "adpsgd", "nodes": nodes})
    assert module._learner_metrics(train) is shown


def test_counts_include_repeated_rows(trained):
    counts = {"epochs": 2, "steps": 16, "utterances": 48, "unalignable": 0, "repeated": 3}
    assert trained.result("train").counts == counts
    assert {name for name in trained.result("train").store.list() if not name.startswith("uses/")} == {
        *("model/model.safetensors", "model/bundle.json", "journal.jsonl", "result.json", "done.json")
    }


def test_second_registration_of_a_training_has_its_own_complete_run(trained):
    until(trained, "register")
    again = until(a_run("again", decode={"kind": "beam", "beam": 4}), "register")
    assert again.result("train").cached
    first, second = (run.result("register").record["mlflow_run"] for run in (trained, again))
    assert first != second
    assert history(first, "training/loss") == history(second, "training/loss")
    assert client().get_run(second).data.params["decode.beam"] == "4"
    assert len(runs()) == 2


def test_failed_registration_is_completed_in_the_same_run(trained, monkeypatch):
    from tasks.stages import register

    until(trained, "score")
    with monkeypatch.context() as patch:
        patch.setattr(register, "_log_model", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space"):
            REGISTER.execute(trained)
    assert [run.info.status for run in runs()] == ["FAILED"]
    REGISTER.execute(trained)
    [run] = runs()
    assert run.info.status == "FINISHED"
    assert history(run.info.run_id, "training/loss") == [(2 * n, 9.0 / n) for n in range(1, 9)]


def test_interrupted_training_continues_in_the_same_run(home, monkeypatch):
    def interrupted(job, folder, on_poll):
        Journal(job.journal).write("start", step=0, run=job.run)
        train_steps(job, 1, 5)
        raise KeyboardInterrupt

    def resumed(job, folder, on_poll):
        write(job.journal, "resume", step=6, epoch=0, steps={"0.0": 3, "1.0": 3})
        train_steps(job, 4, 8)
        finish(job, 8)

    monkeypatch.setattr(module, "run_training", interrupted)
    run = until(a_run(), "features")
    with pytest.raises(KeyboardInterrupt):
        TRAIN.execute(run)
    [first] = runs()
    assert (first.info.status, first.data.tags[ENDED_TAG]) == ("KILLED", "stopped by Ctrl-C")
    assert first.data.tags[NOTE_TAG] == "This run was stopped by Ctrl-C; the same command continues it."
    [listed] = list_runs(client())
    assert (listed.status, listed.decision) == ("stopped", "stopped by Ctrl-C")
    assert history(first.info.run_id, "training-single-learners/loss.0.0")[-1] == (5, 9.0 / 5)
    monkeypatch.setattr(module, "run_training", resumed)
    TRAIN.execute(run)
    [second] = runs()
    assert second.info.run_id == first.info.run_id
    assert second.info.status == "FINISHED"
    assert not {ENDED_TAG, NOTE_TAG} & second.data.tags.keys()
    steps = [step for step, _ in history(first.info.run_id, "training-single-learners/loss.0.0")]
    assert steps == [1, 2, 3, 4, 4, 5, 5, 6, 7, 8]  # steps done again are shown twice, the later ones last
    assert second.data.metrics["training-single-learners/loss.0.0"] == 9.0 / 8


def test_forced_training_has_a_new_run(trained):
    first = runs()[0]
    until(a_run("anew", force_from="train"), "train")
    assert len(runs()) == 2
    assert runs()[0].data.tags[TRAINING_TAG] != first.data.tags[TRAINING_TAG]


def test_registration_sends_metrics_missed_during_an_mlflow_outage(home, monkeypatch):
    monkeypatch.setattr(module, "run_training", whole)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    run = until(a_run(), "train")
    assert not run.result("train").cached
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    until(run, "register")
    [tracked] = runs()
    assert tracked.data.tags[TRAINING_TAG] == run.result("train").record["tracking"]["training"]
    assert history(tracked.info.run_id, "training-single-learners/loss.1.0") == [(n, 9.0 / n) for n in range(1, 9)]


def test_failed_training_is_marked_in_mlflow_and_publishes_nothing(home, monkeypatch):
    def fails(job, folder, on_poll):
        raise TrainingFailedError("status 1")

    monkeypatch.setattr(module, "run_training", fails)
    run = until(a_run(), "features")
    with pytest.raises(TrainingFailedError):
        TRAIN.execute(run)
    assert TRAIN.output(run).record() is None
    assert [tracked.info.status for tracked in runs()] == ["FAILED"]


@pytest.mark.parametrize(
    ("train", "same"),
    [
        ({"launch": {"kind": "external"}}, True),
        ({"membership": {"dead_after_s": 3}}, True),
        ({"exchange": {"encrypt": False, "timeout_s": 1, "chunk_kb": 64}}, True),
        ({"threads": 2, "checkpoint_steps": 7, "checkpoint_keep": 3, "log_steps": 2}, True),
        ({"exchange": {"wire": "bf16"}}, False),
        ({"strategy": {"kind": "adpsgd", "neighbours": "random-ring"}}, False),
        ({"strategy": {"kind": "adpsgd", "newcomer": "weights+optimizer"}}, True),
        ({"nodes": 3}, False),
        ({"strategy": "h-adpsgd", "learners_per_node": 2}, False),
    ],
)
def test_address_does_not_depend_on_how_a_ring_is_launched(home, train, same, request):
    run = until(a_run(), "features")
    changed = run.config.model_dump(mode="json", by_alias=True)
    changed["train"] |= train
    other = Run(parse_config(changed), "other", results=run.results)
    assert (TRAIN.output(run).key == TRAIN.output(other).key) is same


def test_progress_covers_the_ring_and_names_live_nodes(tmp_path):
    from tasks.stages import progress

    journal, heard = tmp_path / "journal.jsonl", []
    reporter = Reporter(journal, 3)
    common = {"epochs": 4, "lr": 0.1, "nodes": 3, "step": 1}
    write(journal, "start", step=0)
    write(journal, "view", number=1, nodes=[0, 1, 2], joined=[0, 1, 2], left={})
    for learner, epoch, loss in (("0.0", 0.5, 2.0), ("1.0", 0.4, 4.0), ("2.0", 0.6, 3.0)):
        write(journal, "step", learner=learner, epoch=epoch, loss=loss, **common)
    write(journal, "view", number=2, nodes=[0, 2], joined=[], left={"1": "silent"})
    write(journal, "step", learner="0.0", epoch=0.7, loss=1.0, **(common | {"nodes": 2}))
    write(journal, "valid", epoch=1, epochs=4, valid_loss=1.5, valid_wer=0.25)
    lines = []
    with progress.listening(lambda *given: heard.append(given)), progress.following(lambda *line: lines.append(line)):
        reporter()
    told = "epoch 1 of 4, loss 2.000, validation loss 1.500, WER 25.0 %"
    assert [(done, note) for _, done, _, note in heard] == [
        (0.5, "epoch 0.50 of 4, loss 2.000, 3 of 3 nodes"),
        (0.5, "epoch 0.50 of 4, loss 3.000, 3 of 3 nodes"),
        (0.6, "epoch 0.60 of 4, loss 3.000, 3 of 3 nodes"),
        (0.7, "epoch 0.70 of 4, loss 2.000, 2 of 3 nodes"),
        (1, f"{told}, 2 of 3 nodes"),
    ]
    assert lines == [("train", told)]
    assert reporter.present == {0, 2}


def test_progress_shows_speed_time_left_learners_and_mlflow_outage(tmp_path):
    from types import SimpleNamespace

    from tasks.stages import progress

    journal, heard = tmp_path / "journal.jsonl", []
    reporter = Reporter(journal, 1)
    reporter.forwarder = forwarder = SimpleNamespace(links={"MLflow run": "http://m"}, trouble="")
    write(journal, "start", step=0)
    with progress.listening(lambda *given: heard.append(given[1:])):
        for n, trouble in ((1, ""), (2, "OSError: away")):
            common = {
                "step": n,
                "epoch": n / 10,
                "epochs": 2,
                "lr": None,
                "elapsed": 10.0 * n,
                "audio_seconds": 40.0 * n,
            }
            for rank in ("0.0", "0.1"):
                write(journal, "step", learner=rank, loss=float("nan") if n == 1 else 2.0, **common)
            forwarder.trouble = trouble
            reporter()
    assert heard[-1] == (
        0.2,
        2.0,
        "epoch 0.20 of 2, loss 2.000, 8 × real time, 0:03:00 left, 2 learners, MLflow is unreachable",
    )
    assert heard[1] == (0.1, 2.0, "epoch 0.10 of 2, no finite loss, 2 learners")
    assert progress.links("train") == {"MLflow run": "http://m"}


def test_each_epoch_of_a_session_and_its_resume_have_a_progress_line(tmp_path):
    from tasks.stages import progress

    journal, lines = tmp_path / "journal.jsonl", []
    write(journal, "start", step=0)
    for n in (1, 2, 3):  # of a training that is resumed
        valid = {"epochs": 3, "train_loss": 1 / n, "valid_loss": None, "valid_wer": 0.5 / n}
        write(
            journal,
            "step",
            learner="0.0",
            step=n,
            epoch=n,
            epochs=3,
            loss=9.0,
            elapsed=60.0 * n,
            audio_seconds=600.0 * n,
        )
        write(journal, "valid", epoch=n, **valid)
        if n == 2:
            reporter = Reporter(journal, 1)
            write(journal, "resume", step=2, epoch=2, steps={"0.0": 2}, elapsed=120.0)
            with progress.following(lambda *line: lines.append(line)):
                reporter()
    with progress.following(lambda *line: lines.append(line)):
        reporter()
        reporter()
    assert lines == [
        ("train", "resumes after epoch 2 of 3, from step 2"),
        ("train", "epoch 3 of 3, loss 0.333, no finite validation loss, WER 16.7 %"),
    ]


def test_work_folder_has_one_forwarding_note(trained):
    folder = work_folder("train", trained.result("train").key)
    assert [path.suffix for path in folder.glob("forward-*.json")] == [".json"]
