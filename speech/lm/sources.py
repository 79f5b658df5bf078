"""Text for language models: files and transcripts, normalized, without the test set, in blocks of units.

    text = Text(TextConfig(paths=["books/*.txt.bz2"]), NormalizerConfig(), protect=test_transcripts)
    for block in text.blocks():
        block.lines

Nothing in the text stops the work: lines that cannot be read, normalized or used are dropped and counted by reason, and
an archive that is damaged is read as far as it goes. A path that does not exist is an error.

A language model that has read the test set's sentences predicts them too well, and the error rate means nothing. Books
and crawled pages often hold what test sets were read from, so lines are left out that share a sequence of words with
protected transcripts. A sequence of eight words that comes twice by chance is rare; shorter transcripts cannot be
protected this way.
"""

from __future__ import annotations

import hashlib
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configurable.lazy import fsspec
from speech.lm.base import LmError, TextConfig, Unit, batches
from speech.lm.processes import in_processes
from speech.lm.vocabulary import END, SPECIAL, START
from speech.text import NormalizerConfig, TextError, TextNormalizer
from speech.tokens import SPACE_SYMBOL, TokenError, Tokenizer


@dataclass(frozen=True)
class Units:
    """Cuts normalized lines into units.

    Raises:
        LmError: Tokens are wanted, but there is no tokenizer.
    """

    unit: Unit = "word"
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.unit == "token" and self.tokenizer is None:
            raise LmError("lm.unit token needs the tokenizer of the acoustic model: use word or character without one")

    def __call__(self, line: str) -> list[str]:
        """The units of a line; between the characters of two words stands "▁", as in the character tokenizer.

        Raises:
            TokenError: The tokenizer lacks a character or word.
        """
        words = line.split()
        if self.unit == "word":
            return words
        if self.unit == "character":
            return list(SPACE_SYMBOL.join(words))
        assert self.tokenizer is not None
        return [self.tokenizer.symbols[token] for token in self.tokenizer.encode(" ".join(words))]


_PRIME = 0x9E3779B97F4A7C15  # odd, bits well mixed: the golden ratio's 64 bits


class Protection:
    """Finds lines that share a word sequence with protected transcripts.

    Sequences are compared by 64-bit hashes of their words' numbers: with 10^8 words of text and 10^5 protected
    sequences, one line in a million such texts is dropped by mistake.

    Args:
        transcripts: Normalized transcripts of the test and validation sets.
        length: Number of words in a sequence.
    """

    def __init__(self, transcripts: Iterable[str], length: int = 8) -> None:
        self.length = length
        lines = [transcript.split() for transcript in transcripts]
        self.too_short = sum(len(words) < length for words in lines)
        words = dict.fromkeys(word for line in lines if len(line) >= length for word in line)
        self._index = {word: number for number, word in enumerate(words, 1)}
        self._hashes = np.unique(_hashes(*self._numbered(lines), length)[0])

    def __len__(self) -> int:
        """Number of different protected sequences."""
        return len(self._hashes)

    def found(self, lines: Sequence[str]) -> NDArray[np.bool_]:
        """Whether each line holds a protected sequence, `[lines]`."""
        hit = np.zeros(len(lines), dtype=np.bool_)
        if len(self._hashes):
            hashes, owners = _hashes(*self._numbered([line.split() for line in lines]), self.length)
            places = np.minimum(self._hashes.searchsorted(hashes), len(self._hashes) - 1)
            hit[owners[self._hashes[places] == hashes]] = True
        return hit

    def _numbered(self, lines: Sequence[Sequence[str]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Numbers of all words, 0 for those that no protected transcript has, and the line of each, `[words]`."""
        get = self._index.get
        lengths = np.fromiter(map(len, lines), np.int64, len(lines))
        numbers = np.fromiter((get(word, 0) for line in lines for word in line), np.uint64, int(lengths.sum()))
        return numbers, np.repeat(np.arange(len(lines)), lengths)


def _hashes(
    numbers: NDArray[np.uint64], owners: NDArray[np.int64], length: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of the sequences that lie in one line, and their lines."""
    count = max(len(numbers) - length + 1, 0)
    starts = np.flatnonzero(owners[:count] == owners[length - 1 :])
    hashes = np.zeros(len(starts), dtype=np.uint64)
    for offset in range(length):
        hashes = (hashes ^ numbers[starts + offset]) * np.uint64(_PRIME)
        hashes ^= hashes >> np.uint64(29)
    return hashes, owners[starts]


_LONGEST_LINE = 1 << 20
_BLOCK_BYTES = 16_000_000
"""Text that a process works on at a time: a few seconds of work, so that few processes wait at the end."""
_STAMPS = ("ETag", "etag", "LastModified", "mtime", "created")
_DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True)
class Block:
    """Some lines of the text, ready for counting."""

    lines: list[str]
    """Units (words, characters or tokens) with one space between them; never empty."""
    counts: Counter[str] = field(default_factory=Counter)
    """`lines` that were read, `kept`, and those dropped by reason: `empty`, `undecodable`, `outside-alphabet`,
    `special-symbol`, `too-long`, `protected`; `files`, and `damaged` files."""


class Text:
    """The text of a language model.

    Args:
        cfg: Files.
        normalizer: How lines are normalized: as the transcripts are.
        transcripts: Training transcripts, normalized already; they come first.
        protect: Transcripts of the test and validation sets, normalized already.
        units: What the model predicts.
        workers: Number of processes that normalize.
        language: BCP 47 tag of the files' language, by which their lines are normalized.
    """

    def __init__(
        self,
        cfg: TextConfig,
        normalizer: NormalizerConfig | None = None,
        transcripts: Iterable[str] = (),
        protect: Iterable[str] = (),
        units: Units | None = None,
        workers: int = 1,
        language: str = "",
    ) -> None:
        self.cfg, self.transcripts, self.workers = cfg, transcripts, workers
        self.units = units or Units()
        self.protection = None if cfg.allow_test_text else Protection(protect, cfg.protected_length)
        cleaner = partial(clean, normalizer or NormalizerConfig(), language, self.protection, self.units)
        self.clean: Callable[[bytes, Counter[str]], Block] = cleaner
        self._prepare = partial(prepare, self.protection, self.units)

    def protection_record(self) -> dict[str, Any]:
        """How the test set is kept out, as a JSON value.

        Returns:
            Whether test text is `allowed`, and if not, the `length` of the protected word sequences, the number of
            different `sequences`, and of transcripts that are `too_short` to have one.
        """
        protection = self.protection
        if protection is None:
            return {"allowed": True}
        return {
            "allowed": False,
            "length": protection.length,
            "sequences": len(protection),
            "too_short": protection.too_short,
        }

    def blocks(self) -> Iterator[Block]:
        """Yields the text in blocks, the same ones whatever the number of processes."""
        yield from self.prepared()
        yield from in_processes(self.clean, self.raw_blocks(), self.workers)

    def prepared(self) -> Iterator[Block]:
        """Yields the transcripts in blocks."""
        for lines in batches(self.transcripts, 100_000):
            yield self._prepare(lines, Counter(lines=len(lines)))

    def raw_blocks(self) -> Iterator[tuple[bytes, Counter[str]]]:
        """Yields pieces of the files, whole lines, with what was already counted."""
        for path in text_files(self.cfg):
            yield from _read(path, _BLOCK_BYTES)


def text_files(cfg: TextConfig) -> list[str]:
    """Returns the URLs of all text files.

    Raises:
        LmError: A path does not exist.
    """
    return [path for url in cfg.paths for path in _files(url)]


def text_digests(cfg: TextConfig) -> list[str]:
    """Returns a digest of each text file: what the files contain counts, not where they are.

    Local files are read; of others, the size and the store's own entity tag or modification time are taken, and only
    files without these are read.

    Raises:
        LmError: A path does not exist, or a file cannot be read.
    """
    return [_digest(path) for path in text_files(cfg)]


def _digest(url: str) -> str:
    try:
        system, path = fsspec.core.url_to_fs(url)
        about = system.info(path)
        stamp = next((about[name] for name in _STAMPS if about.get(name)), None)
        if stamp is not None and "file" not in _protocols(system):
            return hashlib.sha256(f"{about.get('size')} {stamp}".encode()).hexdigest()
        return _content_digest(url, about.get("size"), about.get("mtime"))
    except (OSError, ValueError) as error:
        raise LmError(f"lm.text: {url} cannot be read: {error}") from error


@lru_cache(maxsize=256)
def _content_digest(url: str, size: int, changed: float) -> str:
    with fsspec.open(url, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


def _files(url: str) -> list[str]:
    """The files that a URL with or without wildcards stands for.

    Raises:
        LmError: There are none.
    """
    try:
        system, path = fsspec.core.url_to_fs(url)
        paths = _matching(system, path) if "*" in path else [path] if system.isfile(path) else []
    except (OSError, ValueError, ImportError) as error:
        raise LmError(f"lm.text: {url} cannot be opened: {error}") from error
    if not paths:
        raise LmError(f"lm.text: there is no file {url}: correct the path, or take it out of lm.text.paths")
    return [str(system.unstrip_protocol(name)) for name in paths]


def _matching(system: Any, pattern: str) -> list[str]:
    """Files that a pattern stands for, sorted; `**` is any number of folders.

    fsspec's own `glob` takes hours for a few asterisks and a long name.
    """
    parts = pattern.split("/")
    first = next(place for place, part in enumerate(parts) if "*" in part)
    root, patterns = "/".join(parts[:first]), parts[first:]
    paths = system.find(root or "/", maxdepth=None if "**" in patterns else len(patterns))
    return sorted(name for name in paths if _fits(name.removeprefix(root).strip("/").split("/"), patterns))


def _fits(parts: list[str], patterns: list[str]) -> bool:
    """Whether patterns fit the parts of a path, in time proportional to both."""
    places = _with_skips({0}, patterns)
    for part in parts:
        after = {at + (patterns[at] != "**") for at in places if at < len(patterns) and fnmatchcase(part, patterns[at])}
        places = _with_skips(after, patterns)
    return len(patterns) in places


def _with_skips(places: set[int], patterns: list[str]) -> set[int]:
    """Places in patterns, and those behind each `**`, which may stand for no folder."""
    reached = set(places)
    for at in range(len(patterns)):
        if at in reached and patterns[at] == "**":
            reached.add(at + 1)
    return reached


def _read(url: str, block_bytes: int) -> Iterator[tuple[bytes, Counter[str]]]:
    """Yields whole lines of a file, at most about `block_bytes` at a time."""
    counts, rest = Counter(files=1), b""
    try:
        with fsspec.open(url, "rb", compression="infer") as file:
            while piece := file.read(block_bytes):
                head, newline, tail = piece.rpartition(b"\n")
                if newline:
                    yield rest + head, counts
                    counts, rest = Counter(), tail
                else:
                    rest += tail
                if len(rest) > max(_LONGEST_LINE, block_bytes):
                    rest = b"\xff" * (_LONGEST_LINE + 1)  # no line of text: counted as too long once it ends
    except _DAMAGED as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise LmError(f"lm.text: {url} cannot be opened: {error}") from error
        counts["damaged"] += 1
    if rest or counts:
        yield rest, counts


def clean(
    cfg: NormalizerConfig,
    language: str,
    protection: Protection | None,
    units: Units,
    data: bytes,
    counts: Counter[str],
) -> Block:
    """Decodes and normalizes raw lines of a language."""
    normalizer, lines, dropped = TextNormalizer(cfg), [], Counter(counts)
    raw = data.split(b"\n") if data else []
    dropped["lines"] += len(raw)
    for piece in raw:
        if len(piece) > _LONGEST_LINE:
            dropped["too-long"] += 1
            continue
        try:
            text = piece.decode()
            if "<" in text and _special(text := _without_ends(text)):
                dropped["special-symbol"] += 1
            else:
                lines.append(normalizer(text, language))
        except UnicodeDecodeError:
            dropped["undecodable"] += 1
        except TextError as error:
            dropped["empty" if error.reason == "empty-text" else error.reason] += 1
    return prepare(protection, units, lines, dropped)


def prepare(protection: Protection | None, units: Units, lines: list[str], counts: Counter[str]) -> Block:
    """Drops what must not be counted from normalized lines, and cuts the others into units."""
    usable = [line for line in lines if line.strip()]
    counts["empty"] += len(lines) - len(usable)
    kept = [line for line in usable if "<" not in line or not _special(line)]
    counts["special-symbol"] += len(usable) - len(kept)
    if protection is not None and len(protection):
        hits = protection.found(kept)
        counts["protected"] += int(hits.sum())
        kept = [line for line, hit in zip(kept, hits, strict=True) if not hit]
    cut = []
    for line in kept:
        try:
            cut.append(" ".join(units(line)))
        except TokenError:
            counts["outside-alphabet"] += 1
    counts["kept"] += len(cut)
    return Block(cut, +counts)


def _without_ends(line: str) -> str:
    """A line without the symbols of a sentence's beginning and end, which some toolkits' texts have."""
    return line.strip().removeprefix(f"{START} ").removesuffix(f" {END}")


def _special(line: str) -> bool:
    return any(word in SPECIAL for word in line.split())
