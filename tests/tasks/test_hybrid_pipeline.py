"""The hybrid recognizer through all stages: alignments, a network of tied states, a graph, a registered model."""

from pathlib import Path

import mlflow
import pytest
from support import environment, give_mlflow, tiny_document

from speech.bundle import check_files, load_spec, own_decoder
from tasks.config.pipeline import parse_config
from tasks.orchestration.stage_tasks import run_plainly
from tasks.stages.base import Run
from tasks.stages.decode import decode_with, fetch_bundle
from tasks.stages.prepare import read_table

pytestmark = pytest.mark.slow

STAGE = {"leaves": 30, "gaussians": 90, "iterations": 3, "growing": 2, "realign": [2], "estimate": [2]}
ALIGN = {
    "mono": STAGE | {"realign": [2, 3], "gaussians": 60}, "tri": STAGE, "lda": STAGE, "sat": STAGE,
    "lda_dim": 20, "leaf_frames": 10.0, "minimum_occupancy": 3.0, "beam": 20.0, "shard_frames": 1500,
}  # fmt: skip


def hybrid_document():
    document = tiny_document(
        "hybrid", align=ALIGN, lm={"order": 2, "smoothing": "witten-bell"}, decode={"kind": "graph"}
    )
    document |= {
        "tune": {"grid": {"acoustic_scale": [0.1, 0.3]}},
        "model": {"kind": "tdnn", "dim": 32, "layers": 3, "bottleneck": 8, "prefinal": 16},
    }
    document["train"] |= {"objective": {"kind": "frame_cross_entropy"}, "epochs": 6, "optimizer": {"lr": 0.01}}
    return document


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("hybrid")
    with environment(STARLING_HOME=home, MLFLOW_TRACKING_URI=None):
        give_mlflow(home)
        run = Run(parse_config(hybrid_document()), "r")
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


def test_registered_model_carries_the_graph_and_decodes_alike(run, tmp_path):
    uri = run.result("register").record["model_uri"]
    folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(tmp_path)))
    bundle = next(folder.rglob("bundle.json")).parent
    assert {"graph.fst", "graph-words.txt"} < set(check_files(bundle))
    cfg = own_decoder(bundle)
    assert cfg.acoustic_scale == run.result("decode").record["tuning"]["chosen"]["acoustic_scale"]
    made = run.result("graph")
    assert (bundle / "graph.fst").read_bytes() == made.store.read("graph.fst")
    stored = {row["id"]: row["hyp"] for row in read_table(run.result("decode").store, "test.parquet")}
    alone = {one.id: one.hyp for one in decode_with(run, bundle, "test", cfg)}
    assert alone == stored


def test_graph_of_the_training_bundle_belongs_to_its_states(run, tmp_path):
    bundle = fetch_bundle(run.result("train").output, tmp_path)
    spec = load_spec(bundle)
    assert spec.states.size == run.result("align").counts["states"]
    assert own_decoder(bundle).kind == "greedy"
