"""Training with one learner: it learns, is reproducible, resumes bit for bit, and counts unusable utterances.

Coordinator, node client, worker and evaluator are real, in threads of this process; test_launch.py starts processes.
"""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from tones import LEARNS, bare, train_here

from recognition.bundle import load_bundle
from speech.audio import encode_flac
from speech.features import LogMelConfig, build_features
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard
from training.coordinator.checkpoints import find_checkpoint
from training.coordinator.core import Core
from training.coordinator.journal import parse_lines
from training.node.evaluator import Evaluator, NoModelError
from training.node.worker import DivergedError

KINDS = ["blstm", "conformer"]
OPTIMIZER = {"blstm": {"kind": "sgd", "lr": 0.05}, "conformer": {"kind": "adamw", "lr": 5e-3}}
CONSTANT = {"kind": "constant", "warmup_epochs": 0}
EVERYTHING_RANDOM = {
    "time_masks": 2,
    "time_mask_frames": 3,
    "freq_masks": 1,
    "freq_mask_bins": 3,
    "speed_factors": [0.9, 1.0, 1.1],
    "noise": {"snr_db": [10, 20]},
    "gain_db": 6,
}

# Printed by this very test (`print(run.losses)`) on x86-64 with torch 2.11 and one thread. A refactoring must not
# change them; what changes them on purpose (initialization, batching, augmentation, features) prints new ones.
GOLDEN = {
    "blstm": [14.247912, 12.723560, 13.316573, 11.793944, 6.920802],
    "conformer": [16.442763, 12.051614, 14.429662, 16.292675, 12.888998],
}


@pytest.mark.parametrize("kind", KINDS)
def test_golden_losses(corpus, tmp_path, kind):
    job = corpus.job(tmp_path, kind, epochs=1, optimizer=OPTIMIZER[kind], augment=EVERYTHING_RANDOM)
    run = train_here(job)
    assert run.losses[:5] == pytest.approx(GOLDEN[kind], rel=0, abs=1e-4), run.losses[:5]


def test_a_conformer_learns_the_words(trained):
    assert trained.result["valid"]["wer"] == 0.0
    history = trained.result["history"]
    assert history[-1]["loss"] < 0.1 * history[0]["loss"]


@pytest.mark.slow
def test_a_blstm_learns_the_words(corpus, tmp_path):
    spec = corpus.spec("blstm", model=bare("blstm"))
    run = train_here(corpus.job(tmp_path, spec=spec, epochs=15, optimizer={"lr": 2e-2}, **LEARNS))
    assert run.result["valid"]["wer"] == 0.0


def test_utterance_counts_of_the_result_add_up(trained, corpus):
    result, epochs = trained.result, 10
    assert result["epoch"] == len(result["history"]) == epochs
    assert [entry["epoch"] for entry in result["history"]] == list(range(1, epochs + 1))
    assert result["utterances"] == epochs * len(corpus.train)
    assert result["audio_seconds"] == pytest.approx(epochs * sum(s.row["duration"] for s in corpus.train))
    assert result["unalignable"] == result["repeated"] == result["skipped"] == 0
    assert result["step"] == len(trained.losses)
    assert (result["strategy"], result["nodes"], result["learners_per_node"]) == ("single", 1, 1)
    assert ObjectStore(trained.job.output_url).read_json("result.json") == result


def test_journal_has_an_entry_for_every_epoch(trained, corpus):
    epochs = trained.entries("epoch")
    assert [(entry["epoch"], entry["utterances"], entry["repeated"]) for entry in epochs] == [
        (number, len(corpus.train), 0) for number in range(1, 11)
    ]
    assert all(entry["index"] == len(corpus.train) and not entry["repeated_ids"] for entry in epochs)
    for entry, past in zip(trained.entries("valid"), trained.result["history"], strict=True):
        assert (entry["epoch"], entry["epochs"]) == (past["epoch"], 10)
        assert (entry["valid_loss"], entry["valid_wer"]) == (past["loss"], past["wer"])
        assert entry["replicas"] == past["replicas"] == {"0": past["loss"]}
    lines = list(parse_lines(trained.job.journal.read_text().splitlines()))
    assert lines[0]["kind"] == "start"
    assert lines[-1]["kind"] == "end"
    assert lines[-1]["valid_loss"] == trained.result["valid"]["loss"]
    assert [entry["step"] for entry in trained.entries("step")] == list(range(1, trained.result["step"] + 1))


def test_the_training_loss_is_the_mean_over_an_epochs_steps(trained, corpus):
    """Of the epoch alone, per token; every step's loss is journaled here, and its tokens are its utterances' words."""
    first = trained.entries("valid")[0]["train_loss"]
    steps = [entry for entry in trained.entries("step") if entry["epoch"] < 1]
    assert min(entry["loss"] for entry in steps) < first < max(entry["loss"] for entry in steps)
    assert trained.entries("valid")[-1]["train_loss"] < 0.2 * first


def test_the_model_averages_the_best_epochs(trained):
    output = Path(trained.job.output_url)
    best = sorted(trained.result["history"], key=lambda entry: entry["loss"])[:2]
    epochs = sorted(int(entry["epoch"]) for entry in best)
    assert trained.result["averaged_epochs"] == epochs
    snapshots = [load_file(output / "snapshots" / f"epoch-{epoch:04d}.safetensors") for epoch in epochs]
    assert len(list((output / "snapshots").iterdir())) == 2  # the others are gone
    assert not list((output / "replicas").rglob("*.safetensors"))
    spec, model = load_bundle(trained.bundle)
    assert spec.provenance == {"run": "run-1", "epochs": epochs}
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, (snapshots[0][name] + snapshots[1][name]) / 2)


# --- stopping and resuming


@pytest.fixture(scope="module", params=KINDS)
def uninterrupted(request, corpus, tmp_path_factory):
    """Everything that draws random numbers is on: masks, speed, noise, gain, dropout, dither."""
    spec = corpus.spec(request.param, features=LogMelConfig(num_mels=16, dither=1.0))
    options = {"spec": spec, "optimizer": OPTIMIZER[request.param], "augment": EVERYTHING_RANDOM, "epochs": 2}
    job = corpus.job(tmp_path_factory.mktemp("uninterrupted"), **options)
    return train_here(job), options


def newest_checkpoint(job):
    """The newest complete checkpoint: its number, and what it says."""
    return find_checkpoint(ObjectStore(job.output_url), job.run)


def numbers(job):
    return sorted(int(folder.name) for folder in (Path(job.output_url) / "checkpoints").iterdir())


@pytest.mark.parametrize("stop", ["first", "middle", "end of epoch", "second epoch", "last"])
@pytest.mark.variants(4)
def test_stopping_at_any_step_and_resuming_changes_nothing(uninterrupted, corpus, tmp_path, stop):
    whole, options = uninterrupted
    per_epoch = whole.result["step"] // 2
    places = {"first": 1, "middle": 2, "end of epoch": per_epoch, "second epoch": per_epoch + 1, "last": 2 * per_epoch}
    job = corpus.job(tmp_path, **options)
    train_here(job, stop_at=places[stop])
    assert newest_checkpoint(job)[1]["totals"]["steps"] == places[stop]
    assert not ObjectStore(job.output_url).exists("result.json")
    resumed = train_here(job)
    assert resumed.worker.step == whole.worker.step
    assert resumed.model_bytes == whole.model_bytes
    assert resumed.result["history"] == whole.result["history"]
    assert resumed.result["utterances"] == whole.result["utterances"]
    assert resumed.losses == whole.losses
    restarts = [entry for entry in parse_lines(job.journal.read_text().splitlines()) if entry["kind"] == "resume"]
    assert [entry["steps"] for entry in restarts] == [{"0.0": places[stop]}]


def test_another_seed_gives_another_model(uninterrupted, corpus, tmp_path):
    whole, options = uninterrupted
    assert train_here(corpus.job(tmp_path, seed=8, **options)).model_bytes != whole.model_bytes


def test_finished_run_is_not_trained_again(uninterrupted):
    run, _ = uninterrupted
    before, steps = run.model_bytes, len(run.losses)
    again = train_here(run.job)
    assert again.model_bytes == before
    assert again.result == {**run.result, "elapsed": again.result["elapsed"]}
    assert len(again.losses) == steps


def test_old_checkpoints_are_deleted(uninterrupted):
    run, _ = uninterrupted
    number, document = newest_checkpoint(run.job)
    assert len(numbers(run.job)) == 2
    assert numbers(run.job)[-1] == number
    assert document["totals"]["steps"] == run.result["step"]


@pytest.fixture
def exact_training_time(monkeypatch):
    """The coordinator records the training time at every check, not once a second."""
    monkeypatch.setattr("training.coordinator.coordinator.NOTE_S", 0.0)


def test_max_minutes_ends_an_epoch_early_with_a_model(corpus, tmp_path, exact_training_time, monkeypatch):
    def note(core, _):  # a busy machine may take any time for a step
        core.set(elapsed=0.01 * core.ledger.totals.steps, at=core.wall())

    monkeypatch.setattr(Core, "note_elapsed", note)
    run = train_here(corpus.job(tmp_path, epochs=5000, max_batch=1, batch_seconds=0.1, max_minutes=0.3 / 60))
    result = run.result
    assert result["elapsed"] >= 0.3
    assert result["step"] == len(run.losses) < 5000 * 48
    assert result["epoch"] == result["history"][-1]["epoch"]
    assert 48 * (result["epoch"] - 1) < result["step"]
    assert len(run.model_bytes) > 1000


def test_max_minutes_counts_over_restarts(corpus, tmp_path, exact_training_time):
    train_here(corpus.job(tmp_path, epochs=5000), stop_at=10)
    spent = newest_checkpoint(corpus.job(tmp_path))[1]["elapsed"]
    assert spent > 0
    run = train_here(corpus.job(tmp_path, epochs=5000, max_minutes=(spent + 0.2) / 60))
    (resume,) = run.entries("resume")
    assert resume["elapsed"] == spent
    assert run.result["elapsed"] >= spent + 0.2
    assert run.result["step"] >= 10


@pytest.mark.parametrize("utterances", [10, 48, 70])
@pytest.mark.variants(2)
def test_max_utterances_ends_after_the_batch_that_reaches_it_and_more_utterances_continue_it_exactly(
    corpus, tmp_path, utterances
):
    """Of 48 utterances: within the first epoch, at its end, and within the second."""
    fields = {"epochs": 3, "augment": EVERYTHING_RANDOM, "max_batch": 8}
    whole = train_here(corpus.job(tmp_path / "whole", **fields))
    part = train_here(corpus.job(tmp_path / "part", max_utterances=utterances, **fields)).result
    assert utterances <= part["utterances"] < utterances + 8
    assert part["epoch"] == part["history"][-1]["epoch"] == -(-utterances // 48)
    assert part["valid"]["loss"] == min(entry["loss"] for entry in part["history"])
    longer = train_here(corpus.job(tmp_path / "part", **fields))
    assert longer.entries("resume")
    assert longer.losses == whole.losses
    assert longer.model_bytes == whole.model_bytes
    assert longer.result["history"] == whole.result["history"]


def test_training_without_a_finished_epoch_is_an_error(corpus, tmp_path):
    with pytest.raises(NoModelError, match=r"train\.max_minutes"):
        Evaluator(corpus.job(tmp_path)).finish({}, [])


# --- failures


@pytest.mark.parametrize(("steps", "error"), [(3, DivergedError), (100, NoModelError)])
def test_a_huge_learning_rate_is_reported_as_divergence(corpus, tmp_path, steps, error):
    """Both ways out: too many bad steps in a row, and a validation of broken weights before that."""
    job = corpus.job(
        tmp_path,
        optimizer={"kind": "sgd", "lr": 1e30, "clip_norm": 0},
        schedule=CONSTANT,
        epochs=3,
        membership={"beat_s": 0.05, "max_bad_steps": steps},
    )
    with pytest.raises(error, match=r"lower train\.optimizer\.lr"):
        train_here(job)


def test_gradients_are_clipped(corpus, tmp_path):
    """SGD without momentum and decay moves by rate x clipped gradient, so its step has at most that length."""
    optimizer = {"kind": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.01}
    schedule = {"kind": "constant", "warmup_epochs": 0}
    first = train_here(corpus.job(tmp_path / "1", optimizer=optimizer, epochs=1, schedule=schedule), stop_at=1)
    after = first.worker.learner.flat.weights.clone()
    run = train_here(corpus.job(tmp_path / "all", optimizer=optimizer, epochs=1, schedule=schedule))
    moved = (run.worker.learner.flat.weights - after).norm()
    assert 0 < moved <= 0.0101 * (run.result["step"] - 1)
    assert min(entry["grad_norm"] for entry in run.entries("step")) > 0.01


def unusual_set(url):
    """Ordinary utterances, two with far more words than frames, and one shorter than a feature frame."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for name, length, words in [
        ("a", 4000, 2),
        ("b", 4000, 2),
        ("many", 1600, 40),
        ("more", 1600, 50),
        ("tick", 80, 1),
    ]:
        row = {
            "duration": length / 8000,
            "num_frames": length,
            "sample_rate": 8000,
            "text": " ".join(["ba", "ce"] * words),
        }
        wave = torch.randn(length, generator=generator) * 0.1
        samples.append(Sample(name, {"flac": encode_flac(wave, 8000)}, row))
    store = ObjectStore(url)
    build_index([write_shard(store, "0.tar", samples, "flac")], {}).write(store)


@pytest.mark.parametrize("kind", KINDS)
def test_unalignable_utterances_are_counted_and_skipped(corpus, tmp_path, kind):
    unusual_set(str(tmp_path / "train"))
    run = train_here(corpus.job(tmp_path, kind, train_url=str(tmp_path / "train"), epochs=3))
    assert run.result["unalignable"] == 3 * 3
    assert run.result["utterances"] == 5 * 3
    assert np.isfinite(run.losses).all()
    assert [entry["unalignable"] for entry in run.entries("valid")] == [3, 6, 9]


# --- other inputs and settings


def test_stored_features_train_like_computed_ones(corpus, tmp_path):
    extract = build_features(LogMelConfig(num_mels=16), 8000)
    for name in ("train", "valid"):
        samples = []
        for sample in getattr(corpus, name):
            wave = torch.from_numpy(soundfile.read(io.BytesIO(sample.members["flac"]), dtype="float32")[0])
            feats, frames = extract(wave[None], torch.tensor([len(wave)]))
            buffer = io.BytesIO()
            np.save(buffer, feats[0].numpy())
            row = {**sample.row, "num_frames": int(frames)}
            samples.append(Sample(sample.id, {"npy": buffer.getvalue()}, row))
        store = ObjectStore(str(tmp_path / name))
        build_index([write_shard(store, "0.tar", samples, "npy")], {}).write(store)
    urls = {f"{name}_url": str(tmp_path / name) for name in ("train", "valid")}
    computed = train_here(corpus.job(tmp_path / "computed", epochs=1))
    stored = train_here(corpus.job(tmp_path / "stored", epochs=1, **urls))
    assert stored.result["history"] == computed.result["history"]
    assert stored.model_bytes == computed.model_bytes


@pytest.mark.parametrize("cmvn", ["speaker", "utterance", "none"])
def test_other_normalizations_train(corpus, tmp_path, cmvn):
    spec = corpus.spec(features=LogMelConfig(num_mels=16, cmvn=cmvn), stats=None)
    speakers = {"speaker0": corpus.stats.to_dict()} if cmvn == "speaker" else {}
    run = train_here(corpus.job(tmp_path, spec=spec, speakers=speakers, epochs=1))
    assert np.isfinite(run.result["valid"]["loss"])


def test_losses_of_mixed_precision_stay_close(corpus, tmp_path):
    full, mixed = (
        train_here(corpus.job(tmp_path / amp, "conformer", epochs=1, amp=amp)).losses for amp in ("off", "bf16")
    )
    assert full != mixed
    assert full == pytest.approx(mixed, rel=0.05)


def test_steps_are_logged_as_often_as_configured(corpus, tmp_path):
    job = corpus.job(tmp_path, epochs=2, max_batch=4, log_steps=5)
    run = train_here(job)
    assert [entry["step"] for entry in run.entries("step")] == [5, 10, 15, 20]
    assert run.result["step"] == 24


def test_training_stops_at_the_requested_step(corpus, tmp_path):
    run = train_here(corpus.job(tmp_path, epochs=2, max_batch=4), stop_at=7)
    assert run.worker.step == len(run.losses) == 7
