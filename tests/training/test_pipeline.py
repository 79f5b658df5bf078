"""Layers split over processes: the same weights as in one process, for every model, schedule and batch."""

import json
import textwrap

import pytest
import torch
from ranks import run_ranks
from tones import TINY

from speech.models import MODELS, build_model
from speech.models.networks.blstm import Blstm
from speech.models.networks.stages import balanced, split_model
from training.node.pipeline import BatchPlan
from training.node.process_group import NodeGroup
from training.node.run_rank import build_learner

MICRO_BATCHES = 4


def model_of(kind, layers, **changes):
    torch.manual_seed(0)
    return build_model(TINY[kind].model_copy(update={"layers": layers, **changes}), 16, 7)


SPLIT = [kind for kind, config in MODELS.items() if config.can_be_split]
"""Kinds whose models can be split, which is optional."""
PROGRAM = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    import numpy as np
    import torch
    from ranks import device_of
    from training.learner.checkpoint import cpu_weights
    from training.learner.compute import Learner, open_set
    from training.node.process_group import NodeGroup
    from training.job import TrainJob
    from training.learner.optim import load_optimizer_tensors, optimizer_tensors
    from training.node.pipeline import PipelineLearner

    from tasks.engine import know_tasks

    know_tasks()
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.distributed.send_object_list = torch.distributed.recv_object_list = None  # shapes must not be pickled
    device = device_of(rank)
    group = NodeGroup(rank, size, folder / "meet", device)

    def step(learner, batch, seed):
        losses = learner.gradient(batch and learner.task.drawn(batch, 0), seed)
        norm = learner.scale_gradient(losses.tokens)
        learner.update(0.05)
        return losses, norm

    def compare(job):
        # bfloat16 rounds sums of other orders to other numbers
        limit = 1e-4 if job.train.amp == "off" else 0.05
        if device.type == "cuda":  # kernels for other shapes add up in another order
            limit = max(limit, 2e-3)
        ours, whole, data = PipelineLearner(job, device, group), Learner(job, device), open_set(job, "train")
        initial = cpu_weights(whole.model)
        names = [name for name, _ in ours.model.named_parameters()]
        assert names and set(names) < {name for name, _ in whole.model.named_parameters()}
        # an even batch, uneven ones, some smaller than the number of micro-batches, and none at all
        for number, count in enumerate((8, 9, 3, 1, 0, 5)):
            batch = data.batch(np.arange(10 * number, 10 * number + count) % len(data)) if count else None
            # what the other ranks are given does not count
            losses, norm = step(ours, batch if rank == 0 or number % 2 else None, number)
            wanted, wanted_norm = step(whole, batch, number)
            np.testing.assert_allclose(losses.to_list(), wanted.to_list(), rtol=limit)
            np.testing.assert_allclose(norm, wanted_norm, rtol=10 * limit)
        single, found = cpu_weights(whole.model), ours.gather_state()
        assert (found is None) == (rank > 0)
        if rank == 0:
            assert set(found) == set(single)
            moved = max(float((single[name] - initial[name]).abs().max()) for name in single)
            worst = max(float((single[name] - found[name]).abs().max()) for name in single)
            assert worst < limit * moved, (worst, moved)
        # a checkpoint goes on bit for bit
        again = PipelineLearner(job, device, group)
        again.load_state(cpu_weights(ours.model) | {"another.stage": torch.ones(1)})
        load_optimizer_tensors(again.optimizer, optimizer_tensors(ours.optimizer))
        batch = data.batch(np.arange(6))
        for learner in (ours, again):
            step(learner, batch, 7)
        # a GPU's CTC loss adds up in whatever order
        slack = 0 if device.type == "cpu" else 1e-4
        torch.testing.assert_close(ours.flat.weights, again.flat.weights, rtol=0, atol=slack)
        again.reset()
        assert all(torch.equal(tensor, initial[name]) for name, tensor in cpu_weights(again.model).items())
        # a loss that is no number is one at all ranks
        batch.inputs.fill_(float("nan"))
        losses, norm = step(again, batch, 8)
        assert np.isnan(losses.loss) and np.isnan(norm)

    for file in sorted(folder.glob("*.json")):
        compare(TrainJob.model_validate_json(file.read_bytes()))
    group.close()
    print("fine", flush=True)
    os._exit(0)  # as training.node.rank ends: Gloo sometimes aborts while the interpreter takes it down
    """
)


def run_jobs(folder, jobs, ranks, *words):
    for number, job in enumerate(jobs):
        (folder / f"{number}.json").write_text(job.model_dump_json())
    run_ranks(PROGRAM, ranks, folder, *words)


def job_of(corpus, folder, kind, schedule, ranks, amp="off"):
    model = TINY[kind].model_copy(update={"dropout": 0.0, "layers": 3})
    return corpus.job(
        folder,
        spec=corpus.spec(kind, model=model),
        strategy={"kind": "pipeline", "schedule": schedule, "micro_batches": MICRO_BATCHES},
        learners_per_node=ranks,
        optimizer={"kind": "sgd", "lr": 0.05, "clip_norm": 1.0},
        amp=amp,
    )


def test_two_stages_give_the_weights_of_one_process(corpus, tmp_path):
    kinds = (("conformer", "1f1b"), ("blstm", "gpipe"))
    run_jobs(tmp_path, [job_of(corpus, tmp_path, kind, schedule, 2) for kind, schedule in kinds], 2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("kind", SPLIT)
def test_two_gpus_give_the_weights_of_one(corpus, tmp_path, kind, schedule):
    run_jobs(tmp_path, [job_of(corpus, tmp_path, kind, schedule, 2, amp) for amp in ("off", "bf16")], 2, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("kind", SPLIT)
def test_three_stages_give_the_weights_of_one_process(corpus, tmp_path, kind, schedule):
    run_jobs(tmp_path, [job_of(corpus, tmp_path, kind, schedule, 3, amp) for amp in ("off", "bf16")], 3)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", SPLIT)
def test_stages_in_sequence_compute_the_whole_model(kind, stages):
    model = model_of(kind, 5, bottleneck=6).eval()
    parts = split_model(model, stages)
    state = model.state_dict()
    names = [name for part in parts for name in part.state_dict()]
    assert sorted(names) == sorted(state)
    assert all(p.data_ptr() == state[n].data_ptr() for part in parts for n, p in part.named_parameters())
    x, lengths = torch.randn(3, 21, 16), torch.tensor([21, 9, 0])
    wanted, frames = model(x, lengths)
    for part in parts:
        x = part.eval()(x, lengths)
    assert torch.equal(parts[-1].num_frames(lengths), frames)
    for outputs, other, count in zip(x, wanted, frames, strict=True):
        torch.testing.assert_close(outputs[:count], other[:count], rtol=1e-5, atol=1e-6)


def test_dropout_between_lstm_layers_is_also_between_stages():
    parts = split_model(model_of("blstm", 2, dropout=0.5), 2)
    feats, lengths = torch.randn(2, 40, 16), torch.tensor([40, 40])
    zeros = [(part.train(mode)(feats, lengths) == 0).float().mean() for part in parts[:1] for mode in (False, True)]
    assert zeros[0] == 0
    assert zeros[1] == pytest.approx(0.5, abs=0.05)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"model.layers is 2, which cannot be split into 3 stages: use at most"):
        split_model(model_of("conformer", 2), 3)


def test_stages_that_share_a_gpu_are_refused(corpus, tmp_path):
    group = NodeGroup(0, 1, None, torch.device("cpu"))
    group.size, group.shares_gpu = 2, True
    with pytest.raises(ValueError, match=r"share a GPU, and pipeline .* needs one for each.*train\.device=cpu"):
        build_learner(job_of(corpus, tmp_path, "conformer", "1f1b", 2), torch.device("cpu"), group)


def test_a_model_that_cannot_be_split_is_refused_by_name(monkeypatch):
    assert {"blstm", "conformer", "tdnn"} <= set(SPLIT)
    monkeypatch.delattr(Blstm, "stage")
    monkeypatch.setattr(MODELS["blstm"], "can_be_split", False)
    with pytest.raises(ValueError, match="model blstm cannot be split into stages: use another strategy than pipeline"):
        split_model(model_of("blstm", 2), 2)


def test_batch_without_tokens_survives_its_message():
    transcripts = {"tokens": torch.zeros(3, 0, dtype=torch.int64), "token_lengths": torch.zeros(3, dtype=torch.int64)}
    plan = BatchPlan(torch.tensor([5, 2, 0]), 5, transcripts, 1.5, 2)
    told = BatchPlan.from_message(json.loads(json.dumps(plan.to_message())))
    assert told.targets["tokens"].shape == (3, 0)
    assert not told.targets["tokens"].is_floating_point()
    assert told.to_message() == plan.to_message()


@pytest.mark.parametrize(
    ("utterances", "micro_batches", "cut"),
    [(8, 4, (2, 4)), (9, 4, (3, 3)), (10, 4, (3, 4)), (3, 4, (1, 3)), (5, 1, (5, 1))],
)
def test_micro_batches_have_equal_size_and_are_not_empty(utterances, micro_batches, cut):
    none = torch.zeros(utterances, dtype=torch.int64)
    assert BatchPlan(none, 1, {}, 0.0, 0).cut(micro_batches) == cut


@pytest.mark.parametrize(
    ("costs", "parts", "cuts"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 2, 3, 4, 5], 3, [3, 1, 1]),
        ([5, 1, 1, 1, 5], 3, [1, 3, 1]),
        ([0, 0, 7], 3, [1, 1, 1]),
    ],
)
def test_cost_of_the_largest_stage_is_minimal(costs, parts, cuts):
    shares = balanced(costs, parts)
    assert [len(part) for part in shares] == cuts
    assert [number for part in shares for number in part] == list(range(len(costs)))
