"""Measures a training step of a configuration's model on this machine: on its data if prepared, else on noise."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from devices.choice import best_device
from recognition.data.dataset import Batch
from recognition.systems.acoustic import AcousticTask
from speech.features import build_features
from speech.models import build_model
from speech.models.networks.base import AcousticModel
from speech.models.networks.stages import border_bytes
from storage.batching import plan_epoch
from tasks.config.pipeline import PipelineConfig
from tasks.stages.base import Run, StageResult, get_stage, stages_of
from tasks.stages.initial import model_config
from tasks.stages.sources import synthetic_table
from tasks.stages.train import make_job
from training.learner.compute import Learner, open_set, use_threads
from training.learner.prefetch import Loader

if TYPE_CHECKING:
    from training.job import TrainJob

_MEASURED = 5
"""Steps that are timed, after one warm-up step."""
_VOCABULARY = 256


@dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
        parameters: Weights of the model.
        seconds: Median duration of a step: forward and backward pass; on real data with front end and augmentation,
            without loading.
        data: Description of the data.
        layers: Number of layers of the model.
        border_mb: Hidden frames that a layer passes to the next, in megabytes, averaged over batches.
        data_hours: Audio in the training set; 0 if it is not prepared.
    """

    parameters: int
    seconds: float
    data: str
    layers: int
    border_mb: float
    data_hours: float = 0.0


def measure(config: PipelineConfig, batch_seconds: float) -> Step:
    """Time some steps.

    Args:
        config: Model, features and device; its data are used if the stages up to `features` are done.
        batch_seconds: Seconds of audio in a batch.
    """
    use_threads(config.train.threads)
    job = _prepared(config)
    return _on_noise(config, batch_seconds) if job is None else _on_data(job, batch_seconds)


def _prepared(config: PipelineConfig) -> "TrainJob | None":
    """The training job if its shards and features exist, else None; runs no stage."""
    run = Run(config, "plan")
    if any(source.kind == "synthetic" and not synthetic_table(source).exists() for source in config.data.sources):
        return None
    try:
        for name in stages_of(config):
            if name == "train":
                break
            output = get_stage(name).output(run)
            if (record := output.record()) is None:
                return None
            run.results[name] = StageResult(name, output.key, output.store.url, 0.0, True, {}, record)
        return make_job(run, get_stage("train").output(run))
    except OSError:  # the sources are not on this machine
        return None


def _on_data(job: "TrainJob", batch_seconds: float) -> Step:
    device = best_device(job.train.device)
    dataset, learner = open_set(job, "train"), Learner(job, device)
    most = max(1, job.train.max_batch // job.train.learners)
    plan = plan_epoch(dataset.durations, batch_seconds=batch_seconds, max_batch=most, seed=job.seed, epoch=0)
    # the last batch of a bucket is short
    full = sorted(plan, key=lambda rows: -float(dataset.durations[rows].sum()))[: 1 + _MEASURED]
    load = Loader(dataset, learner.task, device)
    batches: list[Any] = [load(full[number % len(full)], 0) for number in range(1 + _MEASURED)]
    work = iter(batches)
    seconds = _median(lambda: learner.gradient(next(work), 0), device)
    audio = sum(batch.seconds for batch in batches) / len(batches)
    hours = float(dataset.durations.sum()) / 3600
    source = f"batches of the prepared training set, {audio:.0f} s of audio each"
    assert isinstance(learner.model, AcousticModel)
    border = sum(_border_mb(learner, batch) for batch in batches) / len(batches)
    return Step(learner.flat.weights.numel(), seconds, source, learner.model.cfg.layers, border, hours)


@torch.no_grad()
def _border_mb(learner: Learner, batch: Batch) -> float:
    """Size of a batch's hidden frames in megabytes."""
    assert isinstance(learner.model, AcousticModel)
    assert isinstance(learner.task, AcousticTask)
    inputs, lengths = batch.inputs.to(learner.device), batch.lengths.to(learner.device)
    feats, _ = learner.task.frontend(inputs, lengths, batch.speakers)
    return border_bytes(learner.model, len(feats), feats.shape[1]) / 1e6


def _on_noise(config: PipelineConfig, batch_seconds: float) -> Step:
    device = best_device(config.train.device)
    dim = int(build_features(config.features, config.data.sample_rate).dim) * config.features.frame_factor
    torch.manual_seed(0)
    model = build_model(model_config(Run(config, "step time")), dim, _VOCABULARY).to(device)
    each = min(10.0, batch_seconds)
    count = max(1, round(batch_seconds / each))
    feats = torch.randn(count, int(100 * each), dim, device=device)
    lengths = torch.full((count,), feats.shape[1], device=device)
    tokens = torch.randint(1, _VOCABULARY, (count, max(1, int(each))), device=device)

    def step() -> None:
        log_probs, frames = model(feats, lengths)
        loss = F.ctc_loss(log_probs.transpose(0, 1), tokens, frames, torch.full_like(lengths, tokens.shape[1]))
        loss.backward()  # type: ignore[no-untyped-call]

    source = f"noise (the data are not prepared): {count} utterances of {each:g} s, {_VOCABULARY} tokens"
    border = border_bytes(model, count, feats.shape[1]) / 1e6
    return Step(model.num_parameters(), _median(step, device), source, model.cfg.layers, border)


def _median(step: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(1 + _MEASURED):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[1:])[_MEASURED // 2]
