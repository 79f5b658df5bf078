"""The contract of every layout in the registry, with the example that its reader declares."""

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_contract import LayoutContract, write_audio

from storage.corpora import READERS, open_corpus, reader_class
from storage.corpora.base import AUDIO_SUFFIXES
from storage.corpora.table import KNOWN_COLUMNS, write_table

SECONDS = 6.0


def example_of(kind):
    """The files of a layout's own example, not of an ancestor's."""
    example = vars(reader_class(kind)).get("EXAMPLE")
    assert example, f"{READERS[kind]} has no EXAMPLE: give it a tiny corpus, which the tests of all layouts read"
    return example


def write_example(files, folder):
    """Write the files of an example."""
    for name, text in files.items():
        tar, inside, member = name.rpartition(".tar/")
        path = folder / (f"{tar}.tar" if inside else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if inside:
            add_to_tar(path, member, content_of(folder.parent / "plain" / member, text))
        else:
            path.write_bytes(content_of(folder.parent / "plain" / name, text))


def content_of(path, text):
    """What a file of a name contains."""
    if path.suffix in AUDIO_SUFFIXES:
        assert not text, f"{path.name}: leave the text of an audio file empty"
        return write_audio(path, SECONDS).read_bytes()
    if path.suffix != ".parquet":
        return text.encode()
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        row["audio"]["bytes"] = row["audio"]["bytes"].encode()
    pq.write_table(pa.Table.from_pylist(rows), written := io.BytesIO())
    return written.getvalue()


def add_to_tar(path, name, content):
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))


class ExampleContract(LayoutContract):
    """What a layout's own example shows besides."""

    def make(self, folder):
        files = example_of(self.kind)
        write_example(files, folder)
        return folder if reader_class(self.kind).recognises(folder) else folder / next(iter(files))

    def test_every_entry_of_the_example_is_an_utterance(self, path):
        reader = self.open(path)
        utterances = list(reader)
        assert len(utterances) >= 2
        assert reader.problems == []
        assert all(utterance.id and utterance.text for utterance in utterances)
        assert len({utterance.id for utterance in utterances}) == len(utterances)
        assert len({utterance.audio for utterance in utterances}) > 1
        assert all(utterance.start < (utterance.end or SECONDS) <= SECONDS for utterance in utterances)

    def test_layout_with_sets_tells_them(self, path):
        assert not reader_class(self.kind).HAS_SETS or any(utterance.split for utterance in self.open(path))

    def test_lost_audio_loses_its_own_utterances_only(self, path):
        reader = self.open(path)
        first, *others = list(reader)
        (path if path.is_dir() else path.parent).joinpath(first.audio).unlink()
        assert list(reader) == [utterance for utterance in others if utterance.audio != first.audio]

    def test_confidences_are_read_if_the_layout_has_a_place_for_them(self, path):
        confidences = {utterance.confidence for utterance in self.open(path)} - {None}
        expected = {0.41, 0.93} if reader_class(self.kind).CONFIDENCE else set()
        assert confidences <= expected
        assert bool(confidences) == bool(expected)

    def test_what_is_no_confidence_is_kept_as_text_and_stops_nothing(self, tmp_path):
        folder, files = tmp_path / "corpus", example_of(self.kind)
        write_example({name: text.replace("0.93", "93") for name, text in files.items()}, folder)
        path = folder if reader_class(self.kind).recognises(folder) else folder / next(iter(files))
        reader = self.open(path)
        confidences = {utterance.confidence for utterance in reader}
        assert reader.problems == []
        assert ("93" in confidences) == bool(reader.CONFIDENCE)

    def test_a_table_of_the_utterances_is_read_as_the_same_utterances(self, path, tmp_path):
        utterances = list(self.open(path, corpus="c"))
        rows = [(utterance, {"more": number}) for number, utterance in enumerate(utterances)]
        write_table(tmp_path / "table.csv", rows, list(KNOWN_COLUMNS), ["more"])
        reader = open_corpus("table", str(tmp_path / "table.csv"), corpus="c")
        assert list(reader) == utterances
        assert reader.problems == []
        selected = open_corpus("table", str(tmp_path / "table.csv"), corpus="c", where={"more": "1"})
        assert list(selected) == utterances[1:2]


globals().update({f"Test_{kind}": type(f"Test_{kind}", (ExampleContract,), {"kind": kind}) for kind in READERS})


def test_layout_without_example_is_told_what_it_lacks(monkeypatch):
    monkeypatch.delattr(reader_class("fsdd"), "EXAMPLE")
    with pytest.raises(AssertionError, match=r"presets:FsddReader has no EXAMPLE: give it a tiny corpus"):
        example_of("fsdd")
