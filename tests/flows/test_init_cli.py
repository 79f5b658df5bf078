"""`starling init`: the configuration that it writes for one's own recordings runs."""

import csv
import json

import numpy as np
import pytest
import soundfile
from command_line import invoke
from support import write_tone

from tasks.config.pipeline import load_config
from tasks.stages.sources import open_source
from tasks.stages.starter import guess_language

pytestmark = pytest.mark.usefixtures("wide", "home")
WORDS = ("zero", "one", "two")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def digits(folder, speakers=("anna", "ben"), takes=12, rate=8000):
    """Recordings of "words", each a chord of its own, as the rows of a table."""
    rows = []
    for speaker_number, speaker in enumerate(speakers):
        for take in range(takes):
            for number, word in enumerate(WORDS):
                seconds = np.arange(int(0.4 * rate)) / rate
                noise = np.random.default_rng(1000 * speaker_number + 10 * take + number).normal(0, 0.01, len(seconds))
                wave = 0.3 * np.sin(2 * np.pi * (400 + 500 * number + 20 * speaker_number) * seconds) + noise
                path = folder / "audio" / f"{word}_{speaker}_{take}.wav"
                path.parent.mkdir(parents=True, exist_ok=True)
                soundfile.write(path, wave, rate, subtype="PCM_16")
                rows.append((f"audio/{path.name}", word, speaker))
    return rows


def with_table(folder):
    rows = digits(folder)
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "speaker"), *rows])


def with_text_files(folder):
    for path, word, _ in digits(folder):
        (folder / path).with_suffix(".txt").write_text(word)


def with_kaldi_folders(folder):
    rows = digits(folder, speakers=("anna", "ben", "cleo"))
    for name, who in (("train", ("anna", "ben")), ("test", ("cleo",))):
        data = folder / "data" / name
        data.mkdir(parents=True)
        chosen = [(f"{speaker}-{n}", folder / path, text, speaker) for n, (path, text, speaker) in enumerate(rows)]
        chosen = [row for row in chosen if row[3] in who]
        (data / "wav.scp").write_text("".join(f"{name} {path}\n" for name, path, _, _ in chosen))
        (data / "text").write_text("".join(f"{name} {text}\n" for name, _, text, _ in chosen))
        (data / "utt2spk").write_text("".join(f"{name} {speaker}\n" for name, _, _, speaker in chosen))


FOLDERS = {"table": with_table, "text files": with_text_files, "kaldi": with_kaldi_folders}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.variants(1)
def test_written_configuration_runs(here, kind):
    folder = here / "My digits"
    FOLDERS[kind](folder)
    shown = invoke("init", folder).stdout
    assert "written: My-digits.yaml" in shown
    assert "next:    starling run My-digits.yaml" in shown
    assert "8,000 Hz" in shown
    config = load_config(here / "work" / "My-digits.yaml")
    assert (config.name, config.data.sample_rate, config.tokens.kind) == ("My-digits", 8000, "words")
    summary = json.loads(invoke("run", "My-digits.yaml", "--until", "shard", "--no-prefect", "--json").stdout)
    assert {row["set"] for row in summary["data"]["sets"]} == {"train", "valid", "test"}
    assert summary["utterances"]["quarantined"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_written_configuration_trains_and_registers(here, kind):
    FOLDERS[kind](here / "digits")
    invoke("init", here / "digits")
    words = ["--set", "train.epochs=2", "--set", "train.average=1", "--set", "train.device=cpu"]
    summary = json.loads(invoke("run", "digits.yaml", "--no-prefect", "--json", *words).stdout)
    assert summary["model_uri"] == "models:/digits/1"
    assert summary["sets"]["test"]["words"] > 0


def test_every_line_has_a_field_and_its_reason(here):
    with_table(here / "digits")
    invoke("init", here / "digits", "-o", here / "digits" / "mine.yaml", "--name", "ours")
    text = (here / "digits" / "mine.yaml").read_text()
    assert text.startswith("# 72 utterances, 0.008 hours, 2 speakers, 3 different words.\n")
    assert "# Run it with: starling run mine.yaml" in text
    assert "path: labels.csv" in text  # the folder can be moved with its configuration
    assert "split_by: utterance  # 2 speakers: too few" in text
    assert "options: {columns: {text: label}}" in text
    assert len(text.splitlines()) <= 25


def test_discovered_data_is_printed_as_json(here):
    with_kaldi_folders(here / "digits")
    printed = json.loads(invoke("init", here / "digits", "--json").stdout)
    assert printed["config"] == "digits.yaml"
    assert [(source["kind"], source["set"]) for source in printed["sources"]] == [("kaldi", "test"), ("kaldi", "train")]
    assert (printed["survey"]["utterances"], printed["survey"]["sets"]) == (108, {"test": 36, "train": 72})


def test_overlapping_speakers_are_written_to_the_config_and_cause_no_warning(here):
    rows = digits(here / "digits")
    with (here / "digits" / "t.csv").open("w", newline="") as file:
        parts = [(*row, ("valid", "test", "train", "train")[number % 4]) for number, row in enumerate(rows)]
        csv.writer(file).writerows([("path", "text", "speaker", "part"), *parts])
    invoke("init", here / "digits")
    text = (here / "work" / "digits.yaml").read_text()
    assert "speaker_overlap: allow  # 2 speakers of the training set are in other sets, too" in text
    summary = json.loads(invoke("run", "digits.yaml", "--until", "prepare", "--no-prefect", "--json").stdout)
    assert summary["data"]["warnings"] == []
    with_kaldi_folders(here / "others")  # a speaker for the test set alone
    invoke("init", here / "others")
    assert "speaker_overlap" not in (here / "work" / "others.yaml").read_text()


def test_bad_recordings_are_named_and_the_limit_is_left(here):
    with_table(here / "digits")
    for path in sorted((here / "digits" / "audio").iterdir())[:8]:
        path.write_bytes(b"no audio")
    shown = invoke("init", here / "digits").stdout
    assert "warning: 8 of 72 decoded utterances cannot be used, unreadable: one_anna_0 (" in shown
    assert "; and 5 more\n" in shown
    assert "warning: about 11 % cannot be used, and a run stops at more than 5 %" in shown
    assert load_config(here / "work" / "digits.yaml").data.max_quarantined == 0.05
    run = ("run", "digits.yaml", "--until", "prepare", "--no-prefect", "--json")
    assert "data.max_quarantined" in invoke(*run, code=1).stderr
    summary = json.loads(invoke(*run, "--set", "data.max_quarantined=0.2").stdout)
    assert summary["utterances"] == {"read": 72, "written": 64, "quarantined": 8}


def test_sample_rates_of_a_mixture_are_told(here):
    rows = [
        row for name, rate in (("a", 8000), ("b", 16000), ("c", 44100)) for row in digits(here / name, (name,), 4, rate)
    ]
    for path, word, speaker in rows:
        (here / speaker / path).with_suffix(".txt").write_text(word)
    (here / "mixed").mkdir()
    for name in "abc":
        (here / name).rename(here / "mixed" / name)
    assert "33 % at 8,000 Hz, 33 % at 16,000 Hz, 33 % at 44,100 Hz" in invoke("init", here / "mixed").stdout
    assert load_config(here / "work" / "mixed.yaml").data.sample_rate == 16000  # two thirds have these frequencies


GERMAN = ("guten Tag Frau Müller", "schöne Grüße aus Köln", "wie geht es Ihnen heute")


def german(folder, layout, encoding):
    """Recordings of three sentences by two speakers, with their transcripts in an encoding."""
    rows = digits(folder)
    texts = [GERMAN[WORDS.index(word)] for _, word, _ in rows]
    if layout == "sidecar":
        for (path, _, _), text in zip(rows, texts, strict=True):
            (folder / path).with_suffix(".txt").write_bytes(text.encode(encoding))
        return
    lines = [f"{path};{text};{speaker}\n" for (path, _, speaker), text in zip(rows, texts, strict=True)]
    if layout == "ljspeech":
        (folder / "audio").rename(folder / "wavs")
        lines = [f"{path.rpartition('/')[2][:-4]}|{text}\n" for (path, _, _), text in zip(rows, texts, strict=True)]
    header = "" if layout == "ljspeech" else "Datei;label;user\n"
    (folder / "metadata.csv").write_bytes((header + "".join(lines)).encode(encoding))


@pytest.mark.parametrize("layout", ["table", "sidecar", "ljspeech"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_language_and_encoding_of_transcripts_are_told_and_written(here, layout, encoding):
    german(here / "deutsch", layout, encoding)
    shown = invoke("init", here / "deutsch").stdout
    assert "language de, by the transcripts: --language names another one" in shown
    assert ("text in windows-1252" in shown) == (encoding == "latin-1")
    config = load_config(here / "work" / "deutsch.yaml")
    (source,) = config.data.sources
    assert (source.kind, source.language, config.data.normalizer.kind) == (layout, "de", "auto")
    assert source.options.get("encoding", "utf-8") == {"utf-8": "utf-8", "latin-1": "windows-1252"}[encoding]
    assert {utterance.text for utterance in open_source(source)} == set(GERMAN)


def test_a_language_that_is_given_is_not_guessed(here):
    german(here / "deutsch", "table", "utf-8")
    shown = invoke("init", here / "deutsch", "--language", "nl").stdout
    assert "by the transcripts" not in shown
    assert load_config(here / "work" / "deutsch.yaml").data.sources[0].language == "nl"


def test_a_language_that_the_table_names_is_taken(here):
    rows = digits(here / "wo")
    lines = [f"{path},{word},pl\n" for path, word, _ in rows]
    (here / "wo" / "t.csv").write_text("path,text,language\n" + "".join(lines))
    assert "language pl, as the corpus says" in invoke("init", here / "wo").stdout
    assert load_config(here / "work" / "wo.yaml").data.sources[0].language == "pl"


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("zero one two three four five six seven eight nine", "en"),
        ("NULL EINS ZWEI DREI VIER FÜNF", "de"),
        ("uno dos tres cuatro cinco seis siete ocho nueve cero", "es"),
        ("привет как дела сегодня что ты делаешь", "ru"),
        ("alpha bravo charlie delta echo", ""),
        ("1 2 3", ""),
    ],
)
@pytest.mark.variants(3)
def test_language_is_guessed_only_if_it_is_clear(text, language):
    assert guess_language(text.split()) == language


def test_rows_without_audio_are_named_with_table_and_line(here):
    with_table(here / "digits")
    recordings = sorted((here / "digits" / "audio").iterdir())
    recordings[0].unlink()
    first = f"one_anna_0 (line 3 of labels.csv: {recordings[0]} does not exist)"
    assert recordings[0].stem == "one_anna_0"
    assert f"warning: 1 entry has no audio: {first}\n" in invoke("init", here / "digits").stdout
    for path in recordings[1:5]:
        path.unlink()
    shown = invoke("init", here / "digits", "--force").stdout
    assert f"warning: 5 entries have no audio: {first}; one_anna_1 (line " in shown
    assert "; and 2 more\n" in shown
    with (here / "digits" / "labels.csv").open("a") as file:
        file.write("audio/one_ben_0.wav,one\n")
    assert (
        "warning: 1 entry cannot be used, bad-line: labels.csv:74 ("
        in invoke("init", here / "digits", "--force").stdout
    )


def test_too_little_speech_is_warned_of_and_its_configuration_is_written(here):
    rows = digits(here / "few", takes=4)
    with (here / "few" / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "text", "speaker"), *rows])
    shown = invoke("init", here / "few").stdout
    assert "warning: this is probably too little to learn from: training on free speech takes 5 hours or more" in shown
    assert "written: few.yaml" in shown
    with_table(here / "digits")  # 24 of each word
    assert "too little" not in invoke("init", here / "digits").stdout


def test_other_languages_get_their_text_rules(here):
    with_table(here / "digits")
    invoke("init", here / "digits", "--language", "de")
    config = load_config(here / "work" / "digits.yaml")
    assert (config.data.normalizer.kind, config.data.sources[0].language) == ("auto", "de")


def test_data_without_a_training_set_are_reported(here):
    rows = digits(here / "digits", takes=2)
    with (here / "digits" / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "text", "part"), *((path, text, "eval") for path, text, _ in rows)])
    shown = invoke("init", here / "digits")
    assert "there is no training data: score a model with `starling evaluate MODEL CORPUS`" in shown.stderr
    invoke("run", "digits.yaml", "--until", "shard", "--no-prefect")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: write_tone(folder / "a.wav"),
            "has recordings (1 wav), but no transcripts: put NAME.txt",
        ),
        (lambda folder: folder.mkdir(), "has no recordings"),
    ],
)
def test_unusable_folder_is_refused_naming_what_to_add(here, make, message):
    make(here / "digits")
    result = invoke("init", here / "digits", code=1)
    assert message in result.stderr
    assert not list((here / "work").iterdir())


def test_corpus_of_only_bad_recordings_is_refused(here):
    with_table(here / "digits")
    for path in (here / "digits" / "audio").iterdir():
        path.write_bytes(b"no audio")
    assert "72 of 72 utterances cannot be used: 72 unreadable; " in invoke("init", here / "digits", code=1).stderr


def test_existing_file_is_overwritten_only_on_request(here):
    with_table(here / "digits")
    (here / "work" / "digits.yaml").write_text("mine")
    assert "digits.yaml exists" in invoke("init", here / "digits", code=1).stderr
    assert (here / "work" / "digits.yaml").read_text() == "mine"
    invoke("init", here / "digits", "--force")
    assert load_config(here / "work" / "digits.yaml").name == "digits"
