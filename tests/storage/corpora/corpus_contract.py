"""What every corpus reader promises: a suite of tests that the tests of each layout inherit."""

import io
import os
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import pytest
import soundfile

from storage.corpora import CorpusError, CorpusReader, Utterance, guess_kind, open_corpus, reader_class
from storage.corpora.base import corpus_name

SPEAKERS = ("11", "22")


def write_audio(path: Path, seconds: float = 0.01) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {".sph": {"format": "NIST", "subtype": "PCM_16"}, ".opus": {"format": "OGG", "subtype": "OPUS"}}
    soundfile.write(path, np.zeros(int(8000 * seconds), dtype=np.int16), 8000, **kind.get(path.suffix, {}))
    return path


def expected_ids():
    return [f"{speaker}-1-000{number}" for speaker in SPEAKERS for number in range(3)]


def texts():
    """Id, speaker and text of the six utterances."""
    for utterance_id in expected_ids():
        speaker, _, number = utterance_id.partition("-1-000")
        yield utterance_id, speaker, f"TEXT ü {speaker} {number}"


class LayoutContract(ABC):
    """What can be tested of any corpus of a layout."""

    kind: str

    @abstractmethod
    def make(self, folder: Path) -> Path:
        """Writes the corpus and returns the path to open."""

    @pytest.fixture
    def path(self, tmp_path):
        return self.make(tmp_path / "corpus")

    def open(self, path, **options) -> CorpusReader:
        return open_corpus(self.kind, str(path), **options)

    def test_is_lazy_and_repeatable(self, path):
        reader = self.open(path)
        first = next(iter(reader))
        assert isinstance(first, Utterance)
        assert list(reader) == list(reader)

    def test_a_default_name(self, path):
        assert {utterance.corpus for utterance in self.open(path)} == {corpus_name(str(path))}

    def test_files_hold_all_audio(self, path):
        reader = self.open(path)
        files = set(reader.files())
        assert {Path(utterance.audio) for utterance in reader} <= files
        assert all(file.is_file() for file in files)

    def test_fingerprint_follows_the_files(self, path, tmp_path):
        reader = self.open(path)
        before = reader.fingerprint()
        assert before == self.open(path).fingerprint()
        assert len(before) == 64
        audio = Path(next(iter(reader)).audio)
        os.utime(audio, (1, 1))
        touched = self.open(path).fingerprint()
        audio.unlink()
        removed = self.open(path).fingerprint()
        assert len({before, touched, removed}) == 3

    def test_kind_is_guessed(self, path):
        guessed = guess_kind(str(path))  # some layouts are others with settings of their own
        assert issubclass(reader_class(self.kind), reader_class(guessed))
        assert [u.id for u in open_corpus("auto", str(path))] == [u.id for u in self.open(path)]

    def test_audio_can_be_read(self, path):
        for utterance in self.open(path):
            if utterance.offset is not None:
                with Path(utterance.audio).open("rb") as file:
                    file.seek(utterance.offset)
                    assert soundfile.info(io.BytesIO(file.read(utterance.length))).frames > 0

    @pytest.mark.parametrize("seed", range(3))
    def test_damage_is_counted_or_refused_and_nothing_else(self, path, seed):
        random = np.random.default_rng(seed)
        folder = path if path.is_dir() else path.parent
        tables = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix not in {".flac", ".wav", ".sph"}]
        for _ in range(4 if tables else 0):
            file = tables[random.integers(len(tables))]
            content = bytearray(file.read_bytes())
            for _ in range(3):
                where = int(random.integers(max(1, len(content))))
                how = int(random.integers(3))
                junk = bytes(random.integers(0, 256, 3, dtype=np.uint8)) + b'\t\n"{}'[how : how + 2]
                content[where : where + 5 * how] = junk
            file.write_bytes(content)
        try:
            reader = self.open(path)
            utterances = list(reader)
            list(reader.files())
        except CorpusError as error:
            assert str(folder) in str(error) or "no column" in str(error)
            return
        assert len({u.id for u in utterances}) == len(utterances)
        assert all(p.reason and p.detail for p in reader.problems)

    def test_refuses_unknown_options_and_paths(self, path, tmp_path):
        with pytest.raises(CorpusError, match="no option 'colour'"):
            self.open(path, colour="red")
        with pytest.raises(CorpusError, match="does not exist"):
            self.open(tmp_path / "none")


class CorpusContract(LayoutContract):
    """Six good utterances of two speakers; each reader says how its layout is made and broken."""

    text = "TEXT ü 22 1"
    """Of the fifth utterance."""
    own = False
    """Whether the corpus itself says language and domain."""

    def ids(self):
        return expected_ids()

    def speakers(self):
        return [s for s in SPEAKERS for _ in range(3)]

    @abstractmethod
    def add_bad_entries(self, path: Path) -> dict[str, str]:
        """Adds broken entries to the corpus; returns id to reason."""

    def test_yields_every_utterance_in_order(self, path):
        reader = self.open(path, corpus="c", domain="read", language="en-US")
        utterances = list(reader)
        assert [utterance.id for utterance in utterances] == self.ids()
        assert [utterance.speaker for utterance in utterances] == self.speakers()
        assert utterances[4].text == self.text
        assert self.own or {(u.corpus, u.domain, u.language) for u in utterances} == {("c", "read", "en-US")}
        assert all(Path(u.audio).is_absolute() and Path(u.audio).is_file() for u in utterances)
        assert reader.problems == []

    def test_bad_entries_become_problems(self, path):
        expected = self.add_bad_entries(path)
        reader = self.open(path)
        assert [utterance.id for utterance in reader] == self.ids()
        assert {problem.id: problem.reason for problem in reader.problems} == expected
        assert len(reader.problems) == len(expected)
        assert all(problem.detail for problem in reader.problems)
        list(reader)
        assert len(reader.problems) == len(expected)  # not counted twice
