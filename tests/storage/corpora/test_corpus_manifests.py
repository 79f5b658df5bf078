"""Manifests and shards of other toolkits: NeMo, lhotse and icefall, WebDataset."""

import gzip
import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_contract import SPEAKERS, CorpusContract, expected_ids, texts, write_audio

from storage.corpora import CorpusError, open_corpus
from storage.corpora.embedded import CellError, read_cell
from storage.corpora.tars import read_member, tar_members
from storage.safety import UnsafeTarError


def json_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_tar(path, members):
    """A tar of (name, content)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


class TestNemo(CorpusContract):
    kind = "nemo"

    def rows(self):
        for utterance_id, speaker, text in texts():
            name = f"wav/{utterance_id}.wav"
            yield {"audio_filepath": name, "duration": 0.01, "text": text, "speaker": speaker}

    def make(self, folder):
        for utterance_id in expected_ids():
            write_audio(folder / "wav" / f"{utterance_id}.wav")
        (folder / "manifest.json").write_text(json_lines(self.rows()), encoding="utf-8")
        return folder / "manifest.json"

    def add_bad_entries(self, path):
        row = next(self.rows())
        bad = [row | {"audio_filepath": "wav/none.wav"}, row | {"text": None, "id": "q"}, row, {"text": "X"}]
        bad += [row | {"id": "odd", "offset": "x"}, row | {"id": "minus", "duration": -1}]
        with path.open("ab") as file:
            file.write(json_lines(bad).encode() + b"\xff\n\n[1]\n")
        return {
            "none": "missing-audio",
            "q": "missing-transcript",
            "11-1-0000": "duplicate-id",
            "manifest.json:10": "missing-audio",
            "odd": "bad-line",
            "minus": "bad-line",
            "manifest.json:13": "bad-line",
            "manifest.json:15": "bad-line",
        }

    def test_pieces_of_long_files(self, path):
        piece = {"audio_filepath": "wav/11-1-0000.wav", "text": "T", "duration": 1.0, "lang": "de"}
        path.write_text(json_lines([piece | {"offset": 0.0}, piece | {"offset": 1.5}]))
        assert [(u.id, u.start, u.end, u.language) for u in self.open(path)] == [
            ("11-1-0000", 0.0, 1.0, "de"),
            ("11-1-0000-00001500", 1.5, 2.5, "de"),
        ]

    def test_folder_instead_of_a_manifest_is_refused(self, path):
        with pytest.raises(CorpusError, match="name the manifest"):
            list(self.open(path.parent))


class TestTarredNemo(CorpusContract):
    kind = "nemo"

    def make(self, folder):
        rows = []
        for shard, wanted in enumerate(SPEAKERS):
            members = []
            for utterance_id, speaker, text in texts():
                if speaker == wanted:
                    name = f"{utterance_id}.wav"
                    members.append((name, write_audio(folder.parent / "plain" / name).read_bytes()))
                    row = {"audio_filepath": name, "duration": 0.01, "text": text, "speaker": speaker}
                    rows.append(row | {"shard_id": shard})
            write_tar(folder / f"audio_{shard}.tar", members)
        (folder / "tarred_audio_manifest.json").write_text(json_lines(rows), encoding="utf-8")
        return folder / "tarred_audio_manifest.json"

    def add_bad_entries(self, path):
        row = {"duration": 0.01, "text": "X"}
        bad = [row | {"audio_filepath": "none.wav", "shard_id": 0}, row | {"audio_filepath": "x.wav", "shard_id": 7}]
        with path.open("a") as file:
            file.write(json_lines(bad))
        return {"none": "missing-audio", "audio_7.tar": "bad-tar", "x": "missing-audio"}

    def test_shards_with_other_names_are_found(self, path):
        for shard in range(2):
            tar = path.with_name(f"audio_{shard}.tar")
            tar.rename(path.with_name(f"train-{shard}.tar"))
        assert len(list(self.open(path, tars="train-{}.tar"))) == 6


class LhotseContract(CorpusContract):
    kind = "lhotse"

    def recording(self, speaker, folder, **fields):
        source = {"type": "file", "channels": [0], "source": str(folder / f"{speaker}.flac")}
        recording = {"id": f"rec-{speaker}", "sources": [source], "sampling_rate": 8000, "num_samples": 24000}
        return recording | {"duration": 3.0, "channel_ids": [0]} | fields

    def supervision(self, utterance_id, speaker, text, **fields):
        number = float(utterance_id[-1])
        supervision = {"id": utterance_id, "recording_id": f"rec-{speaker}", "start": number, "duration": 0.5}
        return supervision | {"channel": 0, "text": text, "speaker": speaker} | fields


class TestLhotseSets(LhotseContract):
    def make(self, folder):
        for speaker in SPEAKERS:
            write_audio(folder / f"{speaker}.flac", 3.0)
        recordings = [self.recording(speaker, folder) for speaker in SPEAKERS]
        with gzip.open(folder / "mini_recordings_train.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write(json_lines(recordings))
        supervisions = [self.supervision(*row) for row in texts()]
        (folder / "mini_supervisions_train.jsonl.gz").write_bytes(gzip.compress(json_lines(supervisions).encode()))
        return folder

    def add_bad_entries(self, path):
        with gzip.open(path / "mini_recordings_train.jsonl.gz", "at", encoding="utf-8") as file:
            command = {"type": "command", "channels": [0], "source": f"touch {path / 'ran'}"}
            file.write(json_lines([self.recording("c", path, sources=[command])]))
            file.write(json_lines([self.recording("t", path, transforms=[{"name": "Speed"}])]))
            file.write(json_lines([self.recording("gone", path), self.recording("unused", path)]) + "{\n")
        bad = [self.supervision(f"{name}-1-0000", name, "X") for name in ("c", "t", "gone", "nowhere")]
        bad += [self.supervision("mute-0", "11", None), self.supervision("11-1-0000", "11", "AGAIN")]
        bad += [self.supervision("late-0", "11", "X", duration=-1)]
        with gzip.open(path / "mini_supervisions_train.jsonl.gz", "ab") as file:
            file.write(json_lines(bad).encode() + b"\xff\n")
        return {
            "mini_recordings_train.jsonl.gz:7": "bad-line",
            "c-1-0000": "pipe-command",
            "t-1-0000": "transformed",
            "gone-1-0000": "missing-audio",
            "nowhere-1-0000": "missing-audio",
            "mute-0": "missing-transcript",
            "11-1-0000": "duplicate-id",
            "late-0": "bad-segment",
            "mini_supervisions_train.jsonl.gz:14": "bad-line",
            "rec-unused": "missing-transcript",
        }

    def test_places_channels_and_languages(self, path):
        sources = [{"type": "file", "channels": [0, 1], "source": "11.flac"}]
        recordings = [self.recording("11", path, sources=sources)]
        (path / "mini_recordings_train.jsonl.gz").write_bytes(gzip.compress(json_lines(recordings).encode()))
        rows = [
            self.supervision("a-0", "11", "A", channel=1, language="German"),
            self.supervision("b-0", "11", "B", duration=3.0, language="fr-CA"),
            self.supervision("c-1", "11", "C", channel=[1], language="?"),
        ]
        (path / "mini_supervisions_train.jsonl.gz").write_bytes(gzip.compress(json_lines(rows).encode()))
        segments = [(u.channel, u.start, u.end, u.language) for u in self.open(path)]
        assert segments == [(1, 0.0, 0.5, "de"), (0, 0.0, None, "fr-CA"), (1, 1.0, 1.5, "en")]

    def test_truncated_archive_is_a_problem(self, path):
        file = path / "mini_supervisions_train.jsonl.gz"
        file.write_bytes(file.read_bytes()[:-12])
        reader = self.open(path)
        list(reader)
        assert "bad-line" in {problem.reason for problem in reader.problems}


class TestLhotseCuts(LhotseContract):
    def cut(self, row, folder, **fields):
        utterance_id, speaker, text = row
        start = float(utterance_id[-1])
        inner = self.supervision(utterance_id, speaker, text, start=0.0)
        cut = {"id": utterance_id, "start": start, "duration": 0.5, "channel": 0, "supervisions": [inner]}
        return cut | {"recording": self.recording(speaker, folder), "type": "MonoCut"} | fields

    def make(self, folder):
        for speaker in SPEAKERS:
            write_audio(folder / f"{speaker}.flac", 3.0)
        path = folder / "cuts_train.jsonl.gz"
        path.write_bytes(gzip.compress(json_lines(self.cut(row, folder) for row in texts()).encode()))
        return path

    def add_bad_entries(self, path):
        row = next(iter(texts()))
        bad = [
            self.cut(row, path.parent, id="mixed", type="MixedCut"),
            self.cut(row, path.parent, id="mute", supervisions=[]),
            self.cut(row, path.parent, id="features", recording=None),
            self.cut(row, path.parent, id="odd", start="x"),
            self.cut(row, path.parent),
        ]
        with gzip.open(path, "at") as file:
            file.write(json_lines(bad) + "{\n")
        return {
            "mixed": "mixed-cut",
            "mute": "missing-transcript",
            "features": "missing-audio",
            "odd": "bad-segment",
            "11-1-0000": "duplicate-id",
            "cuts_train.jsonl.gz:12": "bad-line",
        }

    def test_cut_with_several_supervisions_gives_several_utterances(self, path):
        inner = [self.supervision(f"s-{n}", "11", f"T {n}") for n in range(2)]
        cut = self.cut(next(iter(texts())), path.parent, start=1.0, supervisions=inner)
        path.write_bytes(gzip.compress(json_lines([cut]).encode()))
        assert [(u.id, u.start, u.end) for u in self.open(path)] == [("s-0", 1.0, 1.5), ("s-1", 2.0, 2.5)]

    def test_folder_without_manifests_is_refused(self, tmp_path):
        with pytest.raises(CorpusError, match="neither"):
            list(open_corpus("lhotse", str(tmp_path)))


class TestWebDataset(CorpusContract):
    kind = "webdataset"

    def members(self, folder, speaker):
        for utterance_id, who, text in texts():
            if who == speaker:
                audio = write_audio(folder.parent / "plain" / f"{utterance_id}.flac").read_bytes()
                yield f"./a/{utterance_id}.flac", audio
                about = {"text": text, "speaker": speaker, "id": utterance_id, "duration": 0.01, "sample_rate": 8000}
                yield f"./a/{utterance_id}.json", json.dumps(about).encode()

    def make(self, folder):
        for number, speaker in enumerate(SPEAKERS):
            write_tar(folder / f"shard-{number:06d}.tar", self.members(folder, speaker))
        return folder

    def add_bad_entries(self, path):
        audio = write_audio(path.parent / "plain" / "x.flac").read_bytes()
        write_tar(
            path / "shard-000002.tar",
            [
                ("no-text.flac", audio),
                ("no-audio.txt", b"X"),
                ("not-utf8.flac", audio),
                ("not-utf8.txt", b"\xff"),
                ("no-json.flac", audio),
                ("no-json.json", b"{"),
                ("twice.txt", b"X"),
                ("twice.txt", b"X"),
                ("huge.flac", audio),
                ("huge.json", b" " * (2 << 20)),
                ("11-1-0000.flac", audio),
                ("11-1-0000.txt", b"AGAIN"),
            ],
        )
        (path / "shard-000003.tar").write_bytes((path / "shard-000000.tar").read_bytes()[:530])
        (path / "shard-000004.tar").write_bytes(gzip.compress(b"x"))
        return {
            "no-text": "missing-transcript",
            "no-audio": "missing-audio",
            "not-utf8": "bad-line",
            "no-json": "bad-line",
            "shard-000002.tar:twice.txt": "duplicate-member",
            "twice": "missing-audio",
            "huge": "bad-line",
            "11-1-0000": "duplicate-id",
            "shard-000003.tar": "bad-tar",
            "shard-000004.tar": "bad-tar",
        }

    def test_patterns_of_shard_names_are_expanded(self, path):
        for pattern in ("shard-{000000..000001}.tar", "shard-*.tar", "shard-00000[01].tar"):
            assert [u.id for u in open_corpus("auto", f"{path}/{pattern}")] == expected_ids()
        assert [u.speaker for u in self.open(f"{path}/shard-{{000001..000001}}.tar")] == ["22"] * 3
        reader = self.open(f"{path}/shard-{{000001..000002}}.tar")
        assert len(list(reader)) == 3
        assert [(p.id, p.reason) for p in reader.problems] == [("shard-000002.tar", "bad-tar")]
        for pattern in ("none-*.tar", "shard-{5..1}.tar", "shard-{0..99999999}.tar"):
            with pytest.raises(CorpusError):
                list(self.open(f"{path}/{pattern}"))

    def test_text_and_class_members_are_transcripts(self, path, tmp_path):
        audio = write_audio(tmp_path / "x.flac").read_bytes()
        members = [("a.flac", audio), ("a.cls", b"7"), ("b.seg.wav", audio), ("b.txt", b" two \n")]
        members += [("c.mp3", audio), ("c.json", b'{"normalized": "three", "text": "3"}')]
        write_tar(tmp_path / "x.tar", members)
        assert [(u.id, u.text) for u in self.open(tmp_path / "x.tar")] == [("a", "7"), ("b", "two"), ("c", "3")]
        assert [u.text for u in self.open(tmp_path / "x.tar", text="normalized")] == ["7", "two", "three"]

    def test_tars_folders_with_tars_and_patterns_of_tars_are_recognised(self, path, tmp_path):
        (tmp_path / "x.tar").touch()
        (tmp_path / "x.flac").touch()
        (tmp_path / "empty").mkdir()
        recognised = [path, tmp_path / "x.tar", path / "shard-{000000..000001}.tar", path / "shard-*.tar"]
        others = [tmp_path / "x.flac", tmp_path / "empty", path / "shard-*.flac", tmp_path / "missing.tar"]
        assert all(type(self.open(path)).recognises(root) for root in recognised)
        assert not any(type(self.open(path)).recognises(root) for root in others)

    def test_only_adjacent_members_are_one_sample(self, tmp_path):
        audio = write_audio(tmp_path / "x.flac").read_bytes()
        members = [("a.flac", audio), ("a.txt", b"one"), ("b.flac", audio), ("b.txt", b"two")]
        write_tar(tmp_path / "x.tar", [*members, ("a.json", b'{"id": "c"}')])
        reader = self.open(tmp_path / "x.tar")
        assert [(u.id, u.text) for u in reader] == [("a", "one"), ("b", "two")]
        assert [(p.id, p.reason) for p in reader.problems] == [("a", "missing-audio")]

    def test_names_are_never_paths(self, tmp_path):
        audio = write_audio(tmp_path / "x.flac").read_bytes()
        write_tar(tmp_path / "in" / "x.tar", [("../../evil.flac", audio), ("../../evil.txt", b"X")])
        (utterance,) = self.open(tmp_path / "in" / "x.tar")
        assert (utterance.id, utterance.audio) == ("../../evil", str(tmp_path / "in" / "x.tar"))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "x.flac"]


def test_links_and_devices_are_skipped(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, kind in (
            ("link.flac", tarfile.SYMTYPE),
            ("hard.flac", tarfile.LNKTYPE),
            ("pipe.flac", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("a.txt")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
    (member,) = tar_members(tmp_path / "x.tar")
    assert read_member(tmp_path / "x.tar", member) == b"hello"
    with pytest.raises(UnsafeTarError, match="more than 4"):
        read_member(tmp_path / "x.tar", member, limit=4)


@pytest.mark.parametrize("cut", [513, 1030, 1536, 1536 + 512])
def test_truncated_tar_is_detected(tmp_path, cut):
    write_tar(tmp_path / "x.tar", [("a.txt", b"x" * 100), ("b.txt", b"y" * 600)])
    whole = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").write_bytes(whole[:cut])
    with pytest.raises(UnsafeTarError, match=r"x\.tar"):
        list(tar_members(tmp_path / "x.tar"))


class TestHuggingFace(CorpusContract):
    kind = "huggingface"

    def make(self, folder):
        for number, (split, speaker) in enumerate(zip(("test", "train"), SPEAKERS, strict=True)):
            rows = [row for row in texts() if row[1] == speaker]
            write_rows(folder / "data" / f"{split}-00000-of-00001.parquet", rows, ogg=bool(number))
        return folder

    def add_bad_entries(self, path):
        rows = [("no-text", "33", None), ("11-1-0000", "33", "AGAIN")]
        write_rows(path / "data" / "validation-00000-of-00001.parquet", rows)
        (path / "data" / "validation-00001-of-00001.parquet").write_bytes(b"PAR1 damaged")
        return {
            "no-text": "missing-transcript",
            "11-1-0000": "duplicate-id",
            "validation-00001-of-00001.parquet": "bad-table",
        }

    def test_sets_are_those_of_the_file_names(self, path):
        assert [u.split for u in self.open(path)] == ["test"] * 3 + ["train"] * 3


class TestHuggingFaceSaved(TestHuggingFace):
    """As `DatasetDict.save_to_disk` writes them."""

    def make(self, folder):
        for split, speaker in zip(("test", "train"), SPEAKERS, strict=True):
            save_rows(folder / split, [row for row in texts() if row[1] == speaker])
        (folder / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
        return folder

    def add_bad_entries(self, path):
        save_rows(path / "validation", [("no-text", "33", None), ("11-1-0000", "33", "AGAIN")])
        (path / "validation" / "data-00001-of-00002.arrow").write_bytes(b"damaged")
        (path / "validation" / "cache-1b2c.arrow").write_bytes(b"of a `map`, and no part of it")
        return {
            "no-text": "missing-transcript",
            "11-1-0000": "duplicate-id",
            "data-00001-of-00002.arrow": "bad-table",
        }

    def test_descriptions_belong_to_the_corpus(self, path):
        assert self.open(path).passed_over().first == []

    def test_a_single_data_set_has_no_sets(self, tmp_path):
        save_rows(tmp_path / "one", list(texts()))
        assert [u.split for u in self.open(tmp_path / "one")] == [None] * 6

    def test_cells_are_those_of_the_rows(self, path):
        utterances = list(self.open(path))
        audio = [read_cell(u.audio, u.column, u.row) for u in reversed(utterances)]
        assert audio == [u.id.encode() for u in reversed(utterances)]
        with pytest.raises(CellError, match="has 3 rows: there is no row 3"):
            read_cell(utterances[0].audio, "audio", 3)
        with pytest.raises(CellError, match="has no column 'text' with audio"):
            read_cell(utterances[0].audio, "text", 0)


def save_rows(folder, rows):
    """An Arrow file of two batches with the audio inside, as Hugging Face's library writes it; the audio is the id."""
    folder.mkdir(parents=True)
    audio = [{"bytes": id_.encode(), "path": f"{id_}.wav"} for id_, _, _ in rows]
    columns = dict(zip(("id", "speaker_id", "text"), map(list, zip(*rows, strict=True)), strict=True))
    table = pa.table({"audio": audio, **columns})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')


def write_rows(path, rows, ogg=False):
    """A Parquet file with the audio inside; rows are id, speaker, text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    audio = [{"bytes": b"OggS" if ogg else b"RIFF", "path": f"{id_}.wav"} for id_, _, _ in rows]
    columns = dict(zip(("id", "speaker_id", "text"), map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table({"audio": audio, **columns}), path)
