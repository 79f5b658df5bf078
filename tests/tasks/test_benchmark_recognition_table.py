"""The table of recognizers: its figures are those of the scores, and streams have rows of their own."""

import pytest
from support import copy_finished, tiny_document

from benchmarks.recognition_table import HEAD, measure
from tasks import STAGES
from tasks.config.pipeline import parse_config
from tasks.stages.base import Run, get_stage


@pytest.fixture
def streaming(finished, tmp_path, monkeypatch):
    """The finished run's corpus, and a transducer that recognizes speech as it comes."""
    monkeypatch.setenv("STARLING_HOME", str(copy_finished(tmp_path / "home")))
    recognizer = {"kind": "transducer", "predictor": {"kind": "stateless", "dim": 16}, "joint_dim": 16}
    document = tiny_document(recognizer=recognizer, decode={"kind": "transducer", "beam": 2})
    document["model"] = document["model"] | {"chunk": {"left": 8}}
    document["train"] = document["train"] | {"objective": "transducer", "epochs": 1}
    run = Run(parse_config(document), "r")
    run.results = {name: finished.results[name] for name in STAGES[: STAGES.index("features")]}
    for name in ("features", "train", "decode", "score"):
        get_stage(name).execute(run)
    return run


@pytest.mark.slow
def test_rows_have_the_scores_of_the_run_and_the_latency_of_each_chunk(streaming):
    offline, *streams = measure(streaming, "recipe", chunks_ms=(160, 640))
    scored = streaming.result("score").record["sets"]["test"]
    assert (offline.wer, offline.words) == (scored["wer"], scored["words"])
    assert (offline.wer_low, offline.wer_high) == (scored["wer_low"], scored["wer_high"])
    assert offline.latency_s is None
    assert [row.latency_s for row in streams] == pytest.approx([0.16, 0.64])
    assert [row.system for row in streams] == [f"transducer, chunks of {chunk} ms" for chunk in (160, 640)]
    for row in (offline, *streams):
        assert row.words == scored["words"]
        assert row.real_time_factor > 0
        assert 0.001 < row.size_mb < 1
        assert row.line().count("|") == HEAD.splitlines()[0].count("|")


def test_recognizers_of_whole_utterances_have_one_row(finished):
    (row,) = measure(finished)
    assert row.system == "ctc"
    assert row.wer == finished.result("score").record["sets"]["test"]["wer"]
    assert "utterance" in row.line()
