"""Evaluation of an existing model on a corpus: the stages from corpus to scores without training, and a report."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configurable.wording import similar
from recognition.bundle import SPEC, BundleError, load_spec, own_decoder
from speech.decoding import DecodeConfig, GreedyConfig
from speech.lm import LmConfig
from tasks import STAGES
from tasks.config.assignments import assign
from tasks.config.decoding import uses_stage
from tasks.config.mistakes import choices
from tasks.config.pipeline import ConfigError, PipelineConfig, parse_config
from tasks.dataset.sources import SourceConfig
from tasks.pages import keep_page
from tasks.stages.base import Run, StageError, get_stage
from tasks.stages.report import render_evaluation

TEST = "test"
"""The set of an evaluated corpus whose own parts are not asked for."""


def evaluation_config(
    bundle: Path,
    corpus: str,
    sources: Sequence[SourceConfig],
    split: str = "",
    *,
    limit: int = 0,
    overrides: Sequence[str] | None = None,
) -> PipelineConfig:
    """Configuration of an evaluation: everything that is the model's comes from its bundle.

    Args:
        bundle: The model's folder.
        corpus: Name of the corpus.
        sources: Its sources.
        split: Part of the corpus to score: a set or the name of a source, or a part of the corpora's own split; by
            default all of it.
        limit: Use only the first utterances of each source, up to this number; 0: all.
        overrides: Assignments such as `data.max_seconds=60`.

    Raises:
        BundleError: If the folder is not a bundle.
        ConfigError: If a field is wrong, or if all sources have a set and none has that one.
    """
    if not (bundle / SPEC).is_file():
        raise BundleError(f"{bundle} is not a model bundle: it has no {SPEC}")
    spec, decode = load_spec(bundle), own_decoder(bundle)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", corpus).strip("-.") or "corpus"
    document: dict[str, Any] = {
        "name": f"evaluate-{name}",
        "data": {
            "sources": _chosen(sources, split, limit),
            "sample_rate": spec.sample_rate,
            "normalizer": spec.normalizer.model_dump(mode="json"),
            # every utterance counts, whatever training would make of it
            "min_seconds": 0.0,
            "max_seconds": 300.0,
            "silence_db": -1000.0,
            "duplicates": {"fingerprint": False},
            # a part is the corpus' own: training data that is divided again may be in it
            **({"valid_share": 0.0, "test_share": 0.0} if split else {}),
        },
        "score": {"sets": [split or TEST]},
    }
    if spec.system.is_trained:  # the configuration of another one needs the GMM-HMM; `use_model` gives it the model's
        document["recognizer"] = spec.system.model_dump(mode="json")
        document["decode"] = decode.model_dump(mode="json")
        document["train"] = dict(zip(("objective",), spec.system.objectives, strict=False))
    if not spec.features.adapted:  # those are made by the bundle itself
        document["features"] = spec.features.model_dump(mode="json") | {"stored": False}
    try:
        assign(document, overrides or [], frozenset(choices(PipelineConfig)))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return parse_config(document, "the evaluation")


def _chosen(sources: Sequence[SourceConfig], split: str, limit: int) -> list[dict[str, Any]]:
    """Sources that hold the part to score, or all of them, as the set of the evaluation."""
    chosen = [source for source in sources if not split or not source.set or _is_part(source, split)]
    if not chosen:
        sets = sorted({source.set for source in sources})
        hint = f"; did you mean {near!r}?" if (near := similar(split, sets)) else ""
        raise ConfigError(f"there is no set {split!r}: the sources have {', '.join(sets)}{hint}")
    documents = [source.model_dump(mode="json", exclude_defaults=True) for source in chosen]
    for document in documents:
        document.pop("min_confidence", None)  # of training
        if limit:
            document["limit"] = min(limit, document.get("limit", limit))
        if not split or "set" in document:
            document["set"] = split or TEST
    return documents


def _is_part(source: SourceConfig, split: str) -> bool:
    """Whether a source is the part of that name: its set, or what its folder, file or rows are called in the corpus."""
    path = Path(source.path)
    return split in (source.set, path.name, path.stem, *source.where.values())


def evaluation_stages() -> tuple[str, ...]:
    """The stages of an evaluation, in order."""
    return tuple(name for name in STAGES if get_stage(name).evaluates)


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
    system = load_spec(bundle).system
    if as_configured or (run.config.decode != GreedyConfig() and run.config.tune is None):
        decode = _completed(run.config.decode, own, run.config.lm)
    parts = {"decode": decode, "recognizer": system, "align": None, "lm": None}
    parts |= {"realign": None, "restore": None, "rescoring": None, "tune": None}
    run.config = run.config.model_copy(update=parts)


def _completed(decode: DecodeConfig, own: DecodeConfig, lm: LmConfig | None) -> DecodeConfig:
    """A configured decoder with the bundle's files where it would take a stage's."""
    if not (decode.makes_graph or uses_stage(decode, lm) or decode.lacking()):
        return decode
    completed = decode.completed(own.files()) if decode.kind == own.kind else decode
    if completed.makes_graph or uses_stage(completed, lm) or completed.lacking():
        raise StageError(
            f"decode.kind {decode.kind} needs files that neither the section decode names nor the model has (its "
            f"decoder is {own.kind}): name them, or remove the section, so that the model's own decoder is used"
        )
    return completed


def write_evaluation(run: Run, model: str) -> Path:
    """Write the report of an evaluation to the data folder, and return its path."""
    return keep_page(f"{run.config.name}-{run.result('score').key}", render_evaluation(run, model).encode())
