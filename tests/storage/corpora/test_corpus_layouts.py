"""Public corpora whose layout is folders: each made here as its publishers give it."""

import json

import pytest
from corpus_contract import SPEAKERS, CorpusContract, expected_ids, texts, write_audio

from storage.corpora import CorpusError, open_corpus
from storage.corpora.sidecar import SidecarReader


class TestSidecar(CorpusContract):
    kind = "sidecar"

    def ids(self):
        return [f"{name.split('-')[0]}-{name}" for name in expected_ids()]

    def make(self, folder):
        for utterance_id, speaker, text in texts():
            path = folder / speaker / f"{utterance_id}.flac"
            write_audio(path)
            path.with_suffix(".txt").write_text(f"{text}\n", encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        write_audio(path / "11" / "no text.wav")
        (path / "11" / "no audio.txt").write_text("X")
        write_audio(path / "33" / "broken.wav")
        (path / "33" / "broken.lab").write_bytes(b"\xff")
        return {"11-no text": "missing-transcript", "11-no audio": "missing-audio", "33-broken": "bad-line"}

    def test_upper_case_suffixes_are_read_and_the_first_of_two_files(self, tmp_path):
        for name in ("a.WAV", "a.LAB", "a.txt", "a.wav"):
            (tmp_path / name).touch()
        assert [path.name for path in SidecarReader(str(tmp_path)).files()] == ["a.WAV", "a.LAB"]

    @pytest.mark.parametrize(("name", "known"), [("a.wav", True), ("b.wav", False)])
    def test_transcript_must_be_beside_its_audio(self, tmp_path, name, known):
        for file in (name, "a.txt"):
            (tmp_path / file).touch()
        assert SidecarReader.recognises(tmp_path) == known

    def test_a_few_recordings_without_transcripts_may_come_first(self, tmp_path):
        for file in ("a.wav", "b.txt", "c.wav", "c.txt"):
            (tmp_path / file).touch()
        assert SidecarReader.recognises(tmp_path)


class TestMls(CorpusContract):
    kind = "mls"

    def ids(self):
        return [name.replace("-", "_") for name in expected_ids()]

    def make(self, folder):
        lines = []
        for utterance_id, speaker, text in texts():
            name = utterance_id.replace("-", "_")
            write_audio(folder / "audio" / speaker / "1" / f"{name}.{'flac' if speaker == '11' else 'opus'}")
            lines.append(f"{name}\t{text}\n")
        (folder / "transcripts.txt").write_text("".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        with (path / "transcripts.txt").open("ab") as file:
            file.write(b"11_1_0009\tNO AUDIO\n\n11_1_0001\tAGAIN\n\xff\tbroken\nno tab\n../../x_1\tAWAY\n")
        write_audio(path / "audio" / "11" / "1" / "11_1_0008.flac")
        part = path.name
        return {
            "11_1_0009": "missing-audio",
            "11_1_0001": "duplicate-id",
            f"{part}/transcripts.txt:10": "bad-line",
            f"{part}/transcripts.txt:11": "bad-line",
            "../../x_1": "bad-id",
            "11_1_0008": "missing-transcript",
        }

    def test_languages_parts_and_handles_select(self, tmp_path):
        for part in ("dev", "train"):
            self.make(tmp_path / "mls_german_opus" / part)
        handles = tmp_path / "mls_german_opus" / "train" / "limited_supervised" / "1hr" / "0"
        handles.mkdir(parents=True)
        (handles / "handles.txt").write_text("22_1_0001\n22_1_0002\n")
        for line in ("dev", "train"):
            text = tmp_path / "mls_german_opus" / line / "transcripts.txt"
            audio = text.parent / "audio" / "22" / "1"
            if line == "train":  # the parts share no utterance
                for path in sorted((text.parent / "audio").rglob("*_1_*")):
                    path.rename(path.with_name(path.name.replace("_1_", "_2_")))
                for folder in ("11", "22"):
                    (text.parent / "audio" / folder / "1").rename(text.parent / "audio" / folder / "2")
                text.write_text(text.read_text().replace("_1_", "_2_"))
                (handles / "handles.txt").write_text("22_2_0001\n22_2_0002\n")
            else:
                assert audio.is_dir()
        utterances = list(open_corpus("auto", str(tmp_path), handles="1hr/0"))
        assert [(u.id, u.split, u.language) for u in utterances[5:]] == [
            ("22_1_0002", "valid", "de"),
            ("22_2_0001", "train", "de"),
            ("22_2_0002", "train", "de"),
        ]
        with pytest.raises(CorpusError, match="handles"):
            list(open_corpus("mls", str(tmp_path), handles="10hr"))


class TestCommonVoice(CorpusContract):
    kind = "commonvoice"
    header = ("client_id", "path", "sentence", "up_votes", "down_votes", "age", "gender", "accents", "locale")

    def row(self, speaker, path, text, accents="", locale="en-US"):
        return "\t".join((speaker, path, text, "2", "0", "", "", accents, locale)) + "\n"

    def make(self, folder):
        lines = ["\t".join(self.header) + "\n"]
        for utterance_id, speaker, text in texts():
            write_audio(folder / "clips" / f"{utterance_id}.mp3")
            lines.append(self.row(speaker, f"{utterance_id}.mp3", text, f"accent {speaker}"))
        for name in ("train", "validated"):
            (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        with (path / "train.tsv").open("ab") as file:
            file.write(self.row("1", "gone.mp3", "X").encode() + self.row("1", "11-1-0000.mp3", "AGAIN").encode())
            file.write(b"too\tfew\n\xff\n" + self.row("1", "", "X").encode())
        return {
            "gone": "missing-audio",
            "11-1-0000": "duplicate-id",
            "train.tsv:10": "bad-line",
            "train.tsv:11": "bad-line",
            "train.tsv:12": "bad-line",
        }

    def test_tables_give_the_sets(self, path):
        rows = (path / "train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
        (path / "train.tsv").write_text("".join(rows[:3]))
        (path / "dev.tsv").write_text("".join([rows[0], *rows[3:5]]))
        assert [u.split for u in self.open(path)] == ["train", "train", "valid", "valid"]
        splits = [u.split for u in self.open(path, tables="validated")]
        assert splits == ["train", "train", "valid", "valid", None, None]

    def test_accents_select(self, path):
        assert {u.speaker for u in self.open(path, where={"accents": "accent 22"})} == {"22"}
        with pytest.raises(CorpusError, match="mapping"):
            list(self.open(path, where="x"))
        with pytest.raises(CorpusError, match=r"other\.tsv"):
            list(self.open(path, tables=["other"]))

    def test_early_releases_are_read(self, path):
        text = (path / "train.tsv").read_text(encoding="utf-8").replace(".mp3", "").replace("\tlocale", "\tsegment")
        (path / "train.tsv").write_text(text.replace("\ten-US", "\t"), encoding="utf-8")
        assert [u.id for u in self.open(path)] == expected_ids()


class TestPeoplesSpeech(CorpusContract):
    kind = "peoples_speech"

    def make(self, folder):
        lines = []
        for speaker in SPEAKERS:
            mine = [(i, t) for i, s, t in texts() if s == speaker]
            data = {"duration_ms": [10] * 3, "label": [t for _, t in mine]}
            data["name"] = [f"{speaker}/{i}.flac" for i, _ in mine]
            for name in data["name"]:
                write_audio(folder / "train" / "clean" / name)
            lines.append(json.dumps({"identifier": speaker, "training_data": data}) + "\n")
        (folder / "train" / "clean.json").write_text("".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        def line(**data):
            return (json.dumps({"identifier": "1", "training_data": data}) + "\n").encode()

        with (path / "train" / "clean.json").open("ab") as file:
            file.write(line(duration_ms=[1], label=["X"], name=["11/none.flac"]))
            file.write(line(duration_ms=[1, 2], label=["X"], name=["x.flac"]))
            file.write(line(duration_ms=[1], label=["AGAIN"], name=["11/11-1-0000.flac"]))
            file.write(line(duration_ms=[1], label=[None], name=["11/q.flac"]))
            file.write(line(duration_ms=[1], label=["X"], name=["../../../etc/passwd.flac"]))
            file.write(b"\xff\n{\n")
        return {
            "none": "missing-audio",
            "clean.json:4": "bad-line",
            "11-1-0000": "duplicate-id",
            "q": "missing-transcript",
            "passwd": "missing-audio",
            "clean.json:8": "bad-line",
            "clean.json:9": "bad-line",
        }

    def test_durations_and_flat_lines_are_read(self, path):
        assert {(u.duration, u.split) for u in self.open(path)} == {(0.01, "train")}
        row = {"id": "x", "audio_filepath": "11/11-1-0000.flac", "duration_ms": 10, "text": "HELLO"}
        (path / "train" / "clean.json").write_text(json.dumps(row) + "\n")
        assert [(u.id, u.text) for u in self.open(path)] == [("11-1-0000", "HELLO")]


class TestPeoplesSpeechInTars(TestPeoplesSpeech):
    def make(self, folder):
        import shutil
        import tarfile

        super().make(folder)
        audio = folder / "train" / "clean"
        with tarfile.open(folder / "train" / "clean_000000.tar", "w") as tar:
            tar.add(audio, "clean")
        shutil.rmtree(audio)
        return folder


class TestAn4(CorpusContract):
    kind = "an4"

    def make(self, folder):
        (folder / "etc").mkdir(parents=True)
        ids, lines = [], []
        for utterance_id, speaker, text in texts():
            write_audio(folder / "wav" / "an4_clstk" / speaker / f"{utterance_id}.sph")
            ids.append(f"an4_clstk/{speaker}/{utterance_id}\n")
            lines.append(f"<s> {text} </s> ({utterance_id})\n")
        (folder / "etc" / "an4_train.fileids").write_text("".join(ids))
        (folder / "etc" / "an4_train.transcription").write_text("".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        with (path / "etc" / "an4_train.fileids").open("ab") as file:
            file.write(b"an4_clstk/11/none\n\n\xff\nan4_clstk/11/gone\n../../x/away\n")
        with (path / "etc" / "an4_train.transcription").open("ab") as file:
            file.write(b"<s> X </s> (gone)\n<s> NO ID </s>\n\xff (y)\nX (lost)\nX (11-1-0000)\n")
        return {
            "none": "missing-transcript",
            "an4_train.fileids:9": "bad-line",
            "gone": "missing-audio",
            "../../x/away": "bad-line",
            "an4_train.transcription:8": "bad-line",
            "an4_train.transcription:9": "bad-line",
            "lost": "missing-audio",
            "11-1-0000": "duplicate-id",
        }

    def test_test_set_and_raw_audio_are_read(self, path):
        (path / "raw" / "an4test_clstk" / "fjlp").mkdir(parents=True)
        (path / "raw" / "an4test_clstk" / "fjlp" / "cen1-fjlp-b.raw").write_bytes(bytes(3200))
        (path / "etc" / "an4_test.fileids").write_text("an4test_clstk/fjlp/cen1-fjlp-b\n")
        (path / "etc" / "an4_test.transcription").write_text("HELLO(2) ++NOISE++ YOU (cen1-fjlp-b)\n")
        utterances = list(self.open(path))
        assert [u.split for u in utterances] == ["train"] * 6 + ["test"]
        assert (utterances[6].text, utterances[6].speaker, utterances[6].sample_rate) == ("HELLO YOU", "fjlp", 16000)

    def test_a_missing_transcription_is_named(self, path):
        (path / "etc" / "an4_train.transcription").unlink()
        with pytest.raises(CorpusError, match=r"an4_train\.transcription is missing"):
            list(self.open(path))


class TestSpeechOcean(CorpusContract):
    kind = "speechocean762"

    def make(self, folder):
        for part, speaker in zip(("train", "test"), SPEAKERS, strict=True):
            (folder / part).mkdir(parents=True)
            lines = {"wav.scp": [], "text": [], "utt2spk": []}
            for utterance_id, _, text in (row for row in texts() if row[1] == speaker):
                write_audio(folder / "WAVE" / f"SPEAKER{speaker}" / f"{utterance_id}.wav")
                lines["wav.scp"].append(f"{utterance_id}\tWAVE/SPEAKER{speaker}/{utterance_id}.wav")
                lines["text"].append(f"{utterance_id}\t{text}")
                lines["utt2spk"].append(f"{utterance_id}\t{speaker}")
            for name, content in lines.items():
                (folder / part / name).write_text("\n".join(content) + "\n", encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        with (path / "test" / "text").open("ab") as file:
            file.write(b"none\tX\n\xff\tX\n11-1-0000\tX\n")
        with (path / "test" / "wav.scp").open("a") as file:
            file.write("11-1-0000\tWAVE/SPEAKER11/11-1-0000.wav\n")
        return {"none": "missing-audio", "text:5": "bad-line", "11-1-0000": "duplicate-id"}

    def test_parts_are_sets(self, path):
        assert [u.split for u in self.open(path)] == ["train"] * 3 + ["test"] * 3


class TestFsdd(CorpusContract):
    kind = "fsdd"
    text = "seven"

    def ids(self):
        return ["7_jackson_0", "7_jackson_1", "7_jackson_5", "7_theo_0", "7_theo_1", "7_theo_5"]

    def speakers(self):
        return ["jackson"] * 3 + ["theo"] * 3

    def make(self, folder):
        for name in self.ids():
            write_audio(folder / "recordings" / f"{name}.wav")
        return folder

    def add_bad_entries(self, path):
        for name in ("seven_theo_1", "7_theo", "7_theo_x"):
            write_audio(path / "recordings" / f"{name}.wav")
        return {"seven_theo_1": "bad-id", "7_theo": "bad-id", "7_theo_x": "bad-id"}

    def test_official_test_set_is_used(self, path):
        assert [u.split for u in self.open(path)] == ["test", "test", "train"] * 2


class TestLJSpeech(CorpusContract):
    kind = "ljspeech"
    text = "normal ü 22 1"

    def speakers(self):
        return ["corpus"] * 6

    def make(self, folder):
        lines = []
        for utterance_id, speaker, _ in texts():
            write_audio(folder / "wavs" / f"{utterance_id}.wav")
            number = utterance_id[-1]
            lines.append(f'{utterance_id}|TEXT "ü, {speaker} {number}|normal ü {speaker} {number}\n')
        (folder / "metadata.csv").write_text("".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        with (path / "metadata.csv").open("ab") as file:
            file.write(b"gone|X|X\n\none cell\na|b|c|d\n\xff|x|x\n|x|x\n../wavs/11-1-0000|X|X\n11-1-0000|AGAIN|X\n")
        write_audio(path / "wavs" / "extra.wav")
        return {
            "gone": "missing-audio",
            "metadata.csv:9": "bad-line",
            "metadata.csv:10": "bad-line",
            "metadata.csv:11": "bad-line",
            "metadata.csv:12": "bad-line",
            "../wavs/11-1-0000": "missing-audio",
            "11-1-0000": "duplicate-id",
            "extra": "missing-transcript",
        }

    def test_text_is_used_without_normalized_text(self, tmp_path):
        write_audio(tmp_path / "wavs" / "a.wav")
        write_audio(tmp_path / "wavs" / "b.flac")
        (tmp_path / "metadata.csv").write_text("a|One|\nb|Two\n")
        assert [u.text for u in self.open(tmp_path)] == ["One", "Two"]
