"""The stage graph for networks: which files it takes, and that decoding uses what it made."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from support import load_beside, tiny_document

from speech.decoding import GraphConfig
from speech.hmm.graph_files import read_graph
from speech.hmm.model import model_digest
from storage.stages import StageOutput
from tasks.config.pipeline import ConfigError, parse_config
from tasks.stages import graph as graph_stage
from tasks.stages.base import Run, StageError, StageResult, stages_of
from tasks.stages.decoder_files import decoder_of, stage_files
from tasks.stages.graph import GRAPH

toys = load_beside(__file__, "../speech/hmm/toys.py")


def document(**decode):
    config = tiny_document(decode={"kind": "graph", **decode})
    config["train"] |= {"objective": {"kind": "frame_cross_entropy", "alignments": "aligned"}}
    return config


@pytest.fixture
def files(tmp_path):
    """HMMs, a lexicon and a language model, as a configuration names them."""
    rng = np.random.default_rng(3)
    toys.random_model(rng, toys.context_tree(rng)).save(tmp_path / "hmm")
    lines = [f"{word} {' '.join(phones)}\n" for word, several in toys.LEXICON.items() for phones in several]
    (tmp_path / "lexicon.txt").write_text("".join(lines))
    (tmp_path / "lm.arpa").write_text(toys.arpa())
    return {
        "hmm": str(tmp_path / "hmm" / "model.json"),
        **{k: str(tmp_path / v) for k, v in {"lexicon": "lexicon.txt", "lm": "lm.arpa"}.items()},
    }


@pytest.fixture
def run(files, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    return Run(parse_config(document(**files)), "r")


def test_graph_of_named_files_is_made_once_and_used_by_the_decoder(run, files):
    made = GRAPH.execute(run)
    assert made.counts["words"] == len(made.store.read("graph-words.txt").split())
    assert GRAPH.execute(run).cached
    decode = decoder_of(run)
    assert isinstance(decode, GraphConfig)
    assert set(decode.files()) == {"graph", "words"}
    graph = read_graph(Path(decode.graph), Path(decode.words))
    assert (len(graph.arrays.finals), len(graph.arrays.arcs)) == (made.counts["states"], made.counts["arcs"])
    assert stage_files(run)["names"] == {"graph": "graph.fst", "words": "graph-words.txt"}


def test_second_language_model_requires_that_of_the_graph(run, files, tmp_path):
    GRAPH.execute(run)
    (tmp_path / "large.arpa").write_text(toys.arpa())
    again = {"rescore_lm": str(tmp_path / "large.arpa")}
    named = Run(parse_config(document(**files, **again)), "r")
    assert GRAPH.execute(named).cached
    decode = decoder_of(named)
    assert (decode.graph_lm, decode.rescore_lm, decode.lm) == (files["lm"], again["rescore_lm"], "")


def test_stage_supplies_the_graphs_language_model(files, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    (tmp_path / "large.arpa").write_text(toys.arpa())
    sources = {name: files[name] for name in ("hmm", "lexicon")}
    again = {"rescore_lm": str(tmp_path / "large.arpa")}
    config = parse_config(document(**sources, **again) | {"lm": {"order": 2}})
    run = Run(config, "r")
    publish_lm(run, "lm")
    GRAPH.execute(run)
    decode = decoder_of(run)
    assert set(decode.files()) == {"graph", "words", "graph_lm", "rescore_lm"}
    assert Path(decode.graph_lm).read_text() == toys.arpa()
    run.config = parse_config(document(**sources) | {"lm": {"order": 2}})
    assert set(decoder_of(run).files()) == {"graph", "words"}


def publish_lm(run, stage):
    output = StageOutput(run.store, stage, "0" * 16)
    output.store.write("lm.arpa", toys.arpa().encode())
    digest = hashlib.sha256(toys.arpa().encode()).hexdigest()
    record = output.publish({"files": {"lm": "lm.arpa"}, "sha256": {"lm.arpa": digest}, "bytes": {"lm.arpa": 1}})
    run.results[stage] = StageResult(stage, output.key, output.store.url, 0.0, False, {}, record)


def test_stages_supply_both_language_models(files, tmp_path, monkeypatch):
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    sources = {name: files[name] for name in ("hmm", "lexicon")}
    run = Run(parse_config(document(**sources) | {"lm": {"order": 2}, "rescoring": {"order": 3}}), "r")
    for stage in ("lm", "rescoring"):
        publish_lm(run, stage)
    GRAPH.execute(run)
    decode = decoder_of(run)
    assert set(decode.files()) == {"graph", "words", "graph_lm", "rescore_lm"}
    stages = {Path(path).parent.parent.name for path in (decode.graph_lm, decode.rescore_lm)}
    assert stages == {"lm", "rescoring"}
    assert decode.hypotheses == decode.rescore_nbest


@pytest.mark.parametrize("changed", ["hmm", "lexicon", "lm", "silence_probability"])
def test_graph_key_depends_on_its_sources(run, files, changed):
    key = GRAPH.output(run).key
    if changed == "hmm":
        folder = Path(files["hmm"]).parent
        before = model_digest(folder)
        toys.random_model(np.random.default_rng(4), toys.context_tree(np.random.default_rng(4))).save(folder)
        assert model_digest(folder) != before
    elif changed == "silence_probability":
        run.config = parse_config(document(**files, silence_probability=0.3))
    else:
        with Path(files[changed]).open("a") as file:
            file.write("\n")
    assert GRAPH.output(run).key != key


def test_search_options_do_not_change_the_graph(run, files):
    key = GRAPH.output(run).key
    assert GRAPH.output(Run(parse_config(document(**files, beam=9.0, acoustic_scale=0.2)), "r")).key == key


@pytest.mark.slow  # a process imports torch and Prefect
def test_large_graph_is_made_in_another_process(run, monkeypatch):
    here = GRAPH.execute(run)
    monkeypatch.setattr(graph_stage, "_SMALL", 0)
    run.force_from = "graph"
    there = GRAPH.execute(run)
    assert there.record["sha256"] == here.record["sha256"]


def test_stage_is_skipped_for_a_finished_graph():
    assert "graph" not in stages_of(parse_config(document(graph="g.fst", words="w.txt")))
    assert "graph" not in stages_of(parse_config(tiny_document()))


@pytest.mark.parametrize(
    ("given", "sections"),
    [({}, "align and the section lm"), ({"lm": "x.arpa"}, "align"), ({"hmm": "m.json", "lexicon": "l.txt"}, "lm")],
)
def test_missing_sources_are_named_with_their_sections(given, sections):
    with pytest.raises(ConfigError, match=f"lacks .*or add the section {sections}$"):
        parse_config(document(**given))


def test_sections_supply_sources_that_the_decoder_omits():
    config = parse_config(document() | {"align": {}, "lm": {"order": 2}})
    assert stages_of(config)[-6:] == ("lm", "graph", "decode", "score", "register", "report")
    with pytest.raises(ConfigError, match="needs a language model of words"):
        parse_config(document() | {"align": {}, "lm": {"order": 2, "unit": "character"}})


def test_damaged_sources_are_named(run, files):
    Path(files["lm"]).write_text("nothing")
    with pytest.raises(StageError, match=r"decode\.lm: .*lm\.arpa"):
        GRAPH.execute(run)
    value = json.loads(Path(files["hmm"]).read_text())
    Path(files["hmm"]).write_text(json.dumps(value)[:-20])
    with pytest.raises(StageError, match=r"decode\.lm|decode\.hmm|model\.json"):
        GRAPH.execute(run)
