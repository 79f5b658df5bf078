"""If `starling init` did not know the name of the column of speakers, it called them unknown, and named no column."""

import csv

import pytest
from support import write_tone

from tasks.config.pipeline import load_config


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table whose transcripts and speakers have columns with names of its author."""
    monkeypatch.chdir(tmp_path)
    names = [f"{number}.wav" for number in range(24)]
    for number, name in enumerate(names):
        write_tone(tmp_path / "digits" / name, seconds=0.3, seed=number)
    rows = [(name, ("one", "two")[number % 2], f"s{number // 3}") for number, name in enumerate(names)]
    path = tmp_path / "digits" / "list.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([("file", "Satz", "Sprecher"), *rows])
    return path


def test_unused_column_is_named_with_the_option_that_uses_it(table, tmp_path, home, invoke):
    shown = invoke("init", table.parent, "--column", "text=Satz").stdout
    assert "speakers unknown" in shown
    option = "--column speaker=Sprecher"
    assert f"hint:    the column Sprecher is not used; if one has the speakers, add --force {option}" in shown
    shown = invoke("init", table.parent, "--column", "text=Satz", "--force", *option.split()).stdout
    assert "8 speakers" in shown
    assert "is not used" not in shown
    config = load_config(tmp_path / "digits.yaml")
    assert config.data.split_by == "speaker"
    assert config.data.sources[0].options == {"columns": {"text": "Satz", "speaker": "Sprecher"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text=Sats", "list.csv has no column 'Sats' for text; did you mean 'Satz'?"),
        ("speeker=Sprecher", "there is no field 'speeker' of a table; did you mean 'speaker'?"),
        ("speaker", "--column speaker: give a field and the column that it is in, such as speaker=who"),
    ],
)
def test_wrong_columns_are_refused(table, home, invoke, given, message):
    shown = invoke("init", table, "--column", given, code=1)
    assert message in " ".join((shown.stdout + shown.stderr).split())
