"""Pretrained models are read from folders, object storage and the hub's cache; what cannot be used is named."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import Forkable
from safetensors.torch import load_file, save_file

from recognition.initial_weights import open_source
from recognition.pretrained import PretrainedError, read_pretrained
from speech.models import Wav2Vec2Config, WhisperConfig, build_model
from storage.objects import ObjectStore

transformers = pytest.importorskip("transformers")

CARD = "---\nlicense: mit\ndatasets:\n- librispeech_asr\n- own\n---\n# A model\n"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def whisper_config(**changes):
    sizes = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32} | {
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 16,
        "vocab_size": 20,
        "max_source_positions": 40,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    }
    return transformers.WhisperConfig(**{**sizes, **changes})


def wav2vec2_config(**changes):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32} | {
        "conv_dim": [8] * 7,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    }
    return transformers.Wav2Vec2Config(**{**sizes, **changes})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind, as the library saves it."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    transformers.WhisperForConditionalGeneration(whisper_config()).save_pretrained(root / "whisper")
    transformers.Wav2Vec2ForCTC(wav2vec2_config(vocab_size=20)).save_pretrained(root / "wav2vec2")
    (root / "whisper" / "README.md").write_text(CARD)
    return root


@pytest.fixture
def whisper(folders, tmp_path):
    """A copy of Whisper's folder, to be damaged."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (folders / "whisper").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def read(source, kind=WhisperConfig, **fields):
    return read_pretrained(kind(source=str(source), **fields), Path(str(source)).parent / "cache")


def weights_of(source, kind=WhisperConfig):
    pretrained = read(source, kind)
    return pretrained.weights(pretrained.sized(kind(source=str(source))))


@pytest.mark.parametrize(("name", "kind"), [("whisper", WhisperConfig), ("wav2vec2", Wav2Vec2Config)])
def test_all_weights_of_the_encoder_are_read(folders, name, kind):
    pretrained = read(folders / name, kind)
    config = pretrained.sized(kind(source=str(folders / name)))
    network = build_model(config, config.num_features, 5)
    weights = pretrained.weights(config)
    missing = network.load_state_dict(weights, strict=False)
    assert sorted(missing.missing_keys) == ["output.bias", "output.weight"]
    file = load_file(folders / name / "model.safetensors")
    prefix = {"whisper": "model.encoder.layers.1.fc1", "wav2vec2": "wav2vec2.encoder.layers.1.attention.k_proj"}[name]
    own = {"whisper": "layers.1.fc1", "wav2vec2": "layers.1.attention.k_proj"}[name]
    assert torch.equal(weights[f"{own}.weight"], file[f"{prefix}.weight"])


def test_what_is_known_of_a_model_is_taken_from_its_card(folders):
    about = read(folders / "whisper").about()
    assert (about["licence"], about["trained_on"]) == ("mit", "librispeech_asr, own")
    assert about["architecture"] == "whisper"
    assert read(folders / "wav2vec2", Wav2Vec2Config).about()["licence"] == ""


@pytest.mark.parametrize("card", ["", "# No head", "---\n[\n---\n", "---\n- a list\n---\n"])
def test_cards_without_a_head_say_nothing(whisper, card):
    (whisper / "README.md").write_text(card)
    assert read(whisper).about()["licence"] == ""


def test_digest_is_of_configuration_and_weights(whisper):
    first = read(whisper).digest
    (whisper / "README.md").write_text("another")
    assert read(whisper).digest == first
    file = load_file(whisper / "model.safetensors")
    file["model.encoder.conv1.bias"] += 1
    save_file(file, whisper / "model.safetensors", {"format": "pt"})
    second = read(whisper).digest
    config = json.loads((whisper / "config.json").read_text())
    (whisper / "config.json").write_text(json.dumps(config | {"encoder_attention_heads": 4}))
    assert len({first, second, read(whisper).digest}) == 3


def test_model_in_several_files_is_the_same(folders, tmp_path):
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folders / "whisper")
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    assert not (tmp_path / "model" / "model.safetensors").exists()
    parts, whole = weights_of(tmp_path / "model"), weights_of(folders / "whisper")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    next((tmp_path / "model").glob("model-00002*")).unlink()
    with pytest.raises(PretrainedError, match="model-00002.*is missing; fetch the model again"):
        read(tmp_path / "model")


def test_half_precision_and_names_of_older_files_are_read(folders, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_bytes((folders / "wav2vec2" / "config.json").read_bytes())
    file = load_file(folders / "wav2vec2" / "model.safetensors")
    renamed = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    old = {}
    for name, tensor in file.items():
        for new, former in renamed.items():
            name = name.replace(new, former)
        old[name.removeprefix("wav2vec2.")] = tensor.half()
    assert any(name.endswith("weight_g") for name in old)
    save_file(old, folder / "model.safetensors")
    weights, wanted = weights_of(folder, Wav2Vec2Config), weights_of(folders / "wav2vec2", Wav2Vec2Config)
    assert weights.keys() == wanted.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, wanted[name], atol=1e-3, rtol=1e-3)


def test_models_on_object_storage_are_copied_once(folders, tmp_path, monkeypatch):
    store = ObjectStore("memory://pretrained/whisper")
    for file in (folders / "whisper").iterdir():
        store.write_file(file.name, file)
    config = WhisperConfig(source=store.url)
    first = read_pretrained(config, tmp_path)
    assert first.digest == read(folders / "whisper").digest
    assert first.paths[0].is_relative_to(tmp_path)
    monkeypatch.setattr(ObjectStore, "fetch", None)
    assert read_pretrained(config, tmp_path).paths == first.paths
    store.delete_tree("")


def test_pickles_are_refused_and_the_remedy_converts_them(folders, whisper):
    torch.save(load_file(whisper / "model.safetensors"), whisper / "pytorch_model.bin")
    (whisper / "model.safetensors").unlink()
    with pytest.raises(PretrainedError, match="pytorch_model.bin only, a pickle") as caught:
        read(whisper)
    _, _, program = shlex.split(re.search(r"python -c .*", str(caught.value))[0])
    subprocess.run([sys.executable, "-c", Forkable(program)], check=True, timeout=240, capture_output=True)
    weights, wanted = weights_of(whisper), weights_of(folders / "whisper")
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def damage(folder, what):
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors, described = load_file(weights), json.loads(config.read_text())
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "no weights":
        weights.unlink()
    elif what == "no config":
        config.unlink()
    elif what == "no JSON":
        config.write_text("{")
    elif what == "a list":
        config.write_text("[]")
    elif what == "no layer":
        save_file({name: tensor for name, tensor in tensors.items() if "encoder.layers.1." not in name}, weights)
    elif what == "NaN":
        tensors["model.encoder.conv1.bias"][0] = float("nan")
        save_file(tensors, weights)
    elif what == "positions":
        tensors["model.encoder.embed_positions.weight"] += 0.1
        save_file(tensors, weights)
    else:
        config.write_text(json.dumps(described | what))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", "model.safetensors is damaged or truncated"),
        ("no weights", "has no model.safetensors: fetch the model again"),
        ("no config", "has no config.json: name a folder in Hugging Face's format"),
        ("no JSON", "config.json is not valid JSON.*: fetch the model again"),
        ("a list", "config.json is not a mapping"),
        ("no layer", r"has no weights for layers\.1\.\S+ and \d+ more"),
        ("NaN", "is damaged: 1 of the 16 numbers of subsampling.conv1.bias are not finite"),
        ("positions", "positions differs from the published one"),
        ({"model_type": "bert"}, "model_type is bert.*supports whisper"),
        ({"d_model": 24}, r"is \(.*, but its config.json describes \(24"),
        ({"num_mel_bins": 128}, r"conv1.weight is \(16, 80, 3\), but its config.json describes \(16, 128, 3\)"),
        ({"encoder_ffn_dim": 10**9}, "are not of one model"),
        ({"d_model": 10**30}, "describes no encoder|greater than"),
        ({"activation_function": "none of these"}, "transformers builds no encoder"),
        ({"d_model": "wide"}, "cannot be used: .*dim"),
    ],
    ids=str,
)
def test_unusable_models_are_refused_with_a_reason(whisper, what, message):
    damage(whisper, what)
    with pytest.raises(PretrainedError, match=message):
        weights_of(whisper)


def test_a_source_that_is_not_there_is_named():
    with pytest.raises(PretrainedError, match=r"openai/whisper-base is not there.*hub, give model\.revision"):
        read("openai/whisper-base")


@pytest.mark.parametrize("revision", ["main", "v1", COMMIT[:12], COMMIT.upper()])
def test_only_commits_pin_a_model_of_the_hub(revision):
    with pytest.raises(ValueError, match="is not a commit"):
        WhisperConfig(source="openai/whisper-base", revision=revision)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache in a folder, without network."""
    constants = pytest.importorskip("huggingface_hub").constants
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys.modules["huggingface_hub._snapshot_download"].constants, "HF_HUB_CACHE", tmp_path / "hub")
    return tmp_path / "hub"


def test_models_in_the_hubs_cache_need_no_network(folders, hub):
    snapshot = hub / "models--someone--whisper-tiny" / "snapshots" / COMMIT
    blobs = hub / "models--someone--whisper-tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (folders / "whisper").iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blobs / file.name)
    pretrained = read("someone/whisper-tiny", revision=COMMIT)
    assert pretrained.digest == read(folders / "whisper").digest
    assert (pretrained.name, pretrained.revision) == ("someone/whisper-tiny", COMMIT)
    assert pretrained.weights(pretrained.sized(WhisperConfig(source="someone/whisper-tiny", revision=COMMIT)))


def test_models_that_the_hubs_cache_lacks_are_an_error_offline(hub):
    with pytest.raises(PretrainedError, match=rf"HF_HUB_OFFLINE forbids.*hf download someone/x --revision {COMMIT}"):
        read("someone/x", revision=COMMIT)


def test_folder_of_a_pretrained_model_is_one_that_training_may_begin_with(folders):
    source = open_source(folders / "wav2vec2")
    assert (source.model.kind, source.model.dim, source.sample_rate) == ("wav2vec2", 16, 16000)
    assert source.digest == read(folders / "wav2vec2", Wav2Vec2Config).digest
    assert source.weights().keys() == weights_of(folders / "wav2vec2", Wav2Vec2Config).keys()
