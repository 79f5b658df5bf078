"""Two learners whose exchange was stopped for most of a training ended with the mean of two different models."""

import pytest
import torch

from recognition.bundle import load_bundle
from storage.objects import ObjectStore
from training.coordinator.messages import replica_name
from training.learner.checkpoint import mean_weights, read_weights, snapshot_name, write_weights
from training.node.evaluator import Evaluator


@pytest.fixture(scope="module")
def trained(tones, corpus, tmp_path_factory):
    """A job, the weights that it leads to, and weights of an untrained model."""
    folder = tmp_path_factory.mktemp("apart")
    run = tones.train_here(corpus.job(folder, epochs=6))
    good = load_bundle(run.bundle)[1].state_dict()
    torch.manual_seed(5)
    start = run.job.task.spec.build_model().state_dict()
    return run.job, good, start


def evaluated(job, epoch, *replicas):
    store = ObjectStore(job.output_url)
    for node, weights in enumerate(replicas):
        write_weights(store, replica_name(epoch, node), weights)
    return Evaluator(job).evaluate(epoch, list(range(len(replicas))))


def equal(weights, other):
    return all(torch.equal(weights[name], other[name]) for name in weights)


def test_best_replica_replaces_a_worse_mean(trained):
    job, good, start = trained
    validated = evaluated(job, 1, start, good)
    assert equal(read_weights(ObjectStore(job.output_url), snapshot_name(1)), good)
    alone = Evaluator(job).validate(good)
    assert (validated["loss"], validated["wer"]) == (alone["loss"], alone["wer"])
    assert validated["replicas"]["1"] == validated["loss"] < validated["replicas"]["0"]


def test_close_replicas_are_averaged(trained):
    job, good, _ = trained
    near = {name: value * (1 + 1e-4) for name, value in good.items()}
    evaluated(job, 2, near, good)
    assert equal(read_weights(ObjectStore(job.output_url), snapshot_name(2)), mean_weights([near, good]))


def test_best_epoch_replaces_a_worse_mean_of_epochs(trained):
    job, good, start = trained
    job = job.model_copy(update={"train": job.train.model_copy(update={"average": 2})})
    store, evaluator = ObjectStore(job.output_url), Evaluator(job)
    write_weights(store, snapshot_name(3), start)
    write_weights(store, snapshot_name(4), good)
    history = [{"epoch": n, "loss": evaluator.validate(weights)["loss"]} for n, weights in ((3, start), (4, good))]
    result = evaluator.finish({}, history)
    assert result["averaged_epochs"] == [4]
    assert result["valid"]["loss"] == history[1]["loss"]
    assert store.read_json("model/bundle.json")["provenance"]["epochs"] == [4]
