"""Batches that processes load: equal to those of threads, also with damaged shards, killed processes and the end."""

import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ROOT, end_processes, environment, processes_naming, wait_until
from tones import train_here, with_task

from recognition.data.dataset import Batch
from speech.features.augment.noise import generated
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.quarantine import ShardQuarantine, TooManyShardsError
from training.config import TrainConfig
from training.learner import prefetch
from training.learner.compute import damage_folder, open_loader, open_set
from training.learner.prefetch import Loader, LoaderProcesses, Prefetcher

CPU = torch.device("cpu")
AUGMENT = {"noise": {"probability": 0.7}, "reverb": {"probability": 0.7}, "pauses": {"edge_s": [0.0, 0.5]}}


@pytest.fixture
def speech(corpus, tmp_path):
    """A copy of the training set that may be damaged."""
    return shutil.copytree(corpus.folder / "train", tmp_path / "speech" / "train")


def open_here(job):
    return Loader(open_set(job, "train"), job.task.build(job.seed), CPU)


def wait_for(processes, count):
    return wait_until(lambda: len(waiting := processes.waiting) == count and waiting, every_s=0.02)


@contextmanager
def loading(job, count=1, opened=None):
    """Loader processes that are ready."""
    processes = LoaderProcesses(open_here(job), opened or partial(open_loader, job, torch.get_num_threads(), 0), count)
    try:
        wait_for(processes, count)
        yield processes
    finally:
        processes.close()


def batches_through(load, rows, count, epoch=1):
    """All batches of four, prefetched."""
    plan = [(rows[start : start + 4], epoch) for start in range(0, len(rows), 4)]
    prefetcher = Prefetcher(load, count)
    loaded = []
    for number, planned in enumerate(plan):
        prefetcher.hint(plan[number : number + 4])
        loaded.append(prefetcher.take(*planned))
    prefetcher.close()
    return loaded


def assert_equal(batch, wanted):
    for name in ("ids", "speakers", "texts", "seconds", "unreadable", "frame_factor"):
        assert getattr(batch, name) == getattr(wanted, name), name
    assert np.array_equal(batch.rows, wanted.rows)
    assert {name: list(tensors) for name, tensors in batch.drawn.items()} == {
        name: list(tensors) for name, tensors in wanted.drawn.items()
    }
    for ours, theirs in zip(batch.tensors(), wanted.tensors(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.fixture(params=[1, 2])
def torch_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    generated.cache_clear()  # a training keeps its number of threads
    yield
    torch.set_num_threads(before)
    generated.cache_clear()


def refuse(*_):
    raise AssertionError("loaded in this process")


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.variants(1)
def test_batches_and_draws_equal_those_of_threads_bit_for_bit(corpus, tmp_path, monkeypatch):
    job = corpus.job(tmp_path, augment=AUGMENT)
    rows = np.random.default_rng(1).permutation(48)
    wanted = batches_through(open_here(job), rows, 2)
    with loading(job, 2) as processes:
        monkeypatch.setattr(Loader, "__call__", refuse)
        loaded = batches_through(processes, rows, 2)
    assert {"noise", "reverb", "pauses"} <= wanted[0].drawn.keys()
    for ours, theirs in zip(loaded, wanted, strict=True):
        assert_equal(ours, theirs)


def test_training_is_the_same_with_threads_and_processes(corpus, tmp_path):
    trained = {n: train_here(corpus.job(tmp_path / f"{n}", loader_processes=n)) for n in (0, 2)}
    assert trained[0].losses == trained[2].losses
    assert trained[0].model_bytes == trained[2].model_bytes


def test_batches_are_loaded_here_while_processes_start(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(prefetch, "_END_S", 0.1)
    job = corpus.job(tmp_path)
    processes = LoaderProcesses(open_here(job), partial(time.sleep, 600), 1)
    try:
        assert_equal(processes(np.arange(3), 0), open_here(job)(np.arange(3), 0))
        assert not processes.waiting
    finally:
        processes.close()


def test_processes_that_cannot_open_the_set_are_given_up(corpus, tmp_path, caplog):
    job = corpus.job(tmp_path)
    processes = LoaderProcesses(
        open_here(job),
        partial(open_loader, with_task(job, train_url=""), 1, 0),
        2,
    )
    try:
        wait_until(lambda: not processes.waiting and caplog.text.count("ended at its start") == 2, every_s=0.02)
        assert processes(np.arange(3), 0).ids
    finally:
        processes.close()


def damaged(speech, shard=1):
    store = ObjectStore(str(speech))
    record = ShardIndex.read(store).shards[shard]
    store.write(record.name, store.read(record.name)[:-3000])
    return record


def test_damaged_shard_is_recorded_once_and_its_utterances_are_counted(corpus, speech, tmp_path):
    record, rows = damaged(speech), np.arange(48)
    job = corpus.job(tmp_path, train_url=str(speech), max_unreadable=0.5)
    wanted = batches_through(open_here(job), rows, 1)
    shutil.rmtree(tmp_path / "output")
    with loading(job, 2) as processes:
        loaded = batches_through(processes, rows, 2)
    assert sum(batch.unreadable for batch in loaded) == record.count
    for ours, theirs in zip(loaded, wanted, strict=True):
        assert_equal(ours, theirs)
    quarantine = ShardQuarantine(ObjectStore(job.output_url), 48, folder=damage_folder("train"))
    assert [entry.shard for entry in quarantine.entries()] == [record.name]


def test_limit_of_damaged_shards_holds_over_all_processes(corpus, speech, tmp_path):
    records = [damaged(speech, shard) for shard in (1, 3)]
    job = corpus.job(tmp_path, train_url=str(speech), max_unreadable=0.3)
    index = ShardIndex.read(ObjectStore(str(speech)))
    first, second = (np.flatnonzero(index.column("shard") == shard)[:2] for shard in (1, 3))
    with loading(job, 1) as batches, loading(job, 1) as other:
        assert batches(first, 0).unreadable == 2
        with pytest.raises(TooManyShardsError, match=f"{sum(r.count for r in records)} of 48"):
            other(second, 0)


def test_batch_of_a_killed_process_is_loaded_here_and_another_one_starts(corpus, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(prefetch, "_RESTARTS", 1)
    job = corpus.job(tmp_path)
    wanted = open_here(job)(np.arange(3), 0)
    with loading(job) as processes:
        for again in (True, False):
            (pid,) = processes.waiting
            os.kill(pid, signal.SIGKILL)
            assert_equal(processes(np.arange(3), 0), wanted)
            assert ("another one starts" in caplog.messages[-1]) == again
            if again:
                assert wait_for(processes, 1) != [pid]
        assert not processes.waiting
        assert_equal(processes(np.arange(3), 0), wanted)


def in_a_thread(load):
    loaded = []
    thread = threading.Thread(target=lambda: loaded.append(load(np.arange(3), 0)), daemon=True)
    thread.start()
    return thread, loaded


def test_process_killed_while_it_loads_does_not_hang_the_learner(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(prefetch, "_RESTARTS", 0)
    with loading(job := corpus.job(tmp_path)) as processes:
        (pid,) = processes.waiting
        os.kill(pid, signal.SIGSTOP)
        thread, loaded = in_a_thread(processes)
        wait_until(lambda: not processes.waiting, every_s=0.02)
        os.kill(pid, signal.SIGKILL)
        thread.join(240)
    assert_equal(loaded[0], open_here(job)(np.arange(3), 0))


def test_process_that_does_not_answer_is_replaced(corpus, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(prefetch, "_PATIENCE_S", 0.1)
    with loading(corpus.job(tmp_path)) as processes:
        (pid,) = processes.waiting
        os.kill(pid, signal.SIGSTOP)
        assert processes(np.arange(3), 0).ids
        assert "no batch for" in caplog.text
        assert not Path(f"/proc/{pid}").exists()


def test_batch_without_room_for_it_is_loaded_here(corpus, tmp_path):
    with loading(job := corpus.job(tmp_path)) as processes:
        (pid,) = processes.waiting
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (10_000, 10_000))
        assert_equal(processes(np.arange(3), 0), open_here(job)(np.arange(3), 0))
        assert processes.waiting == [pid]


def test_batch_without_utterances_comes_from_a_process(corpus, speech, tmp_path):
    damaged(speech, 0)
    job = corpus.job(tmp_path, train_url=str(speech), max_unreadable=0.5)
    rows = np.flatnonzero(ShardIndex.read(ObjectStore(str(speech))).column("shard") == 0)
    with loading(job) as processes:
        batch = processes(rows, 0)
        assert_equal(batch, open_here(job)(rows, 0))
    assert batch.unreadable == len(rows)


def test_ctrl_c_is_for_the_learner_to_handle(corpus, tmp_path):
    with loading(job := corpus.job(tmp_path)) as processes:
        (pid,) = processes.waiting
        os.kill(pid, signal.SIGINT)
        assert_equal(processes(np.arange(3), 0), open_here(job)(np.arange(3), 0))
        assert processes.waiting == [pid]


def test_closing_ends_all_processes_also_one_that_loads(corpus, tmp_path):
    job = corpus.job(tmp_path)
    with loading(job, 2) as idle, loading(job) as busy:
        pids = idle.waiting + busy.waiting
        os.kill(pids[-1], signal.SIGSTOP)
        thread, loaded = in_a_thread(busy)
        wait_until(lambda: not busy.waiting, every_s=0.02)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    thread.join(240)
    assert loaded


LEARNER = """
import sys, time
from functools import partial
from pathlib import Path
import numpy as np
import torch
from tasks.engine import know_tasks
from training.job import TrainJob
from training.learner.compute import open_loader, open_set
from training.learner.prefetch import Loader, LoaderProcesses

know_tasks()
if __name__ == "__main__":
    job = TrainJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    here = Loader(open_set(job, "train"), job.task.build(job.seed), torch.device("cpu"))
    processes = LoaderProcesses(here, partial(open_loader, job, 1, 0), 2)
    while len(processes.waiting) < 2:
        time.sleep(0.1)
    kept = processes(np.arange(8), 0)
    print("loaded", flush=True)
    time.sleep(600)
"""


@pytest.mark.real_interpreter
@pytest.mark.slow
def test_nothing_is_left_when_the_learner_is_killed(corpus, tmp_path):
    (script := tmp_path / "learner.py").write_text(LEARNER)
    (file := tmp_path / "job.json").write_text(corpus.job(tmp_path).model_dump_json())
    shared = set(os.listdir("/dev/shm"))
    with environment(PYTHONPATH=str(ROOT), STARLING_HOME=str(tmp_path)):
        learner = subprocess.Popen([sys.executable, script, file], stdout=subprocess.PIPE, text=True)
    try:
        assert learner.stdout.readline() == "loaded\n"
        assert len(processes_naming(str(tmp_path))) >= 3
        learner.kill()
        wait_until(lambda: [pid for pid in processes_naming(str(tmp_path)) if pid != learner.pid] == [])
    finally:
        learner.kill()
        end_processes(processes_naming(str(tmp_path)))
        learner.communicate()
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if name.startswith(("torch", "batch"))]


def test_all_tensors_of_a_batch_keep_types_shapes_and_values(corpus, tmp_path):
    plain = open_here(corpus.job(tmp_path))(np.arange(3), 0)
    odd = {"a": {"scalar": torch.tensor(2.5), "none": torch.zeros(3, 0), "flags": torch.tensor([True, False, True])}}
    states = torch.arange(12, dtype=torch.int32).view(4, 3).T  # not contiguous
    batch = Batch(**{**vars(plain), "drawn": odd, "states": states, "state_lengths": torch.tensor([4, 3, 1])})
    with os.fdopen(prefetch._shared(batch), "rb") as file:
        memory = mmap.mmap(file.fileno(), 0)
    shapes = batch.each(lambda tensor: torch.empty_like(tensor, device="meta"))
    assert_equal(prefetch._laid_out(shapes, memory), batch)


def test_processes_take_the_place_of_threads():
    assert TrainConfig().loader_processes == 0
    assert TrainConfig(loader_threads=4).loaders == 4
    assert TrainConfig(loader_threads=4, loader_processes=2).loaders == 2
