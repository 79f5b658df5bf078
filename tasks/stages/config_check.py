"""Checks of a configuration before a run: files, folders, devices and addresses that it names; nothing is computed."""

from collections.abc import Callable, Iterator
from pathlib import Path

from speech.lm import check_sources
from storage.corpora.base import CorpusError
from storage.objects import ObjectNameError, ObjectStore
from tasks.config.home import objects_url
from tasks.config.pipeline import ConfigError, PipelineConfig
from tasks.dataset.sets import check_strata
from tasks.stages.base import Run
from tasks.stages.decoder_files import check_decoder_files, check_files
from tasks.stages.preflight import check_devices, check_launch, check_layers, check_model
from tasks.stages.prepare import CHECKED_SCHEMA
from tasks.stages.run_sets import check_scored_sets
from tasks.stages.sources import source_problems


def find_problems(config: PipelineConfig) -> list[str]:
    """What would stop a run of a configuration on this machine, as far as it can be seen beforehand.

    Returns:
        A message for each problem, with the field and the remedy.
    """
    return source_problems(config) + [problem for check in _checks(config) if (problem := _error_of(check))]


def _checks(config: PipelineConfig) -> Iterator[Callable[[], object]]:
    lm = config.lm
    yield lambda: check_strata(config.data, CHECKED_SCHEMA.names)
    yield lambda: _check_scored_sets(config)
    yield lambda: _check_store(config.storage.url)
    yield lambda: check_decoder_files(config.decode)
    yield lambda: check_files(config.lexicon, "lexicon")
    if lm is not None:
        yield lambda: check_sources(lm)
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
