"""AdamW counted steps in which a parameter was frozen, so that it did not correct the moments of one that has thawed.

They begin at zero. With 0.999 as the decay of second moments, the first updates were five times too large.
"""

import pytest
import torch

from training.learner.compute import Learner

FIRST = "subsampling."


@pytest.fixture(scope="module")
def run(tones, corpus, tmp_path_factory):
    """A training whose first layers thaw in the second epoch."""
    freeze = [{"names": [f"{FIRST}*"], "until": 1}]
    return tones.train_here(corpus.job(tmp_path_factory.mktemp("thaw"), "conformer", epochs=2, freeze=freeze))


def counts(learner, first):
    """Steps of AdamW of the first layers' parameters, or of the others."""
    named = learner.model.named_parameters()
    return {int(learner.optimizer.state[p]["step"]) for name, p in named if name.startswith(FIRST) == first}


def test_steps_are_counted_from_the_thaw(run):
    learner, before = run.worker.learner, run.entries("epoch")[0]["step"]
    assert counts(learner, first=False) == {run.worker.step}
    assert counts(learner, first=True) == {run.worker.step - before}


def test_newcomers_hear_of_the_steps_of_what_was_trained_from_the_start(run):
    learner = run.worker.learner
    rows = torch.empty(2, learner.flat.num_parameters)
    assert next(iter(learner.model.named_parameters()))[0].startswith(FIRST)
    assert learner.moments.write(rows, 0, learner.flat.num_parameters) == run.worker.step


def test_gradients_of_thawed_parameters_are_in_the_flat_ones_again(run):
    learner = Learner(run.job, torch.device("cpu"))
    places = [(p.grad.data_ptr(), p.grad.shape) for p in learner.model.parameters()]
    learner.enter(0)
    assert [name for name, p in learner.model.named_parameters() if p.grad is None] == [
        name for name, _ in learner.model.named_parameters() if name.startswith(FIRST)
    ]
    learner.enter(1)
    assert [(p.grad.data_ptr(), p.grad.shape) for p in learner.model.parameters()] == places
