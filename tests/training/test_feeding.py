"""What feeds a GPU: page-locked batches, made by threads that know which GPU is theirs; a compiled model by option."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import feeding
from tasks.train import _NOT_CONTENT
from training import compute, worker
from training.compute import Learner, open_set
from training.config import TrainConfig
from training.prefetch import Prefetcher
from training.worker import Worker

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_every_loader_thread_begins_with_what_it_is_told():
    begun, ready = [], threading.Barrier(3)

    def load(rows):
        ready.wait(60)  # all three are needed at once
        return threading.get_ident() in begun

    prefetcher = Prefetcher(load, 3, begin=lambda: begun.append(threading.get_ident()))
    wanted = [np.array([number]) for number in range(3)]
    prefetcher.hint(wanted)
    assert all(prefetcher.take(rows) for rows in wanted)
    prefetcher.close()
    assert len(set(begun)) == 3


def test_batches_for_a_gpu_are_page_locked_by_the_loader(corpus, tmp_path, monkeypatch):
    data, pinned = open_set(corpus.job(tmp_path), corpus.url("train")), []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: (pinned.append(self), self.clone())[1])
    wanted = data.batch(np.arange(3))
    found = Worker._load(SimpleNamespace(data=data, learner=SimpleNamespace(device=GPU)), np.arange(3))
    assert len(pinned) == 4
    assert (found.ids, found.texts, found.seconds) == (wanted.ids, wanted.texts, wanted.seconds)
    for name in ("inputs", "lengths", "tokens", "token_lengths"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    Worker._load(SimpleNamespace(data=data, learner=SimpleNamespace(device=CPU)), np.arange(3))
    assert len(pinned) == 4


def test_a_workers_loader_threads_claim_its_gpu(corpus, tmp_path, monkeypatch):
    from training.group import NodeGroup

    job = corpus.job(tmp_path, loader_threads=1)
    learner, claimed = Learner(job, CPU), []
    monkeypatch.setattr(worker, "claim", claimed.append)
    rank = Worker(job, 0, learner, NodeGroup(0, 1, tmp_path / "meet", CPU), None, None)
    rank.prefetch.hint([np.arange(2)])
    assert rank.prefetch.take(np.arange(2)).ids
    rank.prefetch.close()
    assert claimed == [CPU]


def test_a_model_is_compiled_by_option_and_stays_the_same_model(corpus, tmp_path, monkeypatch):
    asked = []

    def compiled(model, **fields):
        asked.append(fields)
        return lambda *args: model(*args)

    monkeypatch.setattr(compute.torch, "compile", compiled)
    plain = Learner(corpus.job(tmp_path), CPU)
    assert not asked
    fast = Learner(corpus.job(tmp_path, compile=True), CPU)
    assert asked == [{"dynamic": True}]
    batch = open_set(plain.job, plain.job.train_url).batch(range(4))
    assert fast.gradient(batch, 1, 0) == plain.gradient(batch, 1, 0)
    assert list(fast.model.state_dict()) == list(plain.model.state_dict())
    with pytest.raises(ValueError, match="compile=false"):
        TrainConfig(strategy="pipeline", compile=True)
    assert _NOT_CONTENT["compile"] is True  # a training is the same with it


def test_the_feeding_side_is_measured_by_itself(corpus, capsys):
    feeding.main(["--json", "--url", corpus.url("train"), "--threads", "2", "--seconds", "0.2", "--wanted", "10"])
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (row["threads"], row["learners"]) == (2, 1)
    assert row["fed"] == pytest.approx(row["utterances_per_s"] / 10)
    assert row["audio_per_s"] > 0
    assert row["utterances_per_cpu_s"] > 0


@pytest.mark.gpu
def test_a_compiled_model_trains_on_a_gpu(corpus, tmp_path):
    gpu = torch.device("cuda", 0)
    plain, fast = (Learner(corpus.job(tmp_path, "conformer", compile=yes, amp="off"), gpu) for yes in (False, True))
    data = open_set(plain.job, plain.job.train_url)
    plain.model.eval()
    fast.model.eval()
    for number, count in enumerate((4, 7, 3)):
        batch = data.batch(range(count)).pinned()
        wanted, found = (learner.gradient(batch, number, 0) for learner in (plain, fast))
        assert found.loss == pytest.approx(wanted.loss, rel=1e-3)
