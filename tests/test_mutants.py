"""The sampler of mutants: its changes, what it leaves unchanged, and how it tells killed mutants from survivors."""

import subprocess
from collections import Counter

import pytest

from benchmarks import mutants
from benchmarks.mutations import mutations

SOURCE = b'''"""Docs with 1 number."""
import logging
from typing import TYPE_CHECKING

log = logging.getLogger(__name__)
PATIENCE_S = 3
if TYPE_CHECKING:
    import os


def work(items: "list[int | None]", limit: int = 4) -> float:
    """More docs, 5."""
    assert limit > 0, "ours 6"
    total = 0.5
    for item in items:
        if item is None or item == limit:
            log.warning("item %d of %d", item + 7, 8)
            continue
        if not item:
            raise ValueError(f"no {item + 9}")
        total += min(item, limit) * call(item, total)
    items.clear()
    items[0] = total
    return total / 2


if __name__ == "__main__":
    work([10])
'''


def changes(source=SOURCE):
    lines = source.decode().splitlines()
    for change in mutations("x.py", source):
        yield change, lines[change.line - 1], change.apply(source).decode().splitlines()[change.line - 1].strip()


def test_every_kind_of_change_is_found_valid_and_on_its_line():
    mutants = list(changes())
    kinds = {"comparison", "condition negated", "condition dropped", "statement dropped", "arguments swapped"}
    assert {change.kind for change, _, _ in mutants} == kinds | {"arithmetic", "constant", "return value"}
    after = [after for _, _, after in mutants]
    for wanted in (
        "if item is not None or item == limit:",
        "if ((item == limit)):",
        "if (not (item is None or item == limit)):",
        "if (item):",
        "total -= min(item, limit) * call(item, total)",
        "total += min(item, limit) * call(total, item)",
        "total += min(item, limit) / call(item, total)",
        "return total * 2",
        "return None",
        'def work(items: "list[int | None]", limit: int = 5) -> float:',
    ):
        assert wanted in after
    assert after.count("pass") == 5  # continue, raise, total +=, clear, items[0] =
    for change, before, text in mutants:
        assert change.is_valid(SOURCE)
        assert before.strip() != text


def test_messages_settings_and_main_are_not_changed():
    before = [before for _, before, _ in changes()]
    for part in ("ocs", "import", "PATIENCE", "TYPE_CHECKING", "assert", "log", "__main__", "work([10])"):
        assert not [line for line in before if part in line]
    assert not [text for _, _, text in changes() if "no {item - 9}" in text]


def test_draws_are_reproducible_and_cover_every_folder():
    paths = [*mutants.modules(["training/strategies", "storage/corpora"]), "training/learner/sampling.py"]
    drawn = mutants.draw(paths, 12, 3)
    assert drawn == mutants.draw(paths, 12, 3) != mutants.draw(paths, 12, 4)
    places = [(change.path, change.line) for change in drawn]
    assert len(places) == len(set(places)) == 12
    assert {mutants.stratum(path) for path, _ in places} == {
        "training/learner",
        "training/strategies",
        "storage/corpora",
    }
    assert sum(mutants._shares({"a": 5, "b": 1, "c": 90}, 2).values()) == 2
    assert mutants._shares({"a": 5, "b": 1, "c": 90}, 10) == {"a": 1, "b": 1, "c": 8}


def test_nearest_tests_come_first_also_for_modules_run_as_commands():
    related = mutants.Related(mutants.ROOT)
    assert related.files("training/coordinator/leasing.py", 1) == ["tests/training/test_coordinator.py"]
    assert "tests/training/test_coordinator_server.py" in related.files("training/coordinator/server.py", 4)  # `-m`
    assert related.files("flows/deploy/concurrency.py", 1) == ["tests/flows/test_concurrency.py"]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one module and one test."""
    root = tmp_path / "checkout"
    (root / "training").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "training" / "__init__.py").touch()
    (root / "training" / "sums.py").write_text("def double(x):\n    y = x + 0\n    return y + x\n")
    (root / "tests" / "test_sums.py").write_text(
        "from training.sums import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
    )
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: s", "gpu: g"]\n')
    subprocess.run(["git", "init", "-q", root], check=True)
    monkeypatch.setattr(mutants, "ROOT", root)
    return root


@pytest.mark.slow
def test_survivors_are_distinguished_from_killed_mutants(checkout, tmp_path, capsys):
    drawn = mutants.at_places(["training/sums.py:2,3"])
    wanted = [change for change in drawn if change.kind == "arithmetic"]
    scratch, related = mutants.Scratch(tmp_path / "scratch"), mutants.Related(checkout)
    files = related.files("training/sums.py", 8)
    verdicts = [scratch.test(change, files, 60.0) for change in wanted]
    assert [verdict.killer for verdict in verdicts] == ["", "tests/test_sums.py::test_double"]
    before = {path: (checkout / path).read_text() for path in ("training/sums.py", "tests/test_sums.py")}
    assert before == {path: (scratch.root / path).read_text() for path in before}
    mutants.show(verdicts)
    told = capsys.readouterr().out
    assert "-    y = x + 0\n+    y = x - 0" in told
    assert "50%" in told
    assert Counter(told.split())["survived"] == 1


def test_failing_test_without_a_mutant_does_not_count_as_detection(checkout, tmp_path, monkeypatch):
    scratch, runs = mutants.Scratch(tmp_path / "scratch"), []

    def pytest_answers(words, limit_s):
        runs.append((words, (scratch.root / "training/sums.py").read_text()))
        return (0, "") if "--deselect" in words else (1, "FAILED tests/test_sums.py::test_broken - assert 0")

    monkeypatch.setattr(scratch, "pytest", pytest_answers)
    (change,) = [change for change in mutants.at_places(["training/sums.py:3"]) if change.kind == "arithmetic"]
    assert scratch.test(change, ["tests/test_sums.py"], 60.0).killer == ""
    broken = "tests/test_sums.py::test_broken"
    assert [words for words, _ in runs] == [
        ["tests/test_sums.py"],
        [broken],
        ["tests/test_sums.py", "--deselect", broken],
    ]
    assert [source.count("y - x") for _, source in runs] == [1, 0, 1]
