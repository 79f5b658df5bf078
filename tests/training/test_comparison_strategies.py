"""Every strategy, trained end to end: all learn, and tolerate the same faults."""

import os
import signal

import pytest
from running_training import Running, send_signal
from support import processes_naming
from tones import bare, train

from training.launch.training_process import TrainingFailedError
from training.strategies.registry import STRATEGIES

CONSTANTS = {"tau": 4, "warm_epochs": 2, "block": 64, "micro_batches": 2, "servers": 2}
"""For a training of a hundred steps, where a strategy has such a field."""
EPOCHS = 16


def learners(strategy):
    """The fewest nodes, and learners of each, with which a strategy does all that it does."""
    traits = STRATEGIES[strategy].traits
    if traits.one_node:
        return 1, 3 if traits.decentralized else 2  # a ring of two has one neighbour
    return 2, 1 if traits.one_learner else 2


def comparison_job(corpus, folder, strategy, **changes):
    nodes, ranks = learners(strategy)
    fields = STRATEGIES[strategy].config.model_fields
    options = {
        "strategy": {"kind": strategy, **{name: value for name, value in CONSTANTS.items() if name in fields}},
        "nodes": nodes,
        "learners_per_node": ranks,
        "epochs": EPOCHS,
        "max_batch": 8,
        "checkpoint_steps": 20,
        "optimizer": {"lr": 1e-2},
        "augment": {"enabled": False},
        "schedule": {"kind": "cosine", "warmup_epochs": 0.5},
    }
    model = bare("conformer").model_copy(update={"layers": 2 if STRATEGIES[strategy].traits.split else 1})
    return corpus.job(folder, spec=corpus.spec("conformer", model=model), **(options | changes))


def check(result, epochs=EPOCHS, utterances=48):
    """Every utterance was trained on once an epoch, or is counted as repeated; and the model has learned."""
    assert epochs * utterances <= result["utterances"] <= epochs * utterances + result["repeated"]
    # several nodes are asked for the newest epoch's replicas: one that was over within a moment is passed over, or late
    seen = sorted(int(entry["epoch"]) for entry in result["history"])
    assert len(seen) == len(set(seen))
    assert seen[-1] == epochs
    assert result["nodes"] > 1 or seen == list(range(1, epochs + 1))
    # an untrained model has about 2.3 nats per token in the first epoch's validation, and errs in every word
    assert result["valid"]["loss"] < 1.2
    assert result["valid"]["wer"] < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns_the_words(corpus, tmp_path, strategy):
    run = train(comparison_job(corpus, tmp_path, strategy))
    check(run.result)
    assert run.result["repeated"] == 0
    assert run.result["strategy"] == strategy
    assert not list(tmp_path.rglob("shared-*"))
    staleness = [entry["staleness"] for entry in run.entries("step") if "staleness" in entry]
    if strategy == "d1d":
        assert set(staleness[2:]) == {1.0}
    if strategy in ("asgd", "hogwild"):
        assert max(staleness) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_learner_loses_only_its_own_work(corpus, tmp_path, strategy):
    with Running(comparison_job(corpus, tmp_path, strategy, epochs=40, membership={"dead_after_s": 2})) as running:
        running.wait_for_epoch(3)
        victims = running.processes("training.node.rank", learners(strategy)[0] - 1)
        send_signal(max(victims), signal.SIGKILL)
        check(running.finish().result, 40)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name, method in STRATEGIES.items() if method.traits.server])
def test_killed_parameter_server_resumes_with_its_saved_state(corpus, tmp_path, strategy):
    with Running(comparison_job(corpus, tmp_path, strategy, epochs=40)) as running:
        running.wait_for_epoch(3)
        send_signal(running.processes("training.parameter_server.server")[0], signal.SIGKILL)
        check(running.finish().result, 40)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_resumes_from_checkpoints_when_all_processes_are_killed(corpus, tmp_path, strategy):
    with Running(comparison_job(corpus, tmp_path, strategy, epochs=30)) as running:
        running.wait_for_epoch(6)
        for pid in processes_naming(str(tmp_path)):
            if int(pid) != os.getpid():
                send_signal(pid, signal.SIGKILL)
        with pytest.raises(TrainingFailedError):
            running.finish(30)
    with Running(comparison_job(corpus, tmp_path, strategy, epochs=30)) as running:
        check(running.finish().result, 30)
    (resumed,) = running.entries("resume")
    assert resumed["epoch"] >= 2
