"""The first three layouts: LibriSpeech, Kaldi, tables."""

import json
from abc import abstractmethod
from pathlib import Path

import pytest
from corpus_contract import SPEAKERS, CorpusContract, expected_ids, write_audio

from storage.corpora import READERS, CorpusError, CorpusReader, Utterance, guess_kind, open_corpus, reader_class


class TestLibriSpeech(CorpusContract):
    kind = "librispeech"

    def make(self, folder):
        for speaker, suffix in zip(SPEAKERS, ("flac", "opus"), strict=True):
            chapter = folder / speaker / "1"
            for number in range(3):
                path = chapter / f"{speaker}-1-000{number}.{suffix}"
                if suffix == "flac":
                    write_audio(path)
                else:
                    chapter.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(b"OggS")
            lines = [f"{speaker}-1-000{number} TEXT ü {speaker} {number}\n" for number in range(3)]
            (chapter / f"{speaker}-1.trans.txt").write_text("".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        chapter = path / "11" / "1"
        with (chapter / "11-1.trans.txt").open("ab") as file:
            file.write(b"11-1-0009 NO AUDIO\n\n11-1-0001 AGAIN\n\xff\xfe broken\n")
        write_audio(chapter / "11-1-0008.wav")
        (path / "33" / "1").mkdir(parents=True)
        write_audio(path / "33" / "1" / "33-1-0000.flac")
        return {
            "11-1-0009": "missing-audio",
            "11-1-0001": "duplicate-id",
            "11-1.trans.txt:7": "bad-line",
            "11-1-0008": "missing-transcript",
            "33-1-0000": "missing-transcript",
        }

    def test_a_folder_of_subsets_gives_splits(self, tmp_path):
        for subset in ("dev", "train"):
            self.make(tmp_path / "all" / subset)
        utterances = list(self.open(tmp_path / "all" / "dev"))
        assert {utterance.split for utterance in utterances} == {None}
        splits = [utterance.split for utterance in self.open(tmp_path / "all")]
        assert splits == ["dev"] * 6  # the second subset repeats the ids, which is a problem of this corpus
        assert [utterance.split for utterance in self.open(tmp_path)] == splits


class TestKaldi(CorpusContract):
    kind = "kaldi"

    def make(self, folder):
        wav, text, speakers = [], [], []
        for utterance_id in expected_ids():
            speaker, _, number = utterance_id.partition("-1-000")
            write_audio(folder.parent / "wav" / f"{utterance_id}.flac")
            wav.append(f"{utterance_id} wav/{utterance_id}.flac\n")
            text.append(f"{utterance_id} TEXT ü {speaker} {number}\n")
            speakers.append(f"{utterance_id}\t{speaker}\n")
        folder.mkdir()
        for name, lines in (("wav.scp", wav), ("text", text), ("utt2spk", speakers)):
            (folder / name).write_text("".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        with (path / "wav.scp").open("a") as file:
            file.write(
                "pipe touch %s |\nark foo.ark:123\ngone wav/none.flac\nsilent wav/11-1-0000.flac\n" % (path / "ran")
            )
        with (path / "text").open("ab") as file:
            file.write(b"pipe X\nark X\ngone X\nnowhere X\n11-1-0000 AGAIN\n\n\xff broken\n")
        return {
            "pipe": "pipe-command",
            "ark": "archive-entry",
            "gone": "missing-audio",
            "nowhere": "missing-audio",
            "silent": "missing-transcript",
            "11-1-0000": "duplicate-id",
            "text:13": "bad-line",
        }

    @pytest.mark.parametrize(
        ("entry", "channel"),
        [
            ("sph2pipe -f wav -p -c 2 call.wav |", 1),
            ("/opt/tools/sph2pipe -f wav -c 1 'call.wav' |", 0),
            ("sph2pipe -f wav call.wav |", None),
            ("flac -c -d -s call.wav |", None),
        ],
    )
    def test_well_known_commands_are_understood(self, tmp_path, entry, channel):
        write_audio(tmp_path / "call.wav")
        (tmp_path / "wav.scp").write_text(f"call {entry}\n")
        (tmp_path / "text").write_text("call HELLO\n")
        (utterance,) = self.open(tmp_path)
        assert (utterance.audio, utterance.channel) == (str(tmp_path / "call.wav"), channel)

    @pytest.mark.parametrize(
        "entry", ["sph2pipe -t 1:2 call.wav |", "sox call.wav -t wav - |", "sph2pipe a b |", "flac 'x |", "|"]
    )
    def test_other_commands_are_problems(self, tmp_path, entry):
        write_audio(tmp_path / "call.wav")
        (tmp_path / "wav.scp").write_text(f"call {entry}\n")
        (tmp_path / "text").write_text("call HELLO\n")
        reader = self.open(tmp_path)
        assert list(reader) == []
        assert [problem.reason for problem in reader.problems] == ["pipe-command"]

    def test_commands_are_never_run(self, path):
        self.add_bad_entries(path)
        reader = self.open(path)
        list(reader)
        list(reader.files())
        reader.fingerprint()
        assert not (path / "ran").exists()

    def test_root_option_takes_precedence_over_the_nearest_path(self, path, tmp_path):
        near = write_audio(path / "wav" / "11-1-0000.flac")
        other = write_audio(tmp_path / "other" / "wav" / "11-1-0000.flac")
        assert next(iter(self.open(path))).audio == str(near)
        assert next(iter(self.open(path, root=str(tmp_path / "other")))).audio == str(other)

    def test_segments_and_channels(self, tmp_path):
        write_audio(tmp_path / "call.wav", 2.0)
        files = {
            "wav.scp": "call-A call.wav\ncall-B call.wav\n",
            "segments": "a call-A 0.5 1.25\nb call-B 1.0 -1\nc call-A 1.0 0.5\n"
            + "d call-A x y\ne none 0 1\nf call-A 0 1\n",
            "text": "a ONE\nb TWO\nc X\nd X\ne X\n",
            "utt2spk": "a s1\n",
            "reco2file_and_channel": "call-A call A\ncall-B call B\n",
        }
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        reader = self.open(tmp_path)
        first, second = list(reader)
        assert (first.start, first.end, first.duration, first.channel, first.speaker) == (0.5, 1.25, 0.75, 0, "s1")
        assert (second.start, second.end, second.duration, second.channel, second.speaker) == (1.0, None, None, 1, "b")
        reasons = {problem.id: problem.reason for problem in reader.problems}
        assert reasons == {
            "c": "bad-segment",
            "d": "bad-segment",
            "e": "missing-audio",
            "f": "missing-transcript",
        }

    def test_split_channels_need_no_channel(self, tmp_path):
        for side in "AB":
            write_audio(tmp_path / f"{side}.wav")
        (tmp_path / "wav.scp").write_text("call-A A.wav\ncall-B B.wav\n")
        (tmp_path / "text").write_text("call-A X\ncall-B Y\n")
        (tmp_path / "reco2file_and_channel").write_text("call-A call A\ncall-B call B\n")
        assert [(u.channel, Path(u.audio).name) for u in self.open(tmp_path)] == [(None, "A.wav"), (None, "B.wav")]

    def test_channels_of_a_recording_find_its_audio_by_their_file(self, tmp_path):
        write_audio(tmp_path / "call.wav", 2.0)
        files = {
            "wav.scp": "call call.wav\n",
            "segments": "a call-A 0 1\nb call-B 0 1\n",
            "text": "a ONE\nb TWO\n",
            "reco2file_and_channel": "call-A call A\ncall-B call B\n",
        }
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        sides = [(u.id, Path(u.audio).name, u.channel) for u in self.open(tmp_path)]
        assert sides == [("a", "call.wav", 0), ("b", "call.wav", 1)]

    def test_first_of_two_recordings_with_one_id_is_used(self, tmp_path):
        for name in ("first.wav", "second.wav"):
            write_audio(tmp_path / name)
        (tmp_path / "wav.scp").write_text("u first.wav\nu second.wav\nu first.wav\n")
        (tmp_path / "text").write_text("u ONE\n")
        reader = self.open(tmp_path)
        assert [Path(u.audio).name for u in reader] == ["first.wav"]
        (problem,) = reader.problems
        assert (problem.id, problem.reason) == ("wav.scp:u", "duplicate-id")

    @pytest.mark.parametrize("name", ["wav.scp", "text"])
    def test_a_missing_table_is_named(self, path, name):
        (path / name).unlink()
        with pytest.raises(CorpusError, match=name):
            list(self.open(path))


class TableContract(CorpusContract):
    """The three spellings of a table."""

    kind = "table"
    name: str

    @abstractmethod
    def render(self, rows: list[dict[str, object]]) -> str:
        """The table's text."""

    def rows(self):
        for utterance_id in expected_ids():
            speaker, _, number = utterance_id.partition("-1-000")
            text = f"TEXT ü {speaker} {number}"
            yield {"path": f"wav/{utterance_id}.flac", "text": text, "speaker": speaker, "part": f"p{number}"}

    def make(self, folder):
        for utterance_id in expected_ids():
            write_audio(folder / "wav" / f"{utterance_id}.flac")
        self.write(folder / self.name, list(self.rows()))
        return folder / self.name

    def write(self, path, rows):
        path.write_text(self.render(rows), encoding="utf-8")

    def test_where_selects(self, path):
        reader = self.open(path, where={"part": "p1"})
        assert [utterance.id for utterance in reader] == ["11-1-0001", "22-1-0001"]
        assert reader.problems == []
        assert len(list(reader.files())) == 3

    def test_columns_can_be_named(self, path):
        first = next(iter(self.open(path, columns={"text": "speaker", "split": "part", "id": "text"})))
        assert (first.id, first.text, first.split) == ("TEXT ü 11 0", "11", "p0")
        with pytest.raises(CorpusError, match="no field 'colour'"):
            self.open(path, columns={"colour": "x"})
        with pytest.raises(CorpusError, match="mapping"):
            self.open(path, where="part=p1")

    def test_all_fields_are_read(self, path):
        row = {"id": "x", "audio": "wav/11-1-0000.flac", "text": "T", "speaker": "s", "domain": "d", "language": "de"}
        row |= {"split": "test", "sample_rate": 8000, "start": 1.5, "duration": 2.0, "channel": 1}
        self.write(path, [row])
        (utterance,) = self.open(path, domain="ignored", corpus="c")
        audio = str(path.parent / "wav" / "11-1-0000.flac")
        assert utterance == Utterance("x", audio, "T", "s", "c", "d", "de", 2.0, 8000, 1.5, 3.5, 1, "test")

    @pytest.mark.parametrize(("field", "value"), [("duration", "long"), ("start", "-1"), ("end", "inf"), ("end", "0")])
    def test_bad_numbers_are_problems(self, path, field, value):
        self.write(path, [{"id": "x", "audio": "wav/11-1-0000.flac", "text": "T", field: value}])
        reader = self.open(path)
        assert list(reader) == []
        assert [problem[:2] for problem in reader.problems] == [("x", "bad-line")]

    def test_pieces_of_one_file_get_different_ids(self, path):
        piece = {"audio": "wav/11-1-0000.flac", "text": "T", "duration": 1}
        self.write(path, [{**piece, "offset": 0.0}, {**piece, "offset": 1.5}])
        assert [(u.id, u.start, u.end) for u in self.open(path)] == [
            ("11-1-0000", 0.0, 1.0),
            ("11-1-0000-00001500", 1.5, 2.5),
        ]

    def test_urls_are_not_checked(self, path):
        self.write(path, [{"id": "x", "audio": "s3://bucket/x.flac", "text": "T"}])
        (utterance,) = self.open(path)
        assert utterance.audio == "s3://bucket/x.flac"


def with_separator(rows, separator):
    columns = list(rows[0])
    lines = [separator.join(columns), *(separator.join(str(row[column]) for column in columns) for row in rows)]
    return "\n".join(lines) + "\n"


class TestCsv(TableContract):
    name = "metadata.csv"

    def render(self, rows):
        return with_separator(rows, ",")

    def add_bad_entries(self, path):
        with path.open("ab") as file:
            file.write(b"wav/none.flac,X,s,p\n,X,s,p\nwav/11-1-0000.flac,AGAIN,11,p\ntoo,few\nx,\xff,s,p\n\n")
        return {
            "none": "missing-audio",
            "metadata.csv:9": "missing-audio",
            "11-1-0000": "duplicate-id",
            "metadata.csv:11": "bad-line",
            "metadata.csv:12": "bad-line",
        }

    def test_table_in_a_folder_is_found(self, path):
        assert [u.id for u in open_corpus("auto", str(path.parent))] == expected_ids()

    def test_quotes_and_a_byte_order_mark_are_handled(self, path):
        path.write_text('\ufeffpath,text\nwav/11-1-0000.flac,"one, ""two"""\n', encoding="utf-8")
        assert [u.text for u in self.open(path)] == ['one, "two"']

    def test_missing_column_is_named(self, path):
        path.write_text("path,words\nwav/11-1-0000.flac,X\n")
        with pytest.raises(CorpusError, match=r"no column for text.*only path, words.*rename .* to text.*columns: "):
            list(self.open(path))
        assert [u.text for u in self.open(path, columns={"text": "words"})] == ["X"]
        with pytest.raises(CorpusError, match="'part' to select by"):
            list(self.open(path, columns={"text": "words"}, where={"part": "x"}))

    def test_oversized_cell_is_one_problem(self, path):
        with path.open("a") as file:
            file.write("x," + "y" * 200_000 + ",s,p\nwav/11-1-0000.flac,AFTER,11,p\n")
        reader = self.open(path)
        assert len(list(reader)) == 6
        assert [problem.reason for problem in reader.problems] == ["bad-line", "duplicate-id"]


class TestTsv(TableContract):
    name = "metadata.tsv"

    def render(self, rows):
        return with_separator(rows, "\t")

    def add_bad_entries(self, path):
        with path.open("ab") as file:
            file.write(b"wav/none.flac\tX\ts\tp\nonly one\n")
        return {"none": "missing-audio", "metadata.tsv:9": "bad-line"}

    def test_single_quotation_mark_is_text(self, path):
        path.write_text('client_id\tpath\tsentence\ns\twav/11-1-0000.flac\t"Oh\ns\twav/11-1-0001.flac\tno"\n')
        assert [(u.speaker, u.text) for u in self.open(path)] == [("s", '"Oh'), ("s", 'no"')]


class TestJsonLines(TableContract):
    name = "metadata.jsonl"

    def render(self, rows):
        return "".join(json.dumps(row) + "\n" for row in rows)

    def add_bad_entries(self, path):
        with path.open("ab") as file:
            file.write(
                b'{"path": "wav/none.flac", "text": "X"}\n{"path": "wav/q.flac"}\n{"text": "X"}\n[1]\n{"half\n\xff\n\n'
            )
        return {
            "none": "missing-audio",
            "q": "missing-transcript",
            "metadata.jsonl:9": "missing-audio",
            "metadata.jsonl:10": "bad-line",
            "metadata.jsonl:11": "bad-line",
            "metadata.jsonl:12": "bad-line",
        }

    def test_nemo_manifests(self, path):
        path.write_text('{"audio_filepath": "wav/11-1-0000.flac", "duration": 1.5, "text": "hello"}\n')
        (utterance,) = self.open(path)
        assert (utterance.id, utterance.duration, utterance.end) == ("11-1-0000", 1.5, None)


def test_unknown_kind_suggests_the_nearest():
    with pytest.raises(CorpusError, match=r"did you mean 'librispeech'\?.*kaldi, lhotse, librispeech"):
        open_corpus("LibriSpeach", "/")
    with pytest.raises(CorpusError, match="Known kinds"):
        open_corpus("???", "/")


def test_every_registered_reader_loads():
    assert all(issubclass(reader_class(kind), CorpusReader) for kind in READERS)


def test_every_reader_says_what_its_layout_looks_like():
    layouts = [vars(reader_class(kind)).get("LAYOUT", "") for kind in READERS]  # its own, not an ancestor's
    assert all(20 < len(layout) < 200 and not layout.endswith(".") for layout in layouts)
    assert len(set(layouts)) == len(READERS)


def test_guess_kind_explains_failure(tmp_path):
    with pytest.raises(CorpusError, match=r"no known corpus layout"):
        guess_kind(str(tmp_path))
    with pytest.raises(CorpusError, match="does not exist"):
        guess_kind(str(tmp_path / "none"))


class ColumnsContract(TableContract):
    def render(self, rows):
        raise NotImplementedError

    def add_bad_entries(self, path):
        bad = [{"path": "wav/none.flac", "text": "X"}, {"path": "wav/q.flac"}, {"text": "X"}]
        self.write(path, [*self.rows(), *bad])
        return {"none": "missing-audio", "q": "missing-transcript", f"{self.name}:9": "missing-audio"}


class TestParquet(ColumnsContract):
    name = "metadata.parquet"

    def write(self, path, rows):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)

    def test_a_damaged_file_is_named(self, path):
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(CorpusError, match=r"metadata\.parquet is not a readable Parquet"):
            list(self.open(path))


class TestArrow(ColumnsContract):
    name = "metadata.arrow"

    def write(self, path, rows):
        import pyarrow as pa

        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table, max_chunksize=4)

    def test_a_damaged_file_is_named(self, path):
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(CorpusError, match=r"metadata\.arrow is not a readable stream of Arrow batches"):
            list(self.open(path))
