"""Every utterance is trained on exactly once an epoch: ids are counted as the learners train them, kills included."""

import json
import os
import signal
from collections import Counter, defaultdict

import pytest
from running_training import QUICK, Running, send_signal
from support import environment
from tones import bare, train, train_here

from training.coordinator.journal import read_journal

EPOCHS = 3


def make_job(corpus, folder, **changes):
    spec = corpus.spec("conformer", model=bare("conformer"))
    return corpus.job(folder, spec=spec, **{"epochs": EPOCHS, "max_batch": 4, "membership": {"beat_s": 0.2}, **changes})


def trained_ids(folder):
    """By epoch, how often each id was trained; and the batches of each learner in order."""
    counts = defaultdict(Counter)
    batches = defaultdict(list)
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            counts[entry["epoch"]].update(entry["ids"])
            batches[file.stem].append((entry["epoch"], tuple(entry["ids"])))
    return counts, batches


WORLDS = {
    "one": {"strategy": "single"},
    "two": {"strategy": "adpsgd", "nodes": 2},
    "two by two": {"strategy": "h-adpsgd", "nodes": 2, "learners_per_node": 2},
    "two in blocks": {"strategy": {"kind": "bmuf", "tau": 5}, "learners_per_node": 2},
    "two at a server": {"strategy": "asgd", "nodes": 2},
    "two with processes": {"strategy": "adpsgd", "nodes": 2, "loader_processes": 2},
}
SLOW = ("two", "two by two", "two in blocks", "two at a server", "two with processes")


@pytest.fixture
def trace(tmp_path):
    folder = tmp_path / "ids"
    folder.mkdir()
    with environment(STARLING_TRACE_IDS=str(folder)):
        yield folder


@pytest.mark.parametrize("world", ["one", *(pytest.param(world, marks=pytest.mark.slow) for world in SLOW)])
def test_every_utterance_is_trained_once_in_each_of_three_epochs(corpus, tmp_path, trace, world):
    train(make_job(corpus, tmp_path, **WORLDS[world]))
    counts, _ = trained_ids(trace)
    once = Counter(sample.id for sample in corpus.train)
    assert counts == dict.fromkeys(range(EPOCHS), once)


def batches_with(corpus, folder, ids, **changes):
    ids.mkdir(parents=True)
    with environment(STARLING_TRACE_IDS=str(ids)):
        train_here(make_job(corpus, folder, **changes))
    return trained_ids(ids)[1]["0.0"]


@pytest.mark.slow
def test_order_does_not_depend_on_the_number_of_loader_threads(corpus, tmp_path):
    orders = [
        batches_with(corpus, tmp_path / f"run{n}", tmp_path / f"ids{n}", loader_threads=n, epochs=2) for n in (1, 2, 5)
    ]
    assert orders[0] == orders[1] == orders[2]
    first, second = ([ids for epoch, ids in orders[0] if epoch == number] for number in (0, 1))
    assert first != second


def test_training_stopped_in_mid_epoch_resumes_at_the_same_batch(corpus, tmp_path, trace):
    job = make_job(corpus, tmp_path / "run")
    train_here(job, stop_at=5)
    stopped = trained_ids(trace)[1]["0.0"]
    train_here(job)
    resumed = trained_ids(trace)[1]["0.0"]
    undisturbed = batches_with(corpus, tmp_path / "other", tmp_path / "other-ids")
    assert len(stopped) == 5
    assert resumed == undisturbed


def check_with_repetitions(job, trace, corpus):
    """No utterance is missing; repeated ones are counted and named."""
    counts, _ = trained_ids(trace)
    epochs = {entry["epoch"] - 1: entry for entry in read_journal(job.journal) if entry["kind"] == "epoch"}
    everything = {sample.id for sample in corpus.train}
    assert sorted(counts) == sorted(epochs) == list(range(EPOCHS))
    for epoch, count in counts.items():
        assert count.keys() == everything
        again = {name for name, times in count.items() if times > 1}
        assert again <= set(epochs[epoch]["repeated_ids"])
        assert sum(count.values()) - len(everything) <= epochs[epoch]["repeated"]


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "victim"), [(2, 1), (4, 2), (4, 0)])
def test_killed_learner_loses_no_utterance(corpus, tmp_path, trace, nodes, victim):
    job = make_job(
        corpus, tmp_path, strategy="adpsgd", nodes=nodes, max_batch=4 * nodes, checkpoint_steps=1000, membership=QUICK
    )
    with Running(job, slow=12) as running:
        running.wait_for_epoch(1)
        send_signal(running.learner(victim), signal.SIGKILL)
        running.finish()
    check_with_repetitions(job, trace, corpus)


@pytest.mark.slow
def test_killed_coordinator_loses_no_utterance(corpus, tmp_path, trace):
    job = make_job(corpus, tmp_path, strategy="adpsgd", nodes=4, max_batch=16, checkpoint_steps=1000, membership=QUICK)
    with Running(job, slow=12) as running:
        running.wait_for_epoch(1)
        send_signal(running.processes("training.coordinator.server")[0], signal.SIGKILL)
        running.finish()
    check_with_repetitions(job, trace, corpus)


@pytest.mark.slow
def test_sampled_epochs_draw_each_position_once(corpus, tmp_path, trace):
    weights = {f"speaker{n}": weight for n, weight in enumerate((2, 1, 1))}
    sampling = {"kind": "weights", "by": "speaker", "weights": weights}
    train(make_job(corpus, tmp_path, strategy="adpsgd", nodes=2, sampling=sampling))
    counts, _ = trained_ids(trace)
    speakers = {sample.id: sample.row["speaker"] for sample in corpus.train}
    for epoch in range(EPOCHS):
        drawn = Counter(speakers[name] for name in counts[epoch].elements())
        assert drawn == {"speaker0": 24, "speaker1": 12, "speaker2": 12}


def test_no_trace_is_written_unless_requested(corpus, tmp_path):
    assert "STARLING_TRACE_IDS" not in os.environ
    train_here(make_job(corpus, tmp_path, epochs=1))
    assert not list(tmp_path.rglob("0.0.jsonl"))
