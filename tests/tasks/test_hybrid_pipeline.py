"""The hybrid recognizer through all stages: alignments, a network of tied states, a graph, a registered model."""

from pathlib import Path

import mlflow
import pytest
from support import environment, give_mlflow, load_beside, tiny_document

from recognition.bundle import check_files, load_spec, own_decoder
from tasks.config.home import home
from tasks.config.pipeline import parse_config
from tasks.dataset.tables import read_table
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run, get_stage
from tasks.stages.bundles import fetch_bundle
from tasks.stages.decode import DECODE, decode_with
from tasks.stages.evaluation import evaluation_config, use_model

pytestmark = pytest.mark.slow

kills = load_beside(__file__, "kill_stage.py")
STAGE = {"leaves": 30, "gaussians": 90, "iterations": 3, "growing": 2, "realign": [2], "estimate": [2]}
ALIGN = {
    "mono": STAGE | {"realign": [2, 3], "gaussians": 60}, "tri": STAGE, "lda": STAGE, "sat": STAGE,
    "lda_dim": 20, "leaf_frames": 10.0, "minimum_occupancy": 3.0, "beam": 20.0,
}  # fmt: skip


def hybrid_document(features):
    lm = {"order": 2, "smoothing": "witten-bell"}
    document = tiny_document("hybrid", align=ALIGN, lm=lm, decode={"kind": "graph"}, features=features)
    document |= {
        "tune": {"space": {"acoustic_scale": [0.1, 0.3]}},
        "model": {"kind": "tdnn", "dim": 32, "layers": 3, "bottleneck": 8, "prefinal": 16},
    }
    document["train"] |= {"objective": {"kind": "frame_cross_entropy"}, "epochs": 14, "optimizer": {"lr": 0.01}}
    return document


FMLLR = {"kind": "fmllr", "dim": 20}
IVECTOR = {"kind": "ivector", "dim": 3, "gaussians": 4, "background_iterations": 1, "iterations": 2}
FEATURES = {
    "logmel": {"num_mels": 16},
    "fmllr": FMLLR,
    "appended": {"kind": "appended", "parts": [FMLLR, IVECTOR, {"num_mels": 16, "delta_order": 1}]},
}


@pytest.fixture(scope="module", params=FEATURES.values(), ids=FEATURES)
def run(request, tmp_path_factory):
    home = tmp_path_factory.mktemp("hybrid")
    with environment(STARLING_HOME=home, MLFLOW_TRACKING_URI=None):
        give_mlflow(home)
        run = Run(parse_config(hybrid_document(request.param)), "r")
        run_plainly(run, until="register")
        yield run


def test_decoding_uses_the_stages_graph_and_the_tuned_scale(run):
    record = run.result("decode").record
    assert record["tuning"]["chosen"]["acoustic_scale"] in (0.1, 0.3)
    texts = [row["text"] for row in read_table(run.result("prepare").store, "utterances.parquet")]
    known = {word for text in texts for word in text.split()}
    hypotheses = [row["hyp"] for row in read_table(run.result("decode").store, "test.parquet")]
    assert any(hypotheses)
    assert {word for hypothesis in hypotheses for word in hypothesis.split()} <= known
    assert run.result("score").record["sets"]["test"]["wer"] < 1.0


def test_registered_model_includes_the_graph_and_decodes_alike(run, tmp_path):
    uri = run.result("register").record["model_uri"]
    folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(tmp_path)))
    bundle = next(folder.rglob("bundle.json")).parent
    assert {"graph.fst", "graph-words.txt"} < set(check_files(bundle))
    cfg = own_decoder(bundle)
    assert cfg.acoustic_scale == run.result("decode").record["tuning"]["chosen"]["acoustic_scale"]
    made = run.result("graph")
    assert (bundle / "graph.fst").read_bytes() == made.store.read("graph.fst")
    stored = {row["id"]: row["hyp"] for row in read_table(run.result("decode").store, "test.parquet")}
    alone = {hypothesis.id: hypothesis.hyp for hypothesis in decode_with(run, bundle, "test", cfg)}
    assert alone == stored
    config = evaluation_config(bundle, "synthetic", run.config.data.sources[:1])
    other = Run(config, "evaluated")
    other.results |= {name: run.results[name] for name in ("prepare", "shard")}
    use_model(other, bundle)
    for name in ("features", "decode"):
        get_stage(name).execute(other)
    assert {row["id"]: row["hyp"] for row in read_table(other.result("decode").store, "test.parquet")} == stored


def test_decoding_by_speaker_continues_after_a_kill(run):
    if not run.config.features.adapted:
        pytest.skip("pieces of this model are not kept")
    rows = read_table(run.result("decode").store, "test.parquet")
    output = DECODE.output(run)
    output.withdraw()
    kills.killed_in(home(), run.config.model_dump(mode="json", by_alias=True), "decode", "test")
    kept = {name: output.store.read(name) for name in output.store.list() if name.startswith("work/decoded-test/")}
    assert kept
    again = Run(run.config, "again")
    again.results |= {name: result for name, result in run.results.items() if name != "decode"}
    assert read_table(DECODE.execute(again).store, "test.parquet") == rows
    processes = run.config.runner.model_copy(update={"kind": "processes", "workers": 2})
    again.config, again.force_from = run.config.model_copy(update={"runner": processes}), "decode"
    assert read_table(DECODE.execute(again).store, "test.parquet") == rows


def test_graph_matches_the_states_of_the_training_bundle(run, tmp_path):
    bundle = fetch_bundle(run.result("train").output, tmp_path)
    spec = load_spec(bundle)
    assert spec.states.size == run.result("align").counts["states"]
    assert own_decoder(bundle).kind == "greedy"
