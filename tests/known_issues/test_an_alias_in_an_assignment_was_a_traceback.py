"""`--set train.init=@champion` ended `starling config show`, and the message of any wrong field, in a traceback.

Assignments take a text that begins with @ as it is; where a value came from was found out by YAML, which reserves @.
"""

import pytest
from support import tiny_document, write_config

from tasks.config.origins import annotated, origins
from tasks.config.pipeline import ConfigError, load_config

ALIAS = "train.init=@champion"


@pytest.fixture
def path(tmp_path):
    return write_config(tmp_path / "tiny.yaml", tiny_document())


def test_alias_is_shown_with_its_origin(path):
    config, by_place = origins(path, [ALIAS])
    assert (config.train.init, by_place["train", "init"]) == ("@champion", "--set")
    shown = path.with_name("shown.yaml")
    shown.write_text(annotated(config, by_place), encoding="utf-8")
    assert load_config(shown) == config


def test_wrong_field_beside_an_alias_is_explained(path):
    with pytest.raises(ConfigError, match=r"train\.epoch: there is no such field; did you mean 'epochs'\?"):
        load_config(path, [ALIAS, "train.epoch=3"])
