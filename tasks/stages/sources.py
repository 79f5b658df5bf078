"""Opens the sources of a configuration: readers of corpora, and of speech that is synthesized first."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from configurable.addresses import address_content
from configurable.wording import nearest
from speech.synthesis import SynthesizerMissingError
from speech.synthesis.corpus import SynthesisConfig, synthesize_corpus
from storage.corpora import Utterance, open_corpus
from storage.corpora.base import CorpusError, CorpusReader, RejectedEntry
from storage.corpora.tags import Tags
from storage.locks import file_lock
from storage.stages import digest_json
from tasks.config.home import home
from tasks.config.mistakes import listed
from tasks.config.pipeline import ConfigError, PipelineConfig
from tasks.dataset.sources import SourceConfig
from tasks.dataset.splits import TRAIN
from tasks.locking.slots import WaitNotice
from tasks.stages import progress
from tasks.stages.base import LOCK_WAIT_S, StageError, said_as

EXAMPLES = 3
"""Entries of each reason that are named."""
_LOOKED_AT = 100_000
"""Number of utterances of a source that are looked at before a run."""


def synthetic_table(source: SourceConfig) -> Path:
    """Path of a synthetic source's table, whether it exists or not."""
    config = source.synthesis or SynthesisConfig()
    return home() / "corpora" / f"synthetic-{digest_json(address_content(config))[:16]}" / "metadata.csv"


def open_source(source: SourceConfig) -> CorpusReader:
    """Open the reader of a configured source; synthesizes speech into the data folder first, if necessary."""
    if source.kind == "synthetic":
        config, table = source.synthesis or SynthesisConfig(), synthetic_table(source)
        folder = table.parent
        notice = WaitNotice("the synthetic speech", said_as("prepare"))
        # several runs synthesize the same speech once
        with file_lock(folder.with_suffix(".lock"), LOCK_WAIT_S, on_wait=notice.wait):
            try:
                synthesize_corpus(
                    config, folder, lambda done, total: progress.report("prepare", done, total, "synthesizing")
                )
            except SynthesizerMissingError as error:
                raise StageError(f"data.sources: kind synthetic: {error}") from error
        return open_corpus(
            "table", str(table), corpus=source.corpus_name, domain=source.domain, language=source.language
        )
    if unset := re.search(r"\$\{?(\w+)", source.path):
        raise ConfigError(
            f"data.sources: the path {source.path!r} needs the environment variable {unset[1]}: export "
            f"{unset[1]}=FOLDER, or write the path itself"
        )
    options: dict[str, Any] = {**source.options, **({"where": source.where} if source.where else {})}
    return open_corpus(
        source.kind,
        source.path,
        corpus=source.corpus_name,
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


class _NamedSpeakers:
    """Looks for the speakers that a source names among its corpus' utterances.

    Args:
        number: The source's position in `data.sources`.
        source: The source.
    """

    def __init__(self, number: int, source: SourceConfig) -> None:
        self._place, self._path = f"data.sources.{number}", source.path or source.kind
        self._named = {"speakers": source.speakers, "exclude_speakers": source.exclude_speakers}
        self._missing, self._seen = {*source.speakers, *source.exclude_speakers}, set[str]()

    @property
    def found(self) -> bool:
        """Whether all of them have been seen."""
        return not self._missing

    def see(self, speaker: str) -> None:
        """Take note of an utterance's speaker."""
        if self._missing and speaker not in self._seen:
            self._seen.add(speaker)
            self._missing.discard(speaker)

    def problems(self) -> list[str]:
        """A message for each speaker that has no utterance, after the whole corpus has been seen."""
        known = sorted(self._seen - {""})
        if self._missing and not known:
            fields = " and ".join(f"{self._place}.{field}" for field, names in self._named.items() if names)
            return [
                f"{fields}: the utterances of {self._path} have no speakers: remove the field, or name the column of "
                "speakers, if a table has one (options: {columns: {speaker: NAME}})"
            ]
        return [
            f"{self._place}.{field}: {self._path} has no utterance of a speaker {name!r}{nearest(name, known, 0.6)}"
            for field, names in self._named.items()
            for name in dict.fromkeys(names)
            if name in self._missing
        ]


class _Confidences:
    """Looks for the confidences that a source's `min_confidence` is compared with.

    Args:
        number: The source's position in `data.sources`.
        source: The source.
        reader: Its reader.
    """

    def __init__(self, number: int, source: SourceConfig, reader: CorpusReader) -> None:
        self._place, self._source, self._reader = f"data.sources.{number}", source, reader
        self._seen = self._given = False

    def problem_with(self, utterance: Utterance) -> str:
        """Why `min_confidence` cannot be applied to an utterance; empty if it can, or does not apply to its set."""
        source = self._source
        if not source.min_confidence or (source.own_split and not source.set and utterance.split not in (None, TRAIN)):
            return ""
        confidence = utterance.confidence
        self._seen, self._given = True, self._given or confidence is not None
        if isinstance(confidence, float):
            return ""
        said = "it has no confidence" if confidence is None else f"its confidence is {confidence!r}"
        return f"{said}: min_confidence needs a number from 0 to 1"

    def problems(self) -> list[str]:
        """A message if no utterance has a confidence, after the whole corpus has been seen."""
        if not self._seen or self._given:
            return []
        return [
            f"{self._place}.min_confidence: the utterances of {self._source.path} have no confidence: add it "
            f"({self._reader.CONFIDENCE}), or remove the field"
        ]


def select(number: int, source: SourceConfig, reader: CorpusReader) -> Iterator[Utterance]:
    """The utterances selected by a source's fields, with the set that the source assigns, if any.

    Args:
        number: The source's position in `data.sources`, for messages.
        source: The source.
        reader: Its reader; entries after the last selected one are not counted among its `problems`.

    Raises:
        ConfigError: At the end, if the corpus has no utterance of a speaker that the source names, or no confidence at
            all for its `min_confidence`.
    """
    named, confidences = _NamedSpeakers(number, source), _Confidences(number, source, reader)
    count, rest = 0, iter(reader)
    for utterance in rest:
        named.see(utterance.speaker)
        if not _selects(source, utterance):
            continue
        if wrong := confidences.problem_with(utterance):
            reader.problems.append(RejectedEntry.of(utterance.id, "bad-confidence", wrong))
            continue
        count += 1
        yield replace(utterance, split=source.set) if source.set or not source.own_split else utterance
        if count == source.limit:
            break
    problems = len(reader.problems)
    for other in () if named.found else rest:
        named.see(other.speaker)
        if named.found:
            break
    del reader.problems[problems:]
    if missing := [*named.problems(), *confidences.problems()]:
        raise ConfigError("; ".join(missing))


def _selects(source: SourceConfig, utterance: Utterance) -> bool:
    only, without = source.speakers, source.exclude_speakers
    return (not only or utterance.speaker in only) and utterance.speaker not in without


def selects_nothing(number: int, source: SourceConfig) -> str:
    """That a source selects no utterance, and what to correct."""
    place, path = f"data.sources.{number}", source.path or source.kind
    fields = [name for name in ("speakers", "exclude_speakers", "where", "options") if getattr(source, name)]
    if fields:
        return (
            f"{place} selects no utterance of {path}: correct {' or '.join(fields)}. `starling corpus inspect` shows "
            "what is in it"
        )
    return f"the files of {place}, {path}, have no utterance: `starling corpus inspect` shows what is in them"


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
    return [problem for messages in problems for problem in messages]


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


def _of_source(number: int, source: SourceConfig) -> list[str]:
    """What is wrong with a source: it is opened, and an utterance and the speakers that it selects are looked for."""
    if source.kind == "synthetic":
        return _of_voices(number, source)
    named, read, selected = _NamedSpeakers(number, source), 0, False
    try:
        reader = open_numbered(number, source)
        confidences = _Confidences(number, source, reader)
        for read, utterance in enumerate(reader, start=1):
            named.see(utterance.speaker)
            selected = selected or (_selects(source, utterance) and not confidences.problem_with(utterance))
            if read == _LOOKED_AT or (selected and named.found):  # the stage `prepare` reads the rest
                return []
    except (ValueError, RuntimeError, OSError) as error:
        return [str(error) if isinstance(error, ConfigError) else f"data.sources.{number}: {error}"]
    if read:
        return [*named.problems(), *confidences.problems()] or [selects_nothing(number, source)]
    example = f"; the first of {len(reader.problems)} problems: {reader.problems[0].detail}" if reader.problems else ""
    return [
        f"data.sources.{number}: {source.path} has no utterance{example}. `starling corpus inspect` shows what is in it"
    ]


def _of_voices(number: int, source: SourceConfig) -> list[str]:
    """Speakers that a synthetic source names without having such voices."""
    config = source.synthesis or SynthesisConfig()
    named = _NamedSpeakers(number, source)
    for part in ("train", "valid", "test"):
        # the voices take turns
        for voice in getattr(config, f"{part}_voices")[: getattr(config, part)]:
            named.see(voice)
    return named.problems()
