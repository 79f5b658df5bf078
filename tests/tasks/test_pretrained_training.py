"""Training that starts from a pretrained encoder: its digest, what is left out, what the model's records say of it."""

import shutil

import numpy as np
import pytest
import torch
from support import tiny_document, write_config

from recognition.bundle import load_bundle
from recognition.inference import decode_set, open_set
from recognition.recognizer import Recognizer
from speech.decoding import GreedyConfig
from speech.models import WhisperConfig
from storage.index import ShardIndex
from storage.objects import ObjectStore
from tasks.config.pipeline import ConfigError, load_config, parse_config
from tasks.stages import progress
from tasks.stages.base import Run, StageError
from tasks.stages.bundles import fetch_bundle
from tasks.stages.config_check import find_problems
from tasks.stages.features import FEATURES
from tasks.stages.initial import initial_model, model_config, transfer_initial
from tasks.stages.prepare import PREPARE
from tasks.stages.quarantined import quarantine_lines
from tasks.stages.register import requirements
from tasks.stages.shard import SHARD
from tasks.stages.train import TRAIN, make_spec
from tasks.tracking.model_card import pretrained as described

transformers = pytest.importorskip("transformers")

CARD = "---\nlicense: mit\n---\n# Tiny\n"


def write_whisper(folder, positions=1500, seed=0):
    """A folder with a tiny Whisper model of random weights; returns its URL."""
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "vocab_size": 9}
    sizes |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    config = transformers.WhisperConfig(**sizes, num_mel_bins=80, max_source_positions=positions)
    transformers.WhisperModel(config).save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    return str(folder)


def document(source, **model):
    config = tiny_document()
    config["data"]["sample_rate"] = 16000
    config |= {"features": {"kind": "whisper_logmel"}, "model": {"kind": "whisper", "source": source, **model}}
    config["train"]["epochs"] = 1
    return config


def prepared(source, **model):
    run = Run(parse_config(document(source, **model)), "r")
    for stage in (PREPARE, SHARD, FEATURES):
        stage.execute(run)
    return run


def with_model(run, source, **model):
    return Run(parse_config(document(source, **model)), "r", results=dict(run.results))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished training whose encoder cannot read the longer half of the utterances."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("pretrained")
        patch.setenv("STARLING_HOME", str(root / "home"))
        run = prepared(write_whisper(root / "whole"))
        durations = np.asarray(ShardIndex.read(run.result("shard").store.child("train")).column("duration"))
        source = write_whisper(root / "short", positions=int(np.median(durations) * 50))
        run = with_model(run, source)
        TRAIN.execute(run)
        yield run


def test_too_long_utterances_are_quarantined_and_the_others_trained(trained):
    result = trained.result("train")
    limit = make_spec(trained).max_seconds
    sets = [ShardIndex.read(trained.result("shard").store.child(name)) for name in ("train", "valid")]
    long = {
        index.values("id")[row].as_py() for index in sets for row in np.flatnonzero(index.column("duration") > limit)
    }
    assert 5 < len(long) < 20
    assert {row["id"] for row in result.record["quarantined"]} == long
    assert result.counts["quarantined"] == len(long)
    of_training = np.count_nonzero(np.asarray(sets[0].column("duration")) > limit)
    assert result.counts["utterances"] == len(sets[0]) - of_training
    (line, _) = quarantine_lines(result.output, result.record)
    assert "too-long" in line
    assert f"the model reads up to {limit:g} s" in line


def test_finished_model_needs_its_source_no_more(trained, tmp_path):
    folder = fetch_bundle(trained.result("train").store, tmp_path)
    spec, model = load_bundle(folder)
    assert isinstance(spec.model, WhisperConfig)
    assert (spec.model.dim, spec.model.layers, len(model.layers)) == (16, 2, 2)
    assert spec.provenance["pretrained"]["sha256"] == trained.result("train").record["pretrained"]["sha256"]
    assert "transformers==" + transformers.__version__ in requirements(spec)
    # its weights have moved from where training began, and not far
    begun = initial_model(trained).source.weights()
    name = "layers.1.fc1.weight"
    moved = (model.state_dict()[name] - begun[name]).abs().max()
    assert 0 < moved < 0.1


def test_sets_with_utterances_beyond_the_positions_are_decoded_whole(trained, tmp_path):
    folder = fetch_bundle(trained.result("train").store, tmp_path / "bundle")
    url = trained.result("shard").store.child("test").url
    decoded = decode_set(Recognizer.load(folder, GreedyConfig()), open_set(url, 16000, tmp_path / "cache"))
    assert len(decoded) == len(ShardIndex.read(trained.result("shard").store.child("test"))) == 12
    assert max(hypothesis.duration for hypothesis in decoded.values()) > make_spec(trained).max_seconds


def test_address_depends_on_the_weights_and_not_on_their_place(trained, tmp_path):
    source = trained.config.model.source
    key = TRAIN.output(trained).key
    shutil.copytree(source, tmp_path / "moved")
    assert TRAIN.output(with_model(trained, str(tmp_path / "moved"))).key == key
    assert TRAIN.output(with_model(trained, source, licence="MIT")).key == key
    assert TRAIN.output(with_model(trained, source, dropout=0.1)).key != key
    other = write_whisper(tmp_path / "other", positions=make_spec(trained).model.positions, seed=1)
    assert TRAIN.output(with_model(trained, other)).key != key


def test_all_but_the_output_layer_begins_with_the_pretrained_weights(trained):
    transfer = transfer_initial(trained, make_spec(trained))
    assert transfer.new == ("output.weight", "output.bias")
    assert not transfer.left_out


def test_record_states_licence_and_training_data_or_that_they_are_unknown(trained):
    about = described(trained)
    assert (about["licence"], about["trained_on"], about["source"]) == ("mit", "not stated", "short")
    given = with_model(trained, trained.config.model.source, licence="Apache-2.0", trained_on="books")
    about = described(given)
    assert (about["licence"], about["trained_on"]) == ("Apache-2.0", "books")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {**tiny_document()["data"], "sample_rate": 8000}}, "data.sample_rate=16000"),
        ({"features": {"kind": "logmel"}}, "features.kind=whisper_logmel"),
        ({"model": {"kind": "whisper"}}, "source is empty"),
        ({"model": {"kind": "whisper", "source": "x", "layers": 3}}, "layers comes with the pretrained model"),
        (
            {"model": {"kind": "wav2vec2", "source": "x"}, "features": {"kind": "waveform", "cmvn": "none"}},
            "freq_masks=0",
        ),
    ],
    ids=["rate", "features", "source", "layers", "masks"],
)
def test_configurations_that_do_not_fit_the_encoder_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(document("x") | changes)


def test_folder_of_the_source_is_relative_to_the_configurations_and_a_name_on_the_hub_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    for source, revision, wanted in (
        ("whisper", "", str(tmp_path / "whisper")),
        ("$MODELS/whisper", "", "/models/whisper"),
        ("s3://bucket/whisper", "", "s3://bucket/whisper"),
        ("openai/whisper-base", "ab" * 20, "openai/whisper-base"),
    ):
        file = write_config(tmp_path / "c.yaml", document(source, revision=revision))
        assert load_config(file).model.source == wanted


def test_check_finds_what_is_wrong_with_the_source(tmp_path):
    source = write_whisper(tmp_path / "model")
    assert not find_problems(parse_config(document(source)))
    problems = find_problems(parse_config(document(str(tmp_path / "absent"))))
    assert len(problems) == 1
    assert "absent is not there: correct the path" in problems[0]


def test_unusable_source_ends_the_run_at_its_start(tmp_path):
    with pytest.raises(StageError, match="is not there"):
        initial_model(Run(parse_config(document(str(tmp_path / "absent"))), "r"))
    source = write_whisper(tmp_path / "model")
    wrong = parse_config(document(source) | {"features": {"kind": "whisper_logmel", "num_mels": 40}})
    with pytest.raises(StageError, match=r"num_mels=80"):
        initial_model(Run(wrong, "r"))


# --- another training's model, and pretrained ones by train.init


@pytest.fixture
def bundle(trained, tmp_path):
    return fetch_bundle(trained.result("train").store, tmp_path / "bundle")


def beginning_with(run, init, **model):
    config = document("x")
    config["model"] = {"kind": "whisper", **model}
    config["train"] |= {"init": str(init), "init_tokens": "data"}
    return Run(parse_config(config), "r", results=dict(run.results))


@pytest.mark.parametrize("model", [{}, {"source": "/gone", "dropout": 0.1}])
def test_model_that_came_from_a_pretrained_encoder_holds_all_that_a_further_training_needs(trained, bundle, model):
    run = beginning_with(trained, bundle, **model)
    spec, before = make_spec(run), load_bundle(bundle)[0]
    assert spec.model.encoder == before.model.encoder
    assert (spec.model.dim, spec.model.layers) == (16, 2)
    assert spec.model.dropout == model.get("dropout", before.model.dropout)
    assert spec.model.build(80, 5).state_dict().keys() == before.model.build(80, 5).state_dict().keys()
    transfer = transfer_initial(run, spec)
    assert (transfer.new, transfer.left_out) == ((), ())
    # what others have trained it on is still known
    assert spec.provenance["pretrained"] == before.provenance["pretrained"]
    assert not find_problems(run.config)


@pytest.mark.parametrize("place", ["folder", "file", "memory", "s3"])
def test_pretrained_model_is_found_by_train_init_as_by_model_source(trained, tmp_path, place, request):
    folder = tmp_path / "2"  # no version of a registered model
    write_whisper(folder)
    places = {"folder": str(folder), "file": folder.as_uri(), "memory": "memory://att/whisper"}
    place = (places | {"s3": "s3://speech/att/whisper"})[place]
    if place.startswith("s3:"):
        request.getfixturevalue("s3_server")
    if place.startswith(("memory:", "s3:")):
        for path in folder.iterdir():
            ObjectStore(place).write(path.name, path.read_bytes())
    given, own = beginning_with(trained, place), with_model(trained, str(folder))
    assert initial_model(given).source.digest == initial_model(own).source.digest
    spec = make_spec(given)
    assert (spec.model.encoder, spec.provenance["pretrained"]["licence"]) == (make_spec(own).model.encoder, "mit")
    transfer = transfer_initial(given, spec)
    assert transfer.new == ("output.weight", "output.bias")
    assert not find_problems(given.config)


def test_url_without_a_model_is_refused_naming_the_field(trained):
    run = beginning_with(trained, "memory://att/nothing")
    with pytest.raises(StageError, match=r"train\.init: memory://att/nothing is no bundle.* and no pretrained model"):
        assert initial_model(run).source
    (problem,) = find_problems(run.config)
    assert problem.startswith("train.init: memory://att/nothing is no bundle")


@pytest.mark.parametrize("field", ["train.init", "model.source"])
def test_message_about_a_damaged_model_names_the_field_that_names_it(tmp_path, field):
    source = write_whisper(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    config = document(source)
    if field == "train.init":
        config["train"]["init"] = source
        config["model"] = {"kind": "whisper"}
    with pytest.raises(StageError, match=r"the pretrained model .* has no model\.safetensors") as caught:
        assert initial_model(Run(parse_config(config), "r")).source
    assert [name for name in ("train.init", "model.source") if name in str(caught.value)] == [field]


def test_features_that_the_pretrained_model_of_train_init_does_not_read_are_refused(trained, tmp_path):
    config = document("x")
    config |= {"model": {"kind": "whisper"}, "features": {"kind": "whisper_logmel", "num_mels": 40}}
    config["train"]["init"] = write_whisper(tmp_path / "model")
    (problem,) = find_problems(parse_config(config))
    assert "num_mels=80" in problem


def test_first_night_begins_with_the_pretrained_model_if_there_is_no_champion(tmp_path, api):
    config = document(write_whisper(tmp_path / "model"))
    config["train"]["init"] = "@champion"
    run, lines = Run(parse_config(config), "r"), []
    with progress.following(lambda name, text: lines.append(text)):
        assert initial_model(run).name == config["model"]["source"]
        assert initial_model(run).source.pretrained is not None
    assert lines == [f"tiny has no version yet: training begins with {config['model']['source']}"]
    config["model"] = {"kind": "whisper"}
    with pytest.raises(StageError, match=r"model\.source is empty, and train\.init @champion is no model yet"):
        model_config(Run(parse_config(config), "r"))
