"""A name that no file can have passed `config check`, and sizes of models that no memory holds ended in torch's words.

A name of 5,000 characters failed when the log was opened. `model.dim: 1000000000` ended as "Storage size calculation
overflowed", and a million layers were built for many minutes.
"""

import pytest
from support import tiny_document, write_config

from recognition.bundle import BundleSpec
from speech.features import LogMelConfig
from speech.models import ConformerConfig
from tasks.config.pipeline import ConfigError, load_config, parse_config
from tasks.dataset.sources import LONGEST_NAME
from tasks.stages.base import StageError
from tasks.stages.starter import config_name
from tasks.stages.train import check_sizes


@pytest.mark.parametrize("field", ["name", "register.model"])
def test_name_that_no_file_can_have_is_refused(tmp_path, field):
    path = write_config(tmp_path / "c.yaml", tiny_document())
    load_config(path, [f"{field}={'n' * LONGEST_NAME}"])
    with pytest.raises(ConfigError, match=rf"{field}: .* has 101 characters: use at most 100"):
        load_config(path, [f"{field}={'n' * (LONGEST_NAME + 1)}"])


def test_name_of_a_set_is_bounded_too():
    document = tiny_document()
    document["data"]["sources"][0]["set"] = "s" * 101
    with pytest.raises(ConfigError, match="has 101 characters: use at most 100"):
        parse_config(document)


def test_name_made_from_a_folder_is_short_enough(tmp_path):
    folder = tmp_path / ("n" * 200)
    folder.mkdir()
    assert config_name(folder) == "n" * LONGEST_NAME


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dim", 10**9, "the model cannot be built .* choose smaller sizes in model"),
        ("dim", 4_000_000, r"the model's weights take .* TB, and this machine has .* of memory"),
        ("layers", 10**6, r"model\.layers is 1,000,000: choose at most 1,000"),
    ],
)
def test_model_that_no_memory_holds_is_refused_before_it_is_built(field, value, words):
    sizes = {"dim": 16, "layers": 1, "heads": 2, "kernel": 5, "channels": 4}
    description = {
        "sample_rate": 8000,
        "features": LogMelConfig(num_mels=16),
        "stats": None,
        "tokenizer": {"kind": "characters", "symbols": ["<blank>", "a"]},
    }
    check_sizes(BundleSpec(**description, model=ConformerConfig(**sizes)))
    with pytest.raises(StageError, match=words):
        check_sizes(BundleSpec(**description, model=ConformerConfig(**(sizes | {field: value}))))
