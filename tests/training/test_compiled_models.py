"""`train.compile`: batches of all shapes are computed by a few programs, with the results of the eager model."""

import numpy as np
import pytest
import torch
from tones import bare
from torch._dynamo.utils import counters

from speech.lm.lstm import LstmConfig
from speech.models.networks.dropout import Dropout
from training.learner import compute
from training.learner.compute import Learner, open_set
from training.learner.prefetch import Loader

CPU = torch.device("cpu")
ROWS = (range(5), range(2), range(3, 4), range(1, 8), range(2, 6), range(7, 8))
"""Batches of several numbers of utterances, and lengths."""


@pytest.fixture
def strict():
    """Fails at torch's limit of programs per function, beyond which the function would run uncompiled."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=4):
        yield
    torch._dynamo.reset()


def compare(corpus, folder, kind, backend, monkeypatch, tolerance, rows_of_batches=ROWS):
    """Compute the gradients of all batches, compiled and not; returns the number of compiled programs."""
    job = corpus.job(folder, spec=corpus.spec(kind, model=bare(kind).model_copy(update={"layers": 1})))
    plain = Learner(job, CPU)
    whole = torch.compile
    monkeypatch.setattr(compute.torch, "compile", lambda model, **how: whole(model, backend=backend, **how))
    fast = Learner(job.model_copy(update={"train": job.train.model_copy(update={"compile": True})}), CPU)
    load = Loader(open_set(job, "train"), plain.task, CPU)
    for number, rows in enumerate(rows_of_batches):
        batch = load(rows, 1)
        wanted, got = plain.gradient(batch, number), fast.gradient(batch, number)
        assert got.loss == pytest.approx(wanted.loss, rel=tolerance)
        torch.testing.assert_close(fast.flat.grads, plain.flat.grads, rtol=tolerance, atol=tolerance)
    return counters["stats"]["unique_graphs"]


# compilation takes 6 s of CPU or more for each kind; the tests below and those of pretrained networks compile parts
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["conformer", "blstm", "tdnn"])
def test_batches_of_all_shapes_need_few_programs(corpus, tmp_path, kind, monkeypatch, strict):
    programs = compare(corpus, tmp_path, kind, "eager", monkeypatch, 1e-4)
    # one for single utterances, and on a CPU two for torch's two kinds of convolutions; an LSTM divides them into parts
    assert 0 < programs <= (3 * 3 if kind == "blstm" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["conformer", "blstm"])
def test_compiled_code_has_the_results_of_the_model(corpus, tmp_path, kind, monkeypatch, strict):
    assert 0 < compare(corpus, tmp_path, kind, "inductor", monkeypatch, 1e-3, ROWS[:3]) <= 9


def test_a_mask_of_dropout_needs_no_program_of_its_own(strict):
    dropout = Dropout(0.25).train()
    compiled = torch.compile(dropout, dynamic=True, backend="eager")
    kept = [float((compiled(torch.ones(40 + size, 50)) > 0).float().mean()) for size in range(6)]
    assert counters["stats"]["unique_graphs"] == 1
    assert len(set(kept)) > 1
    assert np.mean(kept) == pytest.approx(0.75, abs=0.02)


def test_sentences_of_all_lengths_need_few_programs(strict):
    torch.manual_seed(0)
    network = LstmConfig(dim=4, layers=1, dropout=0.1).build_network(7).eval()
    compiled = torch.compile(network, dynamic=True, backend="eager")
    for blocks, words in ((2, 6), (3, 9), (5, 4), (4, 12), (2, 3), (6, 8)):
        sentences = torch.randint(2, 7, (blocks, words, 1))
        sentences[:, 0] = sentences[:, words // 2] = 1  # starts of sentences
        lengths = torch.full((blocks,), words)
        lengths[0] -= 1
        torch.testing.assert_close(compiled(sentences, lengths), network(sentences, lengths))
    assert 0 < counters["stats"]["unique_graphs"] <= 4
