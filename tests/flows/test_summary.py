import dataclasses
import io
import json
from pathlib import Path

from rich.console import Console

from flows.summary import print_summary, summarize
from tasks.stage import Run


def printed(summary):
    text = io.StringIO()
    print_summary(summary, Console(file=text, width=160))
    return text.getvalue()


def upto(finished, count):
    return Run(finished.config, "part", results=dict(list(finished.results.items())[:count]))


def test_a_whole_run(finished):
    found = summarize(finished)
    assert json.loads(json.dumps(found)) == found
    assert found["model_uri"] == "models:/tiny/1"
    assert found["model_aliases"] == ["challenger", "champion"]
    assert [stage["name"] for stage in found["stages"]] == list(finished.results)
    text = printed(found)
    for word in (
        "models:/tiny/1",
        "@champion",
        "95 % interval",
        "starling transcribe --model models:/tiny@champion FILE.wav",
    ):
        assert word in text
    assert found["report"] in text


def test_however_far_a_run_went_it_can_be_told(finished):
    for count in range(len(finished.results) + 1):
        found = summarize(upto(finished, count))
        assert len(found["stages"]) == count
        assert found.keys() >= {"run_id", "stages", "utterances", "sets", "model_uri", "model_aliases", "report"}
        assert printed(found)


def test_utterances_that_were_lost_later_are_counted_as_quarantined(finished):
    run = upto(finished, 2)
    shard = run.result("shard")
    run.results["shard"] = dataclasses.replace(shard, counts=shard.counts | {"quarantined": 3})
    assert summarize(run)["utterances"] == {"read": 40, "written": 37, "quarantined": 3}


def test_a_mere_challenger_is_named_by_its_version(finished):
    found = summarize(finished) | {"model_aliases": ["challenger"]}
    assert "--model models:/tiny/1 FILE.wav" in printed(found)


def test_the_report_comes_from_the_store_where_the_data_folder_is_another(finished, home):
    found = summarize(finished)
    assert found["report"].startswith(str(home))
    assert "<html" in Path(found["report"]).read_text()
