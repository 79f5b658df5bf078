"""Brings the docs up to date with the registries: `python -m docs.tables`.

It writes docs/reference.md, and the tables of other pages that follow a line `<!-- table: NAME -->`, where NAME is one
of `TABLES`. tests/test_tables.py compares them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from speech.decoding import DECODERS
from speech.features.config import FilterBankConfig
from speech.features.registry import FEATURES
from speech.lm import LANGUAGE_MODELS, LmConfig
from storage.corpora import READERS, reader_class
from tasks import STAGES
from tasks.config.pipeline import PipelineConfig
from tasks.config.reference import reference, summary
from tasks.dataset.sources import layouts
from tasks.stages.base import get_stage
from training.config import TrainConfig
from training.strategies.registry import STRATEGIES, STRATEGY_CONFIGS
from training.strategies.strategy import Traits

DOCS = Path(__file__).resolve().parent
Row = Sequence[str]
_MARK = re.compile(r"(^<!-- table: ([a-z-]+) -->\n\n)((?:\|.*\n)*)", re.MULTILINE)
_ALONE = ("`single`", "nothing: one learner", "0", "0", "–", "training stops until it is restarted")


def corpus_layouts() -> Iterator[Row]:
    """Layouts of corpora, each with its options."""
    yield "kind", "layout", "options"
    for kind, layout in layouts().items():
        own = reader_class(kind).OPTIONS if kind in READERS else frozenset({"synthesis"})
        yield f"`{kind}`", layout, _names(sorted(own))


def strategies() -> Iterator[Row]:
    """Strategies with the properties that one chooses by."""
    yield (
        "strategy",
        "synchronizes",
        "sent per learner and step",
        "staleness, steps",
        "a slow learner",
        "a dead learner",
    )
    yield _ALONE
    for name, strategy in STRATEGIES.items():
        facts = strategy.facts
        yield f"`{name}`", facts.synchronizes, facts.sent_text, facts.staleness, facts.slow, facts.dead


def strategy_fields() -> Iterator[Row]:
    """Strategies with the learners that they need, and their constants."""
    yield "`train.strategy`", "nodes and learners", "fields"
    general = TrainConfig.model_fields
    for name, config in STRATEGY_CONFIGS.items():
        fields = [_field(field, about) for field, about in config.model_fields.items() if field != "kind"]
        for field, applies in (("exchange", config.traits.exchange), ("comm_hook", config.traits.buckets)):
            fields += [_field(f"train.{field}", general[field])] if applies else []
        yield f"`{name}`", _shape(config.traits), ", ".join(fields) or "–"


def features() -> Iterator[Row]:
    """Kinds of features, each with the options that not all have."""
    yield "kind", "features of a frame", "its own options"
    for kind, config in FEATURES.items():
        yield (
            f"`{kind}`",
            _phrase(config),
            _own(config, FilterBankConfig),
        )


def language_models() -> Iterator[Row]:
    """Kinds of language models, each with the options that not all have."""
    yield "kind", "what it is", "its own options"
    for kind, config in LANGUAGE_MODELS.items():
        yield f"`{kind}`", _phrase(config), _own(config, LmConfig)


def tuning_grids() -> Iterator[Row]:
    """Decoders with the values that are tried for their weights."""
    yield "decoder", "grid"
    for kind, config in DECODERS.items():
        if config.grid:
            fields = [f"`{name}` {', '.join(f'{value:g}' for value in values)}" for name, values in config.grid.items()]
            yield f"`{kind}`", "; ".join(fields)


def stages() -> Iterator[Row]:
    """Stages in order, with what they read and write."""
    yield "stage", "reads", "writes"
    for stage in map(get_stage, STAGES):
        yield stage.name + (f" (only {stage.only})" if stage.only else ""), stage.reads, stage.writes


def _phrase(config: type[BaseModel]) -> str:
    """A class's summary without its full stop, as a phrase."""
    line = summary(config).removesuffix(".")
    return line if line[1:2].isupper() else line[:1].lower() + line[1:]


def _own(config: type[BaseModel], base: type[BaseModel]) -> str:
    """The options that a configuration has and its base has not."""
    return _names([name for name in config.model_fields if name not in {"kind", *base.model_fields}])


def _field(name: str, about: FieldInfo) -> str:
    """A field, with the words that it may be."""
    words = _names(get_args(about.annotation)) if get_origin(about.annotation) is Literal else ""
    return f"`{name}` ({words})" if words else f"`{name}`"


def _shape(traits: Traits) -> str:
    """Which nodes and learners a strategy needs."""
    if traits.grouped:
        return "n nodes of k"
    if traits.one_node:
        return "one node of one" if traits.one_learner else "one node of N"
    return "N nodes of one" + (", on one machine's CPUs" if traits.shared else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "corpus-layouts": corpus_layouts,
    "strategies": strategies,
    "strategy-fields": strategy_fields,
    "features": features,
    "language-models": language_models,
    "tuning-grids": tuning_grids,
    "stages": stages,
}


def with_tables(text: str) -> str:
    """A page with current tables.

    Raises:
        KeyError: A mark names no table.
    """
    return _MARK.sub(lambda match: match[1] + _markdown(TABLES[match[2]]()), text)


def _markdown(rows: Iterator[Row]) -> str:
    head, *others = (f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)
    return head + "|" + "---|" * (head.count("|") - 1) + "\n" + "".join(others)


def pages() -> dict[Path, str]:
    """Pages that are generated, or have tables that are, with what they should be."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    marked = {path: with_tables(text) for path, text in texts.items() if _MARK.search(text)}
    return marked | {DOCS / "reference.md": reference(PipelineConfig)}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
