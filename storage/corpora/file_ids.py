"""Ids of utterances for which a table or manifest names only an audio file."""

import posixpath
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

from storage.duplicates import SeenTexts


class FileIds:
    """Derives ids from the names of audio files.

    The id of a file is its stem. Files of the same name in several folders, such as `anna/1.wav` and `ben/1.wav`, get
    the folders as well: `anna-1` and `ben-1`.

    Args:
        names: Returns the names of all audio files, on every call. They are read once, and not before an id is needed.
    """

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self._names = names
        self._shared: frozenset[str] | None = None

    def __call__(self, name: str) -> str:
        """The id of an audio file; empty for a name without a last part, such as that of the current folder."""
        if self._shared is None:
            self._shared = _shared_stems(self._names())
        path = PurePosixPath(name)
        if path.stem not in self._shared:
            return path.stem
        parts = PurePosixPath(posixpath.normpath(name)).with_suffix("").parts
        return "-".join(part for part in parts if part not in ("/", ".."))


def _shared_stems(names: Iterable[str]) -> frozenset[str]:
    """Stems that belong to several files."""
    files, stems = SeenTexts(), SeenTexts()
    shared: set[str] = set()
    for name in names:
        stem = PurePosixPath(name).stem
        if stem and files.add(posixpath.normpath(name)) and not stems.add(stem):
            shared.add(stem)
    return frozenset(shared)
