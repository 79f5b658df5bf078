import html
import os
import re
from html.parser import HTMLParser
from pathlib import Path

from tasks.stages.base import Run, counts_text
from tasks.stages.register import client
from tasks.stages.report import REPORT, percent

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


def page(run):
    return run.result("report").store.read("report.html").decode()


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(finished):
    checker = Checker()
    checker.feed(page(finished))
    assert checker.open == []
    assert {"table", "img", "h2", "details"} <= checker.seen
    assert all(link.startswith("data:image/png;base64,") for link in checker.links)
    assert "<script" not in page(finished)


def test_the_page_says_how_good_on_what_and_from_where(finished):
    text = html.unescape(re.sub(r"<[^>]*>", " ", page(finished)))
    scores = finished.result("score").record["sets"]["test"]
    register = finished.result("register").record
    wanted = [percent(scores["wer"]), "test", register["model_uri"], register["decision"]["reason"], "tiny-run"]
    wanted += ["Provenance", "commit", "torch", "worst utterances", "f4", "m7", "Quarantined: none"]
    wanted += [entry["digest"][:16] for entry in finished.result("shard").record["sets"].values()]
    assert [word for word in wanted if word not in text] == []
    assert '"epochs": 2' in text


def test_a_copy_lies_in_the_data_folder_and_beside_the_model(finished):
    path = Path(finished.result("report").record["report"])
    assert path.read_text() == page(finished)
    assert path.is_relative_to(os.environ["STARLING_HOME"])
    names = [f.path for f in client().list_artifacts(finished.result("register").record["mlflow_run"])]
    assert "report.html" in names


def test_what_comes_from_data_is_escaped(fragment):
    entry = {
        "kinds": {"<script>": 1},
        "examples": {"<script>": [{"was": "<b>&", "became": ""}]},
        "changed": 1,
        "utterances": 2,
    }
    found = fragment("text", languages={"<img>": entry})
    assert "<td>&lt;img&gt;</td><td>&lt;script&gt;</td><td class=n>1</td>" in found
    assert "&lt;b&gt;&amp; → (nothing)" in found
    assert not re.search("<(script|img|b)>", found)


def test_numbers_are_readable():
    assert percent(0.0567) == "5.67 %"
    assert percent(None) == "–"
    assert counts_text({"read": 12345, "written": 0}) == "12,345 read, 0 written"


def test_the_same_results_have_the_same_report(finished):
    again = Run(finished.config, "another-run", results=dict(finished.results))
    assert REPORT.execute(again).cached
