"""Loading batches for a GPU: page-locked batches, loader threads with the right GPU, and optional compilation."""

import json
import threading

import numpy as np
import pytest
import tones
import torch
from torch import Tensor

from benchmarks import feeding
from recognition.data.augmentation import Augmenter
from speech.features.augment import AugmentConfig
from training.config import TrainConfig
from training.learner import compute
from training.learner.compute import Learner, open_set
from training.learner.prefetch import Loader, Prefetcher
from training.node import worker
from training.node.worker import Worker

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_every_loader_thread_runs_its_initializer_first():
    begun, ready = [], threading.Barrier(3)

    def load(rows, epoch):
        ready.wait(240)  # all three are needed at once
        return threading.get_ident() in begun

    prefetcher = Prefetcher(load, 3, begin=lambda: begun.append(threading.get_ident()))
    wanted = [np.array([number]) for number in range(3)]
    prefetcher.hint([(rows, 0) for rows in wanted])
    assert all(prefetcher.take(rows, 0) for rows in wanted)
    prefetcher.close()
    assert len(set(begun)) == 3


def test_batches_for_a_gpu_are_page_locked_by_the_loader(corpus, tmp_path, monkeypatch):
    data, pinned = open_set(corpus.job(tmp_path), "train"), []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: (pinned.append(self.clone()), pinned[-1])[1])
    augmenter = Augmenter(AugmentConfig(gain_db=3.0, noise={"snr_db": (5, 20)}), tones.RATE, 1)
    wanted = Loader(data, augmenter, CPU)(np.arange(3), 2)
    assert not pinned
    batch = Loader(data, augmenter, GPU)(np.arange(3), 2)
    assert (batch.ids, batch.texts, batch.seconds) == (wanted.ids, wanted.texts, wanted.seconds)
    for given, tensor in zip(tensors(batch), tensors(wanted), strict=True):
        assert torch.equal(given, tensor)
        assert any(given is tensor for tensor in pinned)
    # inputs, tokens, tied states, each with lengths; a factor for the gain, noise and its factors, draws of the masks
    assert len(pinned) == 6 + 4


def tensors(batch):
    """All tensors of a batch."""
    own = [batch.inputs, batch.lengths, batch.tokens, batch.token_lengths]
    return [*own, *(tensor for drawn in batch.drawn.values() for tensor in drawn.values())]


def test_batch_prefetched_for_one_epoch_is_not_used_in_another():
    """Augmentation is drawn with the batch, and differs from epoch to epoch."""
    loads = []
    prefetcher = Prefetcher(lambda rows, epoch: loads.append(epoch) or epoch)
    rows = np.arange(2)
    prefetcher.hint([(rows, 1), (rows, 2)])
    assert [prefetcher.take(rows, epoch) for epoch in (2, 3, 1)] == [2, 3, 1]
    prefetcher.close()
    assert sorted(loads) == [1, 2, 3]


def test_loader_threads_of_a_worker_claim_its_gpu(corpus, tmp_path, monkeypatch):
    from training.node.process_group import NodeGroup

    job = corpus.job(tmp_path, loader_threads=1)
    learner, claimed = Learner(job, CPU), []
    monkeypatch.setattr(worker, "claim", claimed.append)
    rank = Worker(job, 0, learner, NodeGroup(0, 1, tmp_path / "meet", CPU), None, None)
    rank.prefetch.hint([(np.arange(2), 0)])
    assert rank.prefetch.take(np.arange(2), 0).ids
    rank.prefetch.close()
    assert claimed == [CPU]


def test_model_is_compiled_if_configured_and_keeps_its_parameters(corpus, tmp_path, monkeypatch):
    asked = []

    def compiled(model, **fields):
        asked.append(fields)
        return lambda *args: model(*args)

    monkeypatch.setattr(compute.torch, "compile", compiled)
    plain = Learner(corpus.job(tmp_path), CPU)
    assert not asked
    fast = Learner(corpus.job(tmp_path, compile=True), CPU)
    assert asked == [{"dynamic": True}]
    assert fast.frame_multiple > 1
    fast.frame_multiple = 1  # dropout draws other masks for other lengths
    batch = Loader(open_set(plain.job, "train"), plain.task, CPU)(range(4), 0)
    assert fast.gradient(batch, 1) == plain.gradient(batch, 1)
    assert list(fast.model.state_dict()) == list(plain.model.state_dict())
    with pytest.raises(ValueError, match="compile=false"):
        TrainConfig(strategy="pipeline", compile=True)


@pytest.mark.slow
def test_loading_speed_is_measured_without_training(corpus, capsys):
    loaders = ["--threads", "2", "--processes", "1", "--busy"]
    feeding.main(["--json", "--url", corpus.url("train"), *loaders, "--seconds", "0.2", "--wanted", "10"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["threads"], row["processes"], row["learners"]) for row in rows] == [(2, 0, 1), (1, 1, 1)]
    for row in rows:
        assert row["fed"] == pytest.approx(row["utterances_per_s"] / 10)
        assert row["audio_per_s"] > 0
        assert row["utterances_per_cpu_s"] > 0
        assert row["launches_per_s"] > 0


@pytest.mark.gpu
def test_a_compiled_model_trains_on_a_gpu(corpus, tmp_path):
    gpu = torch.device("cuda", 0)
    plain, fast = (Learner(corpus.job(tmp_path, "conformer", compile=yes, amp="off"), gpu) for yes in (False, True))
    load = Loader(open_set(plain.job, "train"), plain.task, gpu)
    plain.model.eval()
    fast.model.eval()
    for number, count in enumerate((4, 7, 3)):
        wanted, got = (learner.gradient(load(range(count), 0), number) for learner in (plain, fast))
        assert got.loss == pytest.approx(wanted.loss, rel=1e-3)
