import json
import re
import shutil
from pathlib import Path

import pytest
from support import give_mlflow, small_corpus, starling, tiny_document, write_config, write_table, write_tone
from typer.testing import CliRunner

from flows.cli.app import app
from flows.cli.score import score_files
from speech.scoring import PairingRules, ScoringRules
from storage.corpora import READERS
from tasks.tracking.fetching import _remedy

COMMANDS = {
    "init",
    "run",
    "config",
    "corpus",
    "lexicon",
    "train",
    "key",
    "score",
    "evaluate",
    "storage",
    "models",
    "runs",
    "promote",
    "rollback",
    "transcribe",
    "serve",
    "top",
    "simulate",
    "plan",
    "up",
    "secrets",
    "backup",
    "restore",
    "deploy",
    "doctor",
}


def invoke(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    assert "Traceback" not in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture
def wide(monkeypatch):
    """A terminal that does not wrap lines."""
    monkeypatch.setattr("flows.cli.common.out.width", 200, raising=False)
    monkeypatch.setattr("flows.cli.common.err.width", 200, raising=False)


def test_help_names_every_command():
    text = invoke("--help").stdout
    assert [name for name in COMMANDS if f" {name} " not in text] == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command):
    assert "Usage:" in invoke(command, "--help").stdout


@pytest.mark.parametrize(
    "command",
    sorted(COMMANDS - {"config", "corpus", "lexicon", "storage", "train"}),
)
def test_every_reporting_command_has_a_json_option(command):
    assert "--json" in invoke(command, "--help").stdout


def test_corpus_list_names_every_layout():
    listed = json.loads(invoke("corpus", "list", "--json").stdout)
    assert set(listed["layouts"]) == {*READERS, "synthetic"}
    assert listed["layouts"]["fsdd"] == "Free Spoken Digit Dataset: recordings/DIGIT_SPEAKER_TAKE.wav"
    assert listed["options"]["gigaspeech"] == ["punctuation", "subset"]
    assert listed["downloads"]["librispeech"]["licence"] == "CC BY 4.0"
    assert "librispeech" in invoke("corpus", "list").stdout


def test_corpus_inspect_counts_good_utterances_and_reasons_of_bad_ones(tmp_path, home):
    path = small_corpus(tmp_path / "corpus")
    (tmp_path / "corpus" / "audio" / "s0-0.wav").write_bytes(b"noise")
    (tmp_path / "corpus" / "audio" / "s0-1.wav").unlink()
    report = json.loads(invoke("corpus", "inspect", path, "--json").stdout)
    assert (report["kind"], report["read"], report["written"], report["quarantined"]) == ("table", 12, 10, 2)
    assert report["reasons"] == {"unreadable": 1, "missing-audio": 1}
    assert (report["speakers"], report["sample_rates"], report["words"]) == (4, {"16000": 10}, 30)
    assert report["longest_seconds"] == 0.5
    shown = invoke("corpus", "inspect", tmp_path / "corpus").stdout
    assert "layout table; 10 of 12 utterances can be used" in shown.replace("\n", "")
    assert re.search(r"unreadable +│ +1 +│ s0-0", shown)
    assert report["examples"]["missing-audio"].startswith("s0-1: ")
    assert "The corpus has no sets" in shown
    assert json.loads(invoke("corpus", "inspect", path, "--limit", 3, "--json").stdout)["written"] <= 3


def test_corpus_inspect_shows_each_set_in_words(tmp_path, home, wide):
    rows = [("a", "audio/a.wav", "one two", "x", "train"), ("b", "audio/b.wav", "two", "y", "test")]
    for number, row in enumerate(rows):
        write_tone(tmp_path / row[1], seconds=1 + number, rate=8000 * (1 + number))
    shown = invoke("corpus", "inspect", write_table(tmp_path, rows)).stdout
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert re.search(r"set +┃ +test ┃ +train ┃ +all ", shown)
    cells = {label: values for label, *values in lines if label}
    assert cells["utterances"] == ["1", "1", "2"]
    assert cells["longest (s)"] == ["2.0", "1.0", "2.0"]
    assert cells["words"] == ["1", "2", "3"]
    assert cells["different words"] == ["1", "2", "2"]
    assert cells["sample rate (Hz)"] == ["16,000", "8,000", "8,000 in 1"]


def test_corpus_inspect_reports_an_unknown_layout(tmp_path, home):
    assert "has no recordings" in invoke("corpus", "inspect", tmp_path, code=1).stderr
    assert "did you mean 'librispeech'" in invoke("corpus", "inspect", tmp_path, "--kind", "librispech", code=1).stderr


def test_score_compares_two_trn_files(tmp_path):
    ref, hyp = tmp_path / "ref.trn", tmp_path / "system.trn"
    ref.write_text("the cat sat (a-1)\nyes (b-1)\n")
    hyp.write_text("the cat sat down (a-1)\nno (b-1)\n")
    scores = json.loads(invoke("score", ref, hyp, "--json").stdout)["sets"]["system"]
    assert (scores["sub"], scores["ins"], scores["del"], scores["words"]) == (1, 1, 0, 4)
    assert scores["wer"] == 0.5
    shown = invoke("score", ref, hyp).stdout
    assert "50.00 %" in shown
    assert "speakers: unknown, so there are no intervals over speakers" in shown


def test_score_counts_and_compares_like_nist(tmp_path, wide):
    files = {
        "ref.stm": ';; LABEL "SW" "Switchboard" ""\nsw A ann 0 4 <SW> it\'s { a / b } (uh) cat-like thing\n',
        "one.ctm": "sw A 0.1 0.2 it\nsw A 0.4 0.2 is\nsw A 0.6 0.2 B\nsw A 1 0.4 cat-\nsw A 1.5 0.4 thing\n",
        "two.ctm": "sw A 0.1 0.2 it\nsw A 0.4 0.2 is\nsw A 0.6 0.2 x\nsw B 1 0.4 no\n",
        "rules.glm": ";;\n* case_sensitive = 'F'\n[IT'S] => [{IT'S / IT IS}] / [ ] __ [ ]\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ref, first, second = (tmp_path / name for name in list(files)[:3])
    options = ["-D", "-F", "--split-hyphens", "--glm", tmp_path / "rules.glm"]
    report = json.loads(invoke("score", ref, first, *options, "--json").stdout)
    assert report["sets"]["one"]["words"] == 7
    assert (report["sets"]["one"]["sub"], report["sets"]["one"]["del"], report["sets"]["one"]["ins"]) == (0, 1, 0)
    assert report["labels"]["one"]["Switchboard"]["errors"] == 1
    assert "'sw b' that" in invoke("score", ref, first, "--compare", second, code=1).stderr
    shown = invoke("score", ref, first, "--compare", second, "--extra", "ignore", *options)
    assert "1 without a reference: sw b" in shown.stderr
    both = invoke("score", ref, first, "--compare", second, "--extra", "insert", *options, "--json")
    assert json.loads(both.stdout)["sets"]["two"]["ins"] == 1
    assert json.loads(both.stdout)["comparison"]["segments"] == 2
    assert "Switchboard" in shown.stdout
    assert "no significant difference between one and two: matched-pairs test over 1 segments" in shown.stdout


def test_score_reads_files_of_any_name_with_marks_as_words(tmp_path):
    (tmp_path / "ref.out").write_text("u-1 { a / b }\n")
    (tmp_path / "hyp.out").write_text("u-1 { a / c }\n")
    files = [tmp_path / "ref.out", tmp_path / "hyp.out"]
    scores = json.loads(invoke("score", *files, "--format", "kaldi", "--words", "--json").stdout)
    assert (scores["sets"]["hyp"]["words"], scores["sets"]["hyp"]["sub"]) == (5, 1)


def test_score_keeps_systems_of_the_same_name_apart(tmp_path):
    ref, hyps = tmp_path / "ref.stm", [tmp_path / name / "hyp.ctm" for name in "ab"]
    ref.write_text("f A ann 0 2 <SW> yes\nf B bob 0 2 <SW,CH> no\n")
    for hyp in hyps:
        hyp.parent.mkdir()
        hyp.write_text("f A 0.5 0.5 yes\n")
    scores, _ = score_files(ref, *hyps, ScoringRules(), PairingRules())
    assert list(scores["sets"]) == ["hyp", str(hyps[1])]
    # both lack the same channel, and no label has a title
    assert scores["missing"] == ["f b"]
    assert {name: counts["ref_words"] for name, counts in scores["labels"]["hyp"].items()} == {"sw": 2, "ch": 1}


@pytest.mark.parametrize(("option", "errors"), [("-D", (1, 0)), ("-F", (0, 1)), ("--optional", (1, 0))])
def test_score_takes_optional_words_and_fragments_apart(tmp_path, option, errors):
    (tmp_path / "ref.out").write_text("u-1 (uh) cat\n")
    (tmp_path / "hyp.out").write_text("u-1 ca-\n")
    result = invoke("score", tmp_path / "ref.out", tmp_path / "hyp.out", "--format", "kaldi", option, "--json")
    scores = json.loads(result.stdout)["sets"]["hyp"]
    assert (scores["sub"], scores["del"]) == errors


def test_score_text_report_is_that_of_the_first_system(tmp_path):
    for name, text in (("ref", "the cat"), ("one", "the hat"), ("two", "a bat")):
        (tmp_path / f"{name}.trn").write_text(f"{text} (a-1)\n")
    ref, first, second = (tmp_path / f"{name}.trn" for name in ("ref", "one", "two"))
    given = ScoringRules(), PairingRules()
    assert score_files(ref, first, second, *given)[1] == score_files(ref, first, None, *given)[1]
    assert score_files(ref, first, second, *given)[1] != score_files(ref, second, None, *given)[1]


def test_score_counts_missing_utterances_if_allowed(tmp_path):
    (tmp_path / "text").write_text("a-1 x y\nb-1 z\n")
    (tmp_path / "hyp.jsonl").write_text('{"id": "a-1", "pred_text": "X y"}\n')
    files = [tmp_path / "text", tmp_path / "hyp.jsonl"]
    result = invoke("score", *files, "--missing", "delete", "--json")
    assert json.loads(result.stdout)["missing"] == ["b-1"]
    assert json.loads(result.stdout)["sets"]["hyp"]["del"] == 1
    assert "1 without a hypothesis: b-1" in result.stderr
    strict = invoke("score", *files, "--missing", "delete", "-s", "--json")
    assert json.loads(strict.stdout)["sets"]["hyp"]["sub"] == 1
    assert "is not a format" in invoke("score", *files, "--format", "xml", code=1).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["score"], "give a reference and a hypothesis: starling score REF HYP"),
        (["score", "{}/ref.trn", "{}/short.trn"], "short.trn lacks 1 utterance: 'b' of"),
        (["score", "{}/ref.trn", "{}/none.trn"], "none.trn"),
        (["score", "{}/ref.trn"], "give a reference and a hypothesis: starling score REF HYP"),
        (["score", "{}/ref.trn", "{}/bad.trn"], "line 1"),
        (["run", "{}/none.yaml"], "none.yaml does not exist: check the path"),
        (["run", "{}/wrong.yaml"], "train.epoch: there is no such field; did you mean 'epochs'?"),
        (["run", "{}/good.yaml", "--set", "train.epochs=["], "is not a YAML value"),
        (["run", "{}/good.yaml", "--set", "nonsense"], "write field=value"),
        (
            ["transcribe", "{}", "--model", "{}"],
            "holds no audio file: give files, or folders with files that end in .aif, ",
        ),
        (["transcribe", "{}/ref.trn", "--model", "{}"], "is not a model bundle"),
        (["transcribe", "{}/ref.trn", "--vad", "ear"], "--vad ear: there is no such detector; use silero or energy or"),
        (["deploy"], "no Prefect server is running: start `starling up`"),
    ],
)
def test_user_error_is_one_message_with_a_remedy(tmp_path, home, words, message, wide):
    (tmp_path / "ref.trn").write_text("x (a)\ny (b)\n")
    (tmp_path / "short.trn").write_text("x (a)\n")
    (tmp_path / "bad.trn").write_text("no id at all\n")
    write_config(tmp_path / "wrong.yaml", tiny_document(train={"epoch": 1}))
    write_config(tmp_path / "good.yaml", tiny_document())
    result = invoke(*(word.format(tmp_path) for word in words), code=1)
    assert message in result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "words", [["run", "x", "--until", "shrad"], ["run", "x", "--from", "nothing"], ["rnu"], ["run"]]
)
def test_wrong_command_line_prints_usage(words):
    assert "Usage:" in invoke(*words, code=2).stderr


def test_run_prints_json_on_stdout_and_tables_on_stderr(tmp_path, home):
    path = write_config(tmp_path / "c.yaml", tiny_document())
    result = invoke("run", path, "--until", "features", "--no-prefect", "--json")
    assert len(result.stdout.splitlines()) == 1
    summary = json.loads(result.stdout)
    assert [stage["name"] for stage in summary["stages"]] == ["prepare", "shard", "features"]
    assert summary["utterances"] == {"read": 40, "written": 40, "quarantined": 0}
    assert summary["model_uri"] is None
    assert "prepare" in result.stderr
    line = r"^shard: 0 quarantined, 40 read, \d+ shards, 40 written \(\d+\.\d s\)$"
    assert re.search(line, result.stderr, re.MULTILINE)
    again = invoke("run", path, "--until", "features", "--no-prefect")
    assert "time    nothing to do; cached: prepare, shard, features\n" in again.stdout
    log = Path(again.stdout.splitlines()[-1].removeprefix("log     "))
    assert log.read_text().count("cached") == 6  # its lines, and the table
    forced = json.loads(invoke("run", path, "--from", "shard", "--until", "shard", "--no-prefect", "--json").stdout)
    assert [stage["cached"] for stage in forced["stages"]] == [True, False]


def test_transcribe_reads_files_and_folders_and_reports_bad_ones(finished, tmp_path, monkeypatch):
    good = write_tone(tmp_path / "audio" / "good.flac", seconds=1.0)
    bad = tmp_path / "audio" / "bad.wav"
    bad.write_bytes(b"no audio")
    bundle = tmp_path / "bundle"
    shutil.copytree(finished.result("train").store.local_path("model/bundle.json").parent, bundle)
    printed = json.loads(invoke("transcribe", good, "--model", bundle, "--json").stdout)
    assert [(entry["file"], entry["seconds"], entry["error"]) for entry in printed["files"]] == [(str(good), 1.0, "")]
    result = invoke("transcribe", tmp_path / "audio", "--model", bundle, "--json", code=1)
    errors = {Path(entry["file"]).name: bool(entry["error"]) for entry in json.loads(result.stdout)["files"]}
    assert errors == {"good.flac": False, "bad.wav": True}
    result = invoke("transcribe", tmp_path / "nowhere.wav", "--model", bundle, code=1)
    assert "nowhere.wav" in result.stderr
    assert "error:" not in result.stderr


def test_unregistered_model_is_an_error_with_a_remedy(finished, tmp_path, wide):
    audio = write_tone(tmp_path / "a.wav")
    result = invoke("transcribe", audio, "--model", "models:/nobody@champion", code=1)
    assert "models:/nobody@champion is not in the registry at sqlite:///" in result.stderr
    assert "it has the model 'tiny': give --model tiny, or set STARLING_HOME" in result.stderr
    result = invoke("transcribe", audio, code=1)  # the default model is the demo's
    assert "models:/starling-demo@champion is not in the registry at" in result.stderr
    assert "it has the model 'tiny'" in result.stderr


def test_registered_models_are_named():
    assert _remedy(["tiny"], "") == "it has the model 'tiny': give tiny"
    remedy = _remedy(["a", "b"], "--model")
    assert remedy == "it has the models 'a', 'b': give one of them, such as --model a"


def test_where_no_model_is_registered_a_run_is_the_remedy(home, tmp_path, wide):
    give_mlflow(home)
    assert "run a pipeline first" in invoke("transcribe", write_tone(tmp_path / "a.wav"), code=1).stderr


def test_doctor_reports_each_problem_with_a_remedy(home):
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["healthy"] is True
    checks = {entry["check"]: entry for entry in report["checks"]}
    assert {"python", "packages", "torchaudio", "soundfile", "espeak-ng", "gpu", "data folder", "object store"} <= set(
        checks
    )
    assert all(entry["remedy"] for entry in report["checks"] if entry["state"] != "ok")


def test_doctor_continues_after_a_failing_check(home, monkeypatch):
    from flows.cli import doctor

    def check_broken():
        raise ImportError("no such library")

    monkeypatch.setattr(doctor, "CHECKS", (check_broken, doctor.check_python))
    report = json.loads(invoke("doctor", "--json", code=1).stdout)
    assert report["healthy"] is False
    assert [entry["state"] for entry in report["checks"]] == ["error", "ok"]
    assert "no such library" in report["checks"][0]["found"]


@pytest.mark.real_interpreter
def test_the_installed_command_starts(tmp_path):
    assert "Usage" in starling("--help", home=tmp_path).stdout


def test_corpus_download_names_known_corpora_and_parts(tmp_path):
    assert "did you mean 'mini_librispeech'" in invoke("corpus", "download", "minilibrispeech", code=1).stderr
    assert "it has: dev-clean-2" in invoke(
        "corpus", "download", "mini_librispeech", "--part", "x", "--to", tmp_path, code=1
    ).stderr.replace("\n", " ")


def test_corpus_download_skips_complete_corpora(tmp_path):
    (tmp_path / "fsdd").mkdir()
    (tmp_path / "fsdd" / ".v1.0.8.completed").write_text("{}")
    downloaded = json.loads(invoke("corpus", "download", "fsdd", "--to", tmp_path, "--json").stdout)
    assert (downloaded["kind"], downloaded["parts"]["v1.0.8"]["present"]) == ("fsdd", True)
    assert "already there" in invoke("corpus", "download", "fsdd", "--to", tmp_path).stdout
