"""A folder of audio files, each with its transcript in a text file of the same name beside it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from configurable.folders import walk_folders
from storage.corpora.base import AUDIO_SUFFIXES, NOT_UTF8, RECORDING_SUFFIXES, CorpusReader, Utterance, read_lines

_TRANSCRIPTS = (".txt", ".lab")
_LOOKED_AT = 200  # files, before a folder counts as another layout
_LONGEST_TEXT = 1 << 20  # bytes: a larger file is no transcript of one recording


class SidecarReader(CorpusReader):
    """Reads `NAME.wav` (or another suffix in `RECORDING_SUFFIXES`) with `NAME.txt` or `NAME.lab`, at any depth.

    The id is the path without its suffix, with `-` for `/`; the speaker is the name of the file's folder.
    """

    LAYOUT = (
        "a folder of audio files, each with a text file of its name beside it (`NAME.wav`, `NAME.txt` or "
        "`NAME.lab`); the folder is the speaker"
    )
    EXAMPLE: ClassVar[dict[str, str]] = {
        "ann/1.wav": "",
        "ann/1.txt": "good morning\n",
        "bob/1.wav": "",
        "bob/1.txt": "good night\n",
    }

    OPTIONS = frozenset({"encoding"})

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether one of the first audio files has a transcript."""
        if not root.is_dir():
            return False
        for number, (audio, transcript) in enumerate(_pairs(root)):
            if audio and transcript:
                return True
            if number >= _LOOKED_AT:
                break
        return False

    def _utterances(self) -> Iterator[Utterance]:
        for audio, transcript in _pairs(self.root, self._unlisted):
            place = (audio or transcript or self.root).relative_to(self.root).with_suffix("")
            id_ = "-".join(place.parts)
            if audio is None:
                self._problem(id_, "missing-audio", f"no audio file of the name of {transcript}")
            elif transcript is None:
                self._problem(id_, "missing-transcript", f"no text file of the name of {audio}")
            else:
                try:
                    text = _transcript(transcript, self.encoding)
                except (OSError, ValueError) as error:
                    self._problem(id_, "bad-line", f"{transcript} cannot be used: {getattr(error, 'strerror', error)}")
                    continue
                utterance = self._make(id_, audio, text, audio.parent.name)
                if utterance:
                    yield utterance

    @override
    def scanned(self) -> list[Path]:
        return [self.root]

    def files(self) -> Iterator[Path]:
        """Yield audio files and transcripts."""
        for pair in _pairs(self.root):
            yield from (path for path in pair if path)


def _transcript(path: Path, encoding: str) -> str:
    """The text of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is in another encoding, or longer than any transcript.
    """
    if path.stat().st_size > _LONGEST_TEXT:
        raise ValueError(f"it has more than {_LONGEST_TEXT >> 20} MiB")
    lines = [line for _, line in read_lines(path, encoding)]
    if None in lines:
        raise ValueError(f"it is {NOT_UTF8}")
    return " ".join(" ".join(line for line in lines if line).split())


def _pairs(
    root: Path, on_error: Callable[[OSError], object] | None = None
) -> Iterator[tuple[Path | None, Path | None]]:
    """Audio files and transcripts of the same name, in order; one of them may be missing.

    Args:
        root: The folder.
        on_error: Called with the error of a folder that cannot be listed.
    """
    for folder, _, names in walk_folders(root, on_error):
        audio: dict[str, Path] = {}
        other: dict[str, Path] = {}
        texts: dict[str, Path] = {}
        for name in names:
            path = Path(folder, name)
            kind = path.suffix.lower()
            if name.startswith("."):
                continue
            if kind in AUDIO_SUFFIXES:
                audio.setdefault(path.stem, path)
            elif kind in RECORDING_SUFFIXES:
                other.setdefault(path.stem, path)
            elif kind in _TRANSCRIPTS:
                texts.setdefault(path.stem, path)
        for stem in sorted(audio.keys() | other.keys() | texts.keys()):
            yield audio.get(stem, other.get(stem)), texts.get(stem)
