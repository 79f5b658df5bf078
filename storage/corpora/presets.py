"""Small public corpora and variants of known layouts: speechocean762, Free Spoken Digits, telephone speech."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from storage.corpora.base import SET_OF_SPLIT, CorpusError, CorpusReader, Utterance
from storage.corpora.kaldi import KaldiReader

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEST_TAKES = 5  # the data set's own division: takes 0 to 4 are for tests (its README)


class SpeechOceanReader(CorpusReader):
    """speechocean762 (Zhang et al. 2021): Kaldi folders `train` and `test` in one folder with the audio.

    Reads the corpus' folder, whose parts are the sets, or one part.
    """

    LAYOUT = "speechocean762: Kaldi data folders `train` and `test` beside `WAVE/`"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "train/wav.scp": "a1\tWAVE/SPEAKER1/a1.wav\n",
        "train/text": "a1\tGOOD MORNING\n",
        "train/utt2spk": "a1\t1\n",
        "test/wav.scp": "b1\tWAVE/SPEAKER2/b1.wav\n",
        "test/text": "b1\tGOOD NIGHT\n",
        "test/utt2spk": "b1\t2\n",
        "WAVE/SPEAKER1/a1.wav": "",
        "WAVE/SPEAKER2/b1.wav": "",
    }
    HAS_SETS = True

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is `WAVE` beside a Kaldi folder `train`."""
        return (root / "WAVE").is_dir() and (root / "train" / "wav.scp").is_file()

    def _parts(self) -> list[KaldiReader]:
        names = [p for p in ("train", "valid", "test") if (self.root / p / "wav.scp").is_file()]
        folders = [self.root / name for name in names] or [self.root]
        return [
            KaldiReader(
                str(folder),
                corpus=self.corpus,
                domain=self.domain,
                language=self.language,
                root=str(self.root if names else self.root.parent),
                **self.options,
            )
            for folder in folders
        ]

    def _utterances(self) -> Iterator[Utterance]:
        for part in self._parts():
            for utterance in part:
                split = SET_OF_SPLIT.get(part.root.name)
                yield Utterance(**{**vars(utterance), "split": split})
            self._take_over(part)

    def files(self) -> Iterator[Path]:
        """Yield the files of the parts."""
        for part in self._parts():
            yield from part.files()


class FsddReader(CorpusReader):
    """Free Spoken Digit Dataset: recordings/DIGIT_SPEAKER_TAKE.wav; takes 0 to 4 are the official test set."""

    LAYOUT = "Free Spoken Digit Dataset: `recordings/DIGIT_SPEAKER_TAKE.wav`"
    EXAMPLE: ClassVar[dict[str, str]] = {"recordings/7_jackson_0.wav": "", "recordings/7_theo_9.wav": ""}
    HAS_SETS = True

    @classmethod
    def recognises(cls, root: Path) -> bool:
        """Whether there is a folder `recordings` with such file names."""
        return any((root / "recordings").glob("[0-9]_*_[0-9]*.wav"))

    def _utterances(self) -> Iterator[Utterance]:
        recordings = list(self.files())
        if not recordings:
            raise CorpusError(f"{self.root} has no recordings/*.wav: name the dataset's folder")
        for path in recordings:
            fields = path.stem.split("_")
            if len(fields) != 3 or fields[0] not in "0123456789" or not fields[2].isdigit():
                self._problem(path.stem, "bad-id", f"{path.name} is not DIGIT_SPEAKER_TAKE")
                continue
            split = "test" if int(fields[2]) < _TEST_TAKES else "train"
            utterance = self._make(path.stem, path, _DIGITS[int(fields[0])], fields[1], split=split)
            if utterance:
                yield utterance

    @override
    def scanned(self) -> list[Path]:
        return [self.root / "recordings"]

    def files(self) -> Iterator[Path]:
        """Yield the recordings, sorted by name."""
        paths = (self.root / "recordings").glob("*")
        yield from sorted(path for path in paths if path.suffix in (".wav", ".flac"))


class TelephoneReader(KaldiReader):
    """Switchboard or Fisher as a Kaldi data folder: segments, and files with one channel per side."""

    LAYOUT = "Switchboard, Fisher and the like as a Kaldi data folder with `segments` and two channels"
    EXAMPLE: ClassVar[dict[str, str]] = {
        "wav.scp": "c1-A sph2pipe -f wav -p -c 1 c1.sph |\nc2-B sph2pipe -f wav -p -c 2 c2.sph |\n",
        "reco2file_and_channel": "c1-A c1 A\nc2-B c2 B\n",
        "segments": "c1-A-0 c1-A 0.5 2\nc2-B-0 c2-B 1 3\n",
        "text": "c1-A-0 good morning\nc2-B-0 good night\n",
        "utt2spk": "c1-A-0 ann\nc2-B-0 bob\n",
        "c1.sph": "",
        "c2.sph": "",
    }

    def __init__(
        self, path: str, *, corpus: str = "", domain: str = "", language: str = "en", **options: object
    ) -> None:
        super().__init__(path, corpus=corpus, domain=domain or "telephone", language=language, **options)
