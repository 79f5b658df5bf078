"""What servers recognize is compared with the test sets: the statistics, the logs, the figures, and the event."""

import json
import math
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from scipy.stats import ks_2samp
from support import give_mlflow, load_beside

from recognition.serving.log import RequestLog
from tasks.config.pipeline import MonitorConfig
from tasks.orchestration import events
from tasks.tracking import monitoring
from tasks.tracking.monitoring import compare_distributions, compare_served, log_files, monitor_model
from tasks.tracking.registry import RegistryError
from tasks.tracking.runs import client

registered = load_beside(__file__, "registered.py")
NOW = datetime(2026, 11, 27, 12, 30, tzinfo=UTC)


def normal(seed, count, middle=0.0):
    return np.random.default_rng(seed).normal(middle, 1.0, count)


# --- the test


@pytest.mark.parametrize("ties", [False, True])
def test_distance_is_that_of_kolmogorov_and_smirnov(ties):
    first, second = normal(1, 83), normal(2, 57, 0.4)
    if ties:
        first, second = first.round(), second.round()
    assert compare_distributions(first, second)[0] == pytest.approx(ks_2samp(first, second).statistic)


def test_p_value_is_that_of_the_exact_test():
    first, second = normal(3, 60), normal(4, 40, 0.55)
    exact = ks_2samp(first, second, method="exact").pvalue
    assert 0.005 < exact < 0.2
    assert compare_distributions(first, second)[1] == pytest.approx(exact, rel=0.25)
    assert compare_distributions(first, first)[1] == 1.0


def test_of_equal_distributions_few_are_significant(monkeypatch):
    monkeypatch.setattr(monitoring, "PERMUTATIONS", 99)
    pairs = [(normal(2 * seed, 40).round(1), normal(2 * seed + 1, 60).round(1)) for seed in range(200)]
    significant = sum(compare_distributions(*pair)[1] <= 0.05 for pair in pairs)
    assert significant <= 20  # 10 are expected; 21 or more come once in 1,000 times


def test_a_difference_counts_if_it_is_large_and_no_chance():
    settings = MonitorConfig(distance=0.2, significance=0.01)

    def outcome(first, second):
        (made,) = compare_served({"confidence": first}, {"confidence": second}, settings)
        return made.changed, made.distance >= 0.2, made.p_value < 0.01

    assert outcome(normal(1, 500, 1.0), normal(2, 500)) == (True, True, True)
    assert outcome(normal(1, 4000, 0.2), normal(2, 4000)) == (False, False, True)
    assert outcome(normal(1, 12), normal(2, 15, 0.8)) == (False, True, False)


def test_p_values_are_corrected_for_the_number_of_comparisons():
    pair = normal(3, 60), normal(4, 40, 0.55)
    single = compare_distributions(*pair)[1]
    names = ("confidence", "seconds", "words_per_second")
    made = compare_served(*(dict.fromkeys(names, side) for side in pair), MonitorConfig())
    assert [entry.p_value for entry in made] == [pytest.approx(3 * single)] * 3


def test_only_a_rise_of_rejected_inputs_counts():
    def shares(served, tested):
        sides = [np.repeat([1.0, 0.0], [count, 400 - count]) for count in (served, tested)]
        (made,) = compare_served({"rejected": sides[0]}, {"rejected": sides[1]}, MonitorConfig(rejected=0.05))
        return made

    assert shares(40, 4).changed
    assert shares(40, 4).served_middle == pytest.approx(0.1)
    assert not shares(4, 40).changed
    assert not shares(18, 4).changed  # fewer than 5 % more


def test_very_many_utterances_are_drawn_from(monkeypatch):
    monkeypatch.setattr(monitoring, "_DRAWN", 50)
    (made,) = compare_served({"seconds": normal(1, 900, 2.0)}, {"seconds": normal(2, 700)}, MonitorConfig())
    assert (made.served, made.tested, made.changed) == (900, 700, True)


# --- the logs


def write_log(path, lines, model="m", version="1"):
    """A log; lines are (minutes ago, event, values)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for minutes, event, values in lines:
            when = (NOW - timedelta(minutes=minutes)).isoformat(timespec="milliseconds")
            entry = {"time": when, "event": event, "model": model, "version": version} | values
            file.write(json.dumps(entry) + "\n")


def spoken(confidence, seconds=2.0, words=4):
    return "segment", {
        "confidence": confidence,
        "seconds": seconds,
        "words": words,
        "words_per_second": words / seconds,
    }


def read(*paths, model="m"):
    return monitoring._read_logs(paths, model, (NOW - timedelta(hours=24)).isoformat(), NOW.isoformat())


def test_the_servers_own_log_is_read(tmp_path):
    lines = RequestLog(tmp_path / "log.jsonl")
    lines.common = {"model": "m"}
    lines.write("segment", version="3", words=2, **dict.fromkeys(monitoring.MEASURES, 0.5), least_confidence=None)
    lines.write("file", version="3")
    lines.write("rejected", code="unsupported_audio")
    lines.close()
    now = datetime.now(UTC)
    since = (now - timedelta(minutes=5)).isoformat()
    found = monitoring._read_logs([tmp_path / "log.jsonl"], "m", since, (now + timedelta(minutes=5)).isoformat())
    assert [line["version"] for line in found.lines] == ["3"]
    assert [refused for _, refused in found.inputs] == [False, True]


def test_only_the_models_lines_of_the_period_count(tmp_path):
    path = tmp_path / "a.jsonl"
    write_log(path, [(5, *spoken(0.5)), (24 * 60 + 1, *spoken(0.1)), (-1, *spoken(0.1))])
    write_log(path, [(5, *spoken(0.1))], model="other")
    found = read(path)
    assert [line["confidence"] for line in found.lines] == [0.5]
    assert found.others == {"other"}


def test_inputs_are_files_and_streams_and_what_is_refused_for_its_audio(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [("file", {}), ("stream", {"end": "client"}), ("stream", {"end": "bad_audio"}), ("model", {"note": "x"})]
    lines += [("rejected", {"code": code}) for code in ("empty_audio", "queue_full", "invalid_api_key")]
    write_log(path, [(1, *line) for line in lines])
    assert [refused for _, refused in read(path).inputs] == [False, False, True, True]


@pytest.mark.parametrize("damage", [b'{"time": "2026-11', b"[1, 2]", b'{"event": "file"}', b"\xff\xfe", b"[" * 100_000])
def test_damaged_lines_are_counted_and_left_out(tmp_path, damage):
    path = tmp_path / "a.jsonl"
    write_log(path, [(2, *spoken(0.5))])
    path.write_bytes(path.read_bytes() + damage + b"\n")
    write_log(path, [(1, *spoken(0.6)), (1, "segment", {"confidence": "high"}), (1, *spoken(math.nan))])
    found = read(path)
    assert ([line["confidence"] for line in found.lines], found.unreadable) == ([0.5, 0.6], 3)


def test_older_parts_of_a_log_are_read_before_it(home, tmp_path):
    for name in ("serve-1.jsonl", "serve-1.jsonl.2", "serve-1.jsonl.1", "serve-2.jsonl", "events.jsonl", "prefect.log"):
        write_log(home / "logs" / name, [])
    names = [path.name for path in log_files(MonitorConfig())]
    assert names == ["serve-1.jsonl.2", "serve-1.jsonl.1", "serve-1.jsonl", "serve-2.jsonl"]
    write_log(tmp_path / "x.jsonl", [])
    assert log_files(MonitorConfig(logs=(str(tmp_path / "x.jsonl"),))) == [tmp_path / "x.jsonl"]
    report = monitor_model("m", MonitorConfig(logs=(str(tmp_path / "y.jsonl"),)), NOW)
    assert report.outcome == "Empty"
    assert report.message.endswith("y.jsonl is not there")


def test_hours_have_figures_of_their_own(tmp_path):
    path = tmp_path / "a.jsonl"
    write_log(path, [(100, *spoken(0.5)), (100, *spoken(0.7)), (5, *spoken(0.9, seconds=1.0)), (5, "file", {})])
    write_log(path, [(5, "rejected", {"code": "empty_audio"})])
    first, second = monitoring._hours(read(path))
    assert first == {
        "hour": "2026-11-27T10", "utterances": 2, "seconds": 4.0, "confidence": 0.6, "inputs": 0, "rejected": 0,
        "words_per_second": 2.0,
    }  # fmt: skip
    assert (second["hour"], second["inputs"], second["rejected"]) == ("2026-11-27T12", 2, 1)


# --- a look


@pytest.fixture
def site(finished, home, monkeypatch):
    """A registry with a version that was tested as the finished run says, and the log of its server."""
    give_mlflow(home)
    (number,) = registered.add(client())
    monkeypatch.setattr(monitoring, "load_run", lambda version: finished)
    tested = monitoring.tested_values(finished)
    return SimpleNamespace(version=number, log=home / "logs" / "serve-8000.jsonl", tested=tested)


def served(site, shift=0.0, count=240):
    """Lines of utterances like those of the test sets, but for their confidence."""
    names = (*monitoring.MEASURES,)
    rows = np.random.default_rng(5).integers(0, len(site.tested["seconds"]), count)
    values = [{name: float(site.tested[name][row]) for name in names} for row in rows]
    lines = [("segment", row | {"confidence": row["confidence"] + shift, "words": 1}) for row in values]
    write_log(site.log, [(5, *line) for line in lines] + [(5, "file", {})] * count, version=site.version)


def figures(site):
    api = client()
    return api, api.get_run(api.get_model_version("m", site.version).run_id).data.metrics


def test_recognition_as_on_the_test_sets_is_no_event(site):
    served(site)
    report = monitor_model("m", MonitorConfig(), NOW)
    assert report.outcome == "Unchanged", report.message
    assert not events.events_path().exists()
    assert [entry.measure for entry in report.comparisons] == [*monitoring.MEASURES, "rejected"]
    assert figures(site)[1]["served.confidence.p_value"] > 0.05


def test_unlike_confidences_are_an_event_and_metrics(site):
    served(site, shift=-5.0)
    report = monitor_model("m", MonitorConfig(), NOW)
    assert report.outcome == "Changed"
    assert [entry.measure for entry in report.comparisons if entry.changed] == ["confidence"]
    (event,) = [json.loads(line) for line in events.events_path().read_text().splitlines()]
    assert (event["event"], event["model"], event["version"]) == ("starling.recognition-changed", "m", site.version)
    assert event["changed"] == ["confidence"]
    assert event["test"].startswith("two-sample Kolmogorov-Smirnov distance; p-value by a permutation test with 1,999")
    assert "not as on the test sets: confidence" in event["reason"]
    api, known = figures(site)
    assert known["served.confidence.distance"] == pytest.approx(1.0)
    assert known["served.confidence.count"] == 240
    (point,) = api.get_metric_history(api.get_model_version("m", site.version).run_id, "served.seconds.distance")
    assert point.step == int(NOW.timestamp() // 3600)


def test_a_rise_of_rejected_inputs_is_an_event(site):
    served(site)
    write_log(site.log, [(3, "rejected", {"code": "unsupported_audio"})] * 60)
    report = monitor_model("m", MonitorConfig(), NOW)
    assert [entry.measure for entry in report.comparisons if entry.changed] == ["rejected"]


def test_the_last_version_alone_is_compared(site):
    write_log(site.log, [(50, *spoken(0.001))] * 500, version="77")
    served(site)
    report = monitor_model("m", MonitorConfig(), NOW)
    assert (report.outcome, report.version, report.comparisons[0].served) == ("Unchanged", site.version, 240)


def test_few_or_no_utterances_are_not_compared(site):
    assert monitor_model("m", MonitorConfig(), NOW).outcome == "Empty"
    write_log(site.log, [(1, *spoken(0.1))] * 500, model="o")
    report = monitor_model("m", MonitorConfig(), NOW)
    assert (report.outcome, "they have some of o" in report.message) == ("Empty", True)
    served(site, shift=-5.0, count=99)
    assert monitor_model("m", MonitorConfig(), NOW).outcome == "TooFew"
    assert not events.events_path().exists()


def test_a_version_that_is_not_registered_is_an_error_with_a_remedy(site):
    write_log(site.log, [(1, *spoken(0.1))] * 100, version="9")
    with pytest.raises(RegistryError, match=r"m has no version 9 in this registry; it has"):
        monitor_model("m", MonitorConfig(), NOW)


def test_an_event_is_noted_without_a_prefect_server(home, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert events.emit("starling.promoted", "m", {"version": "3"}) is False
    (line,) = events.events_path().read_text().splitlines()
    assert json.loads(line).items() >= {"event": "starling.promoted", "model": "m", "version": "3"}.items()
    events.events_path().unlink()
    events.events_path().mkdir()  # no file can be there: the caller goes on
    assert events.emit("starling.promoted", "m", {"version": "4"}) is False


def test_an_unreachable_registry_is_an_error(site, monkeypatch):
    served(site)

    def refuse(*_):
        raise MlflowException("no answer")

    monkeypatch.setattr(monitoring, "get_version", refuse)
    with pytest.raises(MlflowException):
        monitor_model("m", MonitorConfig(), NOW)
