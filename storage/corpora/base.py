"""The interface of corpus readers, and helpers to read text files."""

import codecs
import errno
import gzip
import hashlib
import io
import json
import math
import os
import re
import stat
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, cast
from unicodedata import normalize

from configurable.folders import walk_folders
from configurable.wording import nearest, printable
from storage.corpora.tags import Tags
from storage.duplicates import SeenTexts

_LONGEST_LINE, _HEAD = 1 << 24, 256
_DECODABLE = ".flac .opus .ogg .oga .wav .w64 .rf64 .mp3 .sph .aiff .aif .aifc .au .snd .caf"
_OTHERS = ".m4a .m4b .mp4 .aac .wma .asf .amr .3gp .webm .mka .mkv .mov .avi .ape .wv .ac3 .dss .ra"
AUDIO_SUFFIXES = frozenset(_DECODABLE.split())
"""Suffixes of audio files that can be decoded."""
RECORDING_SUFFIXES = AUDIO_SUFFIXES | frozenset(_OTHERS.split())
"""Also of recordings that must be converted first."""
SET_OF_SPLIT = {"dev": "valid", "validation": "valid", "valid": "valid", "train": "train", "test": "test"}
"""Our name of a set for each name of a part in public corpora."""
_UNTOLD = {
    *(*SET_OF_SPLIT, "training", "val", "eval", "evaluation", "testing", "all", "clean", "other"),
    *("metadata", "manifest", "manifests", "table", "index", "list", "labels", "transcript", "transcripts", "text"),
    *("data", "audio", "wav", "wavs", "clips", "cuts", "tarred"),
}
"""Words in names of files and folders that do not tell which corpus it is."""
_WORD = re.compile(r"[^\W\d_]+")
_FILE_SUFFIX = re.compile(r"(\.(csv|tsv|jsonl?|parquet|arrow|txt|stm|trn|tar|zip|gz|bz2))+$", re.IGNORECASE)
_PROPOSED = 1000
"""Number of values of a column that are kept to propose one for a misspelled value."""
NOT_MEANT = frozenset({"garbage", "no-words", "not-scored"})
"""Reasons for which the corpus itself says that an entry is not an utterance to be used."""


_MISSING = frozenset({"nan", "NaN", "<NA>", "#N/A"})
"""How programs write a missing value of a table as text: Python and pandas, Excel."""
_NOBODY = _MISSING | {"None", "null", "NULL", "N/A", "n/a"}
"""Also taken for a missing value in fields other than the transcript, where they may be words."""
OVERSHOOT_S = 0.5
"""Seconds by which a declared time may exceed the audio: the allowance of Kaldi's extract-segments."""
_OVERSHOOT_SHARE, _ROUNDING_S = 0.1, 0.1
_LONGEST_ID, _LONGEST_DETAIL, _LONGEST_ERROR, _LONGEST_SUFFIX = 200, 600, 1200, 20
_NAMED = 3  # examples of each problem in messages


class CorpusError(ValueError):
    """The corpus cannot be read at all: wrong path, kind, option or column."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _LONGEST_ERROR))


class RejectedEntry(NamedTuple):
    """An entry that cannot be used as an utterance.

    `reason` is a fixed code such as "missing-transcript", for counting; `detail` explains it to people.
    """

    id: str
    reason: str
    detail: str

    @classmethod
    def of(cls, entry_id: str, reason: str, detail: str) -> "RejectedEntry":
        """An entry whose name, on one line, and detail are printable and not too long."""
        return cls(printable(entry_id, _LONGEST_ID).replace("\n", r"\n"), reason, printable(detail, _LONGEST_DETAIL))


class PassedOver(NamedTuple):
    """Files in the folders of a corpus that are not used.

    `kinds` counts them by suffix; `first` has the first names, relative to the corpus.
    """

    kinds: Counter[str]
    first: list[str]


@dataclass(frozen=True)
class Utterance:
    """One utterance of a corpus; its audio has not been opened.

    Attributes:
        id: unique in the corpus.
        audio: absolute path or URL of the file that contains it.
        text: the transcript as in the corpus.
        speaker: the speaker's name in the corpus.
        corpus: name of the corpus.
        domain: kind of speech, such as "read" or "telephone".
        language: BCP 47 tag.
        duration: seconds, if the corpus provides it.
        sample_rate: Hz, if the corpus provides it.
        start: start of the utterance within the file in seconds.
        end: end of the utterance in seconds; None for the end of the file.
        channel: channel, counted from 0; None mixes all channels.
        split: "train", "test", ..., if the corpus provides it.
        offset: offset of the audio in bytes, if it is a member of an uncompressed tar; None for a separate file.
        length: number of bytes of the audio; given together with `offset`.
        row: row of a Parquet file in which the audio is, from 0; None for a separate file.
        column: the column; given together with `row`.
        confidence: how sure it is that the transcript is right, from 0 to 1, if the corpus provides it; as text if the
            corpus has something else in its place.
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
    offset: int | None = None
    length: int | None = None
    row: int | None = None
    column: str | None = None
    confidence: float | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "speaker", normalize("NFC", self.speaker))  # one speaker, however a table spells it


class RequiredValues:
    """The option `where`: only rows whose columns have these values are read.

    Args:
        where: Value by column.
        alone: Whether one reader has all rows; otherwise their owner calls `check`.

    Raises:
        CorpusError: If it is not a mapping.
    """

    def __init__(self, where: object, alone: bool = True) -> None:
        self.alone = alone
        given = where or {}
        if not isinstance(given, Mapping):
            raise CorpusError(f"option 'where' is {where!r}: give a mapping such as {{'part': 'train'}}")
        self.values = {str(name): str(value) for name, value in given.items()}
        self._missing = set(self.values)
        self._others: dict[str, set[str]] = {name: set() for name in self.values}

    def matched_by(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has the required values."""
        matched = True
        for name, value in self.values.items():
            present = str(row.get(name, ""))
            if present == value:
                self._missing.discard(name)
                continue
            matched = False
            if len(self._others[name]) < _PROPOSED:
                self._others[name].add(present)
        return matched

    def check(self, root: Path) -> None:
        """Check that each value was found, after all rows have been read.

        Raises:
            CorpusError: If no row had a value in its column.
        """
        for name in sorted(self._missing):
            value, known = self.values[name], sorted(self._others[name] - {""})
            raise CorpusError(f"where: no row of {root} has {value!r} in the column {name!r}{nearest(value, known)}")


class CorpusReader(ABC):
    """Yields the utterances of a corpus on disk, lazily and in a fixed order.

    A bad entry does not stop the iteration: it is added to `problems` with a reason. Every entry of the corpus is
    either yielded or in `problems`.

    Args:
        path: folder or file of the corpus.
        corpus: its name; by default that of its folder (`corpus_name`).
        domain: default domain of the utterances.
        language: default language of the utterances.
        **options: options in the class's `OPTIONS`.

    Attributes:
        LAYOUT: what the corpus looks like on disk, in a phrase for lists of the layouts; file names in backticks.
        EXAMPLE: a tiny corpus of the layout, at least two recordings of an utterance or more: each file's text by its
            name; an audio file's is empty, for silence of six seconds; `X.tar/NAME` is a member of a tar; a Parquet
            file's text are its rows as JSON lines. It is the folder that is opened, or else the first file. The tests
            of all layouts read it.
        HAS_SETS: whether the layout says to which set an utterance belongs, so that `starling init` takes a corpus as a
            whole.
        CONFIDENCE: where its utterances may have a confidence, in a phrase for messages; empty if they cannot have one.
        OPTIONS: names of its options, besides `tags`, which all have: `remove` the tags of transcripts (default), or
            `keep` them.
        root: absolute path.
        encoding: the option `encoding` of layouts that have it: that of the text files; empty for UTF-8, UTF-16 or
            UTF-32, which are told apart.
        problems: problems of the current or last iteration; cleared when an iteration starts.
        tags: the tags that were removed in it.

    Raises:
        CorpusError: the path does not exist, or the reader has no such option.
    """

    LAYOUT: ClassVar[str]
    EXAMPLE: ClassVar[dict[str, str]]
    HAS_SETS: ClassVar[bool] = False
    CONFIDENCE: ClassVar[str] = ""
    OPTIONS: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, path: str, *, corpus: str = "", domain: str = "", language: str = "en", **options: object
    ) -> None:
        unknown = sorted(options.keys() - self.options_known())
        if unknown:
            known = ", ".join(sorted(self.options_known()))
            raise CorpusError(f"{path}: this layout has no option {unknown[0]!r}; its options are: {known}")
        self.root = Path(os.path.normpath(Path(str(path).removeprefix("file://")).expanduser().absolute()))
        if not self.root.exists():
            raise CorpusError(f"{self.root} does not exist: check the path of the corpus")
        self.corpus = corpus or corpus_name(str(self.root))
        self.domain = domain
        self.language = language
        self.options = options
        self.problems: list[RejectedEntry] = []
        self.tags = Tags()
        self.encoding = _checked_encoding(options.get("encoding", ""))
        if options.get("tags", "remove") not in ("remove", "keep"):
            raise CorpusError(f"option tags is {options['tags']!r}: use remove or keep")

    def __iter__(self) -> Iterator[Utterance]:
        self.problems.clear()
        self.tags.counts.clear()
        seen = SeenTexts()
        for utterance in self._utterances():
            if not seen.add(utterance.id):
                self._problem(utterance.id, "duplicate-id", f"a second entry has this id: {utterance.audio}")
            elif (finished := self._finished(utterance)) is not None:
                yield finished

    def _finished(self, utterance: Utterance) -> Utterance | None:
        """An utterance without tags and what stands for a missing value; None if its transcript is nothing else."""
        if as_text(utterance.text) is None:
            self._problem(
                utterance.id,
                "missing-transcript",
                f"its text is {utterance.text.strip()}, as programs write a missing value: give it a transcript, or "
                "write the word Nan",
            )
            return None
        text, speaker = self._words(utterance.text), as_field(utterance.speaker) or ""
        if text != utterance.text and not any(character.isalnum() for character in text):
            self._problem(utterance.id, "no-words", utterance.text)
            return None
        same = (text, speaker) == (utterance.text, utterance.speaker)
        return utterance if same else replace(utterance, text=text, speaker=speaker)

    def _words(self, text: str) -> str:
        """A transcript without tags."""
        return text if self.options.get("tags") == "keep" else self.tags.without(text)

    @classmethod
    def options_known(cls) -> frozenset[str]:
        """Names of all options of the layout."""
        return cls.OPTIONS | {"tags"}

    @abstractmethod
    def _utterances(self) -> Iterator[Utterance]:
        """Yield utterances and record problems; ids may repeat."""

    @abstractmethod
    def files(self) -> Iterator[Path]:
        """Yield every local file of the corpus: audio, transcripts, tables; some may not exist."""

    def scanned(self) -> Iterable[Path]:
        """The folders in which the layout looks for audio and transcripts; none if lists name all files."""
        return ()

    def passed_over(self) -> PassedOver:
        """The files in the scanned folders that do not belong to the corpus, whatever the reason."""
        folders, passed_over, used = list(self.scanned()), PassedOver(Counter(), []), SeenTexts()
        for file in self.files() if folders else ():
            used.add(os.fspath(file))
        for path in (path for folder in folders for path in _all_files(folder)):
            if used.add(os.fspath(path)):
                passed_over.kinds[printable(path.suffix.lower(), _LONGEST_SUFFIX) or "without a suffix"] += 1
                if len(passed_over.first) < _NAMED:
                    passed_over.first.append(printable(os.path.relpath(path, self.root), _LONGEST_ID))
        return passed_over

    def fingerprint(self) -> str:
        """SHA-256 of the names, sizes and modification times of all files: a cheap way to detect changes."""
        lines = {f"{os.path.relpath(file, self.root)}\t{_stamp(file)}" for file in self.files()}
        digest = hashlib.sha256()
        for line in sorted(lines):
            digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    def _make(self, utterance_id: str, audio: str | Path, text: str, speaker: str, **fields: Any) -> Utterance | None:
        """Create an utterance, ignoring fields that are None; if its file is missing, record a problem, return None."""
        if "://" not in str(audio) and not is_file(Path(audio)):
            self._problem(utterance_id, "missing-audio", f"{audio} {why_no_file(Path(audio))}")
            return None
        own: dict[str, Any] = {"corpus": self.corpus, "domain": self.domain, "language": self.language}
        own |= {name: value for name, value in fields.items() if value is not None}
        return Utterance(id=utterance_id, audio=str(audio), text=text, speaker=speaker, **own)

    def _lines(self, path: Path) -> Iterator[tuple[int, str | None]]:
        """Lines of one of the many text files of a corpus; that it cannot be read is a problem of this file only."""
        try:
            yield from read_lines(path, self.encoding)
        except OSError as error:
            self._problem(path.name, "unreadable", f"{path} cannot be read ({error.strerror or error})")

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether a path clearly has this layout, by its names and at most one line of a file."""
        return False

    def _take_over(self, part: "CorpusReader") -> None:
        """Add the problems and tags of a reader of a part of the corpus."""
        self.problems += part.problems
        for tag, count in part.tags.counts.items():
            self.tags.add(tag, count)

    def _unlisted(self, error: OSError) -> None:
        """Record a folder that cannot be listed: nobody knows what is in it."""
        folder = os.fsdecode(error.filename)
        self._problem(
            os.path.relpath(folder, self.root),
            "unreadable",
            f"the folder {folder} cannot be listed ({error.strerror or error}): check its permissions and its disk",
        )

    def _problem(self, entry_id: str, reason: str, detail: str) -> None:
        self.problems.append(RejectedEntry.of(entry_id, reason, detail))


def corpus_name(path: str) -> str:
    """Name of the corpus at a path: its last part that is not the name of a set or of a table like `metadata.csv`.

    `/speech/digits/metadata.csv` is of `digits`, and `LibriSpeech/train-clean-5` of `LibriSpeech`. The parts of a
    corpus have the same name, so that a speaker's name means the same person in all of them.

    Args:
        path: Of a folder or file, which need not exist.
    """
    parts = [_FILE_SUFFIX.sub("", part) for part in Path(os.path.normpath(path.removeprefix("file://"))).parts]
    telling = (part for part in reversed(parts) if set(_WORD.findall(part.lower())) - _UNTOLD)
    return next(telling, parts[-1] if parts else "")


def is_file(path: Path) -> bool:
    """Whether a file exists, also for names that no file can have, and in folders that may not be read."""
    try:
        return path.is_file()
    except OSError:
        return False


_SPECIAL = "is a device, pipe or socket, not a file"


def why_no_file(path: Path) -> str:
    """Why `is_file` is false, as the end of a message that begins with the path."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            return f"is a link to {path.readlink()}, which does not exist: mend the link"
        return "does not exist"
    except (OSError, ValueError) as error:  # a ValueError for a name with a null byte or lone surrogates
        reason = getattr(error, "strerror", None) or error
        return f"cannot be looked at ({reason}): check its name, and the permissions of its folders"
    return "is a folder, not a file" if stat.S_ISDIR(mode) else _SPECIAL


def named_file(folder: Path, name: str) -> Path:
    """The path of a file that a table in a folder names: absolute, relative to the folder, or with ~."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # there is no such user
        path = Path(name)
    return Path(os.path.normpath(folder / path))


def _all_files(top: Path) -> Iterator[Path]:
    """The files below a folder, in order; hidden folders are left out."""
    for folder, subfolders, names in walk_folders(top):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names)


def _stamp(file: Path) -> str:
    try:
        status = file.stat()
    except (OSError, ValueError):  # a ValueError for a name with a null byte or lone surrogates
        return "missing"
    return f"{status.st_size}\t{status.st_mtime_ns}"


def checked_times(start: float, end: float | None) -> tuple[float, float | None]:
    """Validate the times of a segment and return them unchanged.

    Raises:
        ValueError: they are not finite, negative, or not ascending.
    """
    if not 0 <= start < float("inf") or (end is not None and not start < end < float("inf")):
        raise ValueError(f"its times {start} s and {end} s do not ascend from 0")
    return start, end


def as_text(value: object) -> str | None:
    """A transcript of a table or manifest; None if it is missing.

    A number is written as in a text: 3, also where the column is of floating-point numbers because of its gaps. NaN is
    missing, like `nan` and what else programs write as text for it.
    """
    if (
        value is None
        or isinstance(value, dict | list | tuple | bytes)
        or (isinstance(value, float) and math.isnan(value))
    ):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    return None if text in _MISSING else text


def as_field(value: object) -> str | None:
    """A field other than the transcript, such as the speaker; like `as_text`, but `None` and `N/A` are missing, too."""
    text = as_text(value)
    return None if text in _NOBODY else text


def first_field(row: dict[str, Any], names: Iterable[str]) -> str | None:
    """The first of several fields of a row that is neither missing nor empty."""
    return next((text for name in names if (text := as_field(row.get(name)))), None)


def as_number(name: str, value: object) -> float | None:
    """Parse a number of a manifest, which may be missing or written as text.

    Raises:
        ValueError: it is not a finite number of at least 0.
    """
    text = as_field(value)
    if not text:
        return None
    try:
        number = float("nan" if isinstance(value, bool) else text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {text!r}: it must be a number of at least 0")
    return number


def as_whole_number(name: str, value: object) -> int | None:
    """Parse a whole number of a manifest, such as a channel; like `as_number`.

    Raises:
        ValueError: it is not a whole number of at least 0.
    """
    number = as_number(name, value)
    if number is not None and not number.is_integer():
        raise ValueError(f"{name} is {as_field(value)!r}: it must be a whole number")
    return None if number is None else int(number)


def as_confidence(value: object) -> float | str | None:
    """Parse a confidence of a table or manifest: a number from 0 to 1, None if it is missing, or else its text."""
    text = as_field(value)
    if not text:
        return None
    try:
        number = as_number("confidence", text)
    except ValueError:
        return text
    return text if number is None or number > 1 else number


def overshoot(declared: float, actual: float) -> float:
    """Seconds by which a declared duration exceeds the audio; 0 if no more than may be rounding or padding.

    Up to 0.5 s are accepted, but of short utterances at most a tenth, or 0.1 s: the transcript would not be of what is
    left.
    """
    excess = declared - actual
    return excess if excess > min(OVERSHOOT_S, max(_ROUNDING_S, _OVERSHOOT_SHARE * declared)) else 0.0


_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte-order marks of encodings other than UTF-8 (such as Excel's "Unicode text"), longer ones first."""


NOT_UTF8 = (
    "not UTF-8, or has null characters or more than 16 MB: save it in UTF-8, or name the encoding, such as options: "
    "{encoding: windows-1252}; nulls are often left by a crash: fetch the file again"
)
"""What is wrong with a line that `read_lines` cannot read, in a layout that has the option `encoding`."""
WESTERN = "windows-1252"
"""The encoding of old Western European tables: Latin-1, and a few more characters."""
_GUESSED_BYTES = 16 << 20
"""Of a text whose encoding is guessed, what is looked at."""
_MOST_ACCENTS = 0.3
"""Share of the letters that have an accent in any text of a Western European language, at most."""


def _checked_encoding(name: object) -> str:
    """The Python name of an encoding; empty for UTF-8.

    Raises:
        CorpusError: There is no such encoding of text.
    """
    if name in ("", None):
        return ""
    try:
        "".encode(str(name))  # refuses codecs of other things than text
        codec = codecs.lookup(str(name)).name
    except (LookupError, ValueError) as error:
        raise CorpusError(
            f"option encoding is {name!r}: use the name of an encoding of text, such as {WESTERN} or utf-8"
        ) from error
    return "" if codec in ("utf-8", "utf-8-sig") else codec


def guess_encoding(files: Iterable[Path]) -> str:
    """The encoding of text files for the option `encoding`.

    Args:
        files: The text files of a corpus.

    Returns:
        Empty for UTF-8, UTF-16 or UTF-32, also if some lines are damaged, and for what cannot be told. `WESTERN` if no
        line with other characters than those of ASCII is UTF-8, and few of the letters have accents.
    """
    left, letters, accents = _GUESSED_BYTES, 0, 0
    for path in files:
        if left <= 0:
            break
        try:
            with _open_regular(path) as file:
                content = file.read(left)
        except (OSError, EOFError, zlib.error):
            continue  # the reader says so
        left -= len(content)
        if _wide_encoding(content[:_HEAD]):
            return ""
        for line in content.splitlines():
            if line.isascii():
                letters += sum(character.isalpha() for character in line.decode())
                continue
            if _utf8(line, "utf-8") is not None:
                return ""
            text = line.decode("cp1252", "replace")
            if "\ufffd" in text or "\0" in text:
                return ""
            found = [character for character in text if character.isalpha()]
            letters += len(found)
            accents += sum(not character.isascii() for character in found)
    return WESTERN if 0 < accents <= _MOST_ACCENTS * letters else ""


_CONTROLS = frozenset(range(32)) - frozenset(b"\t\n\r")


def _wide_encoding(head: bytes) -> str:
    """Detect UTF-16 or UTF-32; empty for UTF-8.

    Without a byte-order mark, the high bytes of letters tell: they are control characters (0 for Latin, 4 for
    Cyrillic), which no text in UTF-8 has, and stand at every second byte, or are three zeros of four.
    """
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    zeros = [set(head[place::4]) == {0} for place in range(4)]
    if all(zeros[2:]) != all(zeros[:2]):
        return "utf-32-le" if zeros[3] and not zeros[0] else "utf-32-be"
    even, odd = (sum(byte in _CONTROLS for byte in head[place::2]) for place in range(2))
    if max(even, odd) <= len(head) // 8:
        return ""
    return "utf-16-le" if odd > even else "utf-16-be"


def _open_regular(path: Path) -> IO[bytes]:
    """Open a file, decompressed if it is gzipped; what is no file is refused: a pipe may wait, and a device not end.

    Raises:
        OSError: It is a device, a pipe or a socket, or cannot be read.
    """
    if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, f"it {_SPECIAL}", str(path))
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _bounded_lines(file: Any) -> Iterator[Any]:
    """Yield the lines of `file`, and None for lines that are too long, instead of reading gigabytes into memory."""
    while line := file.readline(_LONGEST_LINE):
        end = b"\n" if isinstance(line, bytes) else "\n"
        if len(line) == _LONGEST_LINE and not line.endswith(end):
            while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(end):
                pass
            line = None
        yield line


def _utf8(line: bytes | None, encoding: str) -> str | None:
    try:
        return None if line is None or b"\0" in line else line.decode(encoding).rstrip("\r\n")
    except UnicodeDecodeError:
        return None


def read_lines(path: Path, encoding: str = "") -> Iterator[tuple[int, str | None]]:
    """Yield numbered lines of a text file (possibly gzipped) without line ends.

    Args:
        path: The file.
        encoding: Its encoding; empty for UTF-8, or UTF-16 or UTF-32, which are detected.

    Yields:
        The line's number and its text; None for a line that is undecodable or too long.

    Raises:
        OSError: It cannot be read, or is a device, a pipe or a socket.
    """
    with _open_regular(path) as file:
        wide = encoding or _wide_encoding(file.read(_HEAD))
        file.seek(0)
        if wide:
            text = io.TextIOWrapper(file, wide, errors="replace", newline="\n")  # type: ignore[type-var]
            for number, line in enumerate(_bounded_lines(text), start=1):
                yield number, None if line is None or "\ufffd" in line or "\0" in line else line.rstrip("\r\n")
        else:
            for number, raw in enumerate(_bounded_lines(file), start=1):
                yield number, _utf8(raw, "utf-8-sig" if number == 1 else "utf-8")


def _whole_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # of 4,300 digits, Python reads none
        raise ValueError(
            f"a number has {len(digits):,} digits: if it is a text, write it in quotation marks"
        ) from error


def _plain_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return fields


_STRICT_JSON: dict[str, Any] = {"object_pairs_hook": _plain_object, "parse_int": _whole_number}


def read_json_lines(path: Path, encoding: str = "") -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield numbered objects of a JSON lines file (possibly gzipped); for a bad line, a description of the error."""
    try:
        for number, line in read_lines(path, encoding):
            if line is not None and not line.strip():
                continue
            try:
                row = None if line is None else json.loads(line, **_STRICT_JSON)
            except ValueError as error:
                yield number, f"not JSON: {error}"
                continue
            except RecursionError:
                yield number, "the JSON is nested too deeply"
                continue
            wrong = "not a JSON object" if line is not None else "not UTF-8, or has null characters or more than 16 MB"
            yield number, row if isinstance(row, dict) else wrong
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield 0, f"the compressed file is truncated or damaged: {error}"


def first_object(path: Path) -> dict[str, Any]:
    """The first JSON object of a JSON lines file; empty if the first line is not one."""
    _, row = next(read_json_lines(path), (0, {}))
    return row if isinstance(row, dict) else {}
