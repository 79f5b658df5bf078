"""Training configurations that are valid, and those that are refused."""

import pytest
from pydantic import ValidationError

from training.config import TrainConfig


@pytest.mark.parametrize(
    ("strategy", "nodes", "per_node"),
    [
        ("single", 1, 1),
        ("scpsgd", 1, 1),
        ("scpsgd", 1, 4),
        ("adpsgd", 1, 1),
        ("adpsgd", 5, 1),
        ("h-adpsgd", 2, 2),
        ("h-adpsgd", 3, 1),
        *((name, 1, 3) for name in ("sdpsgd", "d1d", "ma", "bmuf", "pairs", "onebit", "pipeline")),
        *((name, 3, 1) for name in ("asgd", "easgd", "hogwild")),
    ],
)
def test_valid_layouts_are_accepted(strategy, nodes, per_node):
    cfg = TrainConfig(strategy=strategy, nodes=nodes, learners_per_node=per_node)
    assert cfg.learners == nodes * per_node


@pytest.mark.parametrize(
    ("strategy", "nodes", "per_node", "field", "remedy"),
    [
        ("single", 2, 1, "nodes is 2", "nodes=1, or adpsgd"),
        ("scpsgd", 3, 2, "nodes is 3", "nodes=1, or adpsgd"),
        ("single", 1, 2, "learners_per_node is 2", "learners_per_node=1, or scpsgd"),
        ("adpsgd", 2, 2, "learners_per_node is 2", "learners_per_node=1, or h-adpsgd"),
        ("bmuf", 2, 2, "nodes is 2", "nodes=1, or adpsgd"),
        ("asgd", 2, 2, "learners_per_node is 2", "learners_per_node=1, or h-adpsgd"),
    ],
)
def test_invalid_layouts_are_refused_with_the_remedy(strategy, nodes, per_node, field, remedy):
    with pytest.raises(ValidationError, match=f"{field}.*{remedy}"):
        TrainConfig(strategy=strategy, nodes=nodes, learners_per_node=per_node)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"strategy": "adpsdg"}, "strategy"),
        ({"nodes": 0}, "nodes"),
        ({"learners_per_node": 0}, "learners_per_node"),
        ({"exchange": {"kind": "mpi"}}, r"exchange\.kind"),
        ({"exchange": {"wire": "fp16"}}, r"exchange\.wire"),
        ({"exchange": {"chunk_kb": 1}}, r"exchange\.chunk_kb"),
        ({"strategy": {"kind": "adpsgd", "per_step": 0}}, r"strategy\.adpsgd\.per_step"),
        ({"membership": {"beat_s": 0}}, r"membership\.beat_s"),
        ({"membership": {"dead_after": 3}}, r"membership\.dead_after"),
        ({"launch": {"kind": "slurm"}}, r"launch\.kind"),
        ({"strategy": {"kind": "bmuf", "eta": 1.0}}, r"strategy\.bmuf\.eta"),
        ({"strategy": {"kind": "onebit", "block": 12}}, r"strategy\.onebit\.block"),
        ({"strategy": "bmuf", "comm_hook": "bf16"}, "comm_hook is bf16 but bmuf .* scpsgd or h-adpsgd"),
        ({"strategy": "hogwild", "launch": {"kind": "external"}}, "hogwild shares one machine's memory"),
        ({"strategy": "hogwild", "device": "cuda"}, "hogwild shares weights in main memory"),
        ({"strategy": "scpsgd", "learners_per_node": 3, "machines_per_node": 2}, "equally many learners, so"),
        ({"strategy": "adpsgd", "nodes": 2, "machines_per_node": 2}, "equally many learners, so"),
    ],
)
def test_invalid_values_are_refused_with_the_name_of_the_field(values, field):
    with pytest.raises(ValidationError, match=field):
        TrainConfig.model_validate(values)


def test_a_node_of_several_machines_needs_a_trusted_network():
    layout = {"strategy": "h-adpsgd", "nodes": 3, "learners_per_node": 4, "machines_per_node": 2}
    for kind in ("external", "prefect"):
        with pytest.raises(ValidationError, match=r"without encryption or a key: .*launch\.trusted_network=true"):
            TrainConfig.model_validate(layout | {"launch": {"kind": kind}})
        cfg = TrainConfig.model_validate(layout | {"launch": {"kind": kind, "trusted_network": True}})
        assert (cfg.learners, cfg.places) == (12, 6)
    assert TrainConfig.model_validate(layout).places == 6  # all on this machine, on loopback


def test_the_default_is_one_learner():
    cfg = TrainConfig()
    assert (cfg.strategy.kind, cfg.nodes, cfg.learners_per_node) == ("single", 1, 1)


def test_only_parameter_server_strategies_start_servers():
    assert [TrainConfig(strategy=name).servers for name in ("single", "adpsgd", "asgd", "easgd")] == [0, 0, 1, 1]
    assert TrainConfig.model_validate({"strategy": {"kind": "easgd", "servers": 3}}).servers == 3
