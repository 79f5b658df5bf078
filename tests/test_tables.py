"""The generated pages and tables of the docs are what the registries say."""

import importlib.util
from pathlib import Path

import pytest

from recognition.systems import TASK_CONFIGS
from speech.decoding import DECODERS
from speech.features.registry import FEATURES
from speech.lexicon import LEXICONS
from speech.lm import LANGUAGE_MODELS
from speech.models import MODELS
from speech.objectives import OBJECTIVES
from speech.vad import DETECTORS
from storage.corpora import READERS
from tasks import STAGES
from training.config import OPTIMIZERS
from training.strategies.registry import STRATEGIES, STRATEGY_CONFIGS

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)
PAGES = tables.pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_is_current(path):
    assert path.read_text(encoding="utf-8") == PAGES[path], "run `make tables`"


def test_every_table_is_on_a_page():
    text = "".join(PAGES.values())
    assert all(text.count(f"<!-- table: {name} -->") == 1 for name in tables.TABLES)


def test_a_table_is_replaced_and_what_surrounds_it_stays():
    page = "Before.\n\n<!-- table: strategies -->\n\n| old |\n|---|\n| table |\n\nAfter.\n\n| another |\n"
    text = tables.with_tables(page)
    assert text.startswith("Before.\n\n<!-- table: strategies -->\n\n| strategy | synchronizes |")
    assert text.endswith("|\n\nAfter.\n\n| another |\n")
    assert "old" not in text
    assert tables.with_tables(text) == text
    with pytest.raises(KeyError):
        tables.with_tables("<!-- table: unknown -->\n\n| x |\n")


def test_tables_have_every_kind_and_no_empty_property():
    kinds = {name: [row[0].strip("`") for row in list(rows())[1:]] for name, rows in tables.TABLES.items()}
    assert kinds["corpus-layouts"] == [*sorted(READERS), "synthetic"]
    assert kinds["strategies"] == ["single", *STRATEGIES]
    assert kinds["strategy-fields"] == list(STRATEGY_CONFIGS)
    assert kinds["features"] == list(FEATURES)
    assert kinds["language-models"] == list(LANGUAGE_MODELS)
    assert [row.partition(" ")[0] for row in kinds["stages"]] == list(STAGES)
    assert all(all(row) for row in [*tables.strategies(), *tables.stages()])
    assert kinds["tuning-grids"] == [kind for kind, config in DECODERS.items() if config.grid]
    assert all(what for name in ("features", "language-models") for _, what, _ in tables.TABLES[name]())


def test_kinds_are_described_with_the_options_that_not_all_have():
    rows = {row[0].strip("`"): row[1:] for row in tables.features()}
    assert rows["logmel"] == ("log-mel filter-bank energies", "")
    assert rows["fber"][1] == "`log_energies`"
    assert rows["fmllr"][0].startswith("LDA, MLLT and fMLLR features")
    rows = {row[0].strip("`"): row[1:] for row in tables.language_models()}
    assert rows["unigram"] == ("a bag of words: the relative frequency of every word", "`unit`, `vocabulary`")
    assert ("`words`", "`lm_weight` 0.5, 1, 1.5, 2, 3, 4; `word_score` -1, 0, 1, 2") in tables.tuning_grids()


def test_fields_come_with_their_words_and_learners_with_their_places():
    rows = {row[0].strip("`"): row[1:] for row in tables.strategy_fields()}
    assert rows["single"] == ("one node of one", "–")
    assert rows["scpsgd"] == ("one node of N", "`train.comm_hook` (`none`, `bf16`, `powersgd`)")
    assert rows["h-adpsgd"][0] == "n nodes of k"
    assert rows["h-adpsgd"][1].endswith("`train.exchange`, `train.comm_hook` (`none`, `bf16`, `powersgd`)")
    assert rows["hogwild"] == ("N nodes of one, on one machine's CPUs", "–")
    assert rows["easgd"] == ("N nodes of one", "`tau`, `beta`, `servers`")


@pytest.mark.parametrize(
    "registry",
    [
        MODELS,
        OBJECTIVES,
        FEATURES,
        DECODERS,
        LANGUAGE_MODELS,
        LEXICONS,
        DETECTORS,
        OPTIMIZERS,
        STRATEGY_CONFIGS,
        TASK_CONFIGS,
    ],
)
def test_registries_map_each_kind_to_the_class_of_its_configuration(registry):
    assert {kind: config.model_fields["kind"].default for kind, config in registry.items()} == {k: k for k in registry}
