"""Common Voice: one folder per language with clips/*.mp3 and the tables train, dev, test, validated, … (TSV).

Source: Ardila et al. 2020, "Common Voice: A Massively-Multilingual Speech Corpus".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from storage.corpora.base import (
    SET_OF_SPLIT,
    CorpusError,
    CorpusReader,
    RequiredValues,
    Utterance,
    as_confidence,
    read_lines,
)

_PARTS = ("train", "dev", "test")
_REQUIRED = ("client_id", "path", "sentence")


class CommonVoiceReader(CorpusReader):
    """Reads a language's folder such as `cv-corpus-17.0/de`.

    The speaker is `client_id`, the language is `locale`, and the domain is `sentence_domain` if the release has it.

    Options:
        tables: tables to read; by default train, dev and test, whose names are the sets (`dev` is `valid`), or
            `validated` if none of them exists. Rows of `validated` and other tables get the set of the one of these
            three tables that contains the clip, if any.
        where: required values by column, for example `{accents: "Scottish English"}`; other rows are skipped.
    """

    LAYOUT = "Common Voice, a language's folder: `clips/*.mp3`, `train.tsv`, `dev.tsv`, `test.tsv`, `validated.tsv`"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "train.tsv": "client_id\tpath\tsentence\tlocale\tconfidence\n"
        "1f3a\tcommon_voice_en_1.mp3\tGood morning.\ten\t0.93\n",
        "test.tsv": "client_id\tpath\tsentence\tlocale\n9c2e\tcommon_voice_en_2.mp3\tGood night.\ten\n",
        "clips/common_voice_en_1.mp3": "",
        "clips/common_voice_en_2.mp3": "",
    }
    HAS_SETS = True
    OPTIONS = frozenset({"tables", "where"})
    CONFIDENCE = "the column `confidence`"

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is a folder `clips` beside one of the tables."""
        return (root / "clips").is_dir() and any((root / f"{name}.tsv").is_file() for name in (*_PARTS, "validated"))

    def _utterances(self) -> Iterator[Utterance]:
        where = RequiredValues(self.options.get("where"))
        splits = self._splits()
        for table in self._tables():
            for number, row in self._rows(table):
                if isinstance(row, str):
                    self._problem(f"{table.name}:{number}", "bad-line", row)
                elif where.matched_by(row):
                    split = SET_OF_SPLIT.get(table.stem) or splits.get(row["path"])
                    yield from self._entry(row, split)
        where.check(self.root)

    def _entry(self, row: dict[str, str], split: str | None) -> Iterator[Utterance]:
        path = self._clip(row["path"])
        utterance = self._make(
            path.stem,
            path,
            row["sentence"].strip(),
            row["client_id"],
            language=row.get("locale") or None,
            domain=row.get("sentence_domain") or None,
            split=split,
            confidence=as_confidence(row.get("confidence")),
        )
        if utterance:
            yield utterance

    def _clip(self, name: str) -> Path:
        """Path of a clip; early releases omit the suffix."""
        return self.root / "clips" / (name if name.endswith((".mp3", ".wav", ".flac", ".ogg")) else f"{name}.mp3")

    def _tables(self) -> list[Path]:
        named = self.options.get("tables")
        names = [named] if isinstance(named, str) else list(named) if isinstance(named, list | tuple) else None
        if names is None:
            names = [name for name in _PARTS if (self.root / f"{name}.tsv").is_file()] or ["validated"]
        paths = [self.root / f"{str(name).removesuffix('.tsv')}.tsv" for name in names]
        for path in paths:
            if not path.is_file():
                raise CorpusError(f"{path} does not exist: name a language's folder, and tables that it has")
        return paths

    def _splits(self) -> dict[str, str]:
        """Set of each clip, needed only for tables that are not sets themselves."""
        if all(table.stem in SET_OF_SPLIT for table in self._tables()):
            return {}
        tables = [self.root / f"{name}.tsv" for name in _PARTS]
        return {
            row["path"]: SET_OF_SPLIT[table.stem]
            for table in tables
            if table.is_file()
            for _, row in self._rows(table)
            if not isinstance(row, str)
        }

    def _rows(self, table: Path) -> Iterator[tuple[int, dict[str, str] | str]]:
        """Yield the rows of a table, whose cells are never quoted."""
        lines = read_lines(table)
        header = (next(lines, (0, ""))[1] or "").split("\t")
        if missing := [name for name in _REQUIRED if name not in header]:
            raise CorpusError(f"{table} has no column {missing[0]!r}: it is not a table of Common Voice")
        for number, line in lines:
            if line == "":
                continue
            cells = line.split("\t") if line is not None else []
            if line is None or len(cells) != len(header):
                wrong = "not UTF-8" if line is None else f"{len(cells)} cells where the header has {len(header)}"
                yield number, f"line {number} of {table}: {wrong}"
                continue
            row = dict(zip(header, cells, strict=True))
            yield number, row if row["path"] else f"line {number} of {table} names no clip"

    def files(self) -> Iterator[Path]:
        """Yield the tables and their clips."""
        for table in self._tables():
            yield table
            for _, row in self._rows(table):
                if not isinstance(row, str):
                    yield self._clip(row["path"])
