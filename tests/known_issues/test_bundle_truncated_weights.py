"""Truncated weights and unusable tokens escaped as errors of other libraries instead of BundleError."""

import json

import pytest

from recognition.bundle import BundleError, load_bundle


def test_truncated_weights_raise_bundle_error(bundle):
    path = bundle / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        load_bundle(bundle)


def test_tokens_of_an_unknown_kind_raise_bundle_error(bundle):
    path = bundle / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer": {"kind": "runes"}, "checksum": ""}))
    with pytest.raises(BundleError, match=r"bundle\.json.*runes"):
        load_bundle(bundle)
