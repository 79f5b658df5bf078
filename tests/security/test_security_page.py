"""docs/security.md names a test for each threat: each of them exists, and each file of this folder is named."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)


def test_every_test_that_the_page_names_exists():
    assert len(NAMED) > 25
    for file, name in NAMED:
        path = ROOT / file
        assert path.is_file(), f"there is no {file}"
        if name:
            assert f"def {name}(" in path.read_text(encoding="utf-8"), f"{file} has no {name}"


def test_every_file_of_security_tests_is_named():
    named = {file for file, _ in NAMED}
    for path in Path(__file__).parent.glob("test_*.py"):
        assert f"tests/security/{path.name}" in named | {"tests/security/test_security_page.py"}


def test_every_threat_on_the_page_names_a_test():
    part = TEXT[TEXT.index("## Threats") :]
    rows = [line for line in part.splitlines() if line.startswith("| ") and not re.match(r"\| *(threat|---)", line)]
    assert len(rows) > 20
    assert [row for row in rows if "`tests/" not in row] == []
