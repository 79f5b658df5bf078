"""What a real Prefect server has of a search whose trainings only compute a loss."""

import base64
import io
import json

import pytest
from matplotlib.image import imread
from prefect.settings import PREFECT_API_URL, temporary_settings
from support import load_beside, tiny_document

from flows import search as module
from tasks.config.pipeline import parse_config
from tasks.orchestration.stage_tasks import open_run
from tasks.stages.base import StageResult
from tasks.tracking import search_tracking

site_module = load_beside(__file__, "prefect_site.py")
PLOTS = ("history", "parallel", "budgets", "rungs")


def train(config, run_id):
    """Stands for a training."""
    lr = config.train.optimizer.lr
    valid = {"loss": 100 * lr + 1 / config.train.epochs, "wer": None}
    key = f"{abs(hash((lr, config.train.epochs))):016x}"[:16]
    run = open_run(config, run_id)
    run.results["train"] = StageResult("train", key, "", 0.0, False, {}, {"result": {"valid": valid}})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_flow_run_of_a_search_has_its_state_trials_plots_and_progress(home, monkeypatch):
    monkeypatch.setattr(search_tracking, "client", lambda: None)
    monkeypatch.setattr(module, "ingest", lambda shared: None)
    monkeypatch.setattr(module, "train_flow", train)
    document = tiny_document()
    document["search"] = {
        "method": {"kind": "hyperband", "eta": 2},
        "trials": 2,
        "space": {"train.optimizer.lr": [0.01, 0.002], "model.dropout": {"low": 0, "high": 0.1}},
    }
    with site_module.prefect_site(home) as site:
        with temporary_settings({PREFECT_API_URL: site.api}):
            result = module.search(parse_config(document), "s-1")
        [run] = site.get("flow_runs/filter", {})
        shown = {entry["key"].removeprefix("tiny-search"): entry for entry in site.get("artifacts/latest/filter", {})}
    assert run["state_type"] == "COMPLETED"
    assert {entry["flow_run_id"] for entry in shown.values()} == {run["id"]}
    assert set(shown) == {"", "-trials", "-progress", *(f"-{plot}" for plot in PLOTS)}
    assert shown["-progress"]["data"] == 100.0
    best = result["best"]
    lines = shown[""]["data"].splitlines()
    assert lines[0] == "**tiny: hyperband, 2 of 2 trials (1 finished, 1 paused)**"
    assert f"- best: trial {best['number']}, loss {best['losses'][2]:.4f} after 2 epochs" in lines
    assert f"  - `train.optimizer.lr={best['values']['train.optimizer.lr']}`" in lines
    rows = json.loads(shown["-trials"]["data"])
    assert [row["state"] for row in rows] == ["finished", "paused"]
    assert [row["trial"] for row in rows] == [str(best["number"]), str(1 - best["number"])]
    for plot in PLOTS:
        # an image artifact's page shows the URL, too, across everything beside it
        entry = shown[f"-{plot}"]
        head, _, image = entry["data"].removesuffix(")").partition(",")
        assert (entry["type"], head) == ("markdown", f"![tiny-search-{plot}](data:image/png;base64")
        assert min(imread(io.BytesIO(base64.b64decode(image))).shape[:2]) > 200
