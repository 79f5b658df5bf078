"""What every corpus reader gives and promises."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

AUDIO_SUFFIXES = frozenset({".flac", ".opus", ".ogg", ".wav", ".mp3"})


class CorpusError(ValueError):
    """A corpus that cannot be read at all: a wrong path, kind, option or column."""


class Problem(NamedTuple):
    """An entry that could not become an utterance.

    `reason` is a short fixed word such as "missing-transcript", fit for counting; `detail` is for a human.
    """

    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Utterance:
    """One utterance of a corpus, before any audio has been opened.

    Attributes:
        id: unique in the corpus.
        audio: absolute path or URL of the file that contains it.
        text: the transcript as the corpus has it.
        speaker: speaker's name in the corpus.
        corpus: name of the corpus.
        domain: what kind of speech, such as "read" or "telephone".
        language: BCP 47 tag.
        duration: seconds, when the corpus says so.
        sample_rate: Hz, when the corpus says so.
        start: where the utterance begins in the file, in seconds.
        end: where it ends; None is the end of the file.
        channel: from 0; None mixes all channels.
        split: "train", "test", ... when the corpus says so.
    """

    id: str
    audio: str
    text: str
    speaker: str
    corpus: str
    domain: str = ""
    language: str = "en"
    duration: float | None = None
    sample_rate: int | None = None
    start: float = 0.0
    end: float | None = None
    channel: int | None = None
    split: str | None = None


class CorpusReader(ABC):
    """Yields the utterances of one corpus on disk, lazily and in a fixed order.

    A bad entry never stops the iteration: it is added to `problems`, with a reason, and the next one follows. So the
    entries of the corpus are those that were yielded and those in `problems`.

    Args:
        path: folder or file of the corpus.
        corpus: its name; by default the name of the folder or file.
        domain: goes into every utterance that does not say otherwise.
        language: the same.
        **options: those in the class's `OPTIONS`.

    Attributes:
        root: absolute path.
        problems: filled while iterating, emptied when an iteration begins.

    Raises:
        CorpusError: the path does not exist, or the reader has no such option.
    """

    OPTIONS: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, path: str, *, corpus: str = "", domain: str = "", language: str = "en", **options: object
    ) -> None:
        unknown = sorted(options.keys() - self.OPTIONS)
        if unknown:
            known = ", ".join(sorted(self.OPTIONS)) or "none"
            raise CorpusError(f"{type(self).__name__} has no option {unknown[0]!r}: its options are {known}")
        self.root = Path(os.path.normpath(Path(str(path).removeprefix("file://")).expanduser().absolute()))
        if not self.root.exists():
            raise CorpusError(f"{self.root} does not exist: check the path of the corpus")
        self.corpus = corpus or self.root.stem
        self.domain = domain
        self.language = language
        self.options = options
        self.problems: list[Problem] = []

    def __iter__(self) -> Iterator[Utterance]:
        self.problems.clear()
        seen: set[str] = set()
        for utterance in self._utterances():
            if utterance.id in seen:
                self._problem(utterance.id, "duplicate-id", f"a second entry has this id: {utterance.audio}")
                continue
            seen.add(utterance.id)
            yield utterance

    @abstractmethod
    def _utterances(self) -> Iterator[Utterance]:
        """Yields utterances and notes problems; ids may still repeat."""

    @abstractmethod
    def files(self) -> Iterator[Path]:
        """Every local file that the corpus is made of: audio, transcripts, tables. May name missing ones."""

    def fingerprint(self) -> str:
        """SHA-256 of the names, sizes and modification times of all files: cheap, and changes when the corpus does."""
        lines = {f"{os.path.relpath(file, self.root)}\t{_stamp(file)}" for file in self.files()}
        digest = hashlib.sha256()
        for line in sorted(lines):
            digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
        return digest.hexdigest()

    def _problem(self, entry_id: str, reason: str, detail: str) -> None:
        self.problems.append(Problem(entry_id, reason, detail))


def _stamp(file: Path) -> str:
    try:
        status = file.stat()
    except OSError:
        return "missing"
    return f"{status.st_size}\t{status.st_mtime_ns}"


def read_lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Numbered lines of a UTF-8 text file without their ends; None stands for a line that is not UTF-8."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                yield number, None
