"""Checks a training's configuration before anything starts; errors name the field and the remedy."""

import ipaddress
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from speech.lm import NetworkConfig, check_sources
from speech.models import ModelConfig, PretrainedConfig
from storage.index import ShardIndex
from storage.objects import ObjectStore
from tasks.config.home import work_folder
from tasks.config.lm_training import lm_training
from tasks.dataset.manifest import iter_manifest, scratch_folder
from tasks.dataset.sets import is_trained
from tasks.orchestration.nodes_api import check_pool
from tasks.stages.base import Run, StageError, stages_of
from tasks.stages.decoder_files import check_decoder_files, check_files
from tasks.stages.folds import is_tested
from tasks.stages.prepare import PREPARE
from tasks.stages.run_sets import check_scored_sets, set_url
from tasks.stages.tuning import check_tuning
from training.config import TrainConfig
from training.learner.sampling import check_weights

if TYPE_CHECKING:
    from devices.choice import Inventory

_log = logging.getLogger(__name__)
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:]+\]|[^:\[\]\s/]+):(?P<port>[0-9]{1,5})")


def run_preflight(run: Run) -> None:
    """Check that a training can work on this configuration and these machines.

    Raises:
        StageError: If it cannot; the message names the field and the remedy.
    """
    cfg = run.config.train
    # before training, so that what is missing is reported before hours of work, not after
    check_decoder_files(run.config.decode)
    for lm in filter(None, (run.config.lm, run.config.rescoring)):
        check_sources(lm)
        if isinstance(lm, NetworkConfig):
            check_devices(lm_training(run.config.lm_train))
    if run.config.lm is not None:
        check_files(run.config.lexicon, "lexicon")
    check_tuning(run)
    check_launch(cfg)
    check_devices(cfg)
    check_layers(cfg, check_model(run))
    check_shards(cfg, set_url(run, "train"))
    if cfg.launch.kind == "prefect":
        check_pool(cfg.launch.pool, run.config.name)


def check_names(run: Run) -> None:
    """Check the sets and groups that a configuration names, as soon as the stage `prepare` has found those of the data.

    Raises:
        StageError: If `score.sets` names a set that the data have not.
        SamplingError: If the weights of `train.sampling` are not those of the training set's groups.
    """
    present = sorted(PREPARE.record(run)["sets"])
    check_scored_sets(run.config, present, of_corpus=run.bundle is not None)
    sampling, data = run.config.train.sampling, run.config.data
    # copies at other speeds are made later, as other speakers
    if sampling.kind != "weights" or "train" not in stages_of(run.config) or (sampling.by == "speaker" and data.speeds):
        return
    with scratch_folder(work_folder("names", run.run_id)) as folder:
        rows = iter_manifest(run.result("prepare").store, folder, columns=["set", sampling.by])
        trained = {row[sampling.by] for row in rows if is_trained(row["set"]) and not is_tested(row["set"], data)}
    if trained:
        check_weights(sampling, trained)


def split_address(text: str, field: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 address is in brackets.

    Raises:
        StageError: If the text has another form.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or int(match["port"]) > 65535:
        raise StageError(f"{field} is {text!r}: write HOST:PORT, such as 127.0.0.1:0 or [::1]:7100 (port 0 to 65535)")
    return match["host"].strip("[]"), int(match["port"])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host's address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_launch(cfg: TrainConfig) -> None:
    """Check the coordinator's address and the ring's key.

    Raises:
        StageError: If the address is invalid, or other machines can reach it and no key or encryption is configured.
    """
    launch = cfg.launch
    host, _ = split_address(launch.listen, "train.launch.listen")
    if not is_loopback(host):
        if not launch.key_file:
            raise StageError(
                f"train.launch.listen is {launch.listen}, which other machines can reach: make a key with `starling "
                "key FILE`, copy it to every machine, and name it in train.launch.key_file"
            )
        if not cfg.exchange.encrypt:
            raise StageError(
                f"train.exchange.encrypt is false and train.launch.listen is {launch.listen}, which other machines "
                "can reach: set train.exchange.encrypt to true, or listen on 127.0.0.1"
            )
    if launch.key_file:
        check_key_file(Path(launch.key_file), "train.launch.key_file")


def check_key_file(path: Path, field: str) -> None:
    """Check that the file of the ring's key exists, is readable, and contains a key.

    Raises:
        StageError: If not.
    """
    from training.processes.keys import RingKey

    remedy = "make one with `starling key FILE`, the same for every machine"
    if not path.is_file():
        raise StageError(f"{field} is {path}, which is no file: {remedy}")
    if not os.access(path, os.R_OK):
        raise StageError(f"{field} is {path}, which this user cannot read: change its owner, or {remedy}")
    try:
        RingKey.load(path)
    except ValueError as error:
        raise StageError(f"{field}: {error}") from error


def check_devices(cfg: TrainConfig, machine: "Inventory | None" = None) -> None:
    """Check that there are GPUs for the learners of a local node, if GPUs are to be used.

    Args:
        cfg: Configuration of the training.
        machine: GPUs of this machine; detected by default.

    Raises:
        StageError: If there are none although `train.device` requires them, or too few for a strategy whose learners
            cannot share one.
    """
    if cfg.launch.kind != "local" or cfg.device == "cpu" or cfg.traits.shared:
        return
    from devices.choice import inventory, pick_device
    from training.strategies.pipeline import GPU_EACH

    machine = machine or inventory()
    if machine.trouble and cfg.device == "auto":
        _log.warning("train.device is 'auto' and training runs on the CPU: %s", machine.trouble)
    try:
        pick_device(cfg.device, 0, machine)
    except ValueError as error:
        raise StageError(str(error)) from error
    if not 0 < machine.gpus < cfg.learners_per_node:
        return
    shortage = f"a node has {cfg.learners_per_node} learners on this machine, which has {machine.gpus} GPU(s)"
    if cfg.traits.split:
        raise StageError(f"{shortage}, and {GPU_EACH}")
    _log.warning(
        "%s: they share, and average gradients by Gloo in main memory instead of NCCL; for speed use at most as many "
        "learners as GPUs (train.learners_per_node)",
        shortage,
    )


def check_model(run: Run) -> ModelConfig:
    """Check that what training begins with is there and fits, and that features are those of a pretrained encoder.

    Returns:
        The model's configuration with all its sizes.

    Raises:
        StageError: If not; the message names the field and the remedy.
    """
    config = run.config
    if "train" not in stages_of(config) or not (config.train.init or isinstance(config.model, PretrainedConfig)):
        return config.model
    from tasks.stages.initial import check_initial, model_config  # imports torch and MLflow

    check_initial(run)
    return model_config(run)


def check_layers(cfg: TrainConfig, model: ModelConfig) -> None:
    """Check that the model can be split into as many parts as a pipeline has learners.

    Args:
        cfg: The training.
        model: The model, with all its sizes.

    Raises:
        StageError: If it cannot, or has fewer layers.
    """
    if not cfg.traits.split or cfg.learners_per_node == 1:
        return
    if model.unsplit:
        raise StageError(model.unsplit)
    if model.layers < cfg.learners_per_node:
        raise StageError(
            f"train.learners_per_node is {cfg.learners_per_node} but model.layers is {model.layers}, and every learner "
            f"of a pipeline needs a layer: use train.learners_per_node={model.layers} or fewer, or raise model.layers"
        )


def check_shards(cfg: TrainConfig, train_url: str) -> None:
    """Check that there is at least one training shard for every node, since nodes lease shards.

    Raises:
        StageError: If there are fewer.
    """
    if cfg.nodes == 1:
        return
    shards = len(ShardIndex.read(ObjectStore(train_url)).shards)
    if shards < cfg.nodes:
        raise StageError(
            f"train.nodes is {cfg.nodes} but the training set has only {shards} shard(s), and every node needs one: "
            f"lower storage.shard_seconds to get more shards, or use train.nodes={shards} or fewer"
        )
