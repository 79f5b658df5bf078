"""The benchmark of the published model: a small one runs to its end, and a learner's death ends it at once."""

import json

import pytest

from benchmarks import published_model
from benchmarks.common import BenchmarkError, Watched
from benchmarks.published_model import Options, learner, measure

SMALL = ["--learners", "2", "--seconds", "0.2", "--layers", "1", "--cells", "8", "--outputs", "40", "--batch", "4"]


@pytest.mark.slow
def test_small_model_is_measured_with_finished_exchanges(capsys):
    published_model.main(["--json", "--device", "auto", "--precision", "bf16", *SMALL])
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["params"] == 4 * 8 * 2 * (published_model.DIMENSION + 8 + 2) + 17 * 256 + 257 * 40
    assert row["steps"] >= published_model.MIN_STEPS
    assert row["exchanges"] >= 1
    assert row["exchanges_per_step"] > 0
    assert row["staleness"] >= 1
    assert row["step_s"] > 0
    assert row["frames_per_s"] == pytest.approx(2 * 4 * published_model.SEGMENT / row["step_s_exchanging"])
    assert row["peak_mb"] > 0


@pytest.mark.slow
def test_step_of_a_single_learner_is_measured_without_an_exchange(capsys):
    published_model.main(["--json", "--device", "cpu", "--precision", "fp32", *SMALL, "--learners", "1"])
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["step_s"] == row["step_s_exchanging"] > 0
    assert row["exchanges"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--exchange", "cuda", "--wire", "bf16"], "use wire=fp32 and daemons=1"),
        (["--exchange", "cuda", "--daemons", "2"], "use wire=fp32 and daemons=1"),
        (["--exchange", "cuda", "--device", "cpu"], "needs a GPU: use zmq"),
        (["--learners", "0"], "1 or more"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(monkeypatch, capsys, words, said):
    monkeypatch.setattr(published_model, "measure", lambda options: pytest.fail("it has started"))
    with pytest.raises(SystemExit):
        published_model.main([*SMALL, *words])
    assert said in " ".join(capsys.readouterr().err.split())


def test_missing_device_is_refused_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(published_model, "measure", lambda options: pytest.fail("it has started"))
    with pytest.raises(SystemExit):
        published_model.main(["--device", "cuda", *SMALL])
    assert "torch sees no GPU" in capsys.readouterr().err


def test_a_learner_that_dies_ends_the_benchmark():
    learners = Watched(learner, 2, Options(layers=1, cells=8, outputs=40, batch=4), 300.0)
    try:
        learners._members[1][1].kill()
        # the first one waits for an answer, and says nothing more
        with pytest.raises(BenchmarkError, match="process 1 has ended with status -9"):
            learners.hear()
    finally:
        learners.end()
    assert all(not process.is_alive() for _, process in learners._members)


@pytest.mark.gpu
def test_a_small_model_is_measured_on_a_gpu():
    row = measure(Options(seconds=1.0, layers=2, cells=64, outputs=500, batch=16, device="cuda"))
    assert row["device"].startswith("cuda:")
    assert row["exchanges"] >= 1


@pytest.mark.gpu
def test_learners_of_one_gpu_exchange_in_its_memory():
    row = measure(Options(seconds=2.0, layers=2, cells=64, outputs=500, batch=16, device="cuda", exchange="cuda"))
    assert row["exchanges"] >= 1
    assert row["failed"] == 0
