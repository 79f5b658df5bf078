"""Commands that take a corpus understand what `starling init` understands, and say what they took for what."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from command_line import invoke
from support import copy_finished, write_tone

from flows.cli.found_corpus import corpus_data
from tasks.config.home import home as home_folder
from tasks.stages.bundles import fetch_bundle

TAKEN = "audio in the column filename, text in the column label, speaker in the column user"


@pytest.fixture
def recordings(tmp_path):
    """A folder with `digits.csv`, whose columns have other names, and `clips/*.wav`."""
    rows = [(f"clips/{number}.wav", ("zero", "one")[number % 2], "ab"[number % 2]) for number in range(6)]
    for number, (path, _, _) in enumerate(rows):
        write_tone(tmp_path / "recordings" / path, seconds=0.3 + 0.1 * number, rate=8000, seed=number)
    write(tmp_path / "recordings" / "digits.csv", [("filename", "label", "user"), *rows])
    return tmp_path / "recordings"


def write(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def add_parts(recordings):
    table = recordings / "digits.csv"
    header, *rows = csv.reader(table.read_text().splitlines())
    write(table, [(*header, "part"), *((*row, ("train", "eval")[n % 3 == 0]) for n, row in enumerate(rows))])


def test_a_packaged_configuration_is_found_by_name_unless_a_folder_has_it(recordings, monkeypatch):
    monkeypatch.chdir(recordings.parent)
    assert [source.kind for source in corpus_data(Path("demo")).sources] == ["synthetic"]
    recordings.rename(recordings.parent / "demo")
    assert [source.kind for source in corpus_data(Path("demo")).sources] == ["table"]


@pytest.mark.parametrize("name", [".", "digits.csv"])
def test_inspect_reads_a_table_with_columns_of_other_names(recordings, home, name):
    result = invoke("corpus", "inspect", recordings / name, "--json")
    report = json.loads(result.stdout)
    assert (report["kind"], report["written"], report["quarantined"], report["speakers"]) == ("table", 6, 0, 2)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("found: ")]
    assert line == f"found: table {recordings / 'digits.csv'}, {TAKEN}"
    assert json.loads(invoke("corpus", "inspect", recordings / name, "--limit", 4, "--json").stdout)["read"] == 4


def test_columns_are_guessed_for_a_table_of_a_given_kind(recordings, home):
    shown = invoke("corpus", "inspect", recordings / "digits.csv", "--kind", "table", "--json")
    assert json.loads(shown.stdout)["written"] == 6
    assert TAKEN in shown.stderr


def test_columns_with_usual_names_need_no_line(recordings, home):
    header, rest = "path,text,speaker", (recordings / "digits.csv").read_text().partition("\n")[2]
    (recordings / "metadata.csv").write_text(f"{header}\n{rest}")
    shown = invoke("corpus", "inspect", recordings / "metadata.csv", "--json")
    assert json.loads(shown.stdout)["written"] == 6
    assert "found" not in shown.stderr


def test_inspect_shows_the_sets_that_a_column_names(recordings, home):
    add_parts(recordings)
    shown = invoke("corpus", "inspect", recordings, "--json")
    report = json.loads(shown.stdout)
    assert {name: entry["utterances"] for name, entry in report["sets"].items()} == {"test": 2, "train": 4}
    assert f"rows with part eval, {TAKEN}, as set test" in shown.stderr


def test_inspect_reads_the_sources_of_a_configuration_by_its_rules(recordings, home, tmp_path):
    path = tmp_path / "mine.yaml"
    invoke("init", recordings, "-o", path)
    report = json.loads(invoke("corpus", "inspect", path, "--json").stdout)
    assert (report["kind"], report["written"]) == ("table", 6)
    path.write_text(path.read_text().replace("data:\n", "data:\n  max_seconds: 0.55\n"))
    report = json.loads(invoke("corpus", "inspect", path, "--json").stdout)
    assert (report["written"], report["reasons"]) == (3, {"too-long": 3})
    message = invoke("corpus", "inspect", path, "--kind", "table", code=1).stderr
    assert "gives the kind and language of its sources: remove --kind and --language" in message


def test_parts_are_one_corpus_where_sets_do_not_matter(recordings, home, wide, tmp_path):
    add_parts(recordings)
    (whole,) = corpus_data(recordings, sets=False).sources
    assert (whole.where, whole.set, whole.options["columns"]["text"]) == ({}, "", "label")
    texts = tmp_path / "texts"
    for name in ("train/1", "train/2", "test/1", "others/1"):
        write_tone(texts / f"{name}.wav", seconds=0.3)
        (texts / f"{name}.txt").write_text("hello")
    (whole,) = corpus_data(texts, sets=False).sources
    assert (whole.kind, whole.path) == ("sidecar", str(texts))
    assert [source.set for source in corpus_data(texts).sources] == ["test", "train"]
    warning = f"warning: left out, since their names stand for no set: {texts / 'others'}"
    assert warning in invoke("corpus", "inspect", texts).stderr
    assert warning in invoke("init", texts, "-o", tmp_path / "texts.yaml").stdout


def test_pattern_of_tars_is_a_corpus(tmp_path):
    (source,) = corpus_data(tmp_path / "train-{000000..000001}.tar").sources
    assert (source.kind, source.path) == ("webdataset", str(tmp_path / "train-{000000..000001}.tar"))


def test_manifest_with_a_tables_suffix_is_a_manifest(recordings, tmp_path):
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(json.dumps({"audio_filepath": "recordings/clips/0.wav", "duration": 0.3, "text": "zero"}))
    assert [source.kind for source in corpus_data(manifest).sources] == ["nemo"]


def test_align_reads_a_table_with_columns_of_other_names(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path)))
    table = next((home_folder() / "corpora").glob("*/metadata.csv"))
    header, *lines = table.read_text().splitlines()
    names = {"path": "filename", "text": "label", "speaker": "user"}
    header = ",".join(names.get(name, name) for name in header.split(","))
    corpus = tmp_path / "recordings"
    shutil.copytree(table.parent, corpus)
    (corpus / "metadata.csv").unlink()
    (corpus / "digits.csv").write_text("\n".join([header, *lines[:5]]) + "\n")
    bundle = fetch_bundle(finished.result("train").output, tmp_path / "bundle")
    shown = invoke("align", bundle, corpus, "-o", tmp_path / "aligned", "--json")
    summary = json.loads(shown.stdout.splitlines()[-1])
    assert (summary["aligned"] + summary["failed"], summary["quarantined"]) == (5, 0)
    assert "text in the column label" in shown.stderr
