"""`starling corpus inspect` counted training utterances that `min_confidence` or `share` leaves out as usable ones."""

import csv
import json

import pytest
import yaml
from support import small_corpus
from typer.testing import CliRunner

from flows.cli.app import app
from tasks.config.pipeline import parse_config
from tasks.stages.base import Run
from tasks.stages.prepare import PREPARE


def given(folder, split=lambda number: "", **source):
    """A configuration of 24 utterances with confidences of 0.00, 0.04, …, 0.92."""
    table = small_corpus(folder / "corpus", speakers=6, each=4)
    rows = list(csv.DictReader(table.open(newline="")))
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*rows[0], "confidence", "split"])))
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow(row | {"confidence": f"{number / 25:.2f}", "split": split(number)})
    sources = [{"kind": "table", "path": str(table), **source}]
    document = {"name": "doubtful", "seed": 3, "data": {"sources": sources, "duplicates": {"fingerprint": False}}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path, document


def shown(path, *options):
    result = CliRunner().invoke(app, ["corpus", "inspect", str(path), *options])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def inspected(path, *options):
    return json.loads(shown(path, "--json", *options))


@pytest.mark.parametrize("source", [{"min_confidence": 0.48}, {"share": 0.5}, {"min_confidence": 0.48, "share": 0.5}])
@pytest.mark.parametrize("split", ["", "own"])
def test_inspect_counts_what_the_stage_prepare_leaves_out(home, tmp_path, source, split):
    own = {"split": lambda n: "valid" if n % 4 == 0 else "train"} if split else {"set": "train"}
    path, document = given(tmp_path, **own, **source)
    report = inspected(path)
    result = PREPARE.execute(Run(parse_config(document), "r"))
    counts = {name: report[name] for name in ("read", "written", "quarantined")}
    unused = sum(entry["utterances"] for entry in report["unused"])
    assert result.counts == counts | {"unused": unused}
    assert report["unused"] == result.record["unused"]
    assert report["undivided"] == []
    assert {name: figures["utterances"] for name, figures in report["sets"].items()} == {
        name: figures["utterances"] for name, figures in result.record["sets"].items()
    }


def test_inspect_says_in_words_what_is_left_out(home, tmp_path):
    path, _ = given(tmp_path, set="train", min_confidence=0.48)
    text = shown(path)
    assert "12 of 24 utterances can be used" in text
    assert "unused: 12 training utterances of data.sources.0 have a confidence below 0.48" in text


@pytest.mark.parametrize("split", ["", "train"])
def test_what_a_run_divides_is_counted_apart(home, tmp_path, split):
    path, _ = given(tmp_path, lambda _: split, min_confidence=0.48)
    report = inspected(path)
    assert (report["written"], report["unused"]) == (24, [])
    assert report["undivided"] == [{"source": 0, "field": "min_confidence", "value": 0.48, "utterances": 12}]
    line = "12 utterances of data.sources.0 have a confidence below 0.48: a run leaves out those that its division puts"
    assert line in shown(path)


def test_limit_is_of_what_is_read(home, tmp_path):
    path, _ = given(tmp_path, set="train", min_confidence=0.48)
    report = inspected(path, "--limit", "14")
    assert (report["read"], report["written"]) == (14, 2)
