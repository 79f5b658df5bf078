"""Training on GPUs, end to end: `make test-gpu` runs these tests and all others marked `gpu`, and prints a summary.

Tests that need no GPU are in the files of each part.
"""

import gc
import math
import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from support import wait_until
from tones import LEARNS, bare, train

from devices.portions import TooLargeError
from recognition.data.augmentation import Augmenter
from speech.features.augment import AugmentConfig
from training.coordinator.membership import Member, View
from training.exchange import ExchangeSetup, build_exchange
from training.exchange.config import ExchangeConfig
from training.learner.checkpoint import cpu_weights
from training.learner.compute import Learner, open_set
from training.learner.prefetch import Loader
from training.node.evaluator import Evaluator
from training.strategies.registry import STRATEGIES

GPU = torch.device("cuda", 0)


def job_on(corpus, folder, kind="conformer", device="cuda", **train_fields):
    fields = {"optimizer": {"lr": 1e-2}, **LEARNS, **train_fields}
    model = bare(kind).model_copy(update={"layers": 2})  # one for each stage of a pipeline
    return corpus.job(folder, spec=corpus.spec(kind, model=model), device=device, **fields)


def check(run, learners=1):
    """Every utterance was trained in each epoch, on GPUs, and the words were learned."""
    result = run.result
    assert result["utterances"] + result.get("repeated", 0) >= 48 * result["epoch"]
    assert result["device"] != "cpu"
    assert math.isfinite(result["valid"]["loss"])
    assert result["valid"]["loss"] < result["history"][0]["loss"]
    assert len({entry["learner"] for entry in run.entries("step")}) == learners


@pytest.mark.gpu
@pytest.mark.parametrize("amp", ["auto", "off"])
@pytest.mark.parametrize("kind", ["conformer", "blstm"])
def test_single_learner_trains_on_a_gpu_with_all_processes(corpus, tmp_path, kind, amp):
    run = train(job_on(corpus, tmp_path, kind, epochs=8, amp=amp))
    check(run)
    assert ("bf16" in run.result["precision"]) is (amp == "auto" and torch.cuda.is_bf16_supported(False))


@pytest.mark.gpu
def test_nodes_share_one_gpu_and_average_through_the_cuda_mover(corpus, tmp_path):
    run = train(job_on(corpus, tmp_path, strategy="adpsgd", nodes=2, epochs=8, exchange={"kind": "zmq"}))
    check(run, 2)
    assert any(entry["exchanges"] for entry in run.entries("step"))


@pytest.mark.gpu
def test_nodes_share_one_gpu_and_by_default_average_in_its_memory(corpus, tmp_path):
    run = train(job_on(corpus, tmp_path, strategy="adpsgd", nodes=2, epochs=8))
    check(run, 2)
    assert all("auto: cuda" in log.read_text() for log in tmp_path.rglob("node.log"))
    assert any(entry["exchanges"] for entry in run.entries("step"))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", [name for name, method in STRATEGIES.items() if method.traits.one_node])
def test_a_node_of_two_gpus_trains_by_nccl(corpus, tmp_path, strategy):
    run = train(job_on(corpus, tmp_path, strategy=strategy, learners_per_node=2, epochs=8))
    check(run, 1 if STRATEGIES[strategy].traits.split else 2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("hook", ["bf16", "powersgd"])
def test_communication_hooks_train(corpus, tmp_path, hook):
    check(train(job_on(corpus, tmp_path, strategy="scpsgd", learners_per_node=2, comm_hook=hook, epochs=8)), 2)


@pytest.fixture
def one_gpu(monkeypatch):
    """The processes of a training see the first GPU only."""
    first, _, _ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)


@pytest.mark.gpu
@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    "fields",
    [{"strategy": "h-adpsgd", "nodes": 2}, {"strategy": "sdpsgd"}],  # the second one sends and receives
    ids=lambda fields: fields["strategy"],
)
def test_learners_of_a_node_share_one_gpu(corpus, tmp_path, fields):
    run = train(job_on(corpus, tmp_path, learners_per_node=2, epochs=8, **fields))
    check(run, 2 * run.job.train.nodes)
    said = ["the 2 learners of this node share 1 GPU(s)" in log.read_text() for log in tmp_path.rglob("node.log")]
    assert said == [True] * run.job.train.nodes
    if run.job.train.nodes > 1:
        assert any(entry["exchanges"] for entry in run.entries("step"))


@pytest.mark.gpu(4)
def test_two_nodes_of_two_gpus_train(corpus, tmp_path):
    check(train(job_on(corpus, tmp_path, strategy="h-adpsgd", nodes=2, learners_per_node=2, epochs=8)), 4)


@contextmanager
def memory_for(total_bytes):
    """Let this process have so many bytes of the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(total_bytes / torch.cuda.get_device_properties(GPU).total_memory, GPU)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)


@pytest.mark.gpu
def test_batch_that_exceeds_gpu_memory_is_divided(corpus, tmp_path):
    model = bare("conformer").model_copy(update={"dim": 256, "layers": 6, "heads": 4})
    job = corpus.job(tmp_path, spec=corpus.spec("conformer", model=model), device="cuda", amp="off")
    learner = Learner(job, GPU)
    batch = Loader(open_set(job, "train"), learner.task, GPU)(list(range(48)) * 4, 0)
    learner.gradient(batch.part(slice(0, 2)), 1)  # libraries load, and take what they need
    torch.cuda.empty_cache()
    base = torch.cuda.memory_reserved(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    wanted = learner.gradient(batch, 1)
    grads, peak = learner.flat.grads.clone(), torch.cuda.max_memory_reserved(GPU)
    assert wanted.divided == 0
    with memory_for(base + 0.6 * (peak - base)):
        losses = learner.gradient(batch, 1)
    assert losses.divided == 1
    assert losses.loss == pytest.approx(wanted.loss, rel=1e-3)
    assert (learner.flat.grads - grads).norm() < 0.01 * grads.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_update_allocates_no_gpu_memory(corpus, tmp_path, kind):
    model = bare("conformer").model_copy(update={"dim": 256, "layers": 6, "heads": 4})
    optimizer = {"kind": kind, "lr": 1e-3, "weight_decay": 0.01}
    job = corpus.job(tmp_path, spec=corpus.spec("conformer", model=model), device="cuda", optimizer=optimizer)
    learner = Learner(job, GPU)
    learner.flat.grads.normal_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    for _ in range(2):
        learner.update(1e-3)
    # but for lists of pointers
    assert torch.cuda.max_memory_allocated(GPU) - before < 0.05 * 4 * learner.flat.num_parameters
    assert torch.cuda.memory_allocated(GPU) - before < 2**16


@pytest.mark.gpu
def test_model_that_exceeds_gpu_memory_is_reported(corpus, tmp_path):
    model = bare("conformer").model_copy(update={"dim": 512, "layers": 8, "heads": 4})
    job = corpus.job(tmp_path, spec=corpus.spec("conformer", model=model), device="cuda")
    with memory_for(2**26), pytest.raises(TooLargeError, match=r"optimizer state.*train\.optimizer\.kind=sgd"):
        Learner(job, GPU)


@pytest.mark.gpu
def test_evaluator_falls_back_to_the_cpu_if_the_gpu_is_full(corpus, tmp_path):
    # tensors of over 1 MB: smaller ones may fit into what is left of other tests' blocks
    model = bare("conformer").model_copy(update={"dim": 256, "layers": 2, "heads": 4})
    job, slow = (
        corpus.job(tmp_path, spec=corpus.spec("conformer", model=model), device=device) for device in ("cuda", "cpu")
    )
    weights = cpu_weights(job.task.spec.build_model())
    wanted = Evaluator(slow).validate(weights)
    with memory_for(4096):
        evaluator = Evaluator(job)
        figures = evaluator.validate(weights)
    assert evaluator.device == torch.device("cpu")
    assert figures == wanted


@pytest.mark.gpu
def test_averages_through_the_cuda_mover_conserve_the_sum(tmp_path):
    """Two exchanges of this process: weights come together, and their sum stays what it was."""
    size, count = 100_000, 2
    config = ExchangeConfig(encrypt=False, chunk_kb=64)
    exchanges = [build_exchange(config, ExchangeSetup(n, 0, size, folder=tmp_path)) for n in range(count)]
    live = [torch.full((size,), float(n), device=GPU) + torch.arange(size, device=GPU) % 7 for n in range(count)]
    total = torch.stack(live).double().sum(0)
    step = 0
    try:
        view = View(1, tuple(Member(n, f"once-{n}", (exchanges[n].endpoint,)) for n in range(count)))
        for exchange, weights in zip(exchanges, live, strict=True):
            exchange.set_view(view)
            exchange.start(weights, 0)

        def exchange_once(tick=True):
            nonlocal step
            step += 1
            for exchange, weights in zip(exchanges, live, strict=True):
                if exchange.ready():
                    weights += exchange.take()
                    exchange.release()
                exchange.give(weights, step)
                if tick:
                    exchange.tick(step)
            return float((live[0] - live[1]).abs().max())

        def lost(_):
            return float((torch.stack(live).double().sum(0) - total).abs().max())

        wait_until(lambda: exchange_once() < 1e-3, every_s=0.02)
        # without further exchanges, what is under way arrives
        wait_until(lambda: lost(exchange_once(tick=False)) < 1e-4, every_s=0.02)
        assert all(exchange.stats().finished for exchange in exchanges)
    finally:
        for exchange in exchanges:
            exchange.close()


@pytest.mark.gpu
def test_loader_returns_page_locked_batches(corpus, tmp_path):
    augment = {"noise": {"snr_db": [5, 20]}, "reverb": {"probability": 0.5}, "pauses": {}, "time_warp_frames": 3}
    augmenter = Augmenter(AugmentConfig.model_validate(augment), 8000, 1)
    batch = Loader(open_set(job_on(corpus, tmp_path), "train"), augmenter, GPU)(np.arange(9), 0)
    drawn = [tensor for tensors in batch.drawn.values() for tensor in tensors.values()]
    assert len(batch.drawn) == 5
    assert all(tensor.is_pinned() for tensor in (batch.inputs, batch.lengths, batch.tokens, batch.token_lengths))
    assert all(tensor.is_pinned() for tensor in drawn if tensor.numel())


@pytest.mark.gpu
def test_speed_of_the_published_model_is_measured(record_property):
    from benchmarks.published_model import Options, measure

    for precision in ("fp32", "bf16"):
        row = measure(Options(device="cuda", precision=precision, seconds=10.0, batch=128))
        record_property(
            "measured",
            f"published model, {row['computed_in']}: step {row['step_s'] * 1e3:.1f} ms alone, "
            f"{row['step_s_exchanging'] * 1e3:.1f} ms exchanging, {row['exchanges_per_step']:.2f} exchanges a step, "
            f"staleness {row['staleness']:.1f}, {row['frames_per_s']:,.0f} frames/s, peak {row['peak_mb']:,.0f} MB",
        )


@pytest.mark.gpu
def test_speed_of_batch_loading_is_measured(corpus, record_property):
    from benchmarks.feeding import Options, measure

    for threads in sorted({1, 4, os.cpu_count() or 1}):
        row = measure(Options(corpus.url("train"), threads, seconds=5.0), 1, 300.0)
        record_property(
            "measured",
            f"feeding by {threads} threads: {row['audio_per_s']:,.0f} x real time, "
            f"{row['utterances_per_cpu_s']:,.0f} half-second utterances a CPU-second",
        )
