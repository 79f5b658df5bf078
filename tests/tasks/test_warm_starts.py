"""Warm starts: training begins with a registered model, which is looked up once in a run, and recorded."""

import re

import pytest
from registered import add
from safetensors.torch import load_file
from support import copy_finished, give_mlflow, tiny_document, write_config

from recognition.bundle import load_bundle, load_spec, save_bundle
from speech.tokens import tokenizer_from_dict
from storage.objects import ObjectStore
from tasks.config.model_names import registered_uri
from tasks.config.pipeline import ConfigError, load_config, parse_config
from tasks.orchestration.stage_tasks import close_run, open_run, run_plainly
from tasks.stages import progress
from tasks.stages.base import Run, StageError
from tasks.stages.bundles import fetch_bundle
from tasks.stages.config_check import find_problems
from tasks.stages.features import FEATURES
from tasks.stages.initial import initial_model, initial_tags
from tasks.stages.prepare import PREPARE
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN, make_job, training_run
from training.config import LoraConfig


@pytest.fixture
def home(finished, tmp_path, monkeypatch):
    """A data folder with the finished run's outputs, and an empty registry."""
    folder = copy_finished(tmp_path / "home")
    give_mlflow(folder)
    monkeypatch.setenv("STARLING_HOME", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


@pytest.fixture
def bundle(finished, tmp_path):
    return fetch_bundle(finished.result("train").store, tmp_path / "bundle")


def changed(bundle, folder, **fields):
    """The bundle with other fields of its spec, and with weights that fit them."""
    spec, model = load_bundle(bundle)
    spec = spec.model_copy(update=fields)
    weights = spec.build_model().state_dict()
    weights |= {name: tensor for name, tensor in model.state_dict().items() if weights[name].shape == tensor.shape}
    save_bundle(folder, spec, {name: tensor.contiguous() for name, tensor in weights.items()})
    return folder


def ready(init, **train):
    """A run whose stages before training are done."""
    document = tiny_document()
    document["train"] |= {"epochs": 1, "init": str(init), **train}
    run = Run(parse_config(document), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    return run


# --- names


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("models:/m@champion", "models:/m@champion"),
        ("m@champion", "models:/m@champion"),
        ("m/3", "models:/m/3"),
        ("@champion", "models:/own@champion"),
        ("exp/model", ""),
        ("/abs/3/x", ""),
        ("s3://bucket/3", ""),
        ("", ""),
    ],
)
def test_names_of_registered_models(given, uri):
    assert registered_uri(given, "own") == uri


def test_a_folder_counts_from_the_configuration_and_a_name_does_not(bundle, tmp_path):
    document = tiny_document()
    for given, expected in (("bundle", str(tmp_path / "bundle")), ("m/3", "m/3"), ("@champion", "@champion")):
        document["train"]["init"] = given
        assert load_config(write_config(tmp_path / "c.yaml", document)).train.init == expected
    document["train"].pop("init")
    path = write_config(tmp_path / "c.yaml", document)
    assert load_config(path, ["train.init=@champion"]).train.init == "@champion"


def test_adapters_need_a_model_to_adapt():
    document = tiny_document()
    document["train"]["lora"] = {"rank": 2}
    with pytest.raises(ConfigError, match=r"name it in train\.init"):
        parse_config(document)


def test_a_flows_parameter_comes_before_the_configuration():
    config = parse_config(tiny_document())
    assert config.beginning_with("m/3").train.init == "m/3"
    assert config.beginning_with("") is config


# --- config check


def problems_of(init, **fields):
    document = tiny_document(**fields)
    document["train"]["init"] = str(init)
    return find_problems(parse_config(document))


def test_check_looks_up_what_training_begins_with(bundle, tmp_path, api):
    add(api, "tiny", 1)
    assert not problems_of(bundle)
    assert not problems_of("@champion")  # a first night
    for init, message in (
        (tmp_path / "absent", r"train\.init: .*absent is no model: it has no bundle\.json or config\.json"),
        ("memory://nothing/here", r"train\.init: memory://nothing/here is no bundle"),
        ("other@champion", r"train\.init: the registry has no model other; it has tiny"),
        ("tiny/7", r"train\.init: .*7"),
    ):
        (problem,) = problems_of(init)
        assert re.search(message, problem), problem


def test_check_finds_that_the_model_is_another_than_training_begins_with(bundle):
    (problem,) = problems_of(bundle, model={"kind": "blstm", "dim": 16})
    assert "is a conformer, and model.kind is blstm: set model.kind=conformer" in problem
    (problem,) = problems_of(bundle, features={"num_mels": 20})
    assert "--set features.num_mels=16" in problem


# --- the registry


def test_an_alias_is_looked_up_once_in_a_run(api):
    add(api, "tiny", 2)
    api.set_registered_model_alias("tiny", "champion", "1")
    document = tiny_document()
    document["train"]["init"] = "@champion"
    run = open_run(parse_config(document), "once")
    try:
        initial_model(run)
        api.set_registered_model_alias("tiny", "champion", "2")
        assert initial_model(run).name == "models:/tiny/1"
        assert initial_tags(run) == {"starling.initial": "models:/tiny/1"}
        assert initial_model(Run(run.config, "next")).name == "models:/tiny/2"
    finally:
        close_run("once")


def test_a_plain_run_looks_the_alias_up_before_its_first_stage_and_only_if_it_trains(api, monkeypatch):
    add(api, "tiny", 2)
    document, seen = tiny_document(), []
    document["train"]["init"] = "tiny@nobody"
    run = Run(parse_config(document), "plain")
    monkeypatch.setattr("tasks.orchestration.stage_tasks.get_stage", lambda name: seen.append(name))
    with pytest.raises(StageError, match="no version with the alias @nobody"):
        run_plainly(run)
    assert seen == []
    with pytest.raises(AttributeError):  # the stage is none
        run_plainly(run, "shard")
    assert seen == ["prepare"]


def test_a_run_begins_with_random_weights_if_its_model_has_no_version_yet(api):
    document = tiny_document()
    document["train"]["init"] = "@champion"
    lines = []
    with progress.following(lambda name, text: lines.append(text)):
        assert initial_model(Run(parse_config(document), "first")) is None
    assert lines == ["tiny has no version yet: training begins with random weights"]


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("@nobody", "tiny has no version with the alias @nobody: .*`starling models tiny`"),
        ("tiny/7", "tiny has no version 7 in this registry; it has: 1"),
        ("nobody@champion", "the registry has no model nobody; it has tiny"),
        ("/nowhere", "/nowhere is no model"),
    ],
)
def test_models_that_are_not_there_are_named_with_those_that_are(api, init, message):
    add(api, "tiny")
    document = tiny_document()
    document["train"]["init"] = init
    with pytest.raises((StageError, ValueError), match=f"train.init: {message}"):
        initial_model(Run(parse_config(document), "r")).source  # noqa: B018


# --- training


def test_training_begins_with_the_models_weights_and_says_so(home, bundle):
    run, lines = ready(bundle, optimizer={"lr": 1e-9}), []
    with progress.following(lambda name, text: lines.append(text)):
        record = TRAIN.execute(run).record
    network, before = load_file(run.result("train").store.local_path("model/model.safetensors")), load_bundle(bundle)[1]
    for name, tensor in before.state_dict().items():
        assert (network[name] - tensor).abs().max() < 1e-6, name
    initial = record["initial"]
    assert (initial["given"], initial["model"], initial["new"], initial["left_out"]) == (
        str(bundle),
        str(bundle),
        [],
        [],
    )
    assert initial["taken"] == len(network)
    assert initial["taken_weights"] == sum(tensor.numel() for tensor in network.values())
    assert any(f"begins with {bundle}: takes {len(network)} tensors" in line for line in lines)
    assert not run.result("train").store.list("initial")
    logged = training_run(run, "t")
    assert logged.tags["starling.initial"] == str(bundle)
    assert logged.params["init.digest"] == initial["digest"]


def test_address_has_the_digest_of_the_model_not_its_name(home, bundle, finished, tmp_path):
    keys = {name: TRAIN.output(ready(folder)).key for name, folder in {"one": bundle, "same": bundle}.items()}
    copied = fetch_bundle(finished.result("train").store, tmp_path / "copy")
    keys["copy"] = TRAIN.output(ready(copied)).key
    weights = load_bundle(bundle)[1].state_dict()
    save_bundle(tmp_path / "other", load_spec(bundle), {name: tensor * 1.5 for name, tensor in weights.items()})
    keys["other"] = TRAIN.output(ready(tmp_path / "other")).key
    keys["none"] = TRAIN.output(ready("")).key
    assert keys["one"] == keys["same"] == keys["copy"]
    assert len(set(keys.values())) == 3


def test_statistics_and_tokens_are_kept_unless_told_otherwise(home, bundle, tmp_path):
    spec = load_spec(bundle)
    stats = spec.stats | {"count": spec.stats["count"] * 2} if "count" in spec.stats else spec.stats
    symbols = [*spec.tokenizer["symbols"], "#"]
    source = changed(bundle, tmp_path / "source", tokenizer={**spec.tokenizer, "symbols": symbols}, stats=stats)

    def made(**train):
        run = ready(source, **train)
        return make_job(run, TRAIN.output(run)).task

    kept = made().spec
    assert (kept.stats, kept.tokenizer["symbols"]) == (stats, symbols)
    own = made(init_tokens="data", init_statistics="data")
    assert own.spec.tokenizer == spec.tokenizer
    assert own.spec.stats == spec.stats
    assert own.new_parameters == frozenset()


def test_tokens_that_transcripts_need_are_refused_or_added(home, bundle, tmp_path):
    spec = load_spec(bundle)
    missing, symbols = spec.tokenizer["symbols"][-1], spec.tokenizer["symbols"][:-1]
    source = changed(bundle, tmp_path / "source", tokenizer={**spec.tokenizer, "symbols": symbols})
    run = ready(source)
    with pytest.raises(StageError, match=f"'{missing}' in .*set train.init_tokens to extended"):
        make_job(run, TRAIN.output(run))
    run = ready(source, init_tokens="extended")
    task = make_job(run, TRAIN.output(run)).task
    assert tokenizer_from_dict(task.spec.tokenizer).symbols == [*symbols, missing]
    assert task.new_parameters == {"output.weight", "output.bias"}


def test_a_model_that_does_not_fit_is_refused_before_training(home, bundle):
    document = tiny_document()
    document["train"] |= {"init": str(bundle)}
    document["model"] |= {"dim": 24}
    run = Run(parse_config(document), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    with pytest.raises(StageError, match="model.dim is 24, and there 16.*--set model.dim=16"):
        TRAIN.execute(run)


@pytest.mark.parametrize("place", ["memory://models", "s3://speech/models"])
def test_a_bundle_may_be_in_an_object_store(home, bundle, place, request):
    if place.startswith("s3:"):
        request.getfixturevalue("s3_server")
    store = ObjectStore(f"{place}/m")
    for path in bundle.iterdir():
        store.write_file(path.name, path)
    run = ready(f"{place}/m")
    assert initial_model(run).source.digest == initial_model(ready(bundle)).source.digest
    with pytest.raises(StageError, match=f"{place}/none is no bundle, it has no model.safetensors"):
        initial_model(ready(f"{place}/none")).source  # noqa: B018


def test_training_begins_with_a_model_on_s3(home, bundle, s3_server):
    store = ObjectStore("s3://speech/models/champion")
    for path in bundle.iterdir():
        store.write_file(path.name, path)
    run = ready(store.url, optimizer={"lr": 1e-9}, epochs=1)
    assert TRAIN.execute(run).record["initial"]["model"] == store.url
    network, before = load_file(run.result("train").store.local_path("model/model.safetensors")), load_bundle(bundle)[1]
    assert all((network[name] - tensor).abs().max() < 1e-6 for name, tensor in before.state_dict().items())


def test_misspelt_patterns_are_refused_before_training(home, bundle):
    run = ready(bundle, lora=LoraConfig(modules=("*attn*",)).model_dump())
    with pytest.raises(StageError, match=r"'\*attn\*' matches no layer; these layers can be adapted: subsampling"):
        TRAIN.execute(run)
