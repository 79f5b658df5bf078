"""docker/grafana-dashboard.json: what it asks for is what a server's /metrics has."""

import json
import re
from itertools import combinations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import ROOT, load_beside

from recognition.serving.limits import REFUSED_AUDIO

tones = load_beside(__file__, "running_server.py")
DASHBOARD = json.loads((ROOT / "docker" / "grafana-dashboard.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
EXPRESSIONS = [
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
    *(annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]),
]
OF_PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus adds."""
OF_GRAFANA = {"__rate_interval", "__all"}
KINDS = {"timeseries", "stat"}
_SELECTOR = re.compile(r"\b(starling_\w+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory):
    """Label names of each sample of /metrics, after a file, a stream and a refusal."""
    transcriber = tones.tone_transcriber(tmp_path_factory.mktemp("tones"))
    with tones.running(transcriber, collect=(tmp_path_factory.mktemp("kept"), 1.0)) as server:
        assert tones.post(server, tones.flac(tones.speak("echo")))[0] == 200
        assert tones.post(server, b"no audio")[0] == 415
        with tones.stream(server) as connection:
            connection.send(tones.pcm(tones.speak("alpha")))
            connection.send(json.dumps({"type": "end"}))
            tones.messages(connection)
        server.service.metrics.dropped.labels("idle")  # as if a connection had been closed
        text = tones.fetch(f"{server.url}/metrics")[2].decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def selectors(expression):
    """Metrics of an expression, each with the names of the labels that it is selected by."""
    return [
        (name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))) for name, inside in _SELECTOR.findall(expression)
    ]


def grouped(expression):
    names = ",".join(re.findall(r"by \(([^)]*)\)", expression))
    return {name.strip() for name in names.split(",") if name.strip()}


def test_every_metric_of_the_dashboard_is_one_of_the_server(exposed):
    asked = {name for expression in EXPRESSIONS for name, _ in selectors(expression)}
    assert len(asked) > 20
    assert asked - exposed.keys() == set()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_labels_are_those_of_the_metrics(exposed, expression):
    known = OF_PROMETHEUS.union(*(exposed[name] for name, _ in selectors(expression)))
    for name, labels in selectors(expression):
        assert labels <= exposed[name] | OF_PROMETHEUS
    assert grouped(expression) <= known


def test_legends_name_labels_that_are_left(exposed):
    for panel in PANELS:
        for target in panel["targets"]:
            left = grouped(target["expr"]) or {
                label for name, _ in selectors(target["expr"]) for label in exposed[name]
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= left, panel["title"]


def test_every_metric_of_the_server_is_on_the_dashboard(exposed):
    def base(name):
        return re.sub(r"_(bucket|sum|count|created|total)$", "", name)

    asked = {base(name) for expression in EXPRESSIONS for name, _ in selectors(expression)}
    assert {base(name) for name in exposed if name.startswith("starling_")} == asked


def test_quantiles_are_of_histograms_and_rates_of_counters(exposed):
    for expression in EXPRESSIONS:
        if "histogram_quantile" in expression:
            assert "le" in grouped(expression)
            assert all(name.endswith("_bucket") and "le" in exposed[name] for name, _ in selectors(expression))
        counters = [name for name, _ in selectors(expression) if re.search(r"_(total|bucket|sum|count)$", name)]
        assert len(counters) == len(re.findall(r"\b(?:rate|increase)\(", expression))


def test_the_share_of_refused_audio_has_all_its_reasons():
    (expression,) = [expression for expression in EXPRESSIONS if "reason=~" in expression]
    assert set(re.search(r'reason=~"([^"]*)"', expression)[1].split("|")) == set(REFUSED_AUDIO)


def test_variables_are_defined():
    defined = {entry["name"] for entry in DASHBOARD["templating"]["list"]} | OF_GRAFANA
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used <= defined
    assert {"datasource", "instance"} <= used


def test_the_file_has_what_grafana_needs():
    assert DASHBOARD["title"]
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert "id" not in DASHBOARD  # an id belongs to one Grafana, and is refused by others
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["type"] in KINDS
        assert panel["datasource"] == source
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == source and target["expr"].count("(") == target["expr"].count(")")
                   for target in panel["targets"])  # fmt: skip
        assert "unit" in panel["fieldConfig"]["defaults"]


def test_panels_lie_beside_each_other():
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0 for place in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y
