"""Evaluation of an existing model on a corpus: the stages from corpus to scores without training, and a report."""

import re
from pathlib import Path
from typing import Any

from speech.bundle import SPEC, BundleError, load_spec, own_decoder
from tasks.config.assignments import assign
from tasks.config.home import home
from tasks.config.mistakes import choices
from tasks.config.pipeline import ConfigError, PipelineConfig, parse_config
from tasks.stages.base import Run
from tasks.stages.report import render_evaluation

EVALUATION = ("prepare", "shard", "features", "decode", "score")
"""The stages of an evaluation."""
TEST = "test"
"""The set of an evaluated corpus whose own parts are not asked for."""


def evaluation_config(
    bundle: Path, source: dict[str, Any], split: str = "", overrides: list[str] | None = None
) -> PipelineConfig:
    """Configuration of an evaluation: everything that is the model's comes from its bundle.

    Args:
        bundle: The model's folder.
        source: Fields of a source (`kind`, `path`, …).
        split: Part of the corpus to score; by default all of it.
        overrides: Assignments such as `data.max_seconds=60`.

    Raises:
        BundleError: If the folder is not a bundle.
        ConfigError: If a field is wrong.
    """
    if not (bundle / SPEC).is_file():
        raise BundleError(f"{bundle} is not a model bundle: it has no {SPEC}")
    spec = load_spec(bundle)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(source["path"]).name).strip("-.") or "corpus"
    document: dict[str, Any] = {
        "name": f"evaluate-{name}",
        "data": {
            "sources": [source | ({} if split else {"set": TEST})],
            "sample_rate": spec.sample_rate,
            "normalizer": spec.normalizer.model_dump(mode="json"),
            # every utterance counts, whatever training would make of it
            "min_seconds": 0.0,
            "max_seconds": 300.0,
            "silence_db": -1000.0,
            "duplicates": {"fingerprint": False},
        },
        "features": spec.features.model_dump(mode="json") | {"stored": False},
        "decode": own_decoder(bundle).model_dump(mode="json"),
        "score": {"sets": [split or TEST]},
    }
    try:
        assign(document, overrides or [], frozenset(choices(PipelineConfig)))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return parse_config(document, "the evaluation")


def use_model(run: Run, bundle: Path) -> None:
    """Let a run score an existing model: with the decoder of its bundle, so no language model is made and none tuned.

    Args:
        run: The run, before its stage decode.
        bundle: The model's folder.

    Raises:
        BundleError: If the folder is not a bundle, or its decoder needs files that are not in it.
    """
    run.bundle = bundle
    own = {"decode": own_decoder(bundle), "recognizer": "network", "align": None, "lm": None, "tune": None}
    run.config = run.config.model_copy(update=own)


def write_evaluation(run: Run, model: str) -> Path:
    """Write the report of an evaluation to the data folder, and return its path."""
    path = home() / "reports" / f"{run.config.name}-{run.result('score').key}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_evaluation(run, model), encoding="utf-8")
    return path
