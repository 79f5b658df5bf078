"""The planner's advice agrees with the papers."""

import functools

import pytest

from training.simulation.planner import PlanRequest, Prediction, plan, predict, recommend
from training.strategies.gossip import GossipConfig
from training.strategies.pipeline import LayerPipelineConfig
from training.strategies.registry import STRATEGIES
from training.strategies.synchronous import ScpsgdConfig


def request(**changes):
    values = {"parameters": 40_000_000, "step_s": 0.5, "data_hours": 960, "batch_seconds": 100}
    return PlanRequest.model_validate(values | changes)


def find(result, strategy):
    return next(prediction for prediction in result.predictions if prediction.strategy == strategy)


def test_homogeneous_fast_cluster_gets_synchronous_training():
    result = plan(request(nodes=4, link_gbit=100))
    assert result.choice in ("d1d", "scpsgd")
    assert find(result, "d1d").efficiency > 0.95


def test_heterogeneous_learners_get_an_asynchronous_strategy():
    result = plan(request(nodes=8, link_gbit=100, slow=(10.0,)))
    assert result.choice == "adpsgd"
    assert "unevenly fast" in result.reason
    assert find(result, "adpsgd").epoch_s < 0.2 * find(result, "scpsgd").epoch_s


def test_many_heterogeneous_learners_get_random_neighbours():
    few, many = (
        [Prediction(name, 1.0, 1.0, 1.0, 1.0, 1.0, replicas) for name in ("adpsgd", "adpsgd random-ring")]
        for replicas in (16, 17)
    )
    asked = request(nodes=17, slow=(10.0,))
    assert recommend(asked, few)[0] == "adpsgd"
    assert recommend(asked, many)[0] == "adpsgd random-ring"


def test_fast_nodes_on_slow_links_get_super_learners():
    result = plan(request(nodes=4, gpus_per_node=4, link_gbit=1))
    assert result.choice.startswith("h-adpsgd")
    fast = request(nodes=4, gpus_per_node=4, link_gbit=25)
    grouped, single = (
        predict(fast, name, name, STRATEGIES[name].config(neighbours="random-ring", per_step=1))
        for name in ("h-adpsgd", "adpsgd")
    )
    assert grouped.nic_gb < 0.5 * single.nic_gb


def test_one_learner_gets_no_distributed_strategy():
    assert planned().choice == "single"


def test_lost_learners_slow_synchronous_strategies_more():
    calm, deadly = (request(nodes=4, losses_per_day=losses) for losses in (0, 200))
    lost = {}
    for name, config in (("scpsgd", ScpsgdConfig()), ("adpsgd", GossipConfig())):
        lost[name] = predict(deadly, name, name, config).epoch_s / predict(calm, name, name, config).epoch_s
    assert lost["scpsgd"] > 1.1 > 1.05 > lost["adpsgd"]


@functools.cache
def planned(**changes):
    """A plan that several tests look at."""
    return plan(request(**changes))


SPLIT = {"nodes": 2, "gpus_per_node": 4, "layers": 12, "border_mb": 8.0, "link_gbit": 100}


def test_pipeline_is_predicted_if_layers_and_frames_are_known():
    prediction = find(planned(**SPLIT), "pipeline")
    # four micro-batches for each of eight stages: (32 + 7) / 32, and little on such links
    assert prediction.efficiency == pytest.approx(32 / 39, rel=0.05)
    assert (prediction.staleness, prediction.averaged) == (0, 1)
    # the middle machines' border carries all hidden frames, and their gradients the other way
    assert prediction.nic_gb == pytest.approx(8e-3 * 960 * 3600 / 100)
    config = LayerPipelineConfig(micro_batches=32)
    slow, deadly = (
        predict(request(**SPLIT, **changes), "pipeline", "pipeline", config)
        for changes in ({"slow": (10.0,)}, {"losses_per_day": 200})
    )
    assert slow.epoch_s > 7 * prediction.epoch_s
    assert deadly.epoch_s > 1.1 * prediction.epoch_s


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layers": 0}, "give the model's --layers and --border-mb, or --measure"),
        ({"border_mb": 0}, "give the model's --layers and --border-mb, or --measure"),
        ({"layers": 1}, "2 learners need as many layers, and the model has 1"),
    ],
)
def test_unpredictable_pipeline_is_left_out_with_the_reason(changes, why):
    result = plan(request(**(SPLIT | {"gpus_per_node": 1} | changes)))
    assert result.left_out == {"pipeline": why}
    assert "pipeline" not in {prediction.strategy for prediction in result.predictions}
    assert planned(**SPLIT).left_out == planned().left_out == {}


def test_more_slow_learners_than_learners_are_refused():
    with pytest.raises(ValueError, match="slow names 3 learners of 2"):
        plan(request(nodes=2, slow=(2, 2, 2)))


def test_a_plan_is_json():
    document = plan(request(nodes=2)).to_dict()
    assert set(document) == {"rows", "recommendation", "left_out"}
    assert document["rows"][0]["epoch_s"] <= document["rows"][-1]["epoch_s"]
