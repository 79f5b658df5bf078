"""Public corpora of long recordings with segments: each made here in its publisher's layout."""

import json

import pytest
from corpus_contract import SPEAKERS, CorpusContract, texts, write_audio

from storage.corpora import CorpusError, open_corpus
from storage.corpora.gigaspeech import read_array, spell
from storage.corpora.switchboard import switchboard_words


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

    def test_segments_are_read(self, path):
        second = list(self.open(path))[1]
        assert (second.start, second.end, second.duration) == (1.0, 1.5, 0.5)

    def test_segment_labels_may_be_missing(self, path):
        with (path / "stm" / "22.stm").open("a") as file:
            file.write("22 1 22 2.5 3 first words count\n")
        assert list(self.open(path))[-1].text == "first words count"

    def test_marks_in_transcripts_are_handled(self, path):
        with (path / "stm" / "22.stm").open("a") as file:
            file.write("22 1 22 2.5 3 <o,f0,female> the(2) {NOISE} it 's <unk> <sil> [LAUGH] we 'll\n")
        assert list(self.open(path))[-1].text == "the it's we'll"
        assert "unknown-words" in {p.reason for p in self._problems(path, unknown="refuse")}
        with pytest.raises(CorpusError, match="remove or refuse"):
            list(self.open(path, unknown="x"))

    def _problems(self, path, **options):
        reader = self.open(path, **options)
        list(reader)
        return reader.problems

    def test_release_3_is_read(self, tmp_path):
        root = tmp_path / "TEDLIUM_release-3"
        self.make(root / "data")
        dev = root / "legacy" / "dev"
        (dev / "stm").mkdir(parents=True)
        (dev / "stm" / "11.stm").write_text((root / "data" / "stm" / "11.stm").read_text())
        write_audio(dev / "sph" / "11.sph", 3.0)
        splits = [(u.speaker, u.split) for u in open_corpus("auto", str(root))]
        assert splits == [("11", "valid")] * 3 + [("22", "train")] * 3

    def test_release_2_is_read(self, tmp_path):
        for part in ("train", "test"):
            self.make(tmp_path / part)
        assert [u.split for u in open_corpus("auto", str(tmp_path))] == ["test"] * 6  # the same talks: test counts


class TestTelephone(CorpusContract):
    """Two-channel calls in sph, with segments, as the recipes for Switchboard and Fisher prepare them."""

    kind = "telephone"

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

    def test_sides_and_domain_are_read(self, path):
        assert [(u.channel, u.start, u.domain) for u in self.open(path)][2:4] == [
            (0, 2.0, "telephone"),
            (1, 0.0, "telephone"),
        ]


class TestSwitchboard(CorpusContract):
    """Calls of two sides, and a transcript of each side, as LDC97S62 and its corrected transcripts have them."""

    kind = "switchboard"
    text = "text ü b 1"

    def ids(self):
        return [f"sw2001{side}-ms98-a-{n:04d}" for side in "AB" for n in range(3)]

    def speakers(self):
        return [f"sw02001-{side}" for side in "AB" for _ in range(3)]

    def make(self, folder):
        write_audio(folder / "swb1_d1" / "data" / "sw02001.sph", 6.0)
        for side in "AB":
            lines = [f"sw2001{side}-ms98-a-{n:04d} {n}.0 {n}.5 text ü {side.lower()} {n}\n" for n in range(3)]
            table = folder / "swb_ms98_transcriptions" / "20" / "2001" / f"sw2001{side}-ms98-a-trans.text"
            table.parent.mkdir(parents=True, exist_ok=True)
            table.write_text("".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        folder = path / "swb_ms98_transcriptions" / "20"
        with (folder / "2001" / "sw2001A-ms98-a-trans.text").open("ab") as file:
            file.write(b"sw2001A-ms98-a-0003 2 1 late\nsw2001A-ms98-a-0004 2 3\n\xff 1 2 x\n")
            file.write(b"sw2001A-ms98-a-0005 3 4 [silence]\nsw2001A-ms98-a-0001 3 4 again\n")
        (folder / "2002").mkdir()
        (folder / "2002" / "sw2002A-ms98-a-trans.text").write_text("sw2002A-ms98-a-0001 0 1 yes\n")
        return {
            "sw2001A-ms98-a-trans.text:4": "bad-line",
            "sw2001A-ms98-a-trans.text:5": "bad-line",
            "sw2001A-ms98-a-trans.text:6": "bad-line",
            "sw2001A-ms98-a-0005": "no-words",
            "sw2001A-ms98-a-0001": "duplicate-id",
            "sw2002A-ms98-a-0001": "missing-audio",
        }

    def test_sides_are_channels(self, path):
        sides = [(u.channel, u.start, u.end) for u in self.open(path)]
        assert sides[2:4] == [(0, 2.0, 2.5), (1, 0.0, 0.5)]
        assert {u.domain for u in self.open(path)} == {"switchboard"}

    @pytest.mark.parametrize(
        ("marked", "words", "without"),
        [
            ("[laughter-yeah] [noise] uh", "yeah uh", "yeah uh"),
            ("th[at]- -[th]at it's", "th- -at it's", "it's"),
            ("[it's/its] {smushy} them_1", "it's smushy them", "it's smushy them"),
            ("[lem[guini]-/linguini] <b_aside> so <e_aside>", "lem- so", "so"),
            ("[laughter] [vocalized-noise]", "", ""),
        ],
    )
    def test_marks_in_transcripts_are_removed(self, marked, words, without):
        assert switchboard_words(marked) == words
        assert switchboard_words(marked, keep_fragments=False) == without

    def test_wrong_option_is_named(self, path):
        with pytest.raises(CorpusError, match="fragments is 'x': use keep or remove"):
            list(self.open(path, fragments="x"))


class TestHub5(CorpusContract):
    """The evaluation of 2000: two corpora in one reference."""

    kind = "hub5"
    text = "i am ü b 1"
    own = True

    def ids(self):
        return [f"{call}-{side}_{100 * n:06d}-{100 * n + 50:06d}" for call, side in self.sides() for n in range(3)]

    def sides(self):
        return [("en_4156", "A"), ("sw_4390", "B")]

    def speakers(self):
        return [f"{call}_{side}" for call, side in self.sides() for _ in range(3)]

    def make(self, folder):
        lines = [";; comment\n"]
        for call, side in self.sides():
            write_audio(folder / "hub5e_00" / "english" / f"{call}.sph", 6.0)
            text = f"<O,en,F,en-F> {{ i am / i'm }} (%hesitation) ü {side.lower()}"
            lines += [f"{call} {side} {call}_{side} {n}.0 {n}.5 {text} {n}\n" for n in range(3)]
        table = folder / "reference" / "hub5e00.english.000405.stm"
        table.parent.mkdir()
        table.write_text("".join(lines), encoding="utf-8")
        return folder

    def add_bad_entries(self, path):
        with (path / "reference" / "hub5e00.english.000405.stm").open("ab") as file:
            file.write(b"en_4156 A en_4156_A 5 4 <O> x\nen_4156 A en_4156_A 4 5 <O> IGNORE_TIME_SEGMENT_IN_SCORING\n")
            file.write(b"en_4156 A en_4156_A 3 4 <O> (%hesitation)\nen_4156 C x 3 4 <O> yes\nen_9 A x 0 1 <O> yes\n")
            file.write(b"en_4156 A en_4156_A 0 0.5 <O> again\n")
        return {
            "hub5e00.english.000405.stm:8": "bad-line",
            "en_4156-A_000400-000500": "not-scored",
            "en_4156-A_000300-000400": "no-words",
            "en_4156-C_000300-000400": "bad-channel",
            "en_9-A_000000-000100": "missing-audio",
            "en_4156-A_000000-000050": "duplicate-id",
        }

    def test_subsets_are_domains(self, path):
        assert [(u.domain, u.channel, u.split) for u in self.open(path)][2:4] == [
            ("callhome", 0, "test"),
            ("switchboard", 1, "test"),
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

    def test_folder_subsets_and_sets_select(self, path):
        audios = json.loads(path.read_text(encoding="utf-8"))["audios"]
        audios[0]["segments"][0]["subsets"] = ["{XL}", "{S}"]
        audios[0]["segments"][1]["subsets"] = ["{DEV}"]
        audios[1]["segments"][2]["subsets"] = ["{TEST}"]
        audios[1]["source"] = "podcast"
        self.write(path.parent, audios)
        utterances = list(open_corpus("auto", str(path.parent)))
        assert [u.split for u in utterances] == ["train", "valid", "train", "train", "train", "test"]
        assert [u.domain for u in utterances] == [""] * 3 + ["podcast"] * 3
        assert [u.id for u in self.open(path, subset="S")] == ["11-1-0000"]

    def test_punctuation_tags_are_replaced(self, path):
        assert spell("YES <COMMA> WHY <QUESTIONMARK>", keep=False) == "YES WHY"
        assert spell("YES <COMMA> WHY <QUESTIONMARK>", keep=True) == "YES, WHY?"
        with pytest.raises(CorpusError, match="drop or keep"):
            list(self.open(path, punctuation="x"))

    def test_document_is_read_in_pieces(self, path, monkeypatch):
        import storage.corpora.gigaspeech as module

        monkeypatch.setattr(module, "_CHUNK", 128)
        assert [audio["aid"] for audio in read_array(path)] == list(SPEAKERS)

    def test_another_document_is_refused(self, path):
        path.write_text('{"a": 1}')
        with pytest.raises(CorpusError, match="audios"):
            list(self.open(path))
