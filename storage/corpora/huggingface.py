"""Data sets of Hugging Face as Parquet files: `data/train-00000-of-00002.parquet`, or `train/0000.parquet`.

Or as `save_to_disk` of their library writes them: `train/data-00000-of-00002.arrow`, beside `state.json`. The audio is
inside (`storage.corpora.embedded`). Names as in a clone of a data set's repository, and in the branch of Parquet files
that the site makes of others.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from storage.corpora.base import SET_OF_SPLIT, CorpusError, CorpusReader, RequiredValues, Utterance
from storage.corpora.file_ids import FileIds
from storage.corpora.table import TableReader

_NAME = re.compile(r"(?P<split>[A-Za-z0-9_.]+?)-\d+-of-\d+\.parquet")
_SAVED = re.compile(r"data-\d+-of-\d+\.arrow")
_PATTERNS = ("*.parquet", "*/*.parquet", "*.arrow", "*/*.arrow")
_NUMBER = re.compile(r"\d{4,}\.parquet")


class HuggingFaceReader(CorpusReader):
    """Reads the folder of a data set, or that of its Parquet or Arrow files.

    The names of the files tell the sets: `train`, `validation` (or `dev`) and `test`, also with more words, as in
    `test.clean-00000-of-00001.parquet`. Columns and options are those of a table.
    """

    LAYOUT = "a data set of Hugging Face: `data/train-00000-of-00002.parquet` and its like, with the audio inside"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "data/train-00000-of-00001.parquet": '{"audio": {"bytes": "RIFF", "path": "a.wav"}, "text": "good morning", '
        '"speaker_id": "ann", "confidence": 0.93}\n',
        "data/test-00000-of-00001.parquet": '{"audio": {"bytes": "RIFF", "path": "b.wav"}, "text": "good night", '
        '"speaker_id": "bob", "confidence": 0.41}\n',
    }
    HAS_SETS = True
    OPTIONS = TableReader.OPTIONS - {"encoding"}
    CONFIDENCE = TableReader.CONFIDENCE

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether a folder, or one in it, has files of such names."""
        return root.is_dir() and bool(_files(root))

    def _parts(self) -> list[TableReader]:
        files = _files(self.root) if self.root.is_dir() else [self.root]
        if not files:
            raise CorpusError(f"{self.root} has no NAME-00000-of-00001.parquet: name the data set's folder")
        names = {"corpus": self.corpus, "domain": self.domain, "language": self.language}
        parts = [TableReader(str(file), **names, **self.options) for file in files]  # type: ignore[arg-type]
        ids = FileIds(lambda: chain.from_iterable(map(_names, parts)))
        where = RequiredValues(self.options.get("where"), alone=False)
        for part in parts:
            part.file_id, part.where = ids, where
        return parts

    def _utterances(self) -> Iterator[Utterance]:
        parts = self._parts()
        for part in parts:
            try:
                for utterance in part:
                    yield replace(utterance, split=utterance.split or _split(part.root))
            except CorpusError as error:
                if len(parts) == 1:
                    raise
                self._problem(part.root.name, "bad-table", str(error))
            self._take_over(part)
        parts[0].where.check(self.root)

    @override
    def scanned(self) -> list[Path]:
        return sorted({part.root.parent for part in self._parts()})

    def files(self) -> Iterator[Path]:
        """Yield the Parquet or Arrow files, and audio files that they name."""
        for part in self._parts():
            yield from part.files()
        for folder in {path.parent for path in _files(self.root) if _SAVED.fullmatch(path.name)}:
            yield from sorted(folder.glob("*.json"))  # what the library says about the Arrow files


def _names(part: TableReader) -> Iterator[str]:
    """Names of the audio without an id; those before the damage if a file is damaged, which is reported elsewhere."""
    with suppress(CorpusError):
        yield from part.unnamed_audio()


def example_table(root: Path) -> Path | None:
    """One of the Parquet or Arrow files of a folder; None if it has none."""
    return next(iter(_files(root)), None)


def _files(root: Path) -> list[Path]:
    """The Parquet and Arrow files in a folder and the folders in it, by set and name."""
    paths = [path for pattern in _PATTERNS for path in sorted(root.glob(pattern))]
    return [
        path
        for path in paths
        if _NAME.fullmatch(path.name)
        or (_NUMBER.fullmatch(path.name) and _split(path))
        or (_SAVED.fullmatch(path.name) and (path.parent / "state.json").is_file())
    ]


def _split(path: Path) -> str | None:
    """The set that the name of a file, or else of its folder, stands for."""
    match = _NAME.fullmatch(path.name)
    words = re.split(r"[._]", match["split"] if match else path.parent.name.removeprefix("partial-"))
    return next((SET_OF_SPLIT[word] for word in words if word in SET_OF_SPLIT), None)
