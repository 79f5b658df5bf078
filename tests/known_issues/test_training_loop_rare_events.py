"""Rare events in the training loop, each of which once cost the run."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import training.loop
from speech.features import FeatureConfig
from training.journal import read_journal
from training.loop import DivergedError, StopRequested, Trainer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The tiny corpus of the training tests."""
    path = Path(__file__).resolve().parents[1] / "training" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tones", path)
    tones = sys.modules["tones"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tones)
    return tones.make_corpus(tmp_path_factory.mktemp("tones"))


def break_losses(monkeypatch, bad_calls):
    """The loss of some steps, counted from 0, is no number."""
    calls, real = [], training.loop.ctc_losses

    def ctc_losses(*args):
        losses, unalignable = real(*args)
        calls.append(1)
        return losses * (math.nan if len(calls) - 1 in bad_calls else 1.0), unalignable

    monkeypatch.setattr(training.loop, "ctc_losses", ctc_losses)


def test_one_bad_step_does_not_poison_the_epochs_sum(corpus, tmp_path, monkeypatch):
    """The step was skipped as intended, but the sum was NaN from then on, and no checkpoint could be written."""
    break_losses(monkeypatch, {1})
    job = corpus.job(tmp_path, epochs=2, checkpoint_steps=1)
    assert Trainer(job).run()["epoch"] == 2
    sums = [entry["train_loss"] for entry in read_journal(job.journal) if entry["kind"] == "valid"]
    assert all(math.isfinite(value) for value in sums)


def test_a_bad_step_changes_no_weight(corpus, tmp_path, monkeypatch):
    break_losses(monkeypatch, set(range(100)))
    trainer = Trainer(corpus.job(tmp_path, epochs=1))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


def test_broken_weights_are_reported_as_divergence_at_the_end_of_an_epoch(corpus, tmp_path):
    """A short epoch ends before enough bad steps are counted: the decoder's complaint told nobody what to do."""
    optimizer = {"kind": "sgd", "lr": 1e30, "clip_norm": 0}
    job = corpus.job(tmp_path, optimizer=optimizer, schedule={"kind": "constant", "warmup_epochs": 0})
    with pytest.raises(DivergedError, match=r"lower train\.optimizer\.lr"):
        Trainer(job).run()


class LateTrainer(Trainer):
    """Is stopped in the middle of the first epoch, when the time is up already."""

    def _step(self, *args):
        super()._step(*args)
        self.stop_requested = self.state.step == 2
        self.state.elapsed += 3600.0 * self.stop_requested


def test_a_resume_after_the_time_is_up_leaves_a_model(corpus, tmp_path):
    """It said that no epoch had ended, and the trained steps were lost."""
    job = corpus.job(tmp_path, epochs=9, max_minutes=60)
    with pytest.raises(StopRequested):
        LateTrainer(job).run()
    result = Trainer(job).run()
    assert result["step"] == 2
    assert result["epoch"] == len(result["history"]) == 1
    assert (Path(job.output_url) / "model" / "bundle.json").exists()


def test_dither_does_not_make_validation_random(corpus, tmp_path):
    """A resume at the very end of an epoch validated with other noise, and so might choose another epoch."""
    trainer = Trainer(corpus.job(tmp_path, spec=corpus.spec(features=FeatureConfig(num_mels=16, dither=1.0))))
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(trainer._validate())
    assert results[0] == results[1]
