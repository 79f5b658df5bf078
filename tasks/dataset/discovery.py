"""Finds the corpora in a folder: known layouts, tables with any column names, Kaldi folders, parts for each set."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from storage.corpora import CorpusError, guess_kind, reader_class
from storage.corpora.base import AUDIO_SUFFIXES, RECORDING_SUFFIXES, guess_encoding
from storage.corpora.huggingface import example_table
from storage.corpora.nemo import NemoReader
from storage.corpora.table import TABLE_SUFFIXES
from tasks.dataset.sources import SourceConfig, is_name
from tasks.dataset.table_columns import GuessedColumns, set_of_name

_DEPTH = 3
_COUNTED = 10_000
_TEXTS = 4_000
"""Files of a corpus among which those with text are looked at for their encoding."""
_TABLE_TEXT = "a table metadata.csv with the columns path, text and, if you know them, speaker"


@dataclass(frozen=True)
class FoundSource:
    """A source that was found."""

    kind: str
    path: Path
    set: str = ""
    """The set that its name stands for; empty if it has its own sets or none."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of a table that are not known by their names, by field."""
    where: dict[str, str] = field(default_factory=dict)
    """Rows of a table that belong to it."""
    encoding: str = ""
    """That of its text files; empty for one of the UTF encodings."""
    unused: tuple[str, ...] = ()
    """Columns of a table that are taken for nothing."""

    def document(self) -> dict[str, Any]:
        """Fields of `data.sources`, except the path."""
        options = {"columns": self.columns, "encoding": self.encoding}
        given = {"where": self.where, "options": {name: value for name, value in options.items() if value}}
        return {"kind": self.kind} | {name: value for name, value in given.items() if value}

    def config(self, language: str = "en") -> SourceConfig:
        """The source of a configuration, with an absolute path."""
        given = {"path": str(self.path.expanduser().absolute()), "set": self.set, "language": language}
        return SourceConfig.model_validate(self.document() | given)

    def description(self) -> str:
        """Its layout and path, and what was taken for what."""
        columns = "".join(f", {field} in the column {column}" for field, column in self.columns.items())
        rows = "".join(f", rows with {column} {value}" for column, value in self.where.items())
        text = f", text in {self.encoding}" if self.encoding else ""
        return f"{self.kind} {self.path}{rows}{columns}{text}" + (f", as set {self.set}" if self.set else "")


@dataclass(frozen=True)
class FoundCorpus:
    """What was found in a folder or file.

    Attributes:
        sources: At least one.
        left_out: Parts whose name stands for no set, while others are taken.
    """

    sources: list[FoundSource]
    left_out: list[Path] = field(default_factory=list)

    @property
    def warning(self) -> str:
        """Which parts are left out; empty if none are."""
        names = ", ".join(map(str, self.left_out))
        return f"left out, since their names stand for no set: {names}" if names else ""


def find_corpus(path: Path, kind: str = "", *, sets: bool = True) -> FoundCorpus:
    """The sources of a corpus for a command that takes one.

    Args:
        path: A folder, or a file such as a table or a manifest.
        kind: Its layout; detected if it is empty or "auto".
        sets: Whether the parts are to be told apart. Otherwise all utterances are taken, those of parts whose name
            stands for no set included.

    Raises:
        CorpusError: If there is nothing that can be used, or the kind is unknown.
    """
    path = path.expanduser()
    if kind in ("", "auto"):
        corpus = find_sources(path, sets=sets)
    elif kind == "table" and path.is_file():
        corpus = FoundCorpus(_of_table(path))
    else:
        reader_class(kind)  # its error for an unknown kind suggests the closest one
        corpus = FoundCorpus([_with_encoding(FoundSource(kind, path))])
    if sets:
        return corpus
    whole = {source.path: replace(source, set="", where={}) for source in corpus.sources}
    return FoundCorpus(list(whole.values()), corpus.left_out)


def find_sources(folder: Path, *, sets: bool = True, columns: Mapping[str, str] | None = None) -> FoundCorpus:
    """The sources in a folder, or in a file such as a table or a manifest.

    Args:
        folder: The folder or file.
        sets: Whether to look for parts that stand for sets in a folder that is a corpus as a whole, too.
        columns: Columns of its tables that need not be guessed, by field.

    Raises:
        CorpusError: If there is nothing that can be used; the message says what is there, and what to add.
    """
    kind = _kind(folder)
    if not folder.exists() and not kind:  # a pattern of tars has a kind
        raise CorpusError(f"{folder} does not exist: check the path of your recordings")
    if folder.is_file():
        if kind == "table":
            return FoundCorpus(_of_table(folder, columns))
        if not kind:
            kinds = ", ".join(sorted(suffix.lstrip(".") for suffix in TABLE_SUFFIXES))
            raise CorpusError(f"{folder} is neither a table ({kinds}) nor a manifest: give one, or the folder it is in")
    if folder.is_file() or (kind and (reader_class(kind).HAS_SETS or not folder.is_dir())):
        return FoundCorpus([_with_encoding(FoundSource(kind, folder, columns=_columns_inside(kind, folder, columns)))])
    search = _Search(columns)
    return FoundCorpus(list(map(_with_encoding, search.sources(folder, kind, sets))), search.left_out)


def _with_encoding(source: FoundSource) -> FoundSource:
    """The source with the encoding of its text files, if the layout has files of people's own making."""
    reader = reader_class(source.kind)
    if source.encoding or source.kind == "table" or "encoding" not in reader.OPTIONS:
        return source
    try:
        files = list(islice(reader(str(source.path)).files(), _TEXTS))
    except (CorpusError, OSError):
        return source  # what is wrong is said when it is read
    texts = (path for path in files if path.suffix.lower() not in RECORDING_SUFFIXES)
    return replace(source, encoding=guess_encoding(texts))


def _kind(path: Path) -> str:
    """The layout of a path; empty if it has none."""
    try:
        return guess_kind(str(path))
    except CorpusError:
        return ""


def _children(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _columns_inside(kind: str, folder: Path, given: Mapping[str, str] | None) -> dict[str, str]:
    """Columns of a data set's Parquet files that are not known by their names."""
    table = example_table(folder) if kind == "huggingface" and folder.is_dir() else None
    return GuessedColumns(table, given).columns if table else {}


def _of_table(path: Path, given: Mapping[str, str] | None = None) -> list[FoundSource]:
    """Sources of a table: one, or one for each set that a column names.

    Raises:
        CorpusError: If it lacks audio or text.
    """
    table = GuessedColumns(path, given)
    unused = tuple(table.unused)
    if not table.splits or table.own_split:
        return [FoundSource("table", path, columns=table.columns, encoding=table.encoding, unused=unused)]
    return [
        FoundSource("table", path, name, table.columns, {table.split_column: value}, table.encoding, unused)
        for value, name in table.splits.items()
    ]


class _Search:
    """The search of one folder.

    Args:
        columns: Columns of its tables that need not be guessed, by field.

    Attributes:
        left_out: Parts whose name stands for no set, while others are taken.
    """

    def __init__(self, columns: Mapping[str, str] | None) -> None:
        self._columns = columns
        self.left_out: list[Path] = []

    def sources(self, folder: Path, kind: str, sets: bool) -> list[FoundSource]:
        """The sources in a folder of a layout, which may be unknown; parts of a known layout only if sets are wanted.

        Raises:
            CorpusError: If there are none.
        """
        trouble: list[str] = []
        if sources := self._of_tables(folder, trouble) or self._of_manifests(folder):
            return sources
        if kind:
            parts = [FoundSource(kind, child) for child in _children(folder) if _kind(child) == kind] if sets else []
            return self._of_sets(parts) or [FoundSource(kind, folder)]
        if sources := list(self._below(folder, 1)):
            return (self._of_sets(sources) if sets else []) or sources
        raise CorpusError(_nothing(folder, trouble))

    def _of_tables(self, folder: Path, trouble: list[str]) -> list[FoundSource]:
        """Sources of the tables: one for each set, or else the first usable table, `metadata` before others.

        What is wrong with the others is added to `trouble`.
        """
        tables = [path for path in folder.iterdir() if path.suffix.lower() in TABLE_SUFFIXES and path.is_file()]
        by_table: list[list[FoundSource]] = []
        for path in sorted(tables, key=lambda path: (path.stem != "metadata", path.name)):
            if _kind(path) not in ("", "table"):
                continue
            try:
                by_table.append(_of_table(path, self._columns))
            except CorpusError as error:
                trouble.append(str(error))
        several = [sources[0] for sources in by_table if len(sources) == 1]
        if sets := self._of_sets(several):
            return sets
        self.left_out += [sources[0].path for sources in by_table[1:]]
        return by_table[0] if by_table else []

    def _of_manifests(self, folder: Path) -> list[FoundSource]:
        """Sources of NeMo's manifests."""
        manifests = [
            FoundSource("nemo", path) for path in sorted(folder.glob("*.json*")) if NemoReader.recognises(path)
        ]
        return self._of_sets(manifests) or manifests

    def _of_sets(self, sources: list[FoundSource]) -> list[FoundSource]:
        """The sources with the sets that their names stand for.

        None unless at least one is for training, or several have a set.
        """
        named = [
            (source, set_of_name(source.path.stem if source.path.is_file() else source.path.name)) for source in sources
        ]
        nameless = [source.path for source, name in named if not name]
        named = [(source, name) for source, name in named if name]
        if len(named) < 2 and not any(name == "train" for _, name in named):
            return []
        self.left_out += nameless
        tests = [source for source, name in named if name == "test"]

        def label(source: FoundSource, name: str) -> str:
            own = source.path.stem if source.path.is_file() else source.path.name
            return own if name == "test" and len(tests) > 1 and is_name(own) else name

        return [replace(source, set=label(source, name)) for source, name in named]

    def _below(self, folder: Path, depth: int) -> Iterator[FoundSource]:
        """Corpora in subfolders, down to a few levels; what lies within another one is left out."""
        for child in _children(folder):
            if kind := _kind(child):
                yield FoundSource(kind, child)
            elif tables := self._of_tables(child, []) or self._of_manifests(child):
                yield from tables
            elif depth < _DEPTH:
                yield from self._below(child, depth + 1)


def _nothing(folder: Path, trouble: list[str]) -> str:
    """Why a folder cannot be used, and what to add."""
    audio: Counter[str] = Counter()
    for number, path in enumerate(folder.rglob("*")):
        if path.suffix.lower() in RECORDING_SUFFIXES:
            audio[path.suffix.lower().lstrip(".")] += 1
        if number >= _COUNTED:
            break
    if trouble:
        return f"{folder}: {'; '.join(trouble)}"
    if not audio:
        kinds = ", ".join(sorted(suffix.lstrip(".") for suffix in AUDIO_SUFFIXES))
        return (
            f"{folder} has no recordings ({kinds}) and no table, manifest or Kaldi folder that names any; "
            "`starling corpus list` shows the layouts"
        )
    counts = ", ".join(f"{count:,} {kind}" for kind, count in audio.most_common())
    return (
        f"{folder} has recordings ({counts}), but no transcripts: put NAME.txt beside each recording NAME.wav, or "
        f"{_TABLE_TEXT}, into the folder"
    )
