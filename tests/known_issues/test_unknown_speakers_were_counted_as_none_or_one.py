"""Without a column of speakers, tables said that no speaker of the test set was also in training; that is unknown."""

import pytest
from support import small_corpus, tiny_document, write_table, write_tone
from typer.testing import CliRunner

from flows.cli.app import app
from flows.score_tables import speaker_table
from flows.summary import set_table
from speech.scoring import ScoringError, score_sets, text_report, wer_interval
from tasks.config.pipeline import parse_config
from tasks.dataset.sets import SplitError
from tasks.dataset.speakers import overlap_warnings, set_rows, sets_text
from tasks.scores import summarize
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE
from tasks.stages.report import _PAGES
from tasks.stages.score import figures


def corpus(folder, *speakers):
    """One utterance of each set by these speakers; returns the table."""
    names = ["train", "test"] * len(speakers)
    who = [name for name in speakers for _ in range(2)]
    rows = [
        (f"u{n}", write_tone(folder / f"{n}.wav", seed=n), f"text {n}", speaker, name)
        for n, (speaker, name) in enumerate(zip(who, names, strict=True))
    ]
    return str(write_table(folder, rows))


def prepared(path, **data):
    document = tiny_document(data={"sources": [{"kind": "table", "path": path}], "valid_share": 0, **data})
    run = Run(parse_config(document), "unnamed")
    run.results["prepare"] = PREPARE.execute(run)
    return run


def cells(table):
    return [[str(cell) for cell in column.cells] for column in table.columns]


def test_speakers_of_a_corpus_that_names_none_are_unknown(home, tmp_path):
    run = prepared(corpus(tmp_path, "", ""))
    record = run.result("prepare").record
    rows = {row["set"]: row for row in set_rows(record)}
    assert {(row["speakers"], row["trained_on"], row["unnamed"]) for row in rows.values()} == {(None, None, 2)}
    assert "test 2 utterances, 0.00 h, speakers unknown; train" in sets_text(record)
    _, _, _, speakers, also = cells(set_table(set_rows(record)))
    assert (speakers, also) == (["unknown", "unknown"], ["unknown", ""])
    entry = record["sets"]["test"]
    assert _PAGES.from_string("{{ entry | speakers }}").render(entry=entry) == "unknown"


def test_numbers_of_partly_unknown_speakers_are_lower_bounds(home, tmp_path):
    record = prepared(corpus(tmp_path, "ann", "", "bea")).result("prepare").record
    _, _, _, speakers, also = cells(set_table(set_rows(record)))
    assert (speakers, also) == (["2 or more", "2 or more"], ["2 or more", ""])
    assert "test 3 utterances, 0.00 h, 2 or more speakers" in sets_text(record)


def test_known_speakers_are_counted(home, tmp_path):
    record = prepared(corpus(tmp_path, "ann", "bea")).result("prepare").record
    assert [cells(set_table(set_rows(record)))[column] for column in (3, 4)] == [["2", "2"], ["2", ""]]
    assert all("unnamed" not in row for row in set_rows(record))


def test_unknown_overlap_of_speakers_is_a_warning_and_refused_where_overlap_is(home, tmp_path):
    path = corpus(tmp_path, "", "")
    run = prepared(path)
    (warning,) = overlap_warnings(run.result("prepare").record, run.config.data)
    assert warning.startswith(
        "some utterances have no speaker (2 in 'test', 2 in 'train'): training speakers may be in"
    )
    for allowed in ({"speaker_overlap": "allow"}, {"split_by": "utterance"}):
        run = prepared(path, **allowed)
        assert overlap_warnings(run.result("prepare").record, run.config.data) == []
    with pytest.raises(SplitError, match=r"some utterances have no speaker .* and data.speaker_overlap is refuse"):
        prepared(path, speaker_overlap="refuse")


def test_utterances_of_unknown_speakers_are_not_divided_by_speaker(home, tmp_path):
    rows = [(f"u{n}", write_tone(tmp_path / f"{n}.wav", seed=n), "text", "") for n in range(9)]
    with pytest.raises(SplitError, match=r"^utterances of unknown speakers cannot be divided .*split_by: utterance"):
        prepared(str(write_table(tmp_path, rows)), valid_share=0.2)


def test_scores_have_no_interval_over_unknown_speakers():
    rows = [(f"u{n}", "a b c", "a x c" if n % 2 else "a b c", "" if n < 4 else "ann", "") for n in range(8)]
    some, none = (summarize(score_sets(part), 0) for part in (rows, rows[:4]))
    assert (some["speakers"], some["wer_speaker_low"]) == (1, None)
    assert (none["speakers"], none["wer_speaker_low"]) == (None, None)
    assert not [name for name in figures({"sets": {"test": some}}) if "speaker" in name]
    assert cells(speaker_table({"test": none}))[-1] == ["unknown"]
    table = text_report(score_sets(rows)).split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["speaker", "unknown", "ann"]
    with pytest.raises(ScoringError, match="4 utterances without a speaker"):
        wer_interval([1] * 8, [3] * 8, speakers=[row[3] for row in rows])


def test_init_and_inspect_say_that_speakers_are_unknown(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = small_corpus(tmp_path / "corpus", speakers=3, each=4)
    text = path.read_text()
    for n in range(3):
        text = text.replace(f",s{n},", ",,")
    path.write_text(text)
    inspected = CliRunner().invoke(app, ["corpus", "inspect", str(path), "--json"])
    assert '"speakers": null' in inspected.output
    assert '"unnamed": 12' in inspected.output
    told = CliRunner().invoke(app, ["init", str(tmp_path / "corpus")])
    assert "speakers unknown" in told.output, told.output
    (config,) = tmp_path.glob("*.yaml")
    assert config.read_text().startswith("# 12 utterances, 0.0017 hours, speakers unknown, ")
    assert "split_by: utterance  # speakers are unknown, so none can be set aside for" in config.read_text()
