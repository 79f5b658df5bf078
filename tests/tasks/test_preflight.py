import os

import pytest
from support import tiny_document

from devices.choice import Inventory
from speech.models import BlstmConfig, Wav2Vec2Config
from tasks.config.pipeline import ConfigError, parse_config
from tasks.stages import preflight
from tasks.stages.base import StageError
from tasks.stages.config_check import (
    check_devices,
    check_key_file,
    check_launch,
    check_layers,
    is_loopback,
    split_address,
)
from tasks.stages.preflight import check_shards, run_preflight
from training.config import TrainConfig
from training.processes.keys import RingKey

WAVLM = Wav2Vec2Config(source="x", encoder={"model_type": "wavlm"}, layers=4)


def config(**train):
    return TrainConfig.model_validate(train)


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "ring.key"
    RingKey.generate().save(path)
    return path


@pytest.mark.parametrize(
    "text", ["host", "host:", ":1", "host:99999", "::1:80", "a b:1", "http://host:1", "host:-1", ""]
)
def test_malformed_address_is_refused_with_field_and_example(text):
    with pytest.raises(StageError, match=r"train\.launch\.listen is .*HOST:PORT, such as 127\.0\.0\.1:0"):
        check_launch(config(launch={"listen": text}))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:7100", "::1", 7100), ("head.cluster:7100", "head.cluster", 7100)],
)
def test_address_is_host_and_port(text, host, port):
    assert split_address(text, "x") == (host, port)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("head", False)],
)
def test_loopback_addresses_are_recognized(host, local):
    assert is_loopback(host) is local


def test_ring_across_machines_needs_a_key(key):
    with pytest.raises(StageError, match=r"starling key FILE.*train\.launch\.key_file"):
        check_launch(config(launch={"listen": "0.0.0.0:7100"}))
    listen = {"listen": "0.0.0.0:7100", "key_file": str(key)}
    check_launch(config(launch=listen))
    with pytest.raises(StageError, match=r"train\.exchange\.encrypt is false.*0\.0\.0\.0:7100"):
        check_launch(config(launch=listen, exchange={"encrypt": False}))
    check_launch(config(exchange={"encrypt": False}))


def test_missing_unreadable_or_malformed_key_is_named(tmp_path, key):
    with pytest.raises(StageError, match=r"train\.launch\.key_file is .*nowhere.*no file.*starling key FILE"):
        check_launch(config(launch={"key_file": str(tmp_path / "nowhere")}))
    damaged = tmp_path / "damaged"
    damaged.write_text("no key")
    damaged.chmod(0o600)
    with pytest.raises(StageError, match="damaged"):
        check_key_file(damaged, "--key-file")
    key.chmod(0o644)
    with pytest.raises(StageError, match=r"ring\.key"):
        check_key_file(key, "--key-file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_key_of_another_user_is_reported(key):
    key.chmod(0)
    with pytest.raises(StageError, match="cannot read"):
        check_key_file(key, "--key-file")


@pytest.mark.parametrize(
    ("fields", "gpus", "message"),
    [
        ({"strategy": "pipeline", "learners_per_node": 4}, 2, r"4 learners .* 2 GPU.*train\.learners_per_node.*scpsgd"),
        # `auto` would pick CUDA as well
        ({"device": "auto", "strategy": "pipeline", "learners_per_node": 2}, 1, "needs one for each learner"),
        ({"device": "auto", "strategy": "pipeline", "learners_per_node": 2}, 0, ""),
        ({"device": "cpu", "strategy": "pipeline", "learners_per_node": 2}, 1, ""),
        ({"strategy": "pipeline", "learners_per_node": 2}, 2, ""),
        ({"strategy": "scpsgd", "learners_per_node": 2}, 1, ""),
        ({"device": "auto", "strategy": "h-adpsgd", "nodes": 2, "learners_per_node": 2}, 1, ""),
        ({"device": "auto", "strategy": "scpsgd", "learners_per_node": 2}, 0, ""),
        ({"device": "cpu", "strategy": "scpsgd", "learners_per_node": 2}, 1, ""),
        ({"device": "auto", "strategy": "hogwild", "nodes": 2}, 1, ""),
        ({}, 0, "torch sees no GPU"),
        ({"strategy": "scpsgd", "learners_per_node": 2}, 2, ""),
        ({"strategy": "adpsgd", "nodes": 4}, 1, ""),
        ({"strategy": "scpsgd", "learners_per_node": 4, "launch": {"kind": "external"}}, 0, ""),
    ],
)
def test_local_learners_have_the_gpus_that_their_strategy_needs(fields, gpus, message):
    cfg = config(**{"device": "cuda", **fields})
    if message:
        with pytest.raises(StageError, match=message):
            check_devices(cfg, Inventory(gpus))
    else:
        check_devices(cfg, Inventory(gpus))


def test_warning_if_learners_of_a_node_share_a_gpu(caplog):
    for cfg in (config(strategy="adpsgd", nodes=4), config(strategy="scpsgd", learners_per_node=2)):
        check_devices(cfg, Inventory(2))
    assert not caplog.text
    check_devices(config(strategy="h-adpsgd", nodes=2, learners_per_node=2), Inventory(1))
    assert "a node has 2 learners on this machine, which has 1 GPU(s): they share, and average gradients by Gloo" in (
        caplog.text
    )


def test_warning_if_torch_cannot_use_the_gpu(caplog):
    machine = Inventory(0, "the NVIDIA driver 535 is too old")
    check_devices(config(device="cpu"), machine)
    assert not caplog.text
    check_devices(config(), machine)
    assert "runs on the CPU: the NVIDIA driver 535 is too old" in caplog.text
    with pytest.raises(StageError, match="the NVIDIA driver 535 is too old"):
        check_devices(config(device="cuda"), machine)


def test_every_pipeline_learner_needs_a_layer():
    check_layers(config(strategy="pipeline", learners_per_node=4), BlstmConfig(layers=4))
    check_layers(config(strategy="scpsgd", learners_per_node=4), BlstmConfig(layers=1))
    check_layers(config(strategy="pipeline"), WAVLM)
    with pytest.raises(
        StageError, match=r"learners_per_node is 4 but model\.layers is 3.*learners_per_node=3 or fewer"
    ):
        check_layers(config(strategy="pipeline", learners_per_node=4), BlstmConfig(layers=3))
    with pytest.raises(StageError, match="WavLM cannot be split"):
        check_layers(config(strategy="pipeline", learners_per_node=2), WAVLM)


def test_every_node_needs_a_shard(finished):
    url = finished.result("shard").store.child("train").url
    shards = finished.result("shard").record["sets"]["train"]["shards"]
    check_shards(config(strategy="adpsgd", nodes=shards), url)
    with pytest.raises(
        StageError, match=rf"train\.nodes is 99 .*only {shards} shard.*storage\.shard_seconds.*nodes={shards}"
    ):
        check_shards(config(strategy="adpsgd", nodes=99), url)


def test_stage_checks_before_any_process_starts(finished, monkeypatch):
    run = type(
        "R",
        (),
        {
            "config": parse_config(tiny_document()),
            "results": finished.results,
            "result": finished.result,
            "cache_folder": finished.cache_folder,
        },
    )()
    run_preflight(run)
    document = tiny_document()
    document["train"] |= {"launch": {"kind": "prefect"}, "strategy": "adpsgd"}
    run.config = parse_config(document)
    monkeypatch.setattr(preflight, "check_pool", lambda pool, name: (_ for _ in ()).throw(StageError(f"{pool} {name}")))
    with pytest.raises(StageError, match="starling tiny"):
        run_preflight(run)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"strategy": "adpsdg"}, "train.strategy"),
        ({"strategy": "single", "nodes": 2}, "use nodes=1, or adpsgd"),
        ({"strategy": "adpsgd", "learners_per_node": 2}, "or h-adpsgd"),
        ({"launch": {"kind": "slurm"}}, "train.launch.kind"),
    ],
)
def test_contradictory_training_configurations_are_refused(train, message):
    document = tiny_document()
    document["train"] |= train
    with pytest.raises(ConfigError) as caught:
        parse_config(document)
    assert message in str(caught.value)
