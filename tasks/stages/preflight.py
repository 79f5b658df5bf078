"""Whether a training can work as it is configured: found out before anything starts, with the field and the remedy."""

import ipaddress
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from storage.index import ShardIndex
from storage.objects import ObjectStore
from tasks.orchestration.nodes_api import check_pool
from tasks.stages.base import Run, StageError
from tasks.stages.decoder_files import check_files
from tasks.stages.features import set_url
from training.config import TrainConfig

if TYPE_CHECKING:
    from training.learner.devices import Inventory

_log = logging.getLogger(__name__)
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:]+\]|[^:\[\]\s/]+):(?P<port>[0-9]{1,5})")


def check_world(run: Run) -> None:
    """Refuse a training that cannot work.

    Raises:
        StageError: The message names the field and the remedy.
    """
    cfg = run.config.train
    check_files(run.config.decode)  # what is missing after hours of training could have been named before
    check_launch(cfg)
    check_devices(cfg)
    check_layers(cfg, run.config.model.layers)
    check_shards(cfg, set_url(run, "train"))
    if cfg.launch.kind == "prefect":
        check_pool(cfg.launch.pool, run.config.name)


def split_address(text: str, field: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 address stands in brackets.

    Raises:
        StageError: If the text is no such thing.
    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or int(found["port"]) > 65535:
        raise StageError(f"{field} is {text!r}: write HOST:PORT, such as 127.0.0.1:0 or [::1]:7100 (port 0 to 65535)")
    return found["host"].strip("[]"), int(found["port"])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host's address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_launch(cfg: TrainConfig) -> None:
    """The coordinator's address and the ring's key.

    Raises:
        StageError: If the address is none, or others could reach it who need no key.
    """
    launch = cfg.launch
    host, _ = split_address(launch.listen, "train.launch.listen")
    if not is_loopback(host):
        if not launch.key_file:
            raise StageError(
                f"train.launch.listen is {launch.listen}, which other machines reach: make a key with `starling key "
                "FILE`, give it to every machine, and name it in train.launch.key_file"
            )
        if not cfg.exchange.encrypt:
            raise StageError(
                f"train.exchange.encrypt is false and train.launch.listen is {launch.listen}, which other machines "
                "reach: leave train.exchange.encrypt true, or listen on 127.0.0.1"
            )
    if launch.key_file:
        check_key_file(Path(launch.key_file), "train.launch.key_file")


def check_key_file(path: Path, field: str) -> None:
    """The file of the ring's key must be there and readable.

    Raises:
        StageError: If it is not.
    """
    from training.processes.keys import RingKey

    remedy = "make one with `starling key FILE`, the same for every machine"
    if not path.is_file():
        raise StageError(f"{field} is {path}, where there is no file: {remedy}")
    if not os.access(path, os.R_OK):
        raise StageError(f"{field} is {path}, which this user may not read: change its owner, or {remedy}")
    try:
        RingKey.load(path)
    except ValueError as error:
        raise StageError(f"{field}: {error}") from error


def check_devices(cfg: TrainConfig, found: "Inventory | None" = None) -> None:
    """A GPU for each learner of a local node, wherever GPUs would be used.

    Args:
        cfg: The training.
        found: GPUs of this machine, by default looked up.

    Raises:
        StageError: If there are fewer, or none where they are demanded.
    """
    if cfg.launch.kind != "local" or cfg.device == "cpu" or cfg.traits.shared:
        return
    from training.learner.devices import inventory, rank_device

    found = found or inventory()
    if found.trouble and cfg.device == "auto":
        _log.warning("train.device is 'auto' and training runs on the CPU: %s", found.trouble)
    try:
        rank_device(cfg.device, 0, cfg.learners_per_node, found)
    except ValueError as error:
        raise StageError(str(error)) from error


def check_layers(cfg: TrainConfig, layers: int) -> None:
    """At least one layer of the model for every learner of a pipeline.

    Raises:
        StageError: If there are fewer.
    """
    if cfg.traits.split and layers < cfg.learners_per_node:
        raise StageError(
            f"train.learners_per_node is {cfg.learners_per_node} but model.layers is {layers}, and every learner of a "
            f"pipeline needs a layer: use train.learners_per_node={layers} or fewer, or raise model.layers"
        )


def check_shards(cfg: TrainConfig, train_url: str) -> None:
    """At least one training shard for every node: shards are what nodes lease.

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
