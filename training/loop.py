"""The training loop: steps, validation, checkpoints; resumes in the middle of an epoch, bit for bit on a CPU.

Nothing random survives from step to step: batch order comes from (seed, epoch), dropout and augmentation from
(seed, step). A resume therefore needs weights, optimizer state and counters only.
"""

import math
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speech.bundle import save_bundle
from speech.decoding import DecodeError
from speech.features.augment import SpecAugment, perturb_waves
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.reading import ShardReader
from training.batching import derive_seed, plan_epoch
from training.checkpoint import (
    TrainState,
    average_snapshots,
    best_epochs,
    load_checkpoint,
    prune_snapshots,
    save_checkpoint,
    save_snapshot,
)
from training.data import Batch, SpeechDataset, read_ahead
from training.job import TrainJob
from training.journal import Journal
from training.optim import build_optimizer, set_learning_rate
from training.schedule import learning_rate
from training.validation import ctc_losses, validate

MAX_BAD_STEPS = 20
_DIVERGED_REMEDY = "lower train.optimizer.lr or lengthen train.schedule.warmup_epochs"


class DivergedError(RuntimeError):
    """The loss or the gradient is no longer a finite number."""


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """Somebody asked the process to end; a checkpoint has been written."""


def pick_device(wanted: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here.

    Raises:
        ValueError: If CUDA is wanted and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device is 'cuda' but torch sees no GPU: use 'auto' or 'cpu', or mend the driver")
    name = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    return torch.device(name)


class Trainer:
    """One learner, training one job to its end.

    Args:
        job: What to train.
    """

    def __init__(self, job: TrainJob) -> None:
        self.job, self.cfg = job, job.train
        torch.set_num_threads(self.cfg.threads or max(1, (os.cpu_count() or 1) - 1))
        self.device = pick_device(self.cfg.device)
        self.amp = self.cfg.amp == "bf16" or (self.cfg.amp == "auto" and self.device.type == "cuda")
        self.tokenizer = job.spec.build_tokenizer()
        self.frontend = job.spec.build_frontend(job.speaker_stats()).to(self.device)
        self.train_set = self._dataset(job.train_url)
        self.valid_set = self._dataset(job.valid_url, lenient=True)
        torch.manual_seed(derive_seed("init", job.seed))
        self.model = job.spec.build_model().to(self.device)
        self.optimizer = build_optimizer(self.cfg.optimizer, self.model)
        self.spec_augment = SpecAugment(self.cfg.augment)
        self.output = ObjectStore(job.output_url)
        self.journal = Journal(job.journal)
        self.state = TrainState()
        self.stop_requested = False
        self._bad_steps = 0
        self._mark = time.monotonic()

    def _dataset(self, url: str, lenient: bool = False) -> SpeechDataset:
        store = ObjectStore(url)
        index = ShardIndex.read(store)
        return SpeechDataset(index, ShardReader(store, index, self.job.cache), self.tokenizer, lenient=lenient)

    def run(self) -> dict[str, Any]:
        """Train to the end, from the newest checkpoint if there is one.

        Returns:
            The result: epochs, steps, counters, validation history.

        Raises:
            DivergedError: If training no longer gives finite numbers.
            StopRequested: If `stop_requested` was set meanwhile.
        """
        self._resume()
        self._mark = time.monotonic()
        while self.state.epoch < self.cfg.epochs and not self._time_is_up():
            self._epoch()
        if self.state.cursor:  # resumed in the middle of an epoch, and the time is up already
            self._end_epoch()
        return self._finish()

    def _resume(self) -> None:
        found = load_checkpoint(self.output, self.model, self.optimizer, self.job.run)
        if found is None:
            self.journal.write("start", step=0, run=self.job.run, parameters=self.model.num_parameters())
            return
        self.state = found
        self.journal.write("resume", step=found.step, epoch=found.epoch, cursor=found.cursor)

    def _epoch(self) -> None:
        plan = plan_epoch(
            self.train_set.durations,
            batch_seconds=self.cfg.batch_seconds,
            max_batch=self.cfg.max_batch,
            bucket_batches=self.cfg.bucket_batches,
            seed=self.job.seed,
            epoch=self.state.epoch,
        )
        mean_batch = len(self.train_set) / len(plan)
        self.model.train()
        for batch in read_ahead(self.train_set.batch, plan[self.state.cursor :]):
            progress = self.state.epoch + self.state.cursor / len(plan)
            # the rate at the middle of the step: the first step of a warm-up from zero moves, too
            progress += 0.5 / len(plan)
            lr = learning_rate(self.cfg.schedule, self.cfg.optimizer.lr, progress, self.cfg.epochs, mean_batch)
            self._step(batch, lr, progress)
            self._after_step(len(plan))
            if self._time_is_up():
                break
        self._end_epoch()

    def _step(self, batch: Batch, lr: float, progress: float) -> None:
        seed = derive_seed("step", self.job.seed, self.state.step)
        torch.manual_seed(seed)
        feats, frames = self._augmented(batch, torch.Generator().manual_seed(seed))
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp):
            log_probs, out_frames = self.model(feats, frames)
        losses, unalignable = ctc_losses(log_probs, out_frames, batch)
        tokens = max(1, int(batch.token_lengths.sum()))
        loss = losses.sum() / tokens
        set_learning_rate(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        clip = self.cfg.optimizer.clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        self._update(norm, float(loss.detach()))
        state = self.state
        state.step += 1
        state.cursor += 1
        state.utterances += len(batch.ids)
        state.audio_seconds += batch.seconds
        state.unalignable += unalignable
        if math.isfinite(float(loss.detach())):  # one bad step, which changed no weight, must not void the whole sum
            state.loss_sum += float(losses.detach().sum())
            state.loss_tokens += tokens
        if state.step % self.cfg.log_steps == 0:
            self._log_step(float(loss.detach()), lr, norm, progress)

    def _augmented(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, lengths = batch.inputs.to(self.device), batch.lengths.to(self.device)
        if inputs.ndim == 2:
            rate = self.job.spec.sample_rate
            inputs, lengths = perturb_waves(inputs, lengths, rate, self.cfg.augment, generator)
        feats, frames = self.frontend(inputs, lengths, batch.speakers)
        return self.spec_augment(feats, frames, generator), frames

    def _update(self, norm: float, loss: float) -> None:
        if math.isfinite(norm) and math.isfinite(loss):
            self._bad_steps = 0
            self.optimizer.step()
            return
        self._bad_steps += 1
        if self._bad_steps >= MAX_BAD_STEPS:
            raise DivergedError(
                f"loss or gradient has not been finite for {MAX_BAD_STEPS} steps (step {self.state.step}): "
                f"{_DIVERGED_REMEDY}"
            )

    def _log_step(self, loss: float, lr: float, norm: float, progress: float) -> None:
        self._tick()
        state = self.state
        self.journal.write(
            "step",
            step=state.step,
            epoch=progress,
            epochs=self.cfg.epochs,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            utterances=state.utterances,
            audio_seconds=state.audio_seconds,
            elapsed=state.elapsed,
        )

    def _tick(self) -> None:
        now = time.monotonic()
        self.state.elapsed += now - self._mark
        self._mark = now

    def _time_is_up(self) -> bool:
        self._tick()
        return 0 < self.cfg.max_minutes * 60 <= self.state.elapsed

    def _after_step(self, num_batches: int) -> None:
        if self.stop_requested:
            self._checkpoint()
            raise StopRequested
        if self.state.step % self.cfg.checkpoint_steps == 0 and self.state.cursor < num_batches:
            self._checkpoint()

    def _checkpoint(self) -> None:
        self._tick()
        keep = self.cfg.checkpoint_keep
        save_checkpoint(self.output, self.model, self.optimizer, self.state, self.job.run, keep)

    def _validate(self) -> dict[str, float]:
        self.model.eval()
        # dither draws here, too: the same numbers, whatever this process did before
        torch.manual_seed(derive_seed("valid", self.job.seed))
        try:
            return validate(self.model, self.frontend, self.valid_set, self.tokenizer, self.cfg, self.device)
        except DecodeError as error:
            raise DivergedError(
                f"the model is broken at step {self.state.step} ({error}): {_DIVERGED_REMEDY}"
            ) from error

    def _end_epoch(self) -> None:
        state = self.state
        result = self._validate()
        state.history.append({"epoch": state.epoch, **result})
        save_snapshot(self.output, self.model, state.epoch)
        train_loss = state.loss_sum / max(1, state.loss_tokens)
        self._tick()
        self.journal.write(
            "valid",
            step=state.step,
            epoch=state.epoch + 1,
            epochs=self.cfg.epochs,
            train_loss=train_loss,
            elapsed=state.elapsed,
            audio_seconds=state.audio_seconds,
            unalignable=state.unalignable,
            **{f"valid_{name}": value for name, value in result.items()},
        )
        state.epoch, state.cursor, state.loss_sum, state.loss_tokens = state.epoch + 1, 0, 0.0, 0
        self._checkpoint()
        prune_snapshots(self.output, {*best_epochs(state.history, self.cfg.average)})

    def _finish(self) -> dict[str, Any]:
        chosen = best_epochs(self.state.history, self.cfg.average)
        weights = average_snapshots(self.output, chosen)
        self.model.load_state_dict(weights)
        final = self._validate()
        provenance = {**self.job.spec.provenance, "run": self.job.run, "epochs": sorted(chosen)}
        spec = self.job.spec.model_copy(update={"provenance": provenance})
        with tempfile.TemporaryDirectory() as folder:
            save_bundle(Path(folder), spec, weights)
            for name in ("model.safetensors", "bundle.json"):
                self.output.write_file(f"model/{name}", Path(folder) / name)
        result = {
            **asdict(self.state),
            "parameters": self.model.num_parameters(),
            "averaged_epochs": sorted(chosen),
            "valid": final,
            "device": str(self.device),
        }
        self.journal.write("end", step=self.state.step, **{f"valid_{k}": v for k, v in final.items()})
        self.output.write_json("result.json", result)
        return result
