"""The training loop: it learns, repeats itself, resumes bit for bit, stops when told, and counts what it cannot use."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from speech.audio import encode_flac
from speech.bundle import load_bundle
from speech.features import FeatureConfig, build_features
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, write_shard
from training.checkpoint import CheckpointError, checkpoint_steps
from training.data import Batch
from training.journal import read_journal
from training.loop import DivergedError, StopRequested, Trainer, pick_device
from training.validation import ctc_losses, needed_frames

KINDS = ["blstm", "conformer"]
OPTIMIZER = {"blstm": {"kind": "sgd", "lr": 0.05}, "conformer": {"kind": "adamw", "lr": 5e-3}}
EVERYTHING_RANDOM = {
    "time_masks": 2,
    "time_mask_frames": 3,
    "freq_masks": 1,
    "freq_mask_bins": 3,
    "speed_factors": [0.9, 1.0, 1.1],
    "noise_snr_db": [10, 20],
    "gain_db": 6,
}


def losses(job):
    return [entry["loss"] for entry in read_journal(job.journal) if entry["kind"] == "step"]


def model_bytes(job):
    return (Path(job.output_url) / "model" / "model.safetensors").read_bytes()


# Printed by this very test (`print(losses(job))`) on x86-64 with torch 2.11 and one thread. A refactoring must not
# change them; what changes them on purpose (initialization, batching, augmentation, features) prints new ones.
GOLDEN = {
    "blstm": [11.56332, 12.336752, 12.952078, 11.152263, 5.948936],
    "conformer": [12.838409, 11.729152, 14.361989, 15.107548, 9.869187],
}


@pytest.mark.parametrize("kind", KINDS)
def test_golden_losses(corpus, tmp_path, kind):
    job = corpus.job(tmp_path, kind, epochs=1, optimizer=OPTIMIZER[kind], augment=EVERYTHING_RANDOM)
    Trainer(job).run()
    assert losses(job)[:5] == pytest.approx(GOLDEN[kind], rel=0, abs=1e-4)


def test_a_conformer_learns_the_words(trained):
    assert trained.result["valid"]["wer"] == 0.0
    history = trained.result["history"]
    assert history[-1]["loss"] < 0.1 * history[0]["loss"]


def test_a_blstm_learns_the_words(corpus, tmp_path):
    spec = corpus.spec("blstm", model=corpus.spec("blstm").model.model_copy(update={"subsampling": 4, "dropout": 0.0}))
    job = corpus.job(
        tmp_path,
        spec=spec,
        epochs=15,
        max_batch=4,
        checkpoint_steps=1000,
        augment={"enabled": False},
        optimizer={"lr": 2e-2},
        schedule={"kind": "cosine", "warmup_epochs": 0.5},
    )
    assert Trainer(job).run()["valid"]["wer"] == 0.0


def test_the_result_adds_up(trained, corpus):
    result, epochs = trained.result, 10
    assert result["epoch"] == len(result["history"]) == epochs
    assert result["utterances"] == epochs * len(corpus.train)
    assert result["audio_seconds"] == pytest.approx(epochs * sum(s.row["duration"] for s in corpus.train))
    assert result["unalignable"] == 0
    assert result["step"] == len(losses(trained.job))
    assert ObjectStore(trained.job.output_url).read_json("result.json") == result
    kinds = [entry["kind"] for entry in read_journal(trained.job.journal)]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("valid") == epochs


def test_the_model_averages_the_best_epochs(trained):
    output = Path(trained.job.output_url)
    best = sorted(trained.result["history"], key=lambda entry: entry["loss"])[:2]
    epochs = sorted(int(entry["epoch"]) for entry in best)
    assert trained.result["averaged_epochs"] == epochs
    snapshots = [load_file(output / "snapshots" / f"epoch-{epoch:04d}.safetensors") for epoch in epochs]
    assert len(list((output / "snapshots").iterdir())) == 2  # the others are gone
    spec, model = load_bundle(trained.bundle)
    assert spec.provenance == {"run": "run-1", "epochs": epochs}
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, (snapshots[0][name] + snapshots[1][name]) / 2)


class StoppingTrainer(Trainer):
    """Is asked to stop while it makes a given step."""

    stop_at = 0

    def _step(self, *args):
        super()._step(*args)
        self.stop_requested = self.state.step == self.stop_at


@pytest.fixture(scope="module", params=KINDS)
def undisturbed(request, corpus, tmp_path_factory):
    """Everything that draws random numbers is on: masks, speed, noise, gain, dropout, dither."""
    spec = corpus.spec(request.param, features=FeatureConfig(num_mels=16, dither=1.0))
    options = {"spec": spec, "optimizer": OPTIMIZER[request.param], "augment": EVERYTHING_RANDOM, "epochs": 2}
    job = corpus.job(tmp_path_factory.mktemp("undisturbed"), **options)
    return job, Trainer(job).run(), options


@pytest.mark.parametrize("stop", ["first", "middle", "end of epoch", "second epoch", "last"])
def test_a_stop_at_any_step_and_a_resume_change_nothing(undisturbed, corpus, tmp_path, stop):
    whole, result, options = undisturbed
    per_epoch = result["step"] // 2
    places = {"first": 1, "middle": 2, "end of epoch": per_epoch, "second epoch": per_epoch + 1, "last": 2 * per_epoch}
    job = corpus.job(tmp_path, **options)
    stopped = StoppingTrainer(job)
    stopped.stop_at = places[stop]
    with pytest.raises(StopRequested):
        stopped.run()
    assert checkpoint_steps(ObjectStore(job.output_url))[-1] == places[stop]
    resumed = Trainer(job).run()
    assert model_bytes(job) == model_bytes(whole)
    assert resumed["history"] == result["history"]
    assert resumed["utterances"] == result["utterances"]
    assert losses(job) == losses(whole)


def test_another_seed_gives_another_model(undisturbed, corpus, tmp_path):
    whole, _, options = undisturbed
    job = corpus.job(tmp_path, seed=8, **options)
    Trainer(job).run()
    assert model_bytes(job) != model_bytes(whole)


def test_a_finished_run_only_writes_its_model_again(undisturbed):
    job, result, _ = undisturbed
    before = model_bytes(job)
    again = Trainer(job).run()
    assert model_bytes(job) == before
    assert again["step"] == result["step"]
    assert again["valid"] == result["valid"]


def test_checkpoints_do_not_pile_up(undisturbed):
    job, result, _ = undisturbed
    steps = checkpoint_steps(ObjectStore(job.output_url))
    assert len(steps) == 2
    assert steps[-1] == result["step"]


def test_another_runs_output_is_refused(undisturbed, corpus, tmp_path):
    job, _, options = undisturbed
    other = corpus.job(tmp_path, run="run-2", output_url=job.output_url, **options)
    with pytest.raises(CheckpointError, match="another configuration"):
        Trainer(other).run()


def tick_seconds(monkeypatch, seconds):
    """Every look at the clock takes some seconds."""
    now = [0.0]

    def monotonic():
        now[0] += seconds
        return now[0]

    monkeypatch.setattr("training.loop.time", SimpleNamespace(monotonic=monotonic))


def test_max_minutes_ends_an_epoch_early_with_a_model(corpus, tmp_path, monkeypatch):
    tick_seconds(monkeypatch, 10)
    job = corpus.job(tmp_path, epochs=50, max_batch=4, max_minutes=1)
    result = Trainer(job).run()
    assert result["epoch"] == 1
    assert 0 < result["step"] < 12  # an epoch would have 12 steps
    assert result["elapsed"] >= 60
    assert len(model_bytes(job)) > 1000


def test_max_minutes_counts_over_restarts(corpus, tmp_path, monkeypatch):
    tick_seconds(monkeypatch, 10)
    job = corpus.job(tmp_path, epochs=50, max_minutes=10)
    stopped = StoppingTrainer(job)
    stopped.stop_at = 10
    with pytest.raises(StopRequested):
        stopped.run()
    spent = stopped.state.elapsed
    assert spent > 0
    result = Trainer(job).run()
    assert 600 <= result["elapsed"] < 600 + spent
    assert 10 < result["step"] < 100


def test_without_any_epoch_there_is_a_clear_error(corpus, tmp_path):
    with pytest.raises(CheckpointError, match=r"train\.max_minutes"):
        Trainer(corpus.job(tmp_path, max_minutes=1e-9)).run()


@pytest.mark.parametrize("steps", [3, 100])
def test_a_huge_learning_rate_is_reported_as_divergence(corpus, tmp_path, steps, monkeypatch):
    """Both ways out: too many bad steps in a row, and a validation of broken weights before that."""
    monkeypatch.setattr("training.loop.MAX_BAD_STEPS", steps)
    schedule = {"kind": "constant", "warmup_epochs": 0}
    job = corpus.job(tmp_path, optimizer={"kind": "sgd", "lr": 1e30, "clip_norm": 0}, schedule=schedule, epochs=3)
    with pytest.raises(DivergedError, match=r"lower train\.optimizer\.lr"):
        Trainer(job).run()


def test_gradients_are_clipped(corpus, tmp_path):
    """SGD without momentum and decay moves by rate x clipped gradient, so its step has at most that length."""
    optimizer = {"kind": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.01}
    job = corpus.job(tmp_path, optimizer=optimizer, epochs=1, schedule={"kind": "constant", "warmup_epochs": 0})
    trainer = Trainer(job)
    before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    result = trainer.run()
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert 0 < (after - before).norm() <= 0.0101 * result["step"]
    norms = [entry["grad_norm"] for entry in read_journal(job.journal) if entry["kind"] == "step"]
    assert min(norms) > 0.01


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
def test_unalignable_utterances_are_counted_and_harmless(corpus, tmp_path, kind):
    unusual_set(str(tmp_path / "train"))
    job = corpus.job(tmp_path, kind, train_url=str(tmp_path / "train"), epochs=3)
    result = Trainer(job).run()
    assert result["unalignable"] == 3 * 3
    assert result["utterances"] == 5 * 3
    assert np.isfinite(losses(job)).all()
    valid = [entry for entry in read_journal(job.journal) if entry["kind"] == "valid"]
    assert [entry["unalignable"] for entry in valid] == [3, 6, 9]


def token_batch(tokens, lengths):
    none = torch.zeros(0)
    tokens, lengths = torch.tensor(tokens), torch.tensor(lengths)
    return Batch(np.arange(len(tokens)), [], [], [], none, none, tokens, lengths, 1.0)


def test_needed_frames_counts_a_blank_between_equal_tokens():
    batch = token_batch([[1, 2, 3, 0], [1, 1, 1, 0], [2, 0, 0, 0], [3, 3, 2, 2]], [3, 3, 1, 4])
    assert needed_frames(batch.tokens, batch.token_lengths).tolist() == [3, 5, 1, 6]


def test_ctc_is_the_sum_over_all_alignments():
    """Two frames, one token: of the paths (a, a), (a, blank), (blank, a)."""
    probabilities = torch.tensor([[[0.6, 0.4], [0.3, 0.7]]])
    loss, unalignable = ctc_losses(probabilities.log(), torch.tensor([2]), token_batch([[1]], [1]))
    assert loss.item() == pytest.approx(-np.log(0.4 * 0.7 + 0.4 * 0.3 + 0.6 * 0.7))
    assert unalignable == 0


def test_the_frame_limit_of_ctc_is_exact():
    uniform = torch.full((2, 3, 3), 1 / 3).log()
    batch = token_batch([[1, 1], [1, 2]], [2, 2])
    loss, unalignable = ctc_losses(uniform, torch.tensor([2, 2]), batch)
    assert unalignable == 1
    assert loss[0] == 0.0
    assert loss[1] > 0
    assert ctc_losses(uniform, torch.tensor([3, 2]), batch)[1] == 0


def test_stored_features_train_like_computed_ones(corpus, tmp_path):
    extract = build_features(FeatureConfig(num_mels=16), 8000)
    for name in ("train", "valid"):
        samples = []
        for sample in getattr(corpus, name):
            wave = torch.from_numpy(read_flac(sample.members["flac"]))
            feats, frames = extract(wave[None], torch.tensor([len(wave)]))
            buffer = io.BytesIO()
            np.save(buffer, feats[0].numpy())
            row = {**sample.row, "num_frames": int(frames)}
            samples.append(Sample(sample.id, {"npy": buffer.getvalue()}, row))
        store = ObjectStore(str(tmp_path / name))
        build_index([write_shard(store, "0.tar", samples, "npy")], {}).write(store)
    computed = corpus.job(tmp_path / "computed", epochs=1)
    urls = {f"{name}_url": str(tmp_path / name) for name in ("train", "valid")}
    stored = corpus.job(tmp_path / "stored", epochs=1, **urls)
    assert Trainer(stored).run()["history"] == Trainer(computed).run()["history"]
    assert model_bytes(stored) == model_bytes(computed)


def read_flac(data):
    import soundfile

    return soundfile.read(io.BytesIO(data), dtype="float32")[0]


@pytest.mark.parametrize("cmvn", ["speaker", "utterance", "none"])
def test_other_normalizations_train(corpus, tmp_path, cmvn):
    spec = corpus.spec(features=FeatureConfig(num_mels=16, cmvn=cmvn), stats=None)
    speakers = {"speaker0": corpus.stats.to_dict()} if cmvn == "speaker" else {}
    job = corpus.job(tmp_path, spec=spec, speakers=speakers, epochs=1)
    assert np.isfinite(Trainer(job).run()["valid"]["loss"])


def test_mixed_precision_stays_close(corpus, tmp_path):
    jobs = [corpus.job(tmp_path / amp, "conformer", epochs=1, amp=amp) for amp in ("off", "bf16")]
    for job in jobs:
        Trainer(job).run()
    assert losses(jobs[0]) != losses(jobs[1])
    assert losses(jobs[0]) == pytest.approx(losses(jobs[1]), rel=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported():
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="torch sees no GPU"):
        pick_device("cuda")
