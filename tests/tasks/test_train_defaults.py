"""A training's address leaves out default values: a changed default needs a new version of the stage.

After raising the version, `python tests/tasks/test_train_defaults.py` records the defaults.
"""

import json
from pathlib import Path

from speech.features import FEATURES
from speech.models import MODELS
from speech.objectives import OBJECTIVES
from speech.text import NormalizerConfig
from speech.tokens import TokenConfig
from tasks.stages.train import TRAIN, training_content
from training.config import OPTIMIZERS, TrainConfig
from training.strategies.registry import STRATEGY_CONFIGS

FILE = Path(__file__).with_name("train_defaults.json")
PARTS = {
    "train": TrainConfig,
    "tokens": TokenConfig,
    "normalizer": NormalizerConfig,
    **{f"features {kind}": features for kind, features in FEATURES.items()},
    **{f"model {kind}": model for kind, model in MODELS.items()},
    **{f"strategy {kind}": config for kind, config in STRATEGY_CONFIGS.items()},
    **{f"optimizer {kind}": config for kind, config in OPTIMIZERS.items()},
    **{f"objective {kind}": objective.config for kind, objective in OBJECTIVES.items()},
}


def defaults():
    return {name: part().model_dump(mode="json") for name, part in PARTS.items()}


def changed(recorded, present, place=""):
    """Fields whose default differs from the recorded one; new fields do not count."""
    if isinstance(recorded, dict) and isinstance(present, dict):
        return [one for name, value in recorded.items() for one in changed(value, present.get(name), f"{place}.{name}")]
    return [] if recorded == present else [place.removeprefix(".")]


def test_no_default_has_changed_without_a_new_version():
    recorded = json.loads(FILE.read_text())
    assert recorded["version"] == TRAIN.version, "record the defaults of the new version, see above"
    assert changed(recorded["defaults"], defaults()) == [], "raise the version of the stage `train`"


def test_changed_and_missing_defaults_are_found_but_new_ones_ignored():
    recorded = {"a": {"b": 1, "c": None}, "d": 2}
    assert changed(recorded, {"a": {"b": 1, "c": None, "new": 5}, "d": 2}) == []
    assert changed(recorded, {"a": {"b": 2, "c": None}, "d": 3}) == ["a.b", "d"]
    assert changed(recorded, {"a": {"b": 1, "c": 0}}) == ["a.c", "d"]


def test_fields_that_only_say_how_a_training_runs_do_not_train_again():
    wanted = training_content(TrainConfig())
    assert (
        training_content(TrainConfig(compile=True, loader_threads=3, loader_processes=2, checkpoint_steps=7)) == wanted
    )
    assert training_content(TrainConfig(epochs=7)) != wanted


if __name__ == "__main__":
    FILE.write_text(json.dumps({"version": TRAIN.version, "defaults": defaults()}, indent=1, sort_keys=True) + "\n")
