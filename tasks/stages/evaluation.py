"""Evaluation of an existing model on a corpus: the stages from corpus to scores without training, and a report."""

import re
from pathlib import Path
from typing import Any

from speech.bundle import SPEC, BundleError, load_spec, own_decoder
from speech.decoding import DecodeConfig, GreedyConfig
from speech.lm import LmConfig
from speech.objectives import objective_of
from tasks.config.assignments import assign
from tasks.config.decoding import uses_stage
from tasks.config.home import home
from tasks.config.mistakes import choices
from tasks.config.pipeline import ConfigError, PipelineConfig, parse_config
from tasks.stages.base import Run, StageError
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
    spec, decode = load_spec(bundle), own_decoder(bundle)
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
        "decode": decode.model_dump(mode="json"),
        "train": {"objective": objective_of(decode.kind)},
        "score": {"sets": [split or TEST]},
    }
    if not spec.features.adapted:  # those are made by the bundle itself
        document["features"] = spec.features.model_dump(mode="json") | {"stored": False}
    try:
        assign(document, overrides or [], frozenset(choices(PipelineConfig)))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return parse_config(document, "the evaluation")


def use_model(run: Run, bundle: Path, as_configured: bool = False) -> None:
    """Let a run score an existing model; no language model is made and nothing tuned.

    The model decodes with the decoder of its bundle, unless the configuration has a section `decode` that says another
    than the default, and no section `tune`, whose values are in the bundle. Files that the configured decoder would
    take from other stages are those of the bundle.

    Args:
        run: The run, before its stage decode.
        bundle: The model's folder.
        as_configured: Whether the section counts even if it says the default.

    Raises:
        BundleError: If the folder is not a bundle, or its decoder needs files that are not in it.
        StageError: If the configured decoder needs files that neither the configuration nor the bundle has.
    """
    run.bundle = bundle
    decode = own = own_decoder(bundle)
    if as_configured or (run.config.decode != GreedyConfig() and run.config.tune is None):
        decode = _completed(run.config.decode, own, run.config.lm)
    parts = {"decode": decode, "recognizer": "network", "align": None, "lm": None}
    parts |= {"realign": None, "rescoring": None, "tune": None}
    run.config = run.config.model_copy(update=parts)


def _completed(decode: DecodeConfig, own: DecodeConfig, lm: LmConfig | None) -> DecodeConfig:
    """A configured decoder with the bundle's files where it would take a stage's."""
    if not (decode.makes_graph or uses_stage(decode, lm) or decode.lacking()):
        return decode
    found = decode.completed(own.files()) if decode.kind == own.kind else decode
    if found.makes_graph or uses_stage(found, lm) or found.lacking():
        raise StageError(
            f"decode.kind {decode.kind} needs files that neither the section decode names nor the model has (its "
            f"decoder is {own.kind}): name them, or remove the section, so that the model's own decoder is used"
        )
    return found


def write_evaluation(run: Run, model: str) -> Path:
    """Write the report of an evaluation to the data folder, and return its path."""
    path = home() / "reports" / f"{run.config.name}-{run.result('score').key}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_evaluation(run, model), encoding="utf-8")
    return path
