"""Public corpora of long recordings with segments: each made here in its publisher's layout."""

import json

import pytest
from corpus_contract import SPEAKERS, CorpusContract, texts, write_audio

from storage.corpora import CorpusError, open_corpus
from storage.corpora.gigaspeech import read_array, spell
from storage.corpora.tedlium import clean_text


class TestTedlium(CorpusContract):
    kind = "tedlium"

    def ids(self):
        return [f"{speaker}-{100 * n:07d}-{100 * n + 50:07d}" for speaker in SPEAKERS for n in range(3)]

    def make(self, folder):
        for speaker in SPEAKERS:
            write_audio(folder / "sph" / f"{speaker}.sph", 3.0)
            lines = [f"{speaker} 1 {speaker} {n} {n}.5 <o,f0,female> TEXT ü {speaker} {n}\n" for n in range(3)]
            (folder / "stm").mkdir(exist_ok=True)
            (folder / "stm" / f"{speaker}.stm").write_text(";; comment\n" + "".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        with (path / "stm" / "11.stm").open("ab") as file:
            file.write(b"none 1 x 0 1 <o,f0,male> X\n11 1 11 2 1 <o,f0,male> X\n\xff 1\n11 1\n")
            file.write(b"11 1 inter 4 5 <o,,unknown> ignore_time_segment_in_scoring\n11 1 11 0 0.5 <o,f0,male> AGAIN\n")
        return {
            "none-0000000-0000100": "missing-audio",
            "11.stm:6": "bad-line",
            "11.stm:7": "bad-line",
            "11.stm:8": "bad-line",
            "11-0000400-0000500": "not-scored",
            "11-0000000-0000050": "duplicate-id",
        }

    def test_segments(self, path):
        second = list(self.open(path))[1]
        assert (second.start, second.end, second.duration) == (1.0, 1.5, 0.5)

    def test_marks(self, path):
        assert clean_text("the(2) {NOISE} it 's <unk> <sil> [LAUGH] we 'll") == "the it's we'll"
        with (path / "stm" / "22.stm").open("a") as file:
            file.write("22 1 22 2.5 3 <o,f0,female> a <unk> b\n")
        assert list(self.open(path))[-1].text == "a b"
        assert "unknown-words" in {p.reason for p in self._problems(path, unknown="refuse")}
        with pytest.raises(CorpusError, match="remove or refuse"):
            list(self.open(path, unknown="x"))

    def _problems(self, path, **options):
        reader = self.open(path, **options)
        list(reader)
        return reader.problems

    def test_release_3(self, tmp_path):
        root = tmp_path / "TEDLIUM_release-3"
        self.make(root / "data")
        dev = root / "legacy" / "dev"
        (dev / "stm").mkdir(parents=True)
        (dev / "stm" / "11.stm").write_text((root / "data" / "stm" / "11.stm").read_text())
        write_audio(dev / "sph" / "11.sph", 3.0)
        splits = [(u.speaker, u.split) for u in open_corpus("auto", str(root))]
        assert splits == [("11", "valid")] * 3 + [("22", "train")] * 3

    def test_release_2(self, tmp_path):
        for part in ("train", "test"):
            self.make(tmp_path / part)
        assert [u.split for u in open_corpus("auto", str(tmp_path))] == ["test"] * 6  # the same talks: test counts


class TestTelephone(CorpusContract):
    """Two-channel calls in sph, with segments, as the recipes for Switchboard and Fisher prepare them."""

    kind = "telephone"
    guessed = "kaldi"

    def make(self, folder):
        folder.mkdir()
        write_audio(folder / "call.sph", 6.0)
        lines = {"wav.scp": [], "text": [], "utt2spk": [], "segments": [], "reco2file_and_channel": []}
        for number in range(2):
            side = "AB"[number]
            lines["wav.scp"].append(f"call-{side} sph2pipe -f wav -p -c {number + 1} {folder / 'call.sph'} |")
            lines["reco2file_and_channel"].append(f"call-{side} call {side}")
        for utterance_id, speaker, text in texts():
            side, n = "AB"[SPEAKERS.index(speaker)], int(utterance_id[-1])
            lines["text"].append(f"{utterance_id} {text}")
            lines["utt2spk"].append(f"{utterance_id} {speaker}")
            lines["segments"].append(f"{utterance_id} call-{side} {n} {n + 0.5}")
        for name, content in lines.items():
            (folder / name).write_text("\n".join(content) + "\n", encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        with (path / "segments").open("a") as file:
            file.write("late call-A 2 1\nwhere call-C 0 1\nmute call-A 0 1\n")
        with (path / "text").open("ab") as file:
            file.write(b"late X\nwhere X\n\xff X\n")
        return {
            "late": "bad-segment",
            "where": "missing-audio",
            "text:9": "bad-line",
            "mute": "missing-transcript",
        }

    def test_sides_and_domain(self, path):
        assert [(u.channel, u.start, u.domain) for u in self.open(path)][2:4] == [
            (0, 2.0, "telephone"),
            (1, 0.0, "telephone"),
        ]


class TestGigaSpeech(CorpusContract):
    kind = "gigaspeech"

    def make(self, folder):
        audios = []
        for speaker in SPEAKERS:
            path = f"audio/youtube/{speaker}.opus"
            write_audio(folder / path, 3.0)
            segments = [
                {"sid": i, "speaker": "N/A", "begin_time": n, "end_time": n + 0.5, "subsets": ["{XL}"], "text_tn": t}
                for n, (i, t) in enumerate((i, t) for i, s, t in texts() if s == speaker)
            ]
            audios.append({"aid": speaker, "path": path, "source": "", "duration": 3.0, "segments": segments})
        self.write(folder, audios)
        return folder / "GigaSpeech.json"

    def write(self, folder, audios, end="]}"):
        head = '{"dataset": "GigaSpeech", "language": "EN", "audios" : ['
        text = head + ",\n".join(json.dumps(audio, ensure_ascii=False) for audio in audios) + end
        (folder / "GigaSpeech.json").write_text(text, encoding="utf-8")

    def add_bad_entries(self, path):
        def segment(sid, text="X", begin=0.0, end=1.0, **fields):
            return {"sid": sid, "begin_time": begin, "end_time": end, "subsets": ["{XL}"], "text_tn": text} | fields

        audios = json.loads(path.read_text(encoding="utf-8"))["audios"]
        audios[1]["segments"] += [
            segment("music", "<MUSIC>"),
            segment("late", begin=2.0),
            segment("mute", None),
            segment("11-1-0000", "AGAIN"),
            segment("odd", begin="x"),
            {},
        ]
        audios += [{"aid": "gone", "path": "audio/none.opus", "segments": [segment("gone")]}, 7, {"aid": "empty"}]
        self.write(path.parent, audios, end=", {")
        return {
            "music": "garbage",
            "late": "bad-segment",
            "mute": "missing-transcript",
            "11-1-0000": "duplicate-id",
            "odd": "bad-segment",
            "22:1": "bad-line",
            "gone": "missing-audio",
            "GigaSpeech.json:3": "bad-line",
            "GigaSpeech.json:5": "bad-line",
        }

    def test_a_folder_subsets_and_sets(self, path):
        audios = json.loads(path.read_text(encoding="utf-8"))["audios"]
        audios[0]["segments"][0]["subsets"] = ["{XL}", "{S}"]
        audios[0]["segments"][1]["subsets"] = ["{DEV}"]
        audios[1]["segments"][2]["subsets"] = ["{TEST}"]
        audios[1]["source"] = "podcast"
        self.write(path.parent, audios)
        found = list(open_corpus("auto", str(path.parent)))
        assert [u.split for u in found] == ["train", "valid", "train", "train", "train", "test"]
        assert [u.domain for u in found] == [""] * 3 + ["podcast"] * 3
        assert [u.id for u in self.open(path, subset="S")] == ["11-1-0000"]

    def test_punctuation(self, path):
        assert spell("YES <COMMA> WHY <QUESTIONMARK>", keep=False) == "YES WHY"
        assert spell("YES <COMMA> WHY <QUESTIONMARK>", keep=True) == "YES, WHY?"
        with pytest.raises(CorpusError, match="drop or keep"):
            list(self.open(path, punctuation="x"))

    def test_the_document_is_read_piece_by_piece(self, path, monkeypatch):
        import storage.corpora.gigaspeech as module

        monkeypatch.setattr(module, "_CHUNK", 128)
        assert [audio["aid"] for audio in read_array(path)] == list(SPEAKERS)

    def test_another_document_is_refused(self, path):
        path.write_text('{"a": 1}')
        with pytest.raises(CorpusError, match="audios"):
            list(self.open(path))
