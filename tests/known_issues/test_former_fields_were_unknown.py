"""Fields became constants, and bundles and deployments that named them with the same value could not be read."""

import pytest
from support import tiny_document

from speech.features import LogMelConfig
from speech.hmm.config import AlignConfig, HmmConfig
from speech.synthesis.corpus import SynthesisConfig
from tasks.config.pipeline import ConfigError, PipelineConfig, parse_config


def test_a_former_field_with_its_constant_is_accepted():
    assert LogMelConfig(cmvn_min_window=100, delta_window=2) == LogMelConfig()
    assert HmmConfig.model_validate_json('{"power": 0.25, "seed": 0}') == HmmConfig()
    assert SynthesisConfig(pitch=(35, 65)) == SynthesisConfig.model_validate({"pitch": [35, 65]}) == SynthesisConfig()
    assert AlignConfig.model_validate({"power": 0.25, "features": {"kind": "mfcc", "cmvn": "speaker", "num_mels": 23}})


def test_another_value_is_refused_by_name_with_the_place():
    with pytest.raises(ConfigError, match=r"align: power is no longer a field: it is always 0\.25; remove it"):
        parse_config(tiny_document(align={"power": 0.3}))
    features = {"kind": "mfcc", "num_mels": 23, "delta_window": 3}
    with pytest.raises(ConfigError, match=r"features: delta_window is no longer a field: it is always 2;"):
        parse_config(tiny_document(features=features))
    with pytest.raises(
        ConfigError, match=r"train\.augment: noise_snr_db is no longer .*`noise: \{snr_db: \[5, 20\]\}`"
    ):
        parse_config(tiny_document(train={"augment": {"noise_snr_db": [3, 9]}}))


def test_former_fields_are_none_of_a_configuration():
    shown = parse_config(tiny_document(align={"silence_weight": 0.01})).model_dump()
    assert "silence_weight" not in shown["align"]
    assert PipelineConfig.model_validate(shown).align == AlignConfig()
