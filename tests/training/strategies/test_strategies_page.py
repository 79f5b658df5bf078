"""docs/strategies.md agrees with the registry for every strategy, and names every field."""

import re
from pathlib import Path

import pytest

from training.config import TrainConfig
from training.strategies.registry import METHODS, STRATEGIES, STRATEGY_CONFIGS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "strategies.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]
NAMES = tuple(STRATEGY_CONFIGS)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_pages_facts_are_the_registrys(name):
    facts = STRATEGIES[name].facts
    row = next(row for row in ROWS if row[0] == f"`{name}`" and len(row) == 6)
    assert [row[1], *row[3:]] == [facts.synchronizes, facts.staleness, facts.slow, facts.dead]


def test_the_page_names_every_strategy_in_both_tables():
    for width in (6, 3):
        named = [row[0].strip("`") for row in ROWS if len(row) == width and row[0].strip("`") in NAMES]
        assert sorted(named) == sorted(NAMES)


def test_the_registry_has_every_strategy_of_several_learners():
    assert sorted([*STRATEGIES, "single"]) == sorted(NAMES)


def test_the_page_names_every_field_of_a_strategys_own():
    for name in NAMES:
        section = TrainConfig.model_fields.get(name)
        row = next(row for row in ROWS if len(row) == 3 and row[0] == f"`{name}`")
        fields = set(section.annotation.model_fields) if section else set()
        assert fields <= set(re.findall(r"\w+", row[2])), name


@pytest.mark.parametrize("name", METHODS)
def test_every_program_says_what_one_chooses_by(name):
    said = " ".join(METHODS[name].program.__doc__.split())
    for word in (r"Synchronizes ", r"[Ss]ends ", r"Staleness", r"slow", r"dead "):
        assert re.search(word, said), word
