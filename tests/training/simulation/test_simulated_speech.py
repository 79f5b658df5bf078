"""A real acoustic model in the simulator: batched gradients equal separate ones, and the model learns."""

import pytest
import torch
from tones import LEARNS, bare

from speech.models.networks.stages import split_model
from tasks.simulated_speech import Speech
from training.simulation import Cluster, Simulation, simulate
from training.simulation.leases import BatchLease
from training.simulation.problem import Job
from training.strategies.base import StrategyError


@pytest.fixture(scope="module")
def job(corpus, tmp_path_factory):
    spec = corpus.spec("conformer", model=bare("conformer"))
    return corpus.job(tmp_path_factory.mktemp("simulated"), spec=spec, epochs=6, optimizer={"lr": 1e-2}, **LEARNS)


def gradients(problem):
    jobs = [Job(problem.replica(), BatchLease(number, 0), number, 0) for number in range(3)]
    for number, job in enumerate(jobs):
        job.replica.weights.mul_(1 + 0.1 * number)
    weights = problem.gradients(jobs)
    return torch.stack([job.replica.grads for job in jobs]), weights


def test_batched_gradients_of_replicas_equal_separate_ones(job):
    (together, weights), (single, others) = (gradients(Speech(job, 2, together=size)) for size in (3, 1))
    assert weights == others
    torch.testing.assert_close(together, single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["adpsgd", pytest.param("scpsgd", marks=pytest.mark.slow)])
def test_simulated_learners_learn_the_words(job, strategy):
    problem = Speech(job, 2)
    outcome = Simulation(Cluster(learners=2), strategy, problem, observe=1).run()
    losses = [observation.figures["loss"] for observation in outcome.observations]
    assert losses[-1] < 0.5 * problem.evaluate(problem.replica().weights)["loss"]
    assert 0 <= outcome.figures["wer"] <= 1
    assert len(losses) == 7


def test_split_model_learns_like_synchronous_learners_and_sends_hidden_frames(corpus, tmp_path):
    spec = corpus.spec("conformer", model=bare("conformer").model_copy(update={"layers": 2}))
    job = corpus.job(tmp_path, spec=spec, epochs=1, optimizer={"lr": 1e-2}, **LEARNS)
    problem = Speech(job, 2)
    split, whole = (simulate(Cluster(learners=2), name, problem) for name in ("pipeline", "scpsgd"))
    assert split.figures["loss"] == pytest.approx(whole.figures["loss"], rel=1e-3)
    first, _ = split_model(problem._build(), 2)
    batches = [problem._train.batch(numbers) for numbers in problem._plan(0)]
    hidden = [first(batch.inputs, batch.lengths).nbytes for batch in batches]
    # what the first stage makes goes to the second, and as much comes back: two learners' batches by two learners
    assert split.bytes_per_step == pytest.approx(2 * sum(hidden) / len(hidden))
    with pytest.raises(StrategyError, match=r"model.layers is 2, which cannot be split into 3 stages"):
        simulate(Cluster(learners=3), "pipeline", Speech(job, 3))


def test_diverged_model_evaluates_without_an_error(job):
    problem = Speech(job, 2)
    figures = problem.evaluate(torch.full_like(problem.replica().weights, torch.nan))
    assert set(figures) == {"loss", "wer"}
    assert all(value != value for value in figures.values())


def test_copied_problem_reuses_batches_without_reading_them(job, monkeypatch):
    first = Speech(job, 2)
    expected = gradients(first)
    monkeypatch.setattr("tasks.simulated_speech.open_set", None)
    second = gradients(Speech(job, 2, like=first))
    assert torch.equal(second[0], expected[0])
    assert second[1] == expected[1]
