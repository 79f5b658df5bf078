"""Configurations of features, and the filters, transforms and windows that features are made of."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from configurable.configuration import descriptions
from speech.features import (
    FEATURES,
    FeatureChoice,
    FeatureError,
    LogMelConfig,
    MfccConfig,
    build_features,
)
from speech.features.mel import dct_matrix, lifter_weights, mel_filter_bank, povey_window

CHOICE = TypeAdapter(FeatureChoice)


def test_linear_filters_have_equal_width_in_hz():
    bank = mel_filter_bank(15, 512, 16000, 0.0, 0.0, "linear")
    peaks = bank.argmax(0)
    assert torch.equal(peaks, torch.arange(1, 16) * 16)
    torch.testing.assert_close(bank[16:241].sum(1), torch.ones(225, dtype=torch.float64))


def test_filters_sum_to_one_between_the_outer_centres():
    bank = mel_filter_bank(40, 4096, 16000, 20.0, 0.0)
    sums = bank.sum(1)
    inside = bank[:, 0].argmax(), bank[:, -1].argmax()
    torch.testing.assert_close(sums[inside[0] + 1 : inside[1]], torch.ones_like(sums[inside[0] + 1 : inside[1]]))
    assert not bank[-1].any()


def test_cosine_transform_is_orthonormal():
    matrix = dct_matrix(23, 23)
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(23, dtype=torch.float64))


def test_window_and_lifter_equal_their_formulas():
    window = povey_window(400)
    assert window[0] == 0
    assert window[-1] == pytest.approx(0, abs=1e-12)
    assert window.argmax() in (199, 200)
    assert lifter_weights(13, 0).tolist() == [1.0] * 13
    assert lifter_weights(13, 22)[11] == pytest.approx(12.0)


def test_impossible_configurations_name_their_field():
    with pytest.raises(FeatureError, match=r"features\.num_mels"):
        build_features(LogMelConfig(num_mels=200), 16000)
    with pytest.raises(FeatureError, match=r"features\.high_freq"):
        build_features(LogMelConfig(high_freq=8000.0), 8000)
    with pytest.raises(FeatureError, match=r"features\.num_ceps"):
        build_features(MfccConfig(num_mels=13, num_ceps=14), 16000)
    with pytest.raises(FeatureError, match=r"features\.frame_ms"):
        build_features(LogMelConfig(frame_ms=0.01), 16000)
    with pytest.raises(ValidationError, match=rf"'chroma'.*{', '.join(map(repr, FEATURES))}"):
        CHOICE.validate_python("chroma")


def test_configuration_is_strict_and_documented():
    with pytest.raises(ValidationError, match=r"num_mel\b"):
        LogMelConfig(num_mel=40)
    with pytest.raises(ValidationError, match=r"hop_ms"):
        LogMelConfig(hop_ms=0)
    for kind, features in FEATURES.items():
        assert features().kind == kind
        assert descriptions(features).keys() | {"kind"} == features.model_fields.keys()


@pytest.mark.parametrize(
    "given", [{"kind": "mfcc", "log_energies": True}, {"use_energy": True}, {"kind": "fber", "use_energy": True}]
)
def test_option_of_another_kind_is_refused(given):
    option = next(name for name in given if name != "kind")
    with pytest.raises(ValidationError, match=rf"{option}\n  Extra inputs are not permitted"):
        CHOICE.validate_python(given)


def test_configuration_survives_a_round_trip():
    config = LogMelConfig(delta_order=2, splice_left=3, cmvn="sliding", cmvn_window=300)
    assert CHOICE.validate_json(config.model_dump_json()) == config
    assert CHOICE.validate_python(LogMelConfig().model_dump()) == LogMelConfig()
