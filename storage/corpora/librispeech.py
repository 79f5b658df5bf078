"""LibriSpeech's layout: SPEAKER/CHAPTER/ID.flac beside SPEAKER-CHAPTER.trans.txt with lines `ID TEXT`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from configurable.folders import walk_folders
from storage.corpora.base import AUDIO_SUFFIXES, RECORDING_SUFFIXES, CorpusReader, Utterance

_TRANSCRIPT_SUFFIX = ".trans.txt"


class LibriSpeechReader(CorpusReader):
    """Reads a subset such as `LibriSpeech/train-clean-5`, or a folder of several subsets.

    All suffixes in `RECORDING_SUFFIXES` are accepted; of several files of one stem, the first that can be decoded is
    used. The speaker is the name of the folder above the chapter's. If the path is a folder of subsets, each
    utterance's `split` is the name of its subset.
    """

    LAYOUT = "`SPEAKER/CHAPTER/*.flac` (or opus, ogg, wav, mp3) with `SPEAKER-CHAPTER.trans.txt`"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "19/198/19-198.trans.txt": "19-198-0000 GOOD MORNING\n19-198-0001 GOOD NIGHT\n",
        "19/198/19-198-0000.flac": "",
        "19/198/19-198-0001.flac": "",
    }

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is a transcript anywhere below the path."""
        return any(name.endswith(_TRANSCRIPT_SUFFIX) for _, _, names in walk_folders(root) for name in names)

    def _utterances(self) -> Iterator[Utterance]:
        for folder, names in self._chapters(self._unlisted):
            audio = {Path(name).stem: name for name in names if not name.endswith(_TRANSCRIPT_SUFFIX)}
            for name in names:
                if name.endswith(_TRANSCRIPT_SUFFIX):
                    yield from self._transcribed(folder, name, audio)
            for utterance_id, name in audio.items():
                self._problem(utterance_id, "missing-transcript", f"no transcript has a line for {folder / name}")

    def _transcribed(self, folder: Path, transcript: str, audio: dict[str, str]) -> Iterator[Utterance]:
        """Yield the utterances of one transcript; removes used entries from `audio`."""
        used: dict[str, str] = {}
        for number, line in self._lines(folder / transcript):
            if line is None:
                self._problem(f"{transcript}:{number}", "bad-line", "the line is not UTF-8")
                continue
            utterance_id, _, text = line.strip().partition(" ")
            if not utterance_id:
                continue
            name = audio.pop(utterance_id, None) or used.get(utterance_id)
            if name is None:
                self._problem(utterance_id, "missing-audio", f"no audio file of that name in {folder}")
                continue
            used[utterance_id] = name
            yield Utterance(
                id=utterance_id,
                audio=str(folder / name),
                text=text.strip(),
                speaker=folder.parent.name,
                corpus=self.corpus,
                domain=self.domain,
                language=self.language,
                split=self._split(folder),
            )

    def _split(self, folder: Path) -> str | None:
        parts = folder.relative_to(self.root).parts
        return parts[-3] if len(parts) >= 3 else None

    @override
    def scanned(self) -> list[Path]:
        return [self.root]

    def files(self) -> Iterator[Path]:
        """Yield all audio files and transcripts below the path."""
        for folder, names in self._chapters():
            for name in names:
                yield folder / name

    def _chapters(self, on_error: Callable[[OSError], object] | None = None) -> Iterator[tuple[Path, list[str]]]:
        """Yield folders with audio or transcripts, in order, with the sorted names of these files.

        Args:
            on_error: Called with the error of a folder that cannot be listed.
        """
        for folder, _, names in walk_folders(self.root, on_error):
            transcripts = [name for name in names if name.endswith(_TRANSCRIPT_SUFFIX)]
            audio: dict[str, str] = {}
            for name in sorted(names, key=lambda name: (Path(name).suffix.lower() not in AUDIO_SUFFIXES, name)):
                if Path(name).suffix.lower() in RECORDING_SUFFIXES and not name.startswith("."):
                    audio.setdefault(Path(name).stem, name)
            if transcripts or audio:
                yield Path(folder), sorted([*transcripts, *audio.values()])
