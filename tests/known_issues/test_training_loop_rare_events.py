"""Rare events in training, each of which once cost the run."""

import math

import pytest
import torch

import recognition.systems.acoustic
from speech.features import LogMelConfig
from speech.objectives import Ctc, CtcConfig
from storage.objects import ObjectStore
from training.learner.checkpoint import cpu_weights
from training.learner.compute import Learner
from training.node.evaluator import Evaluator, NoModelError


def break_losses(monkeypatch, bad_calls):
    """Make the loss of some steps, counted from 0, NaN."""
    calls, real = [], recognition.systems.acoustic.build_objective

    class Broken(Ctc):
        def losses(self, *args):
            losses, unalignable = super().losses(*args)
            if not torch.is_grad_enabled():
                return losses, unalignable  # a validation
            calls.append(1)
            return losses * (math.nan if len(calls) - 1 in bad_calls else 1.0), unalignable

    assert isinstance(real(CtcConfig()), Ctc)
    monkeypatch.setattr(recognition.systems.acoustic, "build_objective", lambda cfg: Broken(cfg))


def test_nan_step_does_not_spoil_the_epochs_loss(tones, corpus, tmp_path, monkeypatch):
    """The step was skipped as intended, but the sum was NaN from then on, and no checkpoint could be written."""
    break_losses(monkeypatch, {1})
    run = tones.train_here(corpus.job(tmp_path, epochs=2, checkpoint_steps=1))
    assert run.result["epoch"] == 2
    assert all(math.isfinite(entry["train_loss"]) for entry in run.entries("valid"))
    assert 0 < run.result["skipped"] < 48
    assert run.result["utterances"] == 2 * 48


def test_nan_step_changes_no_weight(tones, corpus, tmp_path, monkeypatch):
    break_losses(monkeypatch, set(range(100)))
    job = corpus.job(tmp_path, epochs=1)
    run = tones.train_here(job)
    assert torch.equal(run.worker.learner.flat.weights, Learner(job, torch.device("cpu")).flat.weights)
    assert run.result["skipped"] == run.result["utterances"] == 48


def test_nan_weights_are_reported_as_divergence_at_epoch_end(tones, corpus, tmp_path):
    """A short epoch ends before enough bad steps are counted: the decoder's error message named no remedy."""
    optimizer = {"kind": "sgd", "lr": 1e30, "clip_norm": 0}
    job = corpus.job(tmp_path, optimizer=optimizer, schedule={"kind": "constant", "warmup_epochs": 0})
    with pytest.raises(NoModelError, match=r"lower train\.optimizer\.lr"):
        tones.train_here(job)


def test_resume_after_the_time_limit_produces_a_model(tones, corpus, tmp_path, monkeypatch):
    """It said that no epoch had ended, and the trained steps were lost."""
    monkeypatch.setattr("training.coordinator.coordinator.NOTE_S", 0.0)
    tones.train_here(corpus.job(tmp_path, epochs=9, max_minutes=60), stop_at=2)
    run = tones.train_here(corpus.job(tmp_path, epochs=9, max_minutes=1e-9))
    assert run.result["step"] == 2
    assert run.result["epoch"] == len(run.result["history"]) == 1
    assert (run.bundle / "bundle.json").exists()


def test_dither_does_not_make_validation_random(corpus, tmp_path):
    """A resume at the very end of an epoch validated with other noise, and so might choose another epoch."""
    job = corpus.job(tmp_path, spec=corpus.spec(features=LogMelConfig(num_mels=16, dither=1.0)))
    evaluator, weights = Evaluator(job), cpu_weights(Learner(job, torch.device("cpu")).model)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(evaluator.validate(weights))
    assert results[0] == results[1]


def test_epoch_keeps_its_evaluation_when_replicas_are_deleted(tones, corpus, tmp_path):
    """Replicas are deleted once they are evaluated, while the checkpoint to resume from may be older than that."""
    run = tones.train_here(corpus.job(tmp_path, epochs=3, average=2))
    store = ObjectStore(run.job.output_url)
    newest = sorted(name for name in store.list("checkpoints") if name.endswith("complete.json"))[-1]
    document = store.read_json(newest)
    store.write_json(newest, {**document, "history": []})
    again = tones.train_here(run.job)
    assert again.result["history"] == run.result["history"]
    assert again.model_bytes == run.model_bytes
