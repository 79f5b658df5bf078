"""A warm-up counted in epochs: the engine knows the length of its first epoch."""

import pytest
from tones import LEARNS, bare, train_here


def warm_job(corpus, folder, sampling):
    spec = corpus.spec("conformer", model=bare("conformer"))
    bmuf = {"kind": "bmuf", "tau": 2, "warm_epochs": 1}
    return corpus.job(folder, spec=spec, strategy=bmuf, sampling=sampling, epochs=2, **LEARNS)


@pytest.mark.parametrize("sampling", [{}, {"kind": "temperature", "by": "speaker"}], ids=["all", "drawn"])
def test_a_warm_up_of_an_epoch_ends_with_the_first_epoch(corpus, tmp_path, sampling):
    run = train_here(warm_job(corpus, tmp_path, sampling))
    context = run.worker.stepper.context
    first = next(entry["step"] for entry in run.entries("step") if entry["epoch"] > 1) - 1
    assert context.epoch_steps == first == int(context.state["warm_steps"])
    assert run.result["step"] > first


def test_interrupted_warm_up_resumes_where_it_stopped(corpus, tmp_path):
    job = warm_job(corpus, tmp_path, {})
    stopped = train_here(job, stop_at=5)
    context = stopped.worker.stepper.context
    assert int(context.state["warm_steps"]) == 5 < context.epoch_steps
    run = train_here(job)
    assert int(run.worker.stepper.context.state["warm_steps"]) == run.worker.stepper.context.epoch_steps
    straight = train_here(warm_job(corpus, tmp_path / "straight", {}))
    assert run.model_bytes == straight.model_bytes
