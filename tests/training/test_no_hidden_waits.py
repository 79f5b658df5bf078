"""The host waits for a GPU once in a training step, at its end; on a CPU, an emulated GPU notes where it would wait."""

from contextlib import contextmanager

import pytest
import torch
from aligned_tones import align_corpus, state_job
from emulated_gpu import GPU, OnGpu, as_kind, emulated_gpu, move_to_gpu, node_of_one, steps
from tones import RATE, bare, with_task

from devices.transfers import known_on_host, on_host, without_host_values
from recognition.systems import system_of
from recognition.systems.attention import AttentionSystem
from recognition.systems.transducer import TransducerSystem
from speech.features import FEATURES, CmvnStats
from speech.frontend import FrontEnd
from speech.models import MODELS, StatelessPredictorConfig, TransformerDecoderConfig
from speech.objectives import OBJECTIVES
from training.learner.compute import Learner, open_set
from training.learner.prefetch import Loader

CPU = torch.device("cpu")
EVERYTHING = {
    "speed_factors": [0.9, 1.0, 1.1],
    "reverb": {"probability": 0.6, "rooms": 5},
    "noise": {"snr_db": [10, 20]},
    "gain_db": 6,
    "pauses": {"probability": 0.8},
    "time_warp_frames": 3,
    "time_mask_frames": 3,
    "freq_mask_bins": 3,
}
OF_SPEECH = sorted(OBJECTIVES)
LAST = "tolist in transfers.py: read_back"
CTC = "ctc_loss in ctc_on_gpu.py: forward"
"""Where torch itself reads the lengths."""


@pytest.fixture(scope="module")
def make_job(corpus, tmp_path_factory):
    """Makes jobs of a kind of model and an objective."""
    folder = align_corpus(corpus, tmp_path_factory.mktemp("alignments"))

    def make(kind, objective, **fields):
        fields["objective"] = objective
        system = system_of(OBJECTIVES[objective]())
        without = {  # dropout draws other numbers on a GPU
            "attention": AttentionSystem(
                decoder_network=TransformerDecoderConfig(dim=16, layers=1, heads=2, dropout=0.0)
            ),
            "transducer": TransducerSystem(predictor=StatelessPredictorConfig(dim=16, dropout=0.0), joint_dim=16),
        }
        system = without.get(system.kind, system)
        if system.targets == "tokens":
            spec = corpus.spec(kind, model=bare(kind), system=system)
            return corpus.job(tmp_path_factory.mktemp("job"), spec=spec, **{"augment": EVERYTHING, **fields})
        job = state_job(corpus, tmp_path_factory.mktemp("job"), folder, kind, **fields)
        return with_task(job, spec=job.task.spec.model_copy(update={"model": bare(kind)}))

    return make


@pytest.mark.parametrize("objective", OF_SPEECH)
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_step_waits_for_the_gpu_at_its_end_only(make_job, kind, objective, monkeypatch):
    job = make_job(kind, objective)
    wanted = steps(*node_of_one(job, CPU))
    learner, stepper = node_of_one(job, CPU)
    move_to_gpu(learner)
    with emulated_gpu(monkeypatch) as gpu:
        got = steps(learner, stepper, gpu.noting_afresh)
    assert not gpu.waits
    assert gpu.expected in ([LAST], [CTC, LAST])
    for tensor, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(tensor.as_subclass(torch.Tensor), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cmvn", ["global", "speaker", "utterance", "sliding", "none"])
@pytest.mark.parametrize("kind", sorted(kind for kind, feature in FEATURES.items() if not feature.adapted))
def test_no_features_are_waited_for_and_the_host_knows_their_number(kind, cmvn, monkeypatch):
    levels = {"cmvn_gate_db": 30.0} if FEATURES[kind].has_levels and cmvn != "none" else {}
    own = FEATURES[kind].tiny
    cfg = FEATURES[kind](cmvn=cmvn, delta_order=1, splice_left=1, stride=2, level_db=-20.0, **levels, **own)
    stats = CmvnStats(cfg.width).add(torch.randn(1, 50, cfg.width))
    frontend = FrontEnd(cfg, RATE, stats, {"a": stats})
    waves, lengths = torch.randn(3, 5000), torch.tensor([5000, 3210, 70])
    speakers = ["a", "b", "a"]
    wanted, frames = frontend(waves, lengths, speakers)
    assert torch.equal(frontend.num_frames(lengths), frames)
    with emulated_gpu(monkeypatch) as gpu:
        for _ in range(2):
            gpu.waits.clear()  # those of the first time copy tables
            got, _ = frontend(as_kind(OnGpu, waves), as_kind(OnGpu, lengths), speakers)
    assert not gpu.waits
    torch.testing.assert_close(got.as_subclass(torch.Tensor), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: torch.zeros(3).to(x.device, non_blocking=True),
        lambda x: torch.zeros(3).pin_memory().to(x),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: torch.equal(x, x),
        lambda x: next(row for row in range(3) if x[row] > 1),
    ],
)
def test_emulated_gpu_notes_every_kind_of_wait(read, monkeypatch):
    with emulated_gpu(monkeypatch) as gpu:
        there = as_kind(OnGpu, torch.tensor([1.0, 2.0, 3.0]))
        there.mul(2).clamp(max=3)[1:].sum()
        torch.zeros(3).pin_memory().to(there, non_blocking=True)
        assert not gpu.waits
        read(there)
    assert gpu.waits


def test_the_host_knows_nothing_while_a_graph_is_recorded(monkeypatch):
    """What it knows of one batch would be repeated for all others."""
    frames = torch.tensor([3, 2])
    with emulated_gpu(monkeypatch) as gpu, known_on_host(frames=frames):
        there = as_kind(OnGpu, frames.clone())
        assert on_host("frames", there) is frames
        assert not gpu.waits
        with without_host_values():
            assert on_host("frames", there) is not frames
        assert gpu.waits


@contextmanager
def forbidden_waits():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("objective", OF_SPEECH)
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_torch_finds_no_hidden_wait_in_a_step(make_job, kind, objective, graphs):
    job = make_job(kind, objective, device="cuda", cuda_graphs=graphs)
    losses, _ = steps(*node_of_one(job, GPU), forbidden_waits)
    assert torch.isfinite(losses).all()


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OF_SPEECH)
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_gradients_on_gpu_and_cpu_agree(make_job, kind, objective):
    """Of each network with each objective; augmentation off, which a GPU rounds otherwise."""
    losses, grads = [], []
    for device in (CPU, GPU):
        job = make_job(kind, objective, device=device.type, amp="off", augment={"enabled": False})
        learner = Learner(job, device)
        batch = Loader(open_set(job, "train"), learner.task, device)(range(6), 0)
        losses.append(learner.gradient(batch, 1).loss)
        grads.append(learner.flat.grads.cpu())
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)  # convolutions in TF32
    assert (grads[1] - grads[0]).norm() < 0.02 * grads[0].norm()
