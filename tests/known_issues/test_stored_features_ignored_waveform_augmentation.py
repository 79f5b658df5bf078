"""With stored features, speed perturbation, noise and gain were accepted in the configuration and silently ignored."""

import pytest

from tasks.config.pipeline import ConfigError, parse_config


@pytest.mark.parametrize(
    "field", [{"speed_factors": [0.9, 1.1]}, {"noise": {"snr_db": [5, 20]}}, {"gain_db": 6}, {"pauses": {}}]
)
def test_stored_features_with_waveform_augmentation_are_refused(field):
    document = {
        "name": "x",
        "data": {"sources": [{"kind": "table", "path": "x.csv"}]},
        "features": {"stored": True},
        "train": {"augment": field},
    }
    with pytest.raises(ConfigError, match=rf"train\.augment has {next(iter(field))}.*features\.stored=false"):
        parse_config(document)
    document["features"]["stored"] = False
    parse_config(document)
