"""Bundles: written bundles are read back, and damage is named."""

import json

import pytest
import torch

from recognition.bundle import BundleError, BundleSpec, load_bundle, load_spec, save_bundle
from speech.decoding import BeamConfig
from speech.features import CmvnStats, LogMelConfig
from speech.models import MODELS
from speech.text import NormalizerConfig
from speech.tokens import TokenConfig, train_tokenizer

TEXTS = ["one two three", "four five six", "seven eight nine", "ten eleven twelve", "it's half past one"]
TINY = {kind: config.model_validate(config.tiny) for kind, config in MODELS.items()}


def make_spec(kind="blstm", tokens="characters", **changes):
    stats = CmvnStats(6).add(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) / 3)
    values = {
        "sample_rate": 8000,
        "features": LogMelConfig(num_mels=6),
        "stats": stats.to_dict(),
        "tokenizer": train_tokenizer(TokenConfig(kind=tokens, vocab_size=30), TEXTS).to_dict(),
        "model": TINY[kind],
        "normalizer": NormalizerConfig(case="lower"),
        "decode": BeamConfig(beam=7),
        "provenance": {"run": "r", "epochs": [1, 2], "note": "naïve – ✓"},
    }
    return BundleSpec.model_validate({**values, **changes})


def write(folder, spec=None, seed=0):
    spec = spec or make_spec()
    torch.manual_seed(seed)
    model = spec.build_model().eval()
    save_bundle(folder, spec, {name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    return spec, model


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("tokens", ["characters", "bpe", "words"])
def test_bundle_survives_a_round_trip(tmp_path, kind, tokens):
    spec, model = write(tmp_path / "deep" / "folder", make_spec(kind, tokens))
    loaded_spec, loaded = load_bundle(tmp_path / "deep" / "folder")
    assert loaded_spec == spec
    assert not loaded.training
    waves, lengths = torch.randn(2, 4000) / 10, torch.tensor([4000, 3000])
    expected = model(*spec.build_frontend()(waves, lengths))
    outputs = loaded(*loaded_spec.build_frontend()(waves, lengths))
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[1], expected[1])
    tokenizer = loaded_spec.build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_statistics_survive_a_round_trip_exactly(tmp_path):
    spec, _ = write(tmp_path)
    stats, loaded = CmvnStats.from_dict(spec.stats), CmvnStats.from_dict(load_spec(tmp_path).stats)
    assert torch.equal(stats.sum, loaded.sum)
    assert torch.equal(stats.sumsq, loaded.sumsq)
    assert stats.count == loaded.count


def test_same_bundle_has_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name)
    for file in ("bundle.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["bundle.json", "model.safetensors"]


def test_missing_folder_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BundleError, match=r"has no bundle\.json"):
            load_bundle(folder)


def edit(folder, **changes):
    path = folder / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "checksum": "", **changes}))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"surprise": 1}, "surprise"),
        ({"sample_rate": "fast"}, "sample_rate"),
        ({"model": {"kind": "oracle"}}, "kind"),
        ({"format": 2}, "format 2"),
        ({"tokenizer": {"kind": "runes"}}, "runes"),
        ({"tokenizer": {"kind": "bpe", "model": "!"}}, "base64"),
        ({"stats": None}, "statistics"),
        ({"stats": {"count": 1}}, "CMVN"),
    ],
)
def test_inconsistent_description_is_named(tmp_path, changes, name):
    write(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(BundleError, match=rf"bundle\.json(.|\n)*{name}"):
        load_bundle(tmp_path)


def test_description_without_later_fields_is_read(tmp_path):
    """As a version wrote it that did not have them."""
    write(tmp_path)
    spec, path = load_spec(tmp_path), tmp_path / "bundle.json"
    value = json.loads(path.read_text())
    for part, later in ((value, ("states", "adaptation")), (value["features"], ("stride", "trim_db"))):
        for name in later:
            del part[name]
    path.write_text(json.dumps(value | {"checksum": ""}))
    assert load_spec(tmp_path) == spec
    assert load_bundle(tmp_path)[0] == spec


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}'])
def test_damaged_description_is_named(tmp_path, text):
    write(tmp_path)
    (tmp_path / "bundle.json").write_text(text)
    with pytest.raises(BundleError, match=r"bundle\.json is damaged or incompatible"):
        load_bundle(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other sizes", "pickle"])
def test_mismatched_weights_are_named(tmp_path, damage):
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other sizes":
        write(tmp_path / "other", make_spec(model=TINY["blstm"].model_copy(update={"dim": 9})))
        path.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    elif damage == "pickle":
        torch.save({"weight": torch.zeros(3)}, path)
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        load_bundle(tmp_path)
