"""Messages about wrong input showed what pydantic, PyYAML or the system had written, or did not name the cause."""

import pytest
from support import write_tone
from typer.testing import CliRunner

from flows.cli.app import app

LIBRARIES = ("pydantic", "validation error", "Config", "Errno", "unicode string", "Traceback", "Reader")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    for console in ("out", "err"):
        monkeypatch.setattr(f"flows.cli.common.{console}.width", 400, raising=False)
    write_tone(tmp_path / "own" / "a.wav")
    (tmp_path / "own" / "a.txt").write_text("one")
    for number in range(3):
        write_tone(tmp_path / "many" / f"{number}.wav", seed=number)
        (tmp_path / "many" / f"{number}.txt").write_text("one")
    (tmp_path / "good.yaml").write_text("name: good\ndata: {sources: [{kind: sidecar, path: own}]}\n")
    (tmp_path / "broken.yaml").write_text("name: x\n data: [\n")
    (tmp_path / "kind.yaml").write_text("name: x\ndata: {sources: [{kind: sidcar, path: own}]}\n")
    (tmp_path / "elsewhere.csv").write_text("path,text\nclips/a.wav,one\n")
    (tmp_path / "few.csv").write_text("path,text\nown/a.wav,one\nown/a.wav,\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "init own/a.wav",
            "own/a.wav is neither a table (arrow, csv, jsonl, parquet, tsv) nor a manifest: give one",
        ),
        ("init many -o good.yaml/x.yaml", "error: good.yaml: File exists"),
        ("init own", "1 utterance(s) with audio and text were found, and a training needs at least three"),
        ("init few.csv", "1 more cannot be used, such as a (duplicate-id: "),
        ("init elsewhere.csv", "{}/clips/a.wav"),
        ("config check none.yaml", "none.yaml does not exist: check the path, or let `starling init FOLDER` write"),
        ("config check many/..", "many/.. is a folder: give a YAML file, or let `starling init many/..` write one"),
        ("config check broken.yaml", "in line 2, column 6"),
        ("config check kind.yaml", "there is no corpus layout 'sidcar'; did you mean 'sidecar'?\n"),
        ("config show good.yaml --set train.epochs=x", "good.yaml (with --set for train.epochs) has 1 wrong field:"),
        ("config show good.yaml --set data.sources.1.set=x", "data.sources is a list of 1, whose items are numbered"),
        ("corpus inspect own --kind sidcar", "unknown corpus kind 'sidcar': did you mean 'sidecar'?"),
    ],
)
def test_messages_name_cause_and_remedy(here, words, message):
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 1, result.output
    assert message.format(here) in result.stderr
    assert not [name for name in LIBRARIES if name in result.stderr]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run own", "own is a folder: give a YAML file"),
        ("run good.yaml --until trayn", "did you mean 'train'?"),
        ("run good.yaml --from score --until train", "--from score comes after --until train"),
    ],
)
def test_so_do_messages_about_usage(words, message):
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())
