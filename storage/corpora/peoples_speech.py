"""The People's Speech: manifests with one JSON object per line, audio in folders or in uncompressed tars.

Source: Galvez et al. 2021, "The People's Speech: A Large-Scale Diverse English Speech Recognition Dataset". A line
describes one recording, whose `training_data` contains parallel lists (`duration_ms`, `label`, `name`) or a list of
objects. The later, flat format (one utterance per line) is supported, too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from configurable.folders import files_below
from storage.corpora.base import (
    SET_OF_SPLIT,
    CorpusError,
    CorpusReader,
    Utterance,
    as_number,
    as_text,
    first_field,
    first_object,
    is_file,
    read_json_lines,
)
from storage.corpora.tars import TarMember, tar_members
from storage.safety import UnsafeTarError

_NAMES = ("name", "audio_path", "output_paths", "audio_filepath")
_TEXTS = ("label", "text", "transcript")
_SUFFIXES = (".json", ".jsonl")


class PeoplesSpeechReader(CorpusReader):
    """Reads one manifest (`train/clean.json`) or a folder of them.

    Audio is searched in the folder named after the manifest (`train/clean/…`), in the manifest's own folder, and in the
    tars of both. The speaker is the recording's `identifier`.
    """

    LAYOUT = "The People's Speech: JSON lines with `training_data`; audio in folders or uncompressed tars"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "train/clean.json": '{"identifier": "talk-1", "training_data": {"duration_ms": [6000, 6000], '
        '"label": ["good morning", "good night"], "name": ["talk-1/a.flac", "talk-1/b.flac"]}}\n',
        "train/clean/talk-1/a.flac": "",
        "train/clean/talk-1/b.flac": "",
    }
    HAS_SETS = True

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is a manifest whose first line has `training_data`."""
        files = [root] if root.is_file() else _manifests(root)
        return any(path.suffix in _SUFFIXES and "training_data" in first_object(path) for path in files[:8])

    def _utterances(self) -> Iterator[Utterance]:
        for manifest in self._tables():
            members: dict[str, tuple[Path, TarMember]] | None = None
            for number, row in read_json_lines(manifest):
                if isinstance(row, str):
                    self._problem(f"{manifest.name}:{number}", "bad-line", row)
                    continue
                try:
                    entries = list(_entries(row))
                except ValueError as error:
                    self._problem(f"{manifest.name}:{number}", "bad-line", str(error))
                    continue
                for entry in entries:
                    if isinstance(entry, str):
                        self._problem(f"{manifest.name}:{number}", "bad-line", entry)
                        continue
                    name, text, seconds = entry
                    place = _plain(manifest, name)
                    if place is None and members is None:
                        members = self._index(manifest)
                    yield from self._entry(manifest, row, (name, text, seconds), place, (members or {}).get(name))

    def _entry(
        self,
        manifest: Path,
        row: dict[str, Any],
        entry: tuple[str, str | None, float | None],
        place: Path | None,
        member: tuple[Path, TarMember] | None,
    ) -> Iterator[Utterance]:
        name, text, seconds = entry
        utterance_id = name.rpartition("/")[2].rpartition(".")[0] or name
        if text is None:
            self._problem(utterance_id, "missing-transcript", f"{manifest} has no text for {name!r}")
            return
        tar, part = member or (None, None)
        utterance = self._make(
            utterance_id,
            place or tar or manifest.with_suffix("") / name,
            text,
            first_field(row, ("identifier", "speaker")) or "",
            duration=seconds,
            split=SET_OF_SPLIT.get(manifest.parent.name) or SET_OF_SPLIT.get(manifest.stem),
            offset=part.offset if part else None,
            length=part.length if part else None,
        )
        if utterance:
            yield utterance

    def _index(self, manifest: Path) -> dict[str, tuple[Path, TarMember]]:
        """Members of the manifest's tars, by their names with and without leading folders."""
        members: dict[str, tuple[Path, TarMember]] = {}
        for tar in _tars(manifest):
            try:
                for member in tar_members(tar):
                    name = member.name.removeprefix("./")
                    members.setdefault(name, (tar, member))
                    while "/" in name:
                        name = name.partition("/")[2]
                        members.setdefault(name, (tar, member))
            except UnsafeTarError as error:
                self._problem(tar.name, "bad-tar", str(error))
        return members

    def _tables(self) -> list[Path]:
        manifests = [self.root] if self.root.is_file() else _manifests(self.root)
        if not manifests:
            raise CorpusError(f"{self.root} has no manifest: name one, such as train/clean.json, or a folder of them")
        return manifests

    def files(self) -> Iterator[Path]:
        """Yield manifests, tars and separate audio files."""
        for manifest in self._tables():
            yield manifest
            yield from _tars(manifest)
            folder = manifest.with_suffix("")
            yield from (path for path in files_below(folder) if path.is_file() and path.suffix != ".tar")


def _manifests(root: Path) -> list[Path]:
    """Manifests in a folder and its subfolders."""
    paths = [path for suffix in _SUFFIXES for pattern in ("", "*/") for path in root.glob(f"{pattern}*{suffix}")]
    return sorted(path for path in paths if path.is_file())


def _tars(manifest: Path) -> list[Path]:
    return sorted({*manifest.with_suffix("").glob("*.tar"), *manifest.parent.glob("*.tar")})


def _plain(manifest: Path, name: str) -> Path | None:
    """The audio as a separate file, if there is one; names must not leave the corpus."""
    if name.startswith("/") or ".." in name.split("/"):
        return None
    return next((p for folder in (manifest.with_suffix(""), manifest.parent) if is_file(p := folder / name)), None)


def _entries(row: dict[str, Any]) -> Iterator[tuple[str, str | None, float | None] | str]:
    """Yield name, text and seconds of each utterance of a line; for a bad one, a description of the error.

    Raises:
        ValueError: the lists of the line differ in length.
    """
    data = row.get("training_data", row)
    if isinstance(data, list):
        items = data
    elif isinstance(data, dict) and isinstance(_first(data, _NAMES), list):
        columns = {key: value for key, value in data.items() if isinstance(value, list)}
        if len({len(column) for column in columns.values()}) != 1:
            raise ValueError("the lists of training_data differ in length")
        items = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    else:
        items = [data]
    for item in items:
        name = _first(item, _NAMES) if isinstance(item, dict) else None
        if not isinstance(name, str) or not name:
            yield "an utterance names no audio"
            continue
        text = next((value for key in _TEXTS if (value := as_text(item.get(key))) is not None), None)
        try:
            milliseconds = as_number("duration_ms", item.get("duration_ms"))
        except ValueError as error:
            yield f"{name}: {error}"
            continue
        yield name, text, None if milliseconds is None else milliseconds / 1000


def _first(item: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)
