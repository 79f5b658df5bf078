"""Replayed passes give the gradients of plain ones. On a CPU, a recording computes again on the memory of a graph."""

import pytest
import torch
from recordings import HostRecording
from tones import LEARNS, bare, train

from benchmarks.published_model import DIMENSION, SEGMENT, Bench, Options
from recognition.systems.attention import AttentionSystem
from recognition.systems.transducer import TransducerSystem
from speech.models import StatelessPredictorConfig, TransformerDecoderConfig
from training.config import TrainConfig
from training.learner import graphs
from training.learner.compute import Learner, open_set
from training.learner.graphs import GraphedForward, rounded
from training.learner.prefetch import Loader

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def made():
    HostRecording.made = []
    return HostRecording.made


OF_TOKENS = {
    "attention": AttentionSystem(decoder_network=TransformerDecoderConfig(dim=16, layers=1, heads=2, dropout=0.0)),
    "transducer": TransducerSystem(predictor=StatelessPredictorConfig(dim=16, dropout=0.0), joint_dim=16),
}
"""Systems whose network reads tokens, without what draws random numbers."""
NETWORKS = ["conformer", "blstm", "tdnn", *OF_TOKENS]


def learners(corpus, folder, kind, device, record=HostRecording, **fields):
    """A plain learner, and one that replays; the kind is that of a CTC model, or one of `OF_TOKENS`."""
    spec = corpus.spec(kind, model=bare(kind)) if kind not in OF_TOKENS else of_tokens(corpus, kind)
    fields |= {"objective": kind} if kind in OF_TOKENS else {}
    plain = Learner(corpus.job(folder, spec=spec, device=device.type, **fields), device)
    if device.type == "cuda":
        return plain, Learner(corpus.job(folder, spec=spec, device="cuda", cuda_graphs=True, **fields), device)
    fast = Learner(corpus.job(folder, spec=spec, **fields), device)
    fast._forward = fast._graphed(record=record)
    return plain, fast


def of_tokens(corpus, kind):
    return corpus.spec("conformer", model=bare("conformer"), system=OF_TOKENS[kind])


def test_sizes_are_a_geometric_series():
    sizes = sorted({rounded(size) for size in range(1, 4097)})
    assert sizes[:18] == [*range(1, 17), 18, 20]
    assert len(sizes) == 16 + 8 * 8
    assert all(size <= rounded(size) <= size * 9 / 8 for size in range(1, 5000))


@pytest.mark.parametrize("kind", NETWORKS)
def test_replayed_gradients_are_those_of_plain_passes(corpus, tmp_path, made, kind):
    plain, fast = learners(corpus, tmp_path, kind, CPU)
    load = Loader(open_set(plain.job, "train"), plain.task, CPU)
    batches = [load(list(rows), 0) for rows in (range(19), range(19, 38), range(3), range(19))]
    for number, batch in enumerate(batches):
        wanted, got = plain.gradient(batch, number), fast.gradient(batch, number)
        assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert got.utterances == wanted.utterances
        torch.testing.assert_close(fast.flat.grads, plain.flat.grads, rtol=1e-4, atol=1e-4)
    assert made  # not only plain passes
    assert all(rows == rounded(rows) and frames == rounded(frames) for rows, frames, _ in made)


PARTED = [
    ("transducer", {"amp": "bf16", "flat_bf16": True}),
    ("attention", {"freeze": [{"names": ["encoder.*"], "until": 0}]}),
]
"""Networks of parts: weights that each part converts for itself, and an encoder without gradients."""


def same_gradients(plain, fast, device, close):
    load = Loader(open_set(plain.job, "train"), plain.task, device)
    batch = load(list(range(12)), 0)
    for number in range(4):
        wanted, got = plain.gradient(batch, number), fast.gradient(batch, number)
        assert got.loss == pytest.approx(wanted.loss, rel=close)
        assert (fast.flat.grads - plain.flat.grads).norm() < close * plain.flat.grads.norm()


@pytest.mark.parametrize(("kind", "fields"), PARTED)
def test_parts_are_replayed_with_converted_weights_and_a_frozen_encoder(corpus, tmp_path, made, kind, fields):
    same_gradients(*learners(corpus, tmp_path, kind, CPU, **fields), CPU, 0.03)
    assert made


def test_recording_changes_neither_gradients_nor_random_numbers(corpus, tmp_path, made):
    _, fast = learners(corpus, tmp_path, "conformer", CPU)
    batch = Loader(open_set(fast.job, "train"), fast.task, CPU)(range(5), 0)
    fast.gradient(batch, 1)
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    fast.flat.grads.fill_(2.0)
    feats, frames = fast.task.features(batch, CPU)
    fast._forward(feats, frames)
    assert len(made) == 1
    assert (fast.flat.grads == 2.0).all()
    assert torch.equal(torch.rand(1), wanted)


class Line(torch.nn.Module):
    """Scores are the features times a weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, feats, frames):
        return feats * self.weight, frames


def lines(count):
    return torch.ones(count, 2, 3), torch.full((count,), 2)


def test_recordings_used_longest_ago_are_dropped(monkeypatch, made):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    model = Line()
    forward = GraphedForward(model, graphs.FlatParameters(model), HostRecording)
    for count in (1, 1, 2, 2, 1, 3, 3):
        scores, frames = forward(*lines(count))
        assert scores.shape == (count, 2, 3)
        assert frames.tolist() == [2] * count
    assert list(forward.recordings) == [(1, 2, 3), (3, 2, 3)]
    assert len(made) == 3


def test_moved_weights_are_recorded_again(made):
    model = Line()
    flat = graphs.FlatParameters(model)
    forward = GraphedForward(model, flat, HostRecording)
    for _ in range(2):
        forward(*lines(1))
    flat.move(torch.full((3,), 5.0))
    assert (forward(*lines(1))[0] == 5.0).all()
    assert len(made) == 2


def test_a_shape_that_cannot_be_recorded_is_computed_and_logged_once(caplog, made):
    def refuse(run, feats, lengths):
        raise RuntimeError("operation not permitted when stream is capturing")

    model = Line()
    forward = GraphedForward(model, graphs.FlatParameters(model), refuse)
    for _ in range(4):
        assert (forward(*lines(1))[0] == 1.0).all()
    assert sum("not permitted" in message for message in caplog.messages) == 1


class Scaled(Line):
    """The scores depend on a third tensor, too."""

    def forward(self, feats, frames, scale):
        return feats * self.weight * scale, frames


def test_network_that_reads_more_than_features_is_not_recorded_and_this_is_logged_once(caplog, made):
    """A recording would repeat the third tensor of the batch that it was made of."""
    model = Scaled()
    forward = GraphedForward(model, graphs.FlatParameters(model), HostRecording)
    for number in range(4):
        assert (forward(*lines(1), torch.tensor(float(number)))[0] == number).all()
    assert not made
    assert sum("no CUDA graphs" in message for message in caplog.messages) == 1


def test_lack_of_memory_is_left_to_the_division_of_batches():
    def refuse(run, feats, lengths):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = Line()
    forward = GraphedForward(model, graphs.FlatParameters(model), refuse)
    forward(*lines(1))
    with pytest.raises(torch.OutOfMemoryError):
        forward(*lines(1))


def test_the_published_benchmark_is_replayed_without_padding(made):
    options = Options(layers=1, cells=8, outputs=40, batch=4, device="cpu")
    plain, replayed = Bench(0, options), Bench(0, options)
    replayed._forward = GraphedForward(replayed._scores, replayed.flat, HostRecording, size=int)
    for _ in range(3):
        plain.step()
        replayed.step()
    assert made == [(4, SEGMENT, DIMENSION)]
    torch.testing.assert_close(replayed.flat.weights, plain.flat.weights)


def test_graphs_are_for_nodes_of_one_learner_and_not_compiled():
    with pytest.raises(ValueError, match=r"learners_per_node is 2.*use cuda_graphs=false"):
        TrainConfig.model_validate({"strategy": "scpsgd", "learners_per_node": 2, "cuda_graphs": True})
    with pytest.raises(ValueError, match="use one of them"):
        TrainConfig(cuda_graphs=True, compile=True)


@pytest.mark.gpu
@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_graphs_give_the_gradients_of_plain_passes(corpus, tmp_path, kind, amp, monkeypatch, caplog):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain, fast = learners(corpus, tmp_path, kind, GPU, amp=amp)
    load = Loader(open_set(plain.job, "train"), plain.task, GPU)
    close = 0.05 if amp == "bf16" else 1e-3
    for number, rows in enumerate((range(19), range(19, 38), range(3), range(19), range(3), range(20, 40))):
        batch = load(list(rows), 0)
        wanted, got = plain.gradient(batch, number), fast.gradient(batch, number)
        assert got.loss == pytest.approx(wanted.loss, rel=close)
        assert (fast.flat.grads - plain.flat.grads).norm() < close * plain.flat.grads.norm()
        for learner in (plain, fast):
            learner.flat.weights.add_(learner.flat.grads, alpha=-1e-4)  # graphs read the weights of each step
    assert len(fast._forward.recordings) >= 1
    assert not caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "fields"), PARTED)
def test_parts_are_recorded_with_converted_weights_and_a_frozen_encoder(corpus, tmp_path, kind, fields, caplog):
    plain, fast = learners(corpus, tmp_path, kind, GPU, **fields)
    same_gradients(plain, fast, GPU, 0.05)
    assert fast._forward.recordings
    assert not caplog.text


@pytest.mark.gpu
def test_dropout_in_a_graph_depends_on_the_seed_alone(corpus, tmp_path):
    model = bare("conformer").model_copy(update={"dropout": 0.3})
    job = corpus.job(tmp_path, spec=corpus.spec("conformer", model=model), device="cuda", cuda_graphs=True)
    learner = Learner(job, GPU)
    batch = Loader(open_set(job, "train"), learner.task, GPU)(range(8), 0)
    learner.gradient(batch, 0)
    losses = [learner.gradient(batch, seed).loss for seed in (1, 2, 1, 3)]
    assert learner._forward.recordings
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
    assert len({round(loss, 3) for loss in losses}) == 3


@pytest.mark.gpu
def test_training_with_graphs_learns(corpus, tmp_path):
    fields = {"optimizer": {"lr": 1e-2}, **LEARNS, "epochs": 8, "cuda_graphs": True}
    spec = corpus.spec("conformer", model=bare("conformer"))
    result = train(corpus.job(tmp_path, spec=spec, device="cuda", strategy="adpsgd", nodes=2, **fields)).result
    assert result["valid"]["loss"] < result["history"][0]["loss"]
