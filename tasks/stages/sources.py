"""Opens the sources of a configuration: readers of corpora, and of speech that is synthesized first."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from speech.synthesis import SynthesizerMissingError
from speech.synthesis.corpus import SynthesisConfig, synthesize_corpus
from storage.corpora import Utterance, open_corpus
from storage.corpora.base import CorpusError, CorpusReader
from storage.corpora.tags import Tags
from storage.locks import file_lock
from storage.stages import digest_json
from tasks.config.home import home
from tasks.config.mistakes import listed
from tasks.config.pipeline import ConfigError, PipelineConfig
from tasks.dataset.sources import SourceConfig
from tasks.stages import progress
from tasks.stages.base import LOCK_WAIT_S, StageError
from tasks.stages.quarantined import EXAMPLES


def synthetic_table(source: SourceConfig) -> Path:
    """Path of a synthetic source's table, whether it exists or not."""
    config = source.synthesis or SynthesisConfig()
    return home() / "corpora" / f"synthetic-{digest_json(config.model_dump(mode='json'))[:16]}" / "metadata.csv"


def open_source(source: SourceConfig) -> CorpusReader:
    """Open the reader of a configured source; synthesizes speech into the data folder first, if necessary."""
    if source.kind == "synthetic":
        config, table = source.synthesis or SynthesisConfig(), synthetic_table(source)
        folder = table.parent
        with file_lock(folder.with_suffix(".lock"), LOCK_WAIT_S):  # several runs synthesize the same speech once
            try:
                synthesize_corpus(
                    config, folder, lambda done, total: progress.report("prepare", done, total, "synthesizing")
                )
            except SynthesizerMissingError as error:
                raise StageError(f"data.sources: kind synthetic: {error}") from error
        name = source.corpus or "synthetic"
        return open_corpus("table", str(table), corpus=name, domain=source.domain, language=source.language)
    if unset := re.search(r"\$\{?(\w+)", source.path):
        raise ConfigError(
            f"data.sources: the path {source.path!r} needs the environment variable {unset[1]}: export "
            f"{unset[1]}=FOLDER, or write the path itself"
        )
    options: dict[str, Any] = {**source.options, **({"where": source.where} if source.where else {})}
    return open_corpus(
        source.kind,
        source.path,
        corpus=source.corpus,
        domain=source.domain,
        language=source.language,
        **options,
    )


def open_numbered(number: int, source: SourceConfig) -> CorpusReader:
    """Open the reader of a configuration's source.

    Raises:
        ConfigError: If it cannot be opened; the message names the source by its number.
    """
    try:
        return open_source(source)
    except (ConfigError, CorpusError) as error:
        raise ConfigError(f"data.sources.{number}: {str(error).removeprefix('data.sources: ')}") from error


def select(source: SourceConfig, reader: Iterable[Utterance]) -> Iterator[Utterance]:
    """The utterances selected by a source's fields, with the set that the source assigns, if any."""

    def wanted(utterance: Utterance) -> bool:
        only, without = source.speakers, source.exclude_speakers
        return (not only or utterance.speaker in only) and utterance.speaker not in without

    chosen = (u for u in reader if wanted(u))
    for utterance in islice(chosen, source.limit) if source.limit else chosen:
        yield replace(utterance, split=source.set) if source.set or not source.own_split else utterance


def left_out(readers: Iterable[CorpusReader]) -> dict[str, Any]:
    """What readers have left out: `tags` of transcripts with their counts, and files that are `passed_over`.

    Args:
        readers: Readers whose utterances have been read.
    """
    tags, kinds, first = Tags(), Counter[str](), list[str]()
    for reader in readers:
        for tag, count in reader.tags.counts.items():
            tags.add(tag, count)
        passed = reader.passed_over()
        kinds += passed.kinds
        first += passed.first
    files = {"files": kinds.total(), "kinds": dict(kinds.most_common()), "first": first[:EXAMPLES]}
    return {"tags": dict(tags.counts.most_common()), "passed_over": files}


def source_problems(config: PipelineConfig) -> list[str]:
    """What is wrong with the sources of a configuration, a message for each that cannot be read."""
    problems = [_of_source(number, source) for number, source in enumerate(config.data.sources)]
    return [problem for problem in problems if problem]


def check_sources_open(config: PipelineConfig, name: str) -> None:
    """Check that all sources of a configuration can be read, before anything is started for a run.

    Args:
        config: The configuration.
        name: Its file, for the message.

    Raises:
        ConfigError: If one cannot; the message is that of `starling config check`.
    """
    if problems := source_problems(config):
        raise ConfigError(listed(name, problems))


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
