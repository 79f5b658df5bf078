"""Truncated weights and unusable tokens escaped as errors of other libraries instead of BundleError."""

import json

import pytest

from speech.bundle import BundleError, BundleSpec, load_bundle, save_bundle
from speech.features import FeatureConfig
from speech.models import ModelConfig
from speech.tokens import TokenConfig, train_tokenizer


@pytest.fixture
def bundle(tmp_path):
    spec = BundleSpec(
        sample_rate=8000,
        features=FeatureConfig(num_mels=6, cmvn="none"),
        stats=None,
        tokenizer=train_tokenizer(TokenConfig(), ["a b"]).to_dict(),
        model=ModelConfig(kind="blstm", dim=8, layers=1, channels=1),
    )
    save_bundle(tmp_path, spec, dict(spec.build_model().state_dict()))
    load_bundle(tmp_path)
    return tmp_path


def test_truncated_weights(bundle):
    path = bundle / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        load_bundle(bundle)


def test_tokens_of_an_unknown_kind(bundle):
    path = bundle / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer": {"kind": "runes"}, "checksum": ""}))
    with pytest.raises(BundleError, match=r"bundle\.json.*runes"):
        load_bundle(bundle)
