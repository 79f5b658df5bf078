import dataclasses
import io
import json
from pathlib import Path

from rich.console import Console

from flows.score_tables import score_table, speaker_table
from flows.summary import (
    group_table,
    outcome_table,
    print_outcome,
    print_summary,
    set_table,
    summarize,
    time_text,
    useless_warnings,
)
from tasks.figures import LEARN_MORE
from tasks.stages.base import Run


def printed(summary):
    text = io.StringIO()
    print_summary(summary, Console(file=text, width=160))
    return text.getvalue()


def upto(finished, count):
    return Run(finished.config, "part", results=dict(list(finished.results.items())[:count]))


def test_summary_of_a_complete_run(finished):
    summary = summarize(finished)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["model_uri"] == "models:/tiny/1"
    assert summary["model_aliases"] == ["challenger", "champion"]
    assert [stage["name"] for stage in summary["stages"]] == list(finished.results)
    text = printed(summary)
    for word in (
        "models:/tiny/1",
        "@champion",
        "95 % interval",
        "starling transcribe --model models:/tiny@champion FILE.wav",
    ):
        assert word in text
    assert summary["report"] in text


def test_run_ended_after_any_stage_can_be_summarized(finished):
    for count in range(len(finished.results) + 1):
        summary = summarize(upto(finished, count))
        assert len(summary["stages"]) == count
        assert summary.keys() >= {"run_id", "stages", "utterances", "sets", "model_uri", "model_aliases", "report"}
        assert printed(summary)


def test_utterances_lost_in_later_stages_count_as_quarantined(finished):
    run = upto(finished, 2)
    shard = run.result("shard")
    run.results["shard"] = dataclasses.replace(shard, counts=shard.counts | {"quarantined": 3})
    assert summarize(run)["utterances"] == {"read": 40, "written": 37, "quarantined": 3}


def test_challenger_is_named_by_its_version(finished):
    summary = summarize(finished) | {"model_aliases": ["challenger"]}
    assert "--model models:/tiny/1 FILE.wav" in printed(summary)


def test_report_comes_from_the_store_with_another_data_folder(finished, home):
    summary = summarize(finished)
    assert summary["report"].startswith(str(home))
    assert "<html" in Path(summary["report"]).read_text()


def cells(*tables):
    """The texts of the tables' cells, row by row."""
    text = io.StringIO()
    for table in tables:
        Console(file=text, width=160).print(table)
    lines = [line.replace("┃", "│") for line in text.getvalue().splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def test_every_value_is_in_the_column_of_its_header():
    scores = {"wer": 0.1, "wer_low": 0.05, "wer_high": 0.2, "cer": 0.03}
    scores |= {"sub": 1, "ins": 2, "del": 3, "words": 1004, "utterances": 5}
    heads, row = cells(score_table({"test": scores}))
    assert dict(zip(heads, row, strict=True)) == {
        "set": "test",
        "WER": "10.00 %",
        "95 % interval": "5.00 % – 20.00 %",
        "CER": "3.00 %",
        "sub": "1",
        "ins": "2",
        "del": "3",
        "words": "1,004",
        "utterances": "5",
    }
    several = scores | {"speakers": 4, "wer_speaker_low": 0, "wer_speaker_high": 0.5}
    assert cells(speaker_table({"one": scores, "two": several}))[1:] == [
        ["one", "10.00 %", "–", "1"],
        ["two", "10.00 %", "0.00 % – 50.00 %", "4"],
    ]
    sets = [
        {"set": name, "utterances": 1200, "hours": 1.5, "speakers": 7, "trained_on": 2} for name in ("train", "test")
    ]
    heads, *rows = cells(set_table(sets))
    assert heads == ["set", "utterances", "hours", "speakers", "speakers also in training"]
    assert rows == [["train", "1,200", "1.50", "7", ""], ["test", "1,200", "1.50", "7", "2"]]
    assert cells(set_table(sets[1:])) == [["set", "utterances", "hours", "speakers"], ["test", "1,200", "1.50", "7"]]
    groups = {"test": {"corpora": {"a": {"wer": 0.5, "ref_words": 1234}}, "domains": {"": {"wer": 0, "ref_words": 0}}}}
    assert cells(group_table(groups))[1:] == [
        ["test", "corpus", "a", "50.00 %", "1,234"],
        ["test", "domain", "–", "0.00 %", "0"],
    ]


def outcome(summary):
    text = io.StringIO()
    print_outcome({"log": "/home/x.log"} | summary, Console(file=text, width=80))
    return text.getvalue()


def test_outcome_says_in_a_few_lines_what_was_reached_and_what_is_next(finished):
    lines = outcome(summarize(finished)).splitlines()
    assert len(lines) <= 20
    assert lines[1].split()[:2] == ["set", "WER"]
    heads = [line.split()[0] for line in lines if line[:1].strip() and not line.startswith("warning ")]
    assert heads == ["set", "test", "time", "model", "report", "try", "log"]
    assert lines[-1] == "log     /home/x.log"


def test_outcome_is_narrow_and_has_intervals_over_speakers_if_there_are_several(finished):
    scores = {"wer": 0.1, "wer_low": 0.05, "wer_high": 0.2, "words": 1004, "utterances": 5, "speakers": 1}
    several = scores | {"speakers": 4, "wer_speaker_low": 0, "wer_speaker_high": 0.5}
    sets = {"one": scores, "a-set-of-another-name": several}
    text = io.StringIO()
    Console(file=text, width=80).print(outcome_table(sets))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert len(lines) == 3
    assert " ".join(lines[1].split()) == "one 10.00 % 5.00 % – 20.00 % 5 utterances 1,004"
    assert " ".join(lines[2].split()) == "a-set-of-another-na… 10.00 % 0.00 % – 50.00 % 4 speakers 1,004"


def test_time_names_the_long_stages_and_those_that_were_not_run_again():
    stage = {"cached": False, "counts": {}}
    stages = [stage | {"name": name, "seconds": s} for name, s in (("prepare", 20.0), ("lm", 1.0), ("train", 179.0))]
    assert time_text(stages) == "3.3 min: train 3.0 min, prepare 20.0 s, 1 other 1.0 s"
    assert time_text([stage | {"name": "shard", "seconds": 0.1, "cached": True}]) == "nothing to do; cached: shard"
    assert time_text([*stages[:1], stages[1] | {"cached": True}]) == "20.0 s: prepare 20.0 s; cached: lm"


def test_stages_are_listed_with_their_time_or_as_cached(finished):
    stages = [
        {"name": "prepare", "cached": False, "seconds": 1.26, "counts": {"read": 1200}},
        {"name": "shard", "cached": True, "seconds": 9.0, "counts": {}},
    ]
    shown = printed(summarize(finished) | {"stages": stages}).splitlines()
    assert next(line for line in shown if "┃" in line).replace("┃", " ").split() == ["stage", "time", "counts"]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown if "│" in line]
    assert rows[0][:2] == ["prepare", "1.3 s"]
    assert "1,200" in rows[0][2]
    assert rows[1] == ["shard", "cached", ""]


def test_summary_shows_several_learners_and_warnings(finished):
    summary = summarize(finished)
    assert "strategy" not in printed(summary)
    training = {"strategy": "adpsgd", "nodes": 2, "learners_per_node": 3, "utterances": 4005, "repeated": 6}
    text = printed(summary | {"training": training, "data": summary["data"] | {"warnings": ["trained [on] speakers"]}})
    assert "│ adpsgd   │     2 │                 3 │              4,005 │        6 │" in text
    assert "warning trained [on] speakers" in text


def test_a_model_that_recognizes_nothing_is_told_with_what_helps():
    learned = {"words": 10, "sub": 2, "del": 7, "ins": 9}
    nothing, empty = learned | {"sub": 3}, {"words": 0, "sub": 0, "del": 0, "ins": 1}
    (line,) = useless_warnings({"a": learned, "b": nothing, "c": empty})
    assert line.startswith("no word of 'b' was recognized correctly")
    assert "train.epochs" in line
    assert "train.batch_seconds" in line


def test_the_warning_is_printed_for_models_that_were_just_trained(finished):
    summary = summarize(finished)
    summary |= {"sets": {"test": summary["sets"]["test"] | {"sub": summary["sets"]["test"]["words"]}}}
    assert "warning no word of 'test' was recognized correctly" in printed(summary)
    assert "warning no word" not in printed(summary | {"training": None})


def test_a_decision_that_says_what_helps_replaces_the_warning(finished):
    summary = summarize(finished)
    summary |= {"sets": {"test": summary["sets"]["test"] | {"sub": summary["sets"]["test"]["words"]}}}
    text = printed(summary | {"decision": f"stays challenger [so far]. {LEARN_MORE}.", "untrained": True})
    assert "stays challenger [so far]" in text
    assert "warning no word" not in text
