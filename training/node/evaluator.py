"""Averages the replicas of each finished epoch, validates the average and every replica's loss, and makes the model.

It is a separate process, so learners never wait for it. It reads replicas from the object store and reports results to
the coordinator.
"""

import argparse
import logging
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from devices.choice import claim, is_out_of_memory, release_memory, spare_device
from storage.batching import derive_seed
from storage.objects import ObjectMissingError, ObjectStore
from storage.quarantine import TooManyShardsError
from training.coordinator.messages import (
    EvaluatedRequest,
    EvaluationsRequest,
    FinalResult,
    FinishedRequest,
    Reply,
    Request,
    StatusRequest,
    replica_name,
)
from training.job import TrainJob
from training.learner.checkpoint import (
    COMPUTE,
    best_epochs,
    evaluation_name,
    mean_weights,
    prune_snapshots,
    read_weights,
    snapshot_name,
    write_weights,
)
from training.learner.compute import open_set, use_threads
from training.learner.flat import split_average
from training.learner.trained import initial_network
from training.node.rank import DIVERGED
from training.processes import logs
from training.processes.children import end_with_parent, exit_at_once
from training.processes.exit_reason import run_with_reason
from training.processes.signs import Signs

log = logging.getLogger(__name__)
POLL_S = 0.3
_COMPARED = ("loss", "wer")
"""Figures of what the final model is not made of."""
_APART = 0.9
"""A replica whose loss is below this fraction of the average's loss replaces the average."""
Weights = dict[str, Tensor]
T = TypeVar("T")


class NoModelError(RuntimeError):
    """Training left no model with finite numbers."""


def is_finite(weights: Weights) -> bool:
    """Whether all weights are finite numbers."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in weights.values() if tensor.is_floating_point())


class Evaluator:
    """Validates weights of one job.

    Args:
        job: What is being trained.
    """

    def __init__(self, job: TrainJob) -> None:
        self.job, self.cfg = job, job.train
        use_threads(self.cfg.threads)
        # learners on the same machine get the first GPUs; launched externally, they may run on other machines
        self.device = spare_device(self.cfg.device, self.cfg.learners if self.cfg.launch.kind == "local" else 0)
        self.output = ObjectStore(job.output_url)
        self.task = job.known_task.build(job.seed)
        self.valid_set = open_set(job, "valid")
        self.initial = initial_network(job)
        self.model = self.initial.network.eval()
        self._or_on_cpu(self._place)

    def _place(self) -> None:
        claim(self.device)
        self.task.to(self.device)
        self.model.to(self.device)

    def _or_on_cpu(self, work: Callable[[], T]) -> T:
        """Run `work`; if the GPU, which learners may share, is out of memory, move to the CPU for good and rerun it."""
        try:
            return work()
        except RuntimeError as error:
            if self.device.type == "cpu" or not is_out_of_memory(error):
                raise
            log.warning("%s is out of memory: validation continues on the CPU: %s", self.device, error)
        # outside the handler: the error's traceback keeps tensors alive
        gpu, self.device = self.device, torch.device("cpu")
        self._place()
        release_memory(gpu)
        return work()

    def validate(self, weights: Weights, loss_only: bool = False) -> dict[str, float]:
        """What `Task.validate` gives: the loss in nats, NaN if the outputs are not finite, and further figures."""
        self.model.load_state_dict(weights)
        try:
            return self._or_on_cpu(partial(self._validate, loss_only))
        finally:
            release_memory(self.device)  # a learner may need it

    def _validate(self, loss_only: bool) -> dict[str, float]:
        # dither draws random numbers: seed them, so that results do not depend on earlier calls
        torch.manual_seed(derive_seed("valid", self.job.seed))
        return self.task.validate(self.model, self.valid_set, self.cfg, self.device, loss_only)

    def evaluate(self, epoch: int, nodes: list[int]) -> dict[str, Any]:
        """Average the replicas of an epoch that have finite weights, validate the average, and each replica's loss.

        Args:
            epoch: The epoch, from 1.
            nodes: Nodes whose replicas were written.

        Returns:
            `loss` and `wer` of the average (None if no replica is finite), and `replicas`, each node's loss.
        """
        try:
            result = self._evaluate(epoch, nodes)
        except ObjectMissingError:
            # evaluated already, before the training resumed from an older checkpoint
            return self._earlier(epoch, nodes)
        self.output.write_json(evaluation_name(epoch), result)
        return result

    def _earlier(self, epoch: int, nodes: list[int]) -> dict[str, Any]:
        """Result of an earlier evaluation of an epoch whose replicas are deleted."""
        try:
            return dict(self.output.read_json(evaluation_name(epoch)))
        except ObjectMissingError:
            log.warning("the replicas of epoch %d are missing: the final model cannot use it", epoch)
            return _nothing(epoch, nodes)

    def _evaluate(self, epoch: int, nodes: list[int]) -> dict[str, Any]:
        """Validate, and save the average, or the best replica if that is much better."""
        sound, others = self._replicas(epoch, nodes)
        if not sound:
            return _nothing(epoch, nodes)
        average = mean_weights(sound.values())
        result = self.validate(average)
        # the losses show how far apart they are; to recognize the set with each would cost many times as much
        losses = {
            node: (result if len(sound) == 1 else self.validate(weights, loss_only=True))["loss"]
            for node, weights in sound.items()
        }
        replicas = {str(node): None for node in nodes} | {str(node): loss for node, loss in losses.items()}
        best = min(losses, key=lambda node: _or_infinite(losses[node]))
        if _far_apart(result["loss"], losses[best]):
            # replicas that have not exchanged for long are unrelated models, and their mean is not a useful one
            log.warning(
                "the replicas of epoch %d are far apart: node %d alone is better than their average", epoch, best
            )
            average, result = sound[best], self.validate(sound[best])
        write_weights(self.output, snapshot_name(epoch), average)
        if others:
            kind = "weights" if self.cfg.final == "ema" else "ema"
            figures = self.validate(mean_weights(others)).items()
            result = {**result, **{f"{kind}_{name}": value for name, value in figures if name in _COMPARED}}
        return {"epoch": epoch, **{k: _number(v) for k, v in result.items()}, "replicas": _numbers(replicas)}

    def _replicas(self, epoch: int, nodes: list[int]) -> tuple[dict[int, Weights], list[Weights]]:
        """What the final model is made of, of each node whose replica is finite, and what it is not made of.

        The latter are the moving averages of weights if `train.final` asks for these, or the other way round; none if
        no averages are kept.
        """
        sound: dict[int, Weights] = {}
        others: list[Weights] = []
        for node in nodes:
            weights = read_weights(self.output, replica_name(epoch, node))
            if not is_finite(weights):
                log.warning("the replica of node %d at epoch %d is not finite and is left out", node, epoch)
                continue
            own, averaged = split_average(weights)
            sound[node], other = (averaged, own) if self.cfg.final == "ema" else (own, averaged)
            others += [other] if other else []
        return sound, others

    def finish(self, totals: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
        """Write the final model: the average over learners, and over the best `train.average` epochs.

        If the best epoch alone is much better than the average, its weights are the final model.

        Args:
            totals: Counters for `result.json`.
            history: Results of `evaluate`, one per epoch.

        Returns:
            The content of `result.json`.

        Raises:
            NoModelError: If no epoch gave finite numbers.
        """
        usable = [entry for entry in history if entry.get("loss") is not None]
        # after a resume, an epoch may be among the best again although its weights have been deleted
        usable = [entry for entry in usable if self.output.exists(snapshot_name(int(entry["epoch"])))]
        if not usable:
            raise NoModelError(
                "no epoch gave a model with finite numbers: lower train.optimizer.lr, lengthen "
                "train.schedule.warmup_epochs, or raise train.max_minutes or train.max_utterances"
            )
        chosen = best_epochs(usable, self.cfg.average)
        weights = mean_weights(read_weights(self.output, snapshot_name(epoch)) for epoch in sorted(chosen))
        final = self.validate(weights)
        lowest = min(float(entry["loss"]) for entry in usable)
        if _far_apart(final["loss"], lowest):
            log.warning(
                "the best epochs' weights are far apart: epoch %d alone is better than their average", chosen[0]
            )
            chosen = chosen[:1]
            weights = read_weights(self.output, snapshot_name(chosen[0]))
            final = self.validate(weights)
        task = self.job.known_task
        with tempfile.TemporaryDirectory() as folder:
            task.save(Path(folder), self.initial.whole(weights), {"run": self.job.run, "epochs": sorted(chosen)})
            for name in task.members:
                self.output.write_file(f"model/{name}", Path(folder) / name)
        result = {
            **totals,
            "history": history,
            "parameters": self.initial.num_weights,
            "trained_parameters": self.initial.num_trained,
            "averaged_epochs": sorted(chosen),
            "valid": final,
            **self._computed(),
            "strategy": self.cfg.strategy.kind,
            "nodes": self.cfg.nodes,
            "learners_per_node": self.cfg.learners_per_node,
        }
        self.output.write_json("result.json", result)
        return result

    def _computed(self) -> dict[str, str]:
        """Devices and precisions that the learners recorded."""
        notes = [self.output.read_json(name) for name in self.output.list(COMPUTE)]
        return {name: "; ".join(sorted({str(note[name]) for note in notes})) for name in ("device", "precision")}


def _nothing(epoch: int, nodes: list[int]) -> dict[str, Any]:
    return {"epoch": epoch, "loss": None, "wer": None, "replicas": {str(node): None for node in nodes}}


def _far_apart(mean: float, best: float) -> bool:
    """Whether the best of several models has a much lower loss than their mean."""
    return best < _APART * _or_infinite(mean)


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else _number(value) for name, value in values.items()}


class Ask(Protocol):
    """Sends a request to the coordinator and returns its reply."""

    def __call__(self, request: Request[Reply]) -> Reply:
        """Ask."""


def run(evaluator: Evaluator, ask: Ask) -> str:
    """Evaluate epochs as they become ready, until training is over.

    Args:
        evaluator: Evaluator of the job.
        ask: Sends a request to the coordinator.

    Returns:
        Why training ended.
    """
    while True:
        reply = ask(EvaluationsRequest())
        for item in reply.ready:
            result = evaluator.evaluate(item.epoch, list(item.nodes))
            history = ask(EvaluatedRequest(epoch=item.epoch, result=result)).history
            best = best_epochs([entry for entry in history if entry.get("loss") is not None], evaluator.cfg.average)
            if reply.finish != "limit":  # then a longer training may continue, for which half an epoch does not count
                # later epochs were trained before a resume: their results may be needed again
                prune_snapshots(evaluator.output, {*best, *range(item.epoch + 1, evaluator.cfg.epochs + 1)})
            evaluator.output.delete_tree(f"replicas/epoch-{item.epoch:04d}")
            log.info("epoch %d: %s", item.epoch, result)
        status = ask(StatusRequest())
        if status.finish not in ("", "done", "limit") or status.result:
            return status.finish
        if status.finish and not status.to_evaluate:
            result = evaluator.finish(status.totals, list(status.history))
            ask(FinishedRequest(result=FinalResult(step=result["step"], valid=result["valid"])))
            return status.finish
        time.sleep(POLL_S)


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m training.node.evaluator`."""
    parser = argparse.ArgumentParser(prog="training.node.evaluator", description="Validate the replicas of a training.")
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--key-file", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(argv)
    end_with_parent(args.parent)
    logs.setup("evaluator")
    from training.coordinator.client import CoordinatorClient
    from training.processes.keys import RingKey

    job = TrainJob.model_validate_json(args.job.read_bytes())
    # the supervisor waits for this process, long after the learners have ended, as long as it computes
    torch.nn.modules.module.register_module_forward_hook(Signs(args.job.parent).give)
    client = CoordinatorClient(args.coordinator, RingKey.load(args.key_file) if args.key_file else None)
    evaluator = Evaluator(job)
    patience_s = job.train.membership.coordinator_patience_s
    try:
        why = run(evaluator, partial(client.request, patience_s=patience_s))
        if why.startswith("failed"):
            log.error("training has %s", why)
            return DIVERGED
    except (NoModelError, TooManyShardsError) as error:
        log.error("%s", error)
        return DIVERGED
    finally:
        client.close()
    return 0


if __name__ == "__main__":
    exit_at_once(run_with_reason(main, DIVERGED))
