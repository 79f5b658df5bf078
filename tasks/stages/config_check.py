"""Checks of a configuration before a run: files, folders, devices and addresses that it names; nothing is computed.

`starling config check` makes them all, and imports no stage for them.
"""

import ipaddress
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configurable.wording import similar
from speech.lm import check_sources
from speech.models import ModelConfig, PretrainedConfig
from storage.corpora.base import CorpusError
from storage.objects import ObjectNameError, ObjectStore
from tasks.config.home import objects_url
from tasks.config.pipeline import ConfigError, PipelineConfig
from tasks.stages.base import Run, StageError, stages_of
from tasks.stages.decoder_files import check_decoder_files, check_files
from tasks.stages.sources import source_problems
from training.config import TrainConfig

if TYPE_CHECKING:
    from devices.choice import Inventory

_log = logging.getLogger(__name__)
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:]+\]|[^:\[\]\s/]+):(?P<port>[0-9]{1,5})")


def find_problems(config: PipelineConfig) -> list[str]:
    """What would stop a run of a configuration on this machine, as far as it can be seen beforehand.

    Returns:
        A message for each problem, with the field and the remedy.
    """
    return source_problems(config) + [problem for check in _checks(config) if (problem := _error_of(check))]


def _checks(config: PipelineConfig) -> Iterator[Callable[[], object]]:
    yield lambda: _check_strata(config)
    yield lambda: _check_scored_sets(config)
    yield lambda: _check_store(config.storage.url)
    yield lambda: check_decoder_files(config.decode)
    yield lambda: check_files(config.lexicon, "lexicon")
    for lm in filter(None, (config.lm, config.rescoring)):
        yield partial(check_sources, lm)
    yield lambda: _check_recordings(config)
    yield lambda: check_launch(config.train)
    yield lambda: check_devices(config.train)
    yield lambda: check_layers(config.train, check_model(Run(config, "check")))


def _error_of(check: Callable[[], object]) -> str:
    """Message of the error that a check raises; empty if it passes."""
    try:
        check()
    except (ValueError, RuntimeError, OSError) as error:
        return str(error)
    return ""


def _check_store(configured: str) -> None:
    try:
        ObjectStore(objects_url(configured))
    except ObjectNameError as error:
        raise ConfigError(f"{'storage.url' if configured else 'STARLING_OBJECTS'}: {error}") from error


def _check_recordings(config: PipelineConfig) -> None:
    missing = [name for name in config.train.augment.file_lists() if not Path(name).expanduser().exists()]
    if missing:
        raise CorpusError(f"train.augment names {', '.join(missing)}, which is not there: correct the path")


def _check_scored_sets(config: PipelineConfig) -> None:
    """Check `score.sets` where the configuration names all sets; else they are known once the data are prepared."""
    named = {source.set for source in config.data.sources}
    if "" not in named and not config.data.folds:
        check_scored_sets(config, sorted(named))


def _check_strata(config: PipelineConfig) -> None:
    if config.data.stratify:
        from tasks.dataset.sets import check_strata  # these import pyarrow
        from tasks.stages.prepare import CHECKED_SCHEMA

        check_strata(config.data, CHECKED_SCHEMA.names)


def check_scored_sets(config: PipelineConfig, present: Sequence[str], *, of_corpus: bool = False) -> None:
    """Check that the sets of `score.sets` are among those of the data.

    Args:
        config: The configuration.
        present: Sets of the data.
        of_corpus: Whether `starling evaluate` names them, which scores the parts of a corpus.

    Raises:
        StageError: If one is not.
    """
    for name in config.score.sets:
        if name in present:
            continue
        if of_corpus:
            raise StageError(
                f"the corpus has no part of its own that is called {name!r}, only {', '.join(present)}: leave out "
                "--split to score all of it. Sets that a run has made by dividing it are scored by that run alone"
            )
        hint = f"; did you mean {near!r}?" if (near := similar(name, present)) else ""
        raise StageError(f"score.sets names {name!r}, but the data has only {', '.join(present)}{hint}")


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
    from devices.choice import check_device, inventory
    from training.strategies.pipeline import GPU_EACH

    machine = machine or inventory()
    if machine.trouble and cfg.device == "auto":
        _log.warning("train.device is 'auto' and training runs on the CPU: %s", machine.trouble)
    try:
        check_device(cfg.device, machine)
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
