"""Training on forced alignments: targets of batches, augmentation that moves time, and a training that learns them."""

from functools import partial
from itertools import groupby

import numpy as np
import pytest
import tones
import torch
from aligned_tones import OBJECTIVE, align_corpus, loudest_quarter, state_job
from support import wait_until

from recognition.data.augmentation import Augmenter
from recognition.data.state_targets import padded_states, read_alignments
from recognition.systems import system_of
from speech.features.augment import SpecAugment, WaveAugment
from speech.features.augment.config import AugmentConfig
from storage.objects import ObjectStore
from tasks.config.training import AcousticTrainConfig, check_system
from tasks.simulated_speech import Speech
from training.learner.compute import Learner, open_loader, open_set
from training.learner.prefetch import Loader, LoaderProcesses
from training.node.evaluator import Evaluator


def with_spec(job, **changes):
    """The job with other fields of what is trained."""
    return tones.with_task(job, spec=job.task.spec.model_copy(update=changes))


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alignments(corpus, tmp_path_factory):
    """A folder of the corpus's alignments, without that of the training set's first utterance."""
    return align_corpus(corpus, tmp_path_factory.mktemp("alignments"))


def test_batches_have_the_states_of_their_utterances(corpus, tmp_path, alignments):
    data = open_set(job := state_job(corpus, tmp_path, alignments), "train")
    batch = data.batch([7, 0, 31])
    expected = [loudest_quarter(corpus.train[row]).tolist() for row in (7, 31)]
    assert batch.state_lengths.tolist() == [len(expected[0]), 0, len(expected[1])]
    assert [batch.states[row, : batch.state_lengths[row]].tolist() for row in (0, 2)] == expected
    assert (batch.states[1] == -1).all()
    assert batch.frame_factor == 2
    part = batch.part(slice(1, 3))
    assert part.state_lengths.tolist() == [0, len(expected[1])]
    assert open_set(job, "valid").batch([0]).states[0].tolist() == loudest_quarter(corpus.valid[0]).tolist()


def test_states_from_a_loader_process_equal_those_of_a_thread(corpus, tmp_path, alignments, monkeypatch):
    job = state_job(corpus, tmp_path, alignments)
    here = Loader(open_set(job, "train"), job.task.build(job.seed), CPU)
    wanted, rows = here(range(12), 3), np.arange(12)
    monkeypatch.setattr(Loader, "__call__", lambda *_: None)
    processes = LoaderProcesses(here, partial(open_loader, job, torch.get_num_threads(), 0), 1)
    wait_until(lambda: processes.waiting, every_s=0.02)
    batch = processes(rows, 3)
    processes.close()
    assert batch.frame_factor == wanted.frame_factor == 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(batch.tensors(), wanted.tensors(), strict=True))


def test_objective_of_tokens_reads_no_alignments(corpus, tmp_path):
    data = open_set(corpus.job(tmp_path), "train")
    assert data.batch([0]).states.numel() == 0


def test_utterance_without_alignment_is_counted_and_skipped(corpus, tmp_path, alignments):
    job = state_job(corpus, tmp_path, alignments, augment={"enabled": False})
    learner, data = Learner(job, CPU), open_set(job, "train")
    model = job.task.spec.model.model_copy(update={"dropout": 0.0})
    learner = Learner(with_spec(job, model=model), CPU)
    losses = learner.gradient(data.batch([3, 0, 5]), 1)
    grads = learner.flat.grads.clone()
    assert (losses.utterances, losses.unalignable) == (3, 1)
    without = learner.gradient(data.batch([3, 5]), 1)
    assert without.unalignable == 0
    assert losses.tokens == without.tokens > 0
    assert losses.loss == pytest.approx(without.loss, rel=1e-5)
    torch.testing.assert_close(grads, learner.flat.grads, rtol=1e-4, atol=1e-4)


def test_alignment_at_another_rate_is_refused(corpus, tmp_path, alignments):
    job = state_job(corpus, tmp_path, alignments)
    states = job.task.spec.states.model_copy(update={"frame_shift_ms": 15.0})
    job = with_spec(job, states=states)
    with pytest.raises(ValueError, match=r"a frame every 20 ms, which is no multiple of the alignments' 15 ms"):
        open_set(job, "train")


@pytest.mark.parametrize("factor", [0.8, 0.9, 1.0, 1.1, 1.25])
def test_states_follow_the_speed(factor):
    """A step in amplitude stays where the state changes."""
    rate, step = 16000, 100
    augment = WaveAugment(AugmentConfig(speed_factors=(factor,)), rate)
    wave = torch.zeros(1, 300 * 160)
    wave[0, step * 160 :] = 1.0
    lengths = torch.tensor([wave.shape[1]])
    drawn = augment.draw(lengths, [5])
    changed, count = augment.apply(wave, lengths, drawn)
    states = (torch.arange(300) >= step).int()
    moved = augment.moved(
        states, {name: {key: tensor[0] for key, tensor in tensors.items()} for name, tensors in drawn.items()}
    )
    assert abs(len(moved) - int(count[0]) / 160) <= 1
    assert abs(int(moved.argmax()) - int((changed[0] > 0.5).int().argmax()) / 160) <= 1
    assert (moved.diff() >= 0).all()


def test_batches_states_are_as_long_as_the_features_at_any_speed(corpus, tmp_path, alignments):
    job = state_job(corpus, tmp_path, alignments, augment={"speed_factors": [0.8, 1.25]})
    data, augmenter = open_set(job, "train"), Augmenter(job.task.augment, tones.RATE, job.seed)
    batch = augmenter.drawn(data.batch(range(1, 9)), 0)
    _, frames = augmenter.features(job.task.spec.build_frontend(), batch, CPU)
    assert (frames - batch.state_lengths).abs().max() <= 2
    assert (batch.state_lengths != data.batch(range(1, 9)).state_lengths).any()


@pytest.mark.parametrize("per_frame", [0.5, 1, 2, 3])
def test_states_follow_time_warping(per_frame):
    """A step in the features stays where the state changes, however many states a frame has."""
    config, step, total = AugmentConfig(time_masks=0, freq_masks=0, time_warp_frames=40), 90, 240
    augment = SpecAugment(config)
    feats = (torch.arange(total) >= step).float().view(1, total, 1)
    states = (torch.arange(int(total * per_frame)) >= step * per_frame).int()
    moves = []
    for seed in range(20):
        drawn = augment.draw([seed])
        changed = augment.apply(feats, torch.tensor([total]), drawn)[0, :, 0]
        moved = augment.moved(states, {"time_warp": {"draws": drawn["time_warp"]["draws"][0]}}, per_frame)
        assert len(moved) == len(states)
        assert (moved.diff() >= 0).all()
        place = int((changed > 0.5).int().argmax())
        assert abs(int(moved.argmax()) / per_frame - place) <= max(1, 1 / per_frame)
        moves.append(abs(place - step))
    assert max(moves) > 15


def test_states_of_an_empty_and_a_short_utterance_stay_under_time_warping():
    augment = SpecAugment(AugmentConfig(time_masks=0, freq_masks=0, time_warp_frames=40))
    for count in (0, 1, 2):
        states = torch.arange(count)
        drawn = {"time_warp": {"draws": augment.draw([3])["time_warp"]["draws"][0]}}
        assert augment.moved(states, drawn).tolist() == states.tolist()


def test_a_learner_warps_its_batches_states_with_the_features(corpus, tmp_path, alignments):
    warped = {"time_warp_frames": 8, "time_masks": 0, "freq_masks": 0}
    job = state_job(corpus, tmp_path, alignments, augment=warped)
    learner, data = Learner(job, CPU), open_set(job, "train")
    plain = data.batch(range(1, 9))
    batch = learner.task.drawn(plain, 0)
    assert batch.state_lengths.tolist() == plain.state_lengths.tolist()
    assert (batch.states != plain.states).any()
    for row, length in enumerate(batch.state_lengths.tolist()):
        before, after = plain.states[row, :length].tolist(), batch.states[row, :length].tolist()
        assert (before[0], before[-1]) == (after[0], after[-1])
        assert [state for state, _ in groupby(after)] == [state for state, _ in groupby(before)]


def checked(document):
    """Check a section `train` with the system that its objective is for."""
    train = AcousticTrainConfig.model_validate(document)
    check_system(system_of(train.objective), train)


def test_augmentation_that_states_cannot_follow_is_refused():
    augment = {"pauses": {}}
    with pytest.raises(ValueError, match=r"aligned states cannot follow pauses of train\.augment"):
        checked({"objective": OBJECTIVE, "augment": augment})
    checked({"augment": augment})
    checked({"objective": OBJECTIVE, "augment": {**augment, "enabled": False}})


def test_missing_alignments_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train\.parquet"):
        read_alignments(ObjectStore(str(tmp_path)), "train")


def test_training_learns_the_states(corpus, tmp_path, alignments):
    job = state_job(corpus, tmp_path, alignments, augment={"enabled": False}, optimizer={"lr": 1e-2})
    learner, data = Learner(job, CPU), open_set(job, "train")
    for step in range(40):
        losses = learner.gradient(data.batch(np.arange(12 * step, 12 * step + 12) % 48), step)
        learner.scale_gradient(losses.tokens)
        learner.update(1e-2)
    figures = Evaluator(job).validate(learner.model.state_dict())
    assert figures["frame_accuracy"] > 0.8
    assert figures["loss"] < 0.7
    assert "wer" not in figures


def test_batch_of_no_utterances_has_no_states():
    assert padded_states([]).shape == (0, 0)


def test_strategy_that_splits_the_model_is_refused():
    with pytest.raises(ValueError, match="pipeline splits the model, .* do not train a recognizer of kind hybrid"):
        checked({"objective": OBJECTIVE, "strategy": "pipeline", "learners_per_node": 2})


def test_simulated_learners_get_the_gradients_of_a_real_one(corpus, tmp_path, alignments):
    job = state_job(corpus, tmp_path, alignments, augment={"enabled": False}, max_batch=6)
    problem = Speech(job, 1)
    batch = problem._train.batch(np.array([7, 0, 31]))
    assert batch.states[0, : batch.state_lengths[0]].tolist() == loudest_quarter(corpus.train[7]).tolist()
    assert batch.state_lengths[1] == 0
    expected = sum(-(-len(loudest_quarter(corpus.train[row])) // 2) for row in (7, 31))
    assert problem._train.tokens(np.array([7, 0, 31])) == expected
    figures = problem.evaluate(problem.replica().weights)
    assert 0 <= figures["frame_accuracy"] <= 1
    assert figures["loss"] > 0
