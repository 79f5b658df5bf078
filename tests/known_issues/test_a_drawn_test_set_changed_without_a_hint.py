"""`starling init` wrote a configuration without a test set of its own, and did not say what that means for later.

When recordings were added, the test set was drawn anew, so that the new model could not be compared with the champion.
"""

import csv

import pytest
from support import write_tone


@pytest.mark.parametrize(("part", "hinted"), [("", True), ("valid", True), ("test", False)])
def test_init_says_that_a_drawn_test_set_changes(tmp_path, home, invoke, part, hinted):
    rows = [("path", "text", "speaker", *(["split"] if part else []))]
    for number in range(24):
        write_tone(tmp_path / "digits" / f"{number}.wav", seconds=0.3, seed=number)
        own = [part if number % 4 == 0 else "train"] if part else []
        rows.append((f"{number}.wav", ("one", "two")[number % 2], f"s{number // 3}", *own))
    with (tmp_path / "digits" / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    shown = invoke("init", tmp_path / "digits", "--output", tmp_path / "digits.yaml").stdout
    assert ("add a source with set: test to the file now" in " ".join(shown.split())) == hinted
