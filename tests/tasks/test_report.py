import base64
import html
import io
import os
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import soundfile
from support import ROOT

from tasks.dataset.tables import read_table
from tasks.figures import percent
from tasks.stages import report_details
from tasks.stages.base import Run, counts_text
from tasks.stages.register import client
from tasks.stages.report import REPORT, render, speed_text
from tasks.stages.report_charts import histogram
from tasks.stages.report_details import audio_of, set_details
from tasks.tracking.significance import Decision

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def worst_of(run):
    return run.result("score").output.read_json("scores.json")["details"]["test"]["worst"]


def page(run):
    return run.result("report").store.read("report.html").decode()


def test_page_is_well_formed_and_self_contained(finished):
    checker = Checker()
    checker.feed(page(finished))
    assert checker.open == []
    assert {"table", "img", "h2", "details", "svg", "audio", "input"} <= checker.seen
    assert all(link.startswith(("data:image/png;base64,", "data:audio/flac;base64,")) for link in checker.links)
    assert page(finished).count("<script") == page(finished).count("<script>") == 1  # none is loaded


def test_page_shows_error_rates_data_and_provenance(finished):
    text = html.unescape(re.sub(r"<[^>]*>", " ", page(finished)))
    scores = finished.result("score").record["sets"]["test"]
    register = finished.result("register").record
    wanted = [percent(scores["wer"]), "test", register["model_uri"], register["decision"]["reason"], "tiny-run"]
    wanted += ["Provenance", "commit", "torch", "worst utterances", "f4", "m7", "Quarantined: none"]
    wanted += ["No recording of the training set is in another set."]
    wanted += [entry["digest"][:16] for entry in finished.result("shard").record["sets"].values()]
    assert [word for word in wanted if word not in text] == []
    assert '"epochs": 2' in text


def test_page_shows_every_error_and_audio_of_worst_utterances(finished):
    text = html.unescape(re.sub(r"<[^>]*>", " ", page(finished)))
    rows = read_table(finished.result("decode").output, "test.parquet")
    details = set_details(finished, "test", worst_of(finished), 1_000_000)
    assert sorted(utterance.id for utterance in details.alignments) == sorted(row["id"] for row in rows)
    errors = [utterance.errors for utterance in details.alignments]
    assert errors == sorted(errors, reverse=True)
    scores = finished.result("score").record["sets"]["test"]
    assert sum(errors) == sum(scores[kind] for kind in ("sub", "ins", "del"))
    assert sum(utterance.words for utterance in details.alignments) == scores["words"]
    assert all(word.errors <= word.spoken for word in details.words)
    worst = details.worst[0]
    marked = next(utterance for utterance in details.alignments if utterance.id == worst.id)
    assert (worst.speaker, worst.errors, worst.text) == (marked.speaker, marked.errors, marked.text)
    assert worst.text in text
    assert {utterance.id for utterance in details.worst} == details.audio.keys()
    samples, _ = soundfile.read(io.BytesIO(base64.b64decode(details.audio[worst.id].partition(",")[2])))
    row = next(row for row in rows if row["id"] == worst.id)
    assert len(samples) / finished.config.data.sample_rate == pytest.approx(row["duration"], abs=0.01)
    heads = ["real-time factor", "test by speaker", "words and confusions", "all alignments", "speaking rate"]
    assert [head for head in heads if head not in text] == []
    assert float(speed_text(finished.result("decode").record, "test")) > 0


def test_worst_utterances_are_those_of_the_stage_score(finished):
    counts = {"errors": 1, "wrong": 12, "spoken": 15}
    entry = {"id": "0_theo_3", "ref": "zero", "hyp": "two", "speaker": "theo"} | counts
    (worst,) = set_details(finished, "test", [entry]).worst
    assert worst == ("0_theo_3", "theo", 1, 12, 15, "(zero->two)")
    assert len(set_details(finished, "test", 20 * [entry]).worst) == 12
    entries = worst_of(finished)
    alike = [(entry["speaker"], entry["ref"]) for entry in entries]
    assert len(set(alike)) == len(alike) > 1


def test_audio_is_limited_in_size_and_optional(finished):
    ids = [row["id"] for row in read_table(finished.result("decode").output, "test.parquet")]
    every = audio_of(finished, "test", ids, 10_000_000)
    assert list(every) == ids
    sizes = [len(base64.b64decode(url.partition(",")[2])) for url in every.values()]
    assert list(audio_of(finished, "test", ["unknown", *ids], sum(sizes[:2]))) == ids[:2]
    assert audio_of(finished, "test", ids, sizes[0] - 1) == {}
    assert set_details(finished, "test").audio == {}


def test_a_large_set_shows_the_alignments_with_the_most_errors(finished, monkeypatch):
    whole = set_details(finished, "test")
    monkeypatch.setattr(report_details, "ALIGNMENTS", 3)
    part = set_details(finished, "test")
    assert part.alignments == whole.alignments[:3]
    assert part.left_out == len(whole.alignments) - 3


def test_comparison_with_the_champion_shows_changed_utterances(finished):
    change = {"set": "test", "id": "<u1>", "ref": "a b", "champion": "a", "challenger": "a b"}
    change |= {"champion_errors": 1, "challenger_errors": 0}
    rates = {"test": {"words": 2, "champion_wer": 0.5, "challenger_wer": 0.0}}
    decision = Decision(
        True, "it wins (p = 0.012)", "7", 0.5, 0.0, 0.012, rates, changed={"better": 1, "worse": 0}, changes=[change]
    )
    register = finished.result("register")
    record = register.record | {"decision": asdict(decision)}
    results = finished.results | {"register": replace(register, record=record)}
    text = render(Run(finished.config, "r", results=results), b"")
    assert "it wins (p = 0.012)" in text
    assert "WER of version 7" in text
    assert "a (-b)" in text
    assert "test: &lt;u1&gt;" in text
    assert "Comparison with the champion" not in page(finished)  # there was none


def test_speed_that_was_not_measured_is_a_dash():
    assert speed_text({"sets": ["test"]}, "test") == "–"
    assert speed_text({"speed": {"test": {"seconds": 1.0, "audio": 0.0}}}, "test") == "–"


def test_labels_of_charts_are_as_large_as_text():
    style = (ROOT / "tasks" / "templates" / "style.html").read_text()
    sizes = [int(size) for size in re.findall(r"(?:svg text|figcaption){font-size:(\d+)px", style)]
    assert len(sizes) == 2
    assert min(sizes) >= 14


def test_outliers_do_not_compress_a_histogram():
    chart = histogram("x", "s", [1.0] * 500 + [2.0] * 500 + [1000.0])
    assert chart.end == 2.0
    assert sum(chart.counts) == 1001
    assert chart.counts[-1] == 501
    assert (chart.bars[-1][1], chart.median) == (1.0, 2.0)
    assert histogram("silence", "s", [0.0]).end == 1.0


def test_report_is_copied_to_data_folder_and_model(finished):
    path = Path(finished.result("report").record["report"])
    assert path.read_text() == page(finished)
    assert path.is_relative_to(os.environ["STARLING_HOME"])
    names = [f.path for f in client().list_artifacts(finished.result("register").record["mlflow_run"])]
    assert "report.html" in names


def test_text_from_data_is_escaped(fragment):
    entry = {
        "kinds": {"<script>": 1},
        "examples": {"<script>": [{"was": "<b>&", "became": ""}]},
        "changed": 1,
        "utterances": 2,
    }
    page = fragment("text", languages={"<img>": entry})
    assert "<td>&lt;img&gt;</td><td>&lt;script&gt;</td><td class=n>1</td>" in page
    assert "&lt;b&gt;&amp; → (nothing)" in page
    assert not re.search("<(script|img|b)>", page)


def test_numbers_are_formatted_readably():
    assert percent(0.0567) == "5.67 %"
    assert (percent(0.0567, 0), percent(None)) == ("6 %", "–")
    assert counts_text({"read": 12345, "written": 0}) == "12,345 read, 0 written"
    assert counts_text({"errors": 1, "copies": 1, "empty": 1, "words": 32}) == "1 error, 1 copy, 1 empty, 32 words"
    assert counts_text({"promoted": 1, "version": 2}) == "version 2 became champion"
    assert counts_text({"version": 1200, "promoted": 0}) == "version 1200 stays challenger"
    assert counts_text({"steps": 0, "unalignable": 0}) == "0 steps"
    assert counts_text({"dimensions": 40, "frames": 0}) == "40 dimensions, computed when they are needed"
    assert counts_text({"dimensions": 40, "frames": 1200}) == "40 dimensions, 1,200 frames"
    assert counts_text({"steps": 2, "unalignable": 1}) == "2 steps, 1 unalignable"


def test_same_results_give_the_same_report(finished):
    again = Run(finished.config, "another-run", results=dict(finished.results))
    assert REPORT.execute(again).cached
