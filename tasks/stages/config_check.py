"""Checks of a configuration before a run: files, folders, devices and addresses that it names; nothing is computed."""

from collections.abc import Callable, Iterator
from pathlib import Path

from speech.lm import check_sources
from storage.corpora.base import CorpusError
from tasks.config.mistakes import listed
from tasks.config.pipeline import ConfigError, PipelineConfig
from tasks.dataset.sources import SourceConfig
from tasks.stages.decoder_files import check_files
from tasks.stages.preflight import check_devices, check_launch, check_layers
from tasks.stages.sources import open_numbered


def find_problems(config: PipelineConfig) -> list[str]:
    """What would stop a run of a configuration on this machine, as far as it can be seen beforehand.

    Returns:
        A message for each problem, with the field and the remedy.
    """
    return _of_sources(config) + [problem for check in _checks(config) if (problem := _error_of(check))]


def check_sources_open(config: PipelineConfig, name: str) -> None:
    """Check that all sources of a configuration can be read, before anything is started for a run.

    Args:
        config: The configuration.
        name: Its file, for the message.

    Raises:
        ConfigError: If one cannot; the message is that of `starling config check`.
    """
    if problems := _of_sources(config):
        raise ConfigError(listed(name, problems))


def _of_sources(config: PipelineConfig) -> list[str]:
    problems = [_of_source(number, source) for number, source in enumerate(config.data.sources)]
    return [problem for problem in problems if problem]


def _checks(config: PipelineConfig) -> Iterator[Callable[[], object]]:
    lm = config.lm
    yield lambda: check_files(config.decode)
    yield lambda: check_files(config.lexicon, "lexicon")
    if lm is not None:
        yield lambda: check_sources(lm)
    yield lambda: _check_recordings(config)
    yield lambda: check_launch(config.train)
    yield lambda: check_devices(config.train)
    yield lambda: check_layers(config.train, config.model.layers)


def _error_of(check: Callable[[], object]) -> str:
    """Message of the error that a check raises; empty if it passes."""
    try:
        check()
    except (ValueError, RuntimeError, OSError) as error:
        return str(error)
    return ""


def _check_recordings(config: PipelineConfig) -> None:
    missing = [name for name in config.train.augment.file_lists() if not Path(name).expanduser().exists()]
    if missing:
        raise CorpusError(f"train.augment names {', '.join(missing)}, which is not there: correct the path")


def _of_source(number: int, source: SourceConfig) -> str:
    """What is wrong with a source: it is opened, and its first utterance is looked up; empty if nothing is wrong."""
    if source.kind == "synthetic":
        return ""
    place = f"data.sources.{number}"
    try:
        reader = open_numbered(number, source)
        if next(iter(reader), None) is not None:
            return ""
    except (ValueError, RuntimeError, OSError) as error:
        return str(error) if isinstance(error, ConfigError) else f"{place}: {error}"
    example = f"; the first of {len(reader.problems)} problems: {reader.problems[0].detail}" if reader.problems else ""
    return f"{place}: {source.path} has no utterance{example}. `starling corpus inspect` shows what is in it"
