"""A model with a flipped bit loaded, and its output was wrong or NaN: bundles had no checksums."""

import json

import pytest

from recognition.bundle import BundleError, check_files, load_bundle, load_spec, save_spec


def rewrite(bundle, *without):
    """Write bundle.json in another layout, without some fields."""
    path = bundle / "bundle.json"
    value = {name: item for name, item in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("place", [-1, -5000, 3])
def test_flipped_bit_in_weights_is_detected(bundle, place):
    path = bundle / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"model\.safetensors is damaged.*fetch the model again, or recreate it"):
        load_bundle(bundle)


def test_changed_digit_in_description_is_detected(bundle):
    path = bundle / "bundle.json"
    path.write_text(path.read_text().replace("1.25", "1.75"))
    with pytest.raises(BundleError, match=r"bundle\.json is damaged.*If you have edited it, remove its field checksum"):
        load_spec(bundle)
    rewrite(bundle, "checksum")
    assert load_bundle(bundle)[0].provenance == {"loss": 1.75}


def test_bundle_without_checksums_is_refused(bundle):
    load_bundle(bundle)
    rewrite(bundle, "checksum", "files")
    with pytest.raises(BundleError, match=r"fetch the model again, or recreate it .*(.|\n)*files\n *Field required"):
        load_bundle(bundle)
    path = bundle / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {}}))
    with pytest.raises(BundleError, match=r"model\.safetensors is damaged.*fetch the model again"):
        load_bundle(bundle)


def test_json_formatting_does_not_change_the_checksum(bundle):
    rewrite(bundle)
    load_bundle(bundle)


def test_missing_weights_file_is_named(bundle):
    (bundle / "model.safetensors").unlink()
    with pytest.raises(BundleError, match=r"model\.safetensors is missing"):
        load_bundle(bundle)


def test_changed_decoding_keeps_the_weights_checksum(bundle):
    before = check_files(bundle)
    save_spec(bundle, load_spec(bundle).model_copy(update={"provenance": {"new": 1}}), before)
    assert check_files(bundle) == before
    assert load_bundle(bundle)[0].provenance == {"new": 1}
